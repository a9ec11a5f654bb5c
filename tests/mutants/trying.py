"""Faults planted one at a time in a copy of the tree, and who finds them there."""

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from services.local_processes import usage_of
from simulation.workers import started_worker
from tests.e2e.processes import ROOT
from tests.mutants.catalog import Mutant

_PASSED, _FAILED = 0, 1
_NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_TAIL_CHARACTERS = 2000
_HUNG = "the simulator hangs"
_TIMES_OF_A_BUSY_MACHINE = 10


class Unusable(RuntimeError):
    """A finding says nothing about the fault: pytest could not begin, or the tests fail without any fault."""


@dataclass(frozen=True)
class MutantFinding:
    """By whom and how a fault was found: a test or a seed, and what failed; `by` is None for one that survived."""

    by: str | None
    how: str
    seconds: float


@dataclass
class CopyOfTree:
    """A copy of the files that git tracks or would, in which one fault at a time is planted."""

    root: Path
    _stamp: int = field(default_factory=lambda: int(time.time()))
    _nursery: "subprocess.Popen[str] | None" = None

    @classmethod
    def made(cls, root: Path) -> "CopyOfTree":
        """Copies the files into the folder `root`, which is not there yet."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)
        return cls(root)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The fault is there within the body. Its file has another second each time: compiled files go by that."""
        path = self.root / mutant.file
        whole = path.read_text(encoding="utf-8")
        self._write(path, mutant.applied(whole))
        try:
            yield
        finally:
            self._write(path, whole)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._stamp += 1
        os.utime(path, (self._stamp, self._stamp))

    @property
    def environment(self) -> Mapping[str, str]:
        """Of processes that run the copy's code, on one core."""
        paths = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def pytest(self, tests: Sequence[str], *, timeout_s: float) -> MutantFinding:
        """Runs the tests up to the first that fails; returns the finding. Raises Unusable."""
        began = time.monotonic()
        code, said = self._asked(["-x", "-q", "-p", "no:cacheprovider", *tests], timeout_s=timeout_s)
        seconds = time.monotonic() - began
        if code is None:
            return MutantFinding(" ".join(tests), f"not done within {timeout_s:g} s", seconds)
        if code == _PASSED:
            return MutantFinding(None, "all passed", seconds)
        named = _NAMED.search(said)
        if code != _FAILED or named is None:
            raise Unusable(f"pytest ended with {code}: {said[-_TAIL_CHARACTERS:]}")
        timed_out = "\nE   Failed: Timeout" in said or "+ Timeout +" in said
        return MutantFinding(named[1], "timeout" if timed_out else "failed", seconds)

    def _asked(self, arguments: Sequence[str], *, timeout_s: float) -> tuple[int | None, str]:
        """Pytest's exit code, None for one that had to be ended with all that it started, and what it printed."""
        if self._nursery is None:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.nursery"], cwd=self.root, env=self.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        said = self.root / ".said"
        asked = {"arguments": list(arguments), "said": str(said), "timeout_s": timeout_s}
        self._nursery.stdin.write(json.dumps(asked) + "\n")
        self._nursery.stdin.flush()
        answer = self._nursery.stdout.readline()
        if not answer:
            raise Unusable(f"the process that runs the tests ended with {self._nursery.wait()}")
        return json.loads(answer), said.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Ends the process that runs the tests."""
        if self._nursery is not None:
            assert self._nursery.stdin is not None
            self._nursery.stdin.close()
            self._nursery.wait()

    def simulate(
        self, seeds: Sequence[int], *, timeout_s: float, tenants: bool = False, passed_over: Collection[int] = ()
    ) -> MutantFinding:
        """The first of the seeds that fails, or takes more CPU than `timeout_s`; one that is `passed_over` never does.

        A fault with which the product does not even begin in the simulator is found by the first seed.
        """
        began = time.monotonic()
        wanted = [seed for seed in seeds if seed not in passed_over]
        for seed, violation in self.seeds(wanted, timeout_s=timeout_s, tenants=tenants):
            if violation is not None:
                return MutantFinding(f"seed {seed}", violation, time.monotonic() - began)
        return MutantFinding(None, f"{len(wanted)} seeds held", time.monotonic() - began)

    def seeds(
        self, seeds: Sequence[int], *, timeout_s: float, tenants: bool = False
    ) -> Iterator[tuple[int, str | None]]:
        """Each seed in order with what it breaks, a hang and a crash of the simulator included."""
        left = list(seeds)
        while left:
            worker = started_worker(left, tenants=tenants, env=self.environment, root=self.root, quiet=True)
            try:
                while left:
                    seed, violation = left[0], _answer(worker, timeout_s=timeout_s)
                    del left[0]
                    yield seed, violation
                    if worker.poll() is not None or violation == _HUNG:
                        break  # the others need a new one
            finally:
                worker.kill()
                worker.wait()


def _answer(worker: "subprocess.Popen[bytes]", *, timeout_s: float) -> str | None:
    """The invariant that the next seed broke, None if none."""
    assert worker.stdout is not None
    if not answered(worker.stdout, worker.pid, timeout_s=timeout_s):
        return _HUNG
    line = worker.stdout.readline()
    if not line:
        return f"the simulator ends with {worker.wait()}"
    violation = json.loads(line)["violation"]
    return None if violation is None else str(violation)


def answered(answers: IO[bytes], pid: int, *, timeout_s: float) -> bool:
    """Waits until there is an answer. False if the process has worked for so long without one, or waited ten times so
    long: on a machine that has other work, a seed that would hold takes its time.
    """
    worked_s, began = usage_of(pid)[0], time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        while not selector.select(1.0):
            if (
                usage_of(pid)[0] - worked_s > timeout_s
                or time.monotonic() - began > _TIMES_OF_A_BUSY_MACHINE * timeout_s
            ):
                return False
    return True
