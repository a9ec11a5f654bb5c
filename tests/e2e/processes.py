"""Real processes under test: their output goes to a file, and a mark finds them and all their children."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from services.process import parent_death_signal

ROOT = Path(__file__).parents[2]
MARK = "E2E_MARK"
TAIL_CHARACTERS = 6000
PATIENCE_S = 240.0
"""Much longer than anything takes: the machine may do other things besides, and a wait ends with what it waits for."""
RARELY_S = 2.0
"""The longest time from one look to the next."""

Found = TypeVar("Found")


class Launched:
    """A process in a session of its own. Everything that it starts inherits `mark`."""

    def __init__(
        self, name: str, words: Sequence[str], *, folder: Path, mark: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.output = folder / f"{name}.{time.monotonic_ns()}.log"
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
                env={**_environment(mark), **(environment or {})}, start_new_session=True,
                preexec_fn=parent_death_signal,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        """The output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        return self._process.wait(timeout=timeout_s)

    def end(self) -> None:
        """Kills it if it still runs."""
        self._process.kill()
        self._process.wait()


@dataclass
class Launcher:
    """Starts console scripts, all under one mark, with `environment` beside what they inherit."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launched: list[Launched] = field(default_factory=list)

    def __call__(self, name: str, *words: str) -> Launched:
        launched = Launched(
            name, [script(name), *words], folder=self.folder, mark=self.mark, environment=self.environment
        )
        self.launched.append(launched)
        return launched


def script(name: str) -> str:
    """A console script of the distribution."""
    return str(Path(sys.executable).with_name(name))


def until(
    condition: Callable[[], Found | None],
    *,
    what: str,
    timeout_s: float = PATIENCE_S,
    during: Sequence[Launched] = (),
) -> Found:
    """The first truthy answer of `condition`. Fails after `timeout_s`, or as soon as one of `during` has ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if answer := condition():
            return answer
        ended = [process.name for process in during if not process.alive]
        assert not ended, f"{ended} ended while the test waited for {what}"
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        # What reads long files is asked the more rarely: the processes need the cores.
        time.sleep(min(max(0.05, 4 * (time.monotonic() - asked)), RARELY_S))


def marked(mark: str) -> dict[int, str]:
    """Command lines of the processes that live and carry `mark`, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def kill_marked(mark: str) -> None:
    """Ends whatever is left of a test."""
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _environment(mark: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return {**clean, MARK: mark, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
