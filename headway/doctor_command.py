"""The commands that ask who is there. `headway doctor`: which of its two examinations is wanted, and its exit code.
`headway status`: what processes do. `headway eval`: which of them have to be started, and what each is told.
"""

import asyncio
import contextlib
import importlib
import json
import math
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from headway.child_output import clock
from headway.doctor.asking import Condition, Patient, Target, ask, ask_all, targets_of, tokens_of
from headway.doctor.before import BARE_BYTES, GIB, MODEL_TIMES, Level, examine
from headway.doctor.diagnosis import Diagnosis, as_json, diagnose, findings_json, findings_text, table, verdict
from headway.own_options import own_options
from protocol.status import Kind, ProgressStatus
from services.config.models import ProcessConfig
from services.config.sources import ConfigError
from services.http.tls import TlsFiles
from services.local_processes import command_of
from services.run_lock import holder_of

_SECOND_LOOK_S = 2.0
_LONGEST_WAIT = 60

Progress = dict[str, ProgressStatus]


@dataclass(frozen=True)
class DoctorOptions:
    """`before`: examine the machine, whatever runs. `more` are processes that the config file does not name."""

    before: bool = False
    as_json: bool = False
    more: Sequence[Target] = field(default_factory=tuple)


def options_of(words: Sequence[str]) -> tuple[DoctorOptions, list[str]]:
    """The doctor's own options, and the words that are for the processes' configs. Raises ConfigError."""
    own, others = own_options(words, {"--before": False, "--json": False, "--url": True})
    more = tuple(map(_target, own.get("--url", [])))
    return DoctorOptions(before="--before" in own, as_json="--json" in own, more=more), others


def doctor(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    """Prints what was found; 0 if all is well, 1 if not."""
    return asyncio.run(_doctor(configs, options))


TABLED = ("135M", "0.5B", "1.5B", "7B", "32B", "70B")
"""Numbers of parameters for which memory is tabled if none is named."""
_UNITS = {"M": 1e6, "B": 1e9}
_PARAMETER_BYTES = 2
_ON_GPU = {"learner": 16, "generator": 2}
"""Bytes of a parameter: weights, gradients and two moments in float32; weights in bfloat16. The rest is elsewhere."""


def memory_table(sizes: Sequence[str] = TABLED, *, cache_gb: float = 1.0) -> str:
    """A Markdown table of GiB by numbers of parameters ("135M", "7B"), by the same rule as `check_memory`.

    For a model that is kept in bfloat16, trained in float32 by one rank, without activations. Raises ValueError.
    """
    heads = ("parameters", "learner", "of it on its GPU", "generator", "of it on its GPU")
    rows = [heads, ("---",) * len(heads)]
    for size in sizes:
        count = _parameters(size)
        cells = [size]
        for process in ("learner", "generator"):
            cache = cache_gb * GIB if process == "generator" else 0.0
            everything = BARE_BYTES[process] + MODEL_TIMES[process] * _PARAMETER_BYTES * count + cache
            cells += [f"{everything / GIB:.1f}", f"{(_ON_GPU[process] * count + cache) / GIB:.1f}"]
        rows.append(tuple(cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _parameters(size: str) -> float:
    number, unit = size[:-1], _UNITS.get(size[-1:].upper())
    try:
        count = float(number) * (unit or 0)
    except ValueError:
        count = 0
    if not 0 < count < math.inf:
        raise ValueError(f"--memory: got {size!r}: expected numbers of parameters such as {', '.join(TABLED[:3])}")
    return count


def tell_memory(sizes: Sequence[str]) -> int:
    """Prints what models of these sizes want, or of usual ones. Raises ConfigError."""
    try:
        text = memory_table(sizes or TABLED)
    except ValueError as error:
        raise ConfigError([f"command line: {error}"]) from error
    note = (
        "GiB: bfloat16 files, trained in float32 by one rank, 1 GiB of cache in the generator; activations not counted"
    )
    sys.stdout.write(f"{text}\n{note}\n")
    return 0


async def _doctor(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    patients = [] if options.before else await ask_all(_targets(configs, options), tokens=tokens_of(configs))
    if all(patient.condition is Condition.DEAD for patient in patients):
        return await _before(configs, options)
    diagnosis = diagnose(patients)
    if diagnosis.by_waiting:
        patients, diagnosis = await _second_look(configs, options, patients)
    if options.as_json:
        sys.stdout.write(as_json(patients=patients, diagnosis=diagnosis))
    else:
        sys.stdout.write(f"{table(patients)}\n{whose(configs, patients)}{verdict(diagnosis, patients)}")
    return 1 if diagnosis.culprits else 0


def whose(configs: Mapping[str, ProcessConfig], patients: Sequence[Patient]) -> str:
    """Says it if what answers at the addresses of the config file is of another run; empty if it is of this one."""
    folder = next((config.run.folder for config in configs.values()), None)
    learners = [patient.status for patient in patients if patient.kind == "learner" and patient.status is not None]
    if folder is not None and not learners and holder_of(folder) is None:
        return _of_nobody(folder, patients)
    if folder is None or not learners or learners[0].host != socket.gethostname():
        return ""
    holder, learner = holder_of(folder), learners[0]
    if holder is not None and holder.pid == learner.pid:
        return ""
    command = command_of(learner.pid) or "not known"
    runs = f"which is that of {holder}" if holder is not None else "which does not run"
    return (
        f"The learner that answers is process {learner.pid} ({command}), and not of the run in {folder}, {runs}: what "
        "follows is about another run. Name the right file or run.name, or stop the other run.\n\n"
    )


def _of_nobody(folder: Path, patients: Sequence[Patient]) -> str:
    """Without a learner, those that answer may be of a run that starts, or ended, or of another one."""
    here = [one.status for one in patients if one.status is not None and one.status.host == socket.gethostname()]
    whose = [f"{one.service}: process {one.pid} ({command_of(one.pid) or 'not known'})" for one in here]
    lines = "".join(f"    {line}\n" for line in whose)
    return f"No learner has the run in {folder} yet. Those that answer here are\n{lines}\n" if lines else ""


async def _before(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    findings = await examine(configs)
    if options.as_json:
        sys.stdout.write(findings_json(findings))
    else:
        why = "as asked for" if options.before else "no process of the config file answers"
        sys.stdout.write(f"before a start ({why}):\n\n{findings_text(findings)}")
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


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
    async def look() -> tuple[list[Patient], float]:
        return await ask_all(_targets(configs, options), tokens=tokens_of(configs)), time.monotonic()

    rates = Rates()
    rates.take(*await look())
    opened: Any = contextlib.nullcontext() if live is None else live.Live(auto_refresh=False)
    with opened as screen:
        while True:
            await asyncio.sleep(_LOOK_S)
            patients, now = await look()
            made = rates.take(patients, now)
            if live is None:
                sys.stdout.write(status_json(patients, made) if options.as_json else status_text(patients, made))
                return 0 if any(patient.condition is Condition.ANSWERS for patient in patients) else 1
            text = f"{time.strftime('%H:%M:%S')}\n{status_text(patients, made, columns=screen.console.width)}"
            screen.update(_as_wide_as_the_screen(text), refresh=True)


def _as_wide_as_the_screen(text: str) -> Any:
    """A row stays a row in a narrow terminal."""
    return importlib.import_module("rich.text").Text(text.rstrip("\n"), no_wrap=True, overflow="ellipsis")


class Rates:
    """How much of its progress a process made a second, over the last minute: a step may take longer than a look."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, patients: Sequence[Patient], now: float) -> dict[str, float]:
        """By name of the process, from what was seen of it so far; one that is new, or started anew, has none yet."""
        found = {}
        for name, progress in _progress(patients).items():
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


def status_json(patients: Sequence[Patient], rates: Mapping[str, float]) -> str:
    """For scripts: of each process its whole status, if it answered, and its rate a second."""
    found = [
        {
            "process": patient.kind, "url": patient.target.url, "condition": patient.condition.value,
            "complaint": patient.complaint, "rate_per_s": rates.get(patient.name),
            "status": None if patient.status is None else patient.status.model_dump(mode="json"),
        }
        for patient in patients
    ]  # fmt: skip
    return json.dumps(found, indent=1) + "\n"


def status_text(patients: Sequence[Patient], rates: Mapping[str, float], *, columns: int | None = None) -> str:
    """A row for each process, and below them what is wrong and what was said last. Where a row does not fit into
    `columns`, its last two cells stand below it.
    """
    rows = [("process", "version", "progress", "waits for", "last")]
    rows += [_status_row(patient, rates.get(patient.name)) for patient in patients]
    lines = _in_columns(rows)
    if columns is not None and max(map(len, lines)) > columns:
        whole = _in_columns([row[:3] for row in rows])
        more = [[], *(_below(row) for row in rows[1:])]
        lines = [line for head, below in zip(whole, more, strict=True) for line in (head, *below)]
    for patient in patients:
        if patient.status is not None:
            lines += [f"{patient.kind}: {' '.join(text.split())}" for text in patient.status.problems]
            lines += [
                f"{patient.kind}, {_ago(failure.age_s)}: {' '.join(failure.text.split())[:200]}"
                for failure in patient.status.failures[:2]
            ]
    return "".join(f"{line}\n" for line in lines)


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _below(row: Sequence[str]) -> list[str]:
    """What does not fit beside its process, cell by cell."""
    *_, waits, events = row
    cells = ("" if waits == _NOBODY else f"waits for {waits}", events)
    return [f"    {cell}" for cell in cells if cell]


def _status_row(patient: Patient, rate: float | None) -> tuple[str, str, str, str, str]:
    said, name = patient.status, f"{patient.kind} {patient.target.place.removeprefix('localhost')}"
    if said is None:
        return name, "", f"{patient.condition}: {patient.complaint}", _NOBODY, ""
    waits = ", ".join(f"{wait.whom} ({_duration(wait.since_s)})" for wait in said.waits)
    events = ", ".join(f"{event.name} {_ago(event.age_s)}" for event in said.events)
    queues = ", ".join(f"{queue.depth:,} {queue.name}" for queue in said.queues)
    progress = "stopping" if said.stopping else _progress_text(said.progress, rate) or queues
    return name, said.policy_version or "", progress, _cut(waits) or _NOBODY, events


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_WAIT else f"{text[: _LONGEST_WAIT - 1]}…"


def _progress_text(progress: ProgressStatus | None, rate: float | None) -> str:
    if progress is None:
        return ""
    of = "" if progress.total is None else f" of {progress.total:,}"
    text = f"{progress.done:,}{of} {progress.unit}"
    if not rate:
        return text
    text = f"{text}, {f'{rate:,.0f}' if rate >= 100 else f'{rate:.2g}'}/s"
    if progress.total is None:
        return text
    return f"{text}, {clock((progress.total - progress.done) / rate)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else clock(seconds)


def _ago(seconds: float) -> str:
    return f"{_duration(seconds)} ago"


async def _second_look(
    configs: Mapping[str, ProcessConfig], options: DoctorOptions, patients: Sequence[Patient]
) -> tuple[list[Patient], Diagnosis]:
    """Whoever has got on with its work meanwhile is slow, and no culprit."""
    await asyncio.sleep(_SECOND_LOOK_S)
    again = await ask_all(_targets(configs, options), tokens=tokens_of(configs))
    before, after = _progress(patients), _progress(again)
    at_work = frozenset(name for name, now in after.items() if name in before and now != before[name])
    return again, diagnose(again, at_work=at_work)


def _targets(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> list[Target]:
    known = targets_of(configs)
    tokens = {target.kind: target.token for target in known}
    trust = next((target.tls for target in known if target.tls.ca is not None), TlsFiles())
    more = (Target(kind=one.kind, url=one.url, token=tokens.get(one.kind), tls=trust) for one in options.more)
    return [*known, *more]


def _target(text: str) -> Target:
    """`generator=http://host:7310`."""
    name, _, url = text.partition("=")
    kind = next((kind for kind in get_args(Kind) if kind == name), None)
    if kind is None or not url.startswith(("http://", "https://")):
        expected = f"PROCESS=http://HOST:PORT, PROCESS one of {', '.join(get_args(Kind))}"
        raise ConfigError([f"command line: --url: got {text!r}: expected {expected}"])
    return Target(kind=kind, url=url.rstrip("/"))


def _progress(patients: Sequence[Patient]) -> Progress:
    return {
        patient.name: patient.status.progress
        for patient in patients
        if patient.status is not None and patient.status.progress is not None
    }


# headway eval

EVALUATION_OPTIONS: Mapping[str, bool] = dict.fromkeys(
    ("--model", "--checkpoint", "--tasks", "--samples", "--output", "--against", "--judge"), True
)
"""The command's own options, each with a value."""

_LEARNER = "learner"
_FLAGS = {
    "--model": "--model",
    "--checkpoint": "--evaluation.checkpoint",
    "--tasks": "--evaluation.final-tasks",
    "--samples": "--evaluation.samples",
    "--output": "--evaluation.output",
    "--against": "--evaluation.against",
    "--judge": "--evaluation.judge.verifier",
}
_WITH_A_MODEL = (_LEARNER, "generator", "env-service")


def evaluation_words(
    own: Mapping[str, Sequence[str]], overrides: Mapping[str, Sequence[str]], *, path: Path, tables: Iterable[str]
) -> dict[str, list[str]]:
    """The command line of each process: the user's overrides, then the command's own options as settings, which so go
    before those that a run was trained with.

    `tables` are those of the config file at `path`. Raises ConfigError if the learner is not among them.
    """
    known = set(tables)
    if _LEARNER not in known:
        raise ConfigError([f"{path}: no table [learner]; an evaluation needs one, for the model and the addresses"])
    words = {process: list(more) for process, more in overrides.items()}
    words.setdefault(_LEARNER, []).extend(("--evaluation.only", "true"))
    for name, values in own.items():
        takers = _WITH_A_MODEL if name == "--model" else (_LEARNER,)
        for process in known.intersection(takers):
            words.setdefault(process, []).extend((_FLAGS[name], values[-1]))
    return words


def to_be_started(configs: Mapping[str, ProcessConfig]) -> list[str]:
    """Asks at their addresses which processes of `configs` are there; returns the others. Raises ConfigError."""
    return missing(configs, asyncio.run(_ask(configs)))


def missing(names: Iterable[str], patients: Sequence[Patient]) -> list[str]:
    """Those of `names` that none of the patients is, the learner among them.

    Raises ConfigError if somebody else is at the address of one of them, or a learner at the learner's: it is its place
    that the evaluation takes.
    """
    there = [patient for patient in patients if patient.condition is not Condition.DEAD]
    problems = [_in_the_way(patient) for patient in there if _is_in_the_way(patient)]
    if problems:
        raise ConfigError(problems)
    kinds = {patient.kind for patient in there}
    return [name for name in names if name not in kinds]


async def _ask(configs: Mapping[str, ProcessConfig]) -> list[Patient]:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(target)) for target in targets_of(configs)]
    return [task.result() for task in asked]


def _is_in_the_way(patient: Patient) -> bool:
    return patient.kind == _LEARNER or patient.condition is not Condition.ANSWERS


def _in_the_way(patient: Patient) -> str:
    if patient.condition is not Condition.ANSWERS:
        return f"{patient.target.url} is the address of [{patient.kind}], and is taken: {patient.complaint}"
    return (
        f"a learner runs at {patient.target.url}, whose place an evaluation takes: wait until it has ended, or give "
        "all processes of the evaluation other addresses"
    )
