"""`headway status`: what the processes of a run do, and how fast."""

import asyncio
import contextlib
import importlib
import json
import sys
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headway.columns import in_columns
from headway.doctor.asking import ask_all, tokens_of
from headway.doctor_options import DoctorOptions, progress_of, targets
from headway.tenants_table import tenant_lines
from protocol.status import ProgressStatus
from services.config.models import ProcessConfig
from services.diagnosis.asked import AskedProcess, Condition
from services.diagnosis.culprits import diagnose
from services.diagnosis.pace import standing_s
from services.diagnosis.verdict import RunVerdict, verdict_on
from services.durations import clock_text
from services.standard_output import harmless

_MAX_WAIT = 60


_LOOK_S = 1.0
_RATES_OVER_S = 60.0
_NOBODY = "nobody"


def status(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    """Prints what the processes do, in a terminal again and again until Ctrl-C; 1 if none of them answers."""
    try:
        live = importlib.import_module("rich.live") if sys.stdout.isatty() and not options.as_json else None
    except ImportError:
        live = None
    try:
        return asyncio.run(_status(configs, options, live))
    except KeyboardInterrupt:
        return 0


async def _status(configs: Mapping[str, ProcessConfig], options: DoctorOptions, live: Any) -> int:
    async def look() -> tuple[list[AskedProcess], float]:
        return await ask_all(targets(configs, options), tokens=tokens_of(configs)), time.monotonic()

    rates = Rates()
    rates.take(*await look())
    opened: Any = contextlib.nullcontext() if live is None else live.Live(auto_refresh=False)
    with opened as screen:
        while True:
            await asyncio.sleep(_LOOK_S)
            procs, now = await look()
            made = rates.take(procs, now)
            if live is None:
                sys.stdout.write(status_json(procs, made) if options.as_json else status_text(procs, made))
                return 0 if any(proc.condition is Condition.ANSWERS for proc in procs) else 1
            text = f"{time.strftime('%H:%M:%S')}\n{status_text(procs, made, columns=screen.console.width)}"
            screen.update(_as_wide_as_the_screen(text), refresh=True)


def _as_wide_as_the_screen(text: str) -> Any:
    """A row stays a row in a narrow terminal."""
    return importlib.import_module("rich.text").Text(text.rstrip("\n"), no_wrap=True, overflow="ellipsis")


class Rates:
    """Progress of each process a second, over the last minute: a step may take longer than a look."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, procs: Sequence[AskedProcess], now: float) -> dict[str, float]:
        """By name of the process, from what was seen of it so far; one that is new, or started anew, has none yet."""
        found = {}
        for name, progress in progress_of(procs).items():
            seen = self._seen.setdefault(name, deque())
            if seen and progress.done < seen[-1][1]:
                seen.clear()
            seen.append((now, progress.done))
            while now - seen[0][0] > _RATES_OVER_S:
                seen.popleft()
            since, done = seen[0]
            if now > since:
                found[name] = (progress.done - done) / (now - since)
        return found


def status_json(procs: Sequence[AskedProcess], rates: Mapping[str, float]) -> str:
    """For scripts: of each process its whole status, if it answered, its rate a second, and the verdict on the run."""
    told = asdict(_verdict(procs, rates))
    found = [
        {
            "process": proc.kind, "url": proc.target.url, "condition": proc.condition.value,
            "complaint": proc.complaint, "rate_per_s": rates.get(proc.name),
            "status": None if proc.status is None else proc.status.model_dump(mode="json"), "verdict": told,
        }
        for proc in procs
    ]  # fmt: skip
    return json.dumps(found, indent=1) + "\n"


def _verdict(procs: Sequence[AskedProcess], rates: Mapping[str, float]) -> RunVerdict:
    return verdict_on(procs, diagnose(procs, at_work=frozenset(name for name, rate in rates.items() if rate)))


def status_text(procs: Sequence[AskedProcess], rates: Mapping[str, float], *, columns: int | None = None) -> str:
    """The verdict, a row for each process, and below them the tenants of a server, what is wrong, and what was said
    last. Where a row does not fit into `columns`, its last two cells stand below it.
    """
    rows = [("process", "version", "progress", "waits for", "last")]
    rows += [_status_row(proc, rates.get(proc.name)) for proc in procs]
    lines = in_columns(rows)
    if columns is not None and max(map(len, lines)) > columns:
        whole = in_columns([row[:3] for row in rows])
        more = [[], *(_below(row) for row in rows[1:])]
        lines = [line for head, below in zip(whole, more, strict=True) for line in (head, *below)]
    for proc in procs:
        if proc.status is not None:
            lines += [] if proc.status.tenants is None else ["", *tenant_lines(proc.status.tenants), ""]
            lines += [f"{proc.kind}: {' '.join(text.split())}" for text in (*proc.status.problems, *proc.status.notes)]
            lines += [
                f"{proc.kind}, {_ago(failure.age_s)}: {' '.join(failure.text.split())[:200]}"
                for failure in proc.status.failures[:2]
            ]
    sentence = _verdict(procs, rates).text
    told = [sentence] if columns is None else textwrap.wrap(sentence, columns)
    return harmless("".join(f"{line}\n" for line in (*told, "", *lines)))


def _below(row: Sequence[str]) -> list[str]:
    """The cells that do not fit beside their process, one a line."""
    *_, waits, events = row
    cells = ("" if waits == _NOBODY else f"waits for {waits}", events)
    return [f"    {cell}" for cell in cells if cell]


def _status_row(proc: AskedProcess, rate: float | None) -> tuple[str, str, str, str, str]:
    said, name = proc.status, f"{proc.kind} {proc.target.place.removeprefix('localhost')}"
    if said is None:
        return name, "", f"{proc.condition}: {proc.complaint}", _NOBODY, ""
    waits = ", ".join(f"{wait.whom} ({_duration(wait.since_s)})" for wait in said.waits)
    events = ", ".join(f"{event.name} {_ago(event.age_s)}" for event in said.events)
    queues = ", ".join(f"{queue.depth:,} {queue.name}" for queue in said.queues)
    stands_s = standing_s(said)
    progress = "stopping" if said.stopping else _progress_text(said.progress, rate, stands_s) or queues
    return name, said.policy_version or "", progress, _cut(waits) or _NOBODY, events


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_WAIT else f"{text[: _MAX_WAIT - 1]}…"


def _progress_text(progress: ProgressStatus | None, rate: float | None, stands_s: float | None) -> str:
    """Without a rate, and a time that is left, where nothing is done at present."""
    if progress is None:
        return ""
    of = "" if progress.total is None else f" of {progress.total:,}"
    text = f"{progress.done:,}{of} {progress.unit}"
    if stands_s is not None:
        return f"{text}, none for {_duration(stands_s)}"
    if not rate:
        return text
    text = f"{text}, {f'{rate:,.0f}' if rate >= 100 else f'{rate:.2g}'}/s"
    if progress.total is None:
        return text
    return f"{text}, {clock_text((progress.total - progress.done) / rate)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else clock_text(seconds)


def _ago(seconds: float) -> str:
    return f"{_duration(seconds)} ago"
