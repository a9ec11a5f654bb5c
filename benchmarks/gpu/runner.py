"""Runs the parts of `make gpu`, each in a process of its own with a time limit: none can keep another from running."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.gpu.rows import REHEARSAL, GpuRow, Say, State, heard
from services.process import parent_death_signal

ROOT = Path(__file__).parents[2]
TAIL_LINES = 12
TAIL_CHARACTERS = 1500
LEAST_S = 15.0
"""A part that has less time left is not begun."""

Need = Literal["cuda", "vllm", "deepspeed"]


@dataclass(frozen=True)
class GpuPart:
    """A part: the words after `python -m`, and its limits. One that is not `timed` runs beside others."""

    name: str
    about: str
    words: tuple[str, ...]
    limit_s: float
    needs: tuple[Need, ...] = ("cuda",)
    timed: bool = True


def lacking(needs: Sequence[Need]) -> str:
    """Reason why a part cannot run here; empty if it can."""
    for need in needs:
        if need == "cuda" and (why := _no_cuda()):
            return why
        if need != "cuda" and importlib.util.find_spec(need) is None:
            return f"{need} is not installed"
    return ""


def _no_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else f"needs a CUDA device, and torch {torch.__version__} sees none"


def run_parts(
    parts: Sequence[GpuPart],
    *,
    say: Say,
    log: Path,
    minutes: float,
    rehearsal: bool = False,
    lack: Callable[[Sequence[Need]], str] = lacking,
) -> bool:
    """Runs what can run, parts that are not timed beside each other; True if none failed. Rows are said at once."""
    ends = time.monotonic() + 60 * minutes
    lock = threading.Lock()

    def said(row: GpuRow) -> None:
        with lock:
            say(row)

    def one(part: GpuPart) -> bool:
        needs = tuple(need for need in part.needs if not (rehearsal and need == "cuda"))
        left_s = ends - time.monotonic()
        why = lack(needs) or ("" if left_s > LEAST_S else f"no time is left of {minutes:g} minutes")
        if why:
            said(GpuRow(part=part.name, what=part.about, found=why, state="skipped"))
            return True
        return run_part(replace(part, limit_s=min(part.limit_s, left_s)), say=said, log=log, rehearsal=rehearsal)

    well = True
    for group in _groups(parts):
        with ThreadPoolExecutor(len(group)) as threads:
            well = all([*threads.map(one, group)]) and well
    return well


def _groups(parts: Sequence[GpuPart]) -> list[list[GpuPart]]:
    """Groups of parts that are run beside each other, in order: neighbours that are not timed."""
    groups: list[list[GpuPart]] = []
    for part in parts:
        if part.timed or not groups or groups[-1][0].timed:
            groups.append([])
        groups[-1].append(part)
    return groups


def run_part(part: GpuPart, *, say: Say, log: Path, rehearsal: bool = False) -> bool:
    """Runs one, and says its rows and how it ended; True if it ended well. Whatever it started is ended with it."""
    began = time.monotonic()
    words = [sys.executable, "-m", *part.words, *([REHEARSAL] if rehearsal else [])]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, preexec_fn=parent_death_signal, env=_environment(os.environ),
    )  # fmt: skip
    broken = threading.Event()

    def end() -> None:
        broken.set()
        _kill(process.pid)

    timer = threading.Timer(part.limit_s, end)
    timer.start()
    tail = _follow(process, part, say=say, log=log)
    code = process.wait()
    timer.cancel()
    _kill(process.pid)  # what it left
    took = f"{time.monotonic() - began:.0f} s"
    state, found = _ending(code, broken=broken.is_set(), took=took, tail=tail, limit_s=part.limit_s)
    say(GpuRow(part=part.name, what=part.about, found=found, state=state))
    return state == "passed"


def _follow(process: "subprocess.Popen[str]", part: GpuPart, *, say: Say, log: Path) -> Sequence[str]:
    """Says what it says; the last lines of all else that it prints, which goes to the log."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    assert process.stdout is not None, "it is a pipe"
    with log.open("a", encoding="utf-8") as file, process.stdout as lines:
        for line in lines:
            row = heard(line, part=part.name)
            if row is not None:
                say(row)
                continue
            file.write(f"{part.name}: {line}")
            file.flush()
            if line.strip():
                tail.append(line.strip())
    return tail


def _ending(code: int, *, broken: bool, took: str, tail: Sequence[str], limit_s: float) -> tuple[State, str]:
    last = " / ".join(tail)[-TAIL_CHARACTERS:]
    if broken:
        return "broken off", f"after its limit of {limit_s:.0f} s; the last it said: {last or 'nothing'}"
    if code:
        return "failed", f"code {code} after {took}: {last or 'it said nothing'}"
    return "passed", f"ran to its end in {took}"


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
