"""`headway report RUN [RUN ...]`: one HTML file of one run or of several, to be kept, sent and printed.

    metrics.jsonl, summary.json, made_with.json, samples.jsonl ──▶ ReportedRun ──▶ a file without script

Curves are SVG within it; nothing is loaded from outside, and a policy in its head forbids it. What a run's folder does
not hold is left out.
"""

import html
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from string import Template
from typing import Any

from headway.own_options import own_options
from learner.reports.history import FIGURES, FigureSpec, Points, RunHistory, curves_in, is_number, lines_in, objects_in
from learner.reports.marks import MARK_KINDS, CurveMark, is_marked, marks_in, near_each_other
from services.config import made_with
from services.config.sources import ConfigError

_WIDTH, _HEIGHT = 720, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 26
_COLORS = 6
_SAMPLES = 8
_MAX_TEXT = 4000
_MARKS_APART = 12.0
_MOST_TOLD = 6
_REGULAR = frozenset(each.kind for each in MARK_KINDS if each.regular)
_EVENTS = ("evaluation", "verdict", "publish", "load")
_LIGHT = "--c0:#0b5fa5;--c1:#b34700;--c2:#2f7d32;--c3:#8e2a8a;--c4:#6b6f76;--c5:#946200;--line:#d0d4d9"
_DARK = "--c0:#6cb6ff;--c1:#f5a04c;--c2:#7bc47f;--c3:#e08fdc;--c4:#a3a9b2;--c5:#e0b84c;--line:#3a4048"
_FILLS = "".join(f".line{n}{{stroke:var(--c{n})}}.fill{n}{{background:var(--c{n})}}" for n in range(_COLORS))
_STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_FILLS}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:0 auto;padding:16px}figure{margin:16px 0}"
    "svg{width:100%;height:auto}svg text{font-size:11px;fill:currentColor}.grid{stroke:var(--line)}"
    ".curve{fill:none;stroke-width:1.6}.mark path{stroke:currentColor;stroke-dasharray:3 3;opacity:.6}"
    ".key span,figcaption span{margin-right:12px;display:inline-block}"
    "i{display:inline-block;width:10px;height:10px;margin-right:4px}.bar{display:flex;height:20px}"
    "table{border-collapse:collapse;margin:8px 0}"
    "th{text-align:left;font-weight:400;overflow-wrap:anywhere;vertical-align:top}"
    "td{padding-left:16px;overflow-wrap:anywhere}tr{border-bottom:1px solid var(--line)}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;unicode-bidi:plaintext}"
    "article{border-top:1px solid var(--line);margin-top:12px}"
    f"@media print{{:root{{color-scheme:light;{_LIGHT}}}body{{max-width:none;padding:0;font-size:10pt}}"
    "figure,tr{break-inside:avoid}h2,h3,h4{break-after:avoid}.bar div,i{print-color-adjust:exact}}"
    "@page{size:A4;margin:15mm}"
)
_PAGE = Template(
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    f"<title>$title · Headway</title><style>{_STYLE}</style></head>"
    "<body><main><h1>$title</h1>$charts$sections</main></body></html>\n"
)


@dataclass(frozen=True)
class ReportedRun:
    """The content of a run's folder, as far as it can be read."""

    name: str
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    made: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    verdicts: Sequence[Mapping[str, Any]] = ()
    publishes: Sequence[Mapping[str, Any]] = ()
    loads: Sequence[Mapping[str, Any]] = ()
    marks: Sequence[CurveMark] = ()


def report(words: Sequence[str]) -> int:
    """Writes the file that `--output` names (report.html in the first run's folder). Raises ConfigError."""
    own, folders = own_options(words, {"--output": True})
    if not folders or any(folder.startswith("-") for folder in folders):
        raise ConfigError(["headway report needs the folder of a run: headway report runs/NAME [runs/OTHER ...]"])
    runs = [read_run(Path(folder)) for folder in folders]
    path = Path(own["--output"][-1]) if "--output" in own else Path(folders[0]) / "report.html"
    try:
        path.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror}; name another file by --output"]) from error
    sys.stdout.write(f"{path}\n")
    return 0


def read_run(folder: Path) -> ReportedRun:
    """Raises ConfigError for a folder that is none of a run."""
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError([f"{folder} holds no metrics.jsonl: expected the folder of a run, such as runs/addition"])
    history = RunHistory(dict, lambda kind, entry: entry if kind in _EVENTS or is_marked(kind) else None)
    history.read(folder / "metrics.jsonl")
    events = {kind: [one for one in history.events if one["kind"] == kind] for kind in _EVENTS}
    return ReportedRun(
        name=folder.resolve().name,
        steps=list(history.steps.values()),
        evaluations=events["evaluation"],
        verdicts=events["verdict"],
        publishes=events["publish"],
        loads=events["load"],
        marks=[mark for mark in marks_in(history.events) if mark.kind not in _REGULAR],
        summary=_object(folder / "summary.json"),
        made=made_with.read(folder),
        samples=list(objects_in(folder / "samples.jsonl")),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The balance


@dataclass(frozen=True)
class Balance:
    """Rates of a run, and of each side without the other, in trained tokens a second.

    `sampling` is what the generators did in the time in which they had work; None if their idle time is not known.
    Both sides ran at once: where they share a machine, each would be faster alone than this says.
    """

    reached: float
    training: float
    sampling: float | None
    shares: Mapping[str, float]
    generators: int = 1

    @property
    def bound(self) -> float:
        """The slower side's rate: no overlap can be faster."""
        return self.training if self.sampling is None else min(self.training, self.sampling)

    @property
    def in_turn(self) -> float | None:
        """The rate of the same two sides one after the other."""
        return None if self.sampling is None else 1 / (1 / self.training + 1 / self.sampling)


def balance_of(run: ReportedRun) -> Balance | None:
    """None for a run without steps that sampled."""
    timed = [entry for entry in run.steps if entry.get("kind") == "step" and is_number(entry.get("wait_s"))]
    spent = {curve.name: sum(entry[curve.name] for entry in timed) for curve in curves_in("time")}
    tokens = sum(entry.get("sampled_tokens", 0) for entry in timed)
    stepped = sum(spent.values())
    if not tokens or not spent["train_s"]:
        return None
    whole = run.summary.get("train_wall_s")
    wall = max(stepped, float(whole)) if is_number(whole) and whole is not None else stepped
    idle = run.summary.get("generator_idle_share")
    reached = tokens / wall
    return Balance(
        reached=reached,
        training=tokens / (spent["train_s"] + spent["copy_s"]),
        sampling=reached / (1 - idle) if idle is not None and is_number(idle) and idle < 1 else None,
        shares={
            **{curve.title: spent[curve.name] / wall for curve in curves_in("time")},
            "between steps (checkpoints, evaluations)": (wall - stepped) / wall,
        },
        generators=max((int(one.get("members") or 1) for one in run.publishes), default=1),
    )


def verdict_of(run: ReportedRun) -> str:
    """The verdict that held for most of the run, with its share of the time; empty for a run without one."""
    events = (*run.verdicts, *run.publishes, *run.evaluations)
    end = max((float(one["unix_s"]) for one in events if is_number(one.get("unix_s"))), default=0.0)
    timed = [one for one in run.verdicts if is_number(one.get("unix_s"))]
    ends = [*(float(one["unix_s"]) for one in timed[1:]), end]
    held: dict[tuple[object, ...], float] = {}
    texts: dict[tuple[object, ...], str] = {}
    for one, until in zip(timed, ends, strict=False):
        if one.get("state") not in ("starting", "ending"):
            which = (one.get("state"), one.get("cause"), one.get("who"))
            held[which] = held.get(which, 0.0) + max(0.0, until - float(one["unix_s"]))
            texts[which] = "; ".join(str(one[name]) for name in ("sentence", "remedy") if one.get(name))
    if not held:
        return ""
    most = max(held, key=lambda which: held[which])
    return f"{texts[most]} (so for {held[most] / (sum(held.values()) or 1):.0%} of the run)"


def advice(balance: Balance) -> str:
    """The changes that would make it faster, the cheapest first; of machines a split in whole ones."""
    if balance.sampling is None:
        return "How long the generators were idle is not known, so nothing can be said of a better split."
    ratio, count = balance.training / balance.sampling, balance.generators
    if ratio > 1.1:
        return (
            f"Sampling bounds this run: training alone is {ratio:.2f} times as fast. See, in this order, whether "
            "env-service.capacity was full (then raise it), generator.engine.max_num_seqs (raise it), and whether "
            f"learner.max_lag held leases back (raise it); if none of these, {_counted(math.ceil(ratio * count))} "
            f"instead of {count} would make the two sides even."
        )
    if ratio < 0.9:
        fewer = max(1, math.ceil(ratio * count))
        would_do = f"{_counted(fewer)} instead of {count} would do, or " if fewer < count else ""
        return (
            f"Training bounds this run: sampling alone is {1 / ratio:.2f} times as fast: {would_do}"
            f"{math.ceil(1 / ratio)} times the learner's ranks would make the two sides even."
        )
    return "The two sides are even: only faster ones of both would help, or less time lost between them."


def _counted(generators: int) -> str:
    return "1 generator" if generators == 1 else f"{generators} generators"


def _balance_section(run: ReportedRun) -> str:
    balance = balance_of(run)
    if balance is None:
        return ""
    says = "; ".join(f"{name} {share:.1%}" for name, share in balance.shares.items())
    bars = "".join(
        f'<div class="fill{place}" style="width:{100 * share:.2f}%"></div>'
        for place, share in enumerate(balance.shares.values())
    )
    keys = "".join(
        f'<span><i class="fill{place}"></i>{_text(name)} {share:.1%}</span> '
        for place, (name, share) in enumerate(balance.shares.items())
    )
    rows: list[tuple[str, object]] = [
        ("reached, trained tokens a second", balance.reached),
        ("training alone (and copying weights)", balance.training),
        ("sampling alone: while generators had work", balance.sampling),
        ("the bound: the slower side", balance.bound),
        ("one after the other", balance.in_turn),
        ("share of the bound that was reached", f"{balance.reached / balance.bound:.1%}"),
    ]
    return (
        f'<h3>The balance</h3><div class="bar" role="img" aria-label="{_text(says)}">{bars}</div>'
        f'<p class="key">{keys}</p>'
        f"{_table(rows)}<p>{_text(advice(balance))} Rates are of tokens that were trained; both sides ran at once, and "
        "where they share a machine each is faster alone.</p>"
    )


def _verdicts(runs: Sequence[ReportedRun]) -> str:
    """On top of the file; with a name where there are several runs."""
    told = [(run.name, verdict_of(run)) for run in runs]
    return "".join(
        f"<p><strong>{_text(text if len(runs) == 1 else f'{name}: {text}')}</strong></p>" for name, text in told if text
    )


# Figures


def thinned(points: Points, columns: int) -> Points:
    """At most two points a column of pixels, its least and its most: peaks stay, and the file stays small."""
    if len(points) <= 2 * columns:
        return points
    size, kept = len(points) / columns, []
    for column in range(columns):
        part = points[int(column * size) : int((column + 1) * size)]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def round_ticks(low: float, high: float, *, least: float = 0.0) -> list[float]:
    """Three to eight round numbers between the two, `least` or more apart: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    apart = max(least, next(times * power for times in (1, 2, 5, 10) if (high - low) / (times * power) <= 7))
    return [number * apart for number in range(math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9) + 1)]


def chart(title: str, curves: Mapping[str, Points], marks: Sequence[CurveMark] = ()) -> str:
    """A figure of SVG with its caption, and with marks where something happened; empty without a point."""
    curves = {name: points for name, points in curves.items() if points}
    every = [point for points in curves.values() for point in points]
    if not every:
        return ""
    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    y0, y1 = min(0.0, *(y for _, y in every)), max(y for _, y in every)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 + 0.05 * (y1 - y0) if y1 > y0 else y0 + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for height in round_ticks(y0, y1):
        _, y = place(x0, height)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{height:.6g}</text>')
    for step in round_ticks(x0, x1, least=1.0):
        x, _ = place(step, y0)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{step:.0f}</text>')
    for number, points in enumerate(curves.values()):
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in thinned(points, _WIDTH))
        parts.append(f'<path class="curve line{number % _COLORS}" d="M{path}"/>')
    parts += _mark_lines([mark for mark in marks if x0 <= mark.step <= x1], lambda step: place(step, y0)[0])
    words = "; ".join(
        f"{name}: {points[0][1]:.4g} at first, {points[-1][1]:.4g} at last" for name, points in curves.items()
    )
    keys = "".join(f'<span><i class="fill{n % _COLORS}"></i>{_text(name)}</span> ' for n, name in enumerate(curves))
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(f"{title}. {words}")}">'
        f"{''.join(parts)}</svg><figcaption>{_text(title)} over steps. {keys}<br><small>{_text(words)}</small>"
        "</figcaption></figure>"
    )


def _mark_lines(marks: Sequence[CurveMark], across: Callable[[int], float]) -> Iterator[str]:
    """A line for marks that are near each other, with the symbol of the first, and their words under the pointer."""
    for x, near in near_each_other(marks, across, apart=_MARKS_APART):
        told = [f"step {mark.step}: {mark.text}" for mark in near[:_MOST_TOLD]]
        told += [f"and {len(near) - _MOST_TOLD} more"] if len(near) > _MOST_TOLD else []
        words = "\n".join(told)
        yield (
            f'<g class="mark"><title>{_text(words)}</title><path d="M{x:.1f} {_TOP + 4}V{_HEIGHT - _BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{_TOP}" text-anchor="middle">{_text(near[0].symbol)}</text></g>'
        )


def _marks_key(marks: Sequence[CurveMark]) -> str:
    there = {mark.kind for mark in marks}
    kinds = ", ".join(f"{each.symbol} {each.title}" for each in MARK_KINDS if each.kind in there)
    return f"<p><small>Marked on the curves: {_text(kinds)}</small></p>" if there else ""


def _charts(runs: Sequence[ReportedRun]) -> str:
    def curves_of(run: ReportedRun, figure: FigureSpec) -> Iterator[tuple[str, Points]]:
        for curve, points in lines_in(figure, ((entry["step"], entry) for entry in run.steps), run.evaluations):
            yield curve.title if len(runs) == 1 else f"{run.name}: {curve.title}", points

    marks = runs[0].marks if len(runs) == 1 else ()  # of several runs nobody could tell whose they are
    return _marks_key(marks) + "".join(
        chart(figure.heading, dict(pair for run in runs for pair in curves_of(run, figure)), marks)
        for figure in FIGURES
        if figure.drawn
    )


# Text and tables


def _text(value: object) -> str:
    return html.escape(str(value))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _table(rows: Sequence[tuple[str, object]], *, head: Sequence[str] = ()) -> str:
    top = "".join(f'<th scope="col">{_text(one)}</th>' for one in head)
    body = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(_shown(value))}</td></tr>' for name, value in rows
    )
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>" if rows else ""


def _numbers(run: ReportedRun) -> str:
    rows = [(name, value) for name, value in run.summary.items() if is_number(value) or isinstance(value, str)]
    histogram = run.summary.get("lag_histogram")
    if isinstance(histogram, dict) and histogram:
        rows.append(("trained trajectories by lag", ", ".join(f"{lag}: {count}" for lag, count in histogram.items())))
    return f"<h3>Numbers</h3>{_table(rows)}" if rows else "<p>The run has not ended: there is no summary yet.</p>"


def _configuration(run: ReportedRun) -> str:
    settings = run.made.get("settings")
    if not isinstance(settings, dict):
        return ""
    defaults = _defaults(settings)
    changed = [(key, value) for key, value in settings.items() if key not in defaults or defaults[key] != value]
    rest = [(key, value) for key, value in settings.items() if key in defaults and defaults[key] == value]
    return (
        f"<h3>Configuration: what differs from the defaults</h3>{_table(changed)}"
        f"<details><summary>{len(rest)} settings as they are by default</summary>{_table(rest)}</details>"
    )


def _defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a learner with the same algorithm, by dotted key; of one with another release's algorithm, the plain ones."""
    (entry,) = entry_points(group="headway.process", name="learner")
    model = getattr(importlib.import_module(entry.module), entry.attr)
    given = {"model": "unknown", "data": {"path": "unknown"}, "algo": {"type": settings.get("algo.type", "grpo")}}
    try:
        made = made_with.settings_of(model.model_validate(given))
    except ValueError:
        made = made_with.settings_of(model.model_validate({"model": "unknown"}))
    return {key: value for key, value in made.items() if key not in ("model", "data.path")}


def _environment(run: ReportedRun) -> str:
    rows: list[tuple[str, object]] = [("began", run.made.get("began", "not known"))]
    for group in ("versions", "host", "git"):
        found = run.made.get(group)
        rows += [(f"{group} {key}", value) for key, value in found.items()] if isinstance(found, dict) else []
    command = run.made.get("command")
    if isinstance(command, list):
        rows.append(("command", " ".join(map(str, command))))
    rows += [("changed by a resume", change) for change in run.made.get("changes") or ()]
    return f"<h3>Environment</h3>{_table(rows)}" if run.made else ""


def _samples(run: ReportedRun) -> str:
    """Some from all of the run, evenly."""
    count = len(run.samples)
    chosen = [run.samples[index * count // _SAMPLES] for index in range(_SAMPLES)] if count > _SAMPLES else run.samples
    cards = "".join(
        f"<article><h4>step {_text(sample.get('step'))}, lease {_text(sample.get('lease_id'))}</h4>"
        f"{_pre(sample.get('prompt', ''))}{''.join(map(_completion, sample.get('completions') or ()))}</article>"
        for sample in chosen
    )
    return f"<h3>Samples</h3>{cards}" if cards else ""


def _completion(given: Mapping[str, Any]) -> str:
    versions = ", ".join(map(str, given.get("versions") or ()))
    says = (
        f"reward {_shown(given.get('reward'))}, {given.get('tokens')} tokens, {given.get('finish_reason')}, {versions}"
    )
    return f"<p>{_text(says)}</p>{_pre(given.get('text', ''))}"


def _pre(text: object) -> str:
    whole = str(text)
    cut = whole if len(whole) <= _MAX_TEXT else f"{whole[:_MAX_TEXT]} [{len(whole) - _MAX_TEXT} more]"
    return f'<pre dir="auto">{_text(cut)}</pre>'


def page(runs: Sequence[ReportedRun]) -> str:
    """The whole file."""
    sections = "".join(
        f"<section><h2>{_text(run.name)}</h2>{_balance_section(run)}{_numbers(run)}{_configuration(run)}"
        f"{_environment(run)}{_samples(run)}</section>"
        for run in runs
    )
    title = _text(", ".join(run.name for run in runs))
    return _PAGE.substitute(title=title, charts=f"{_verdicts(runs)}{_charts(runs)}", sections=sections)
