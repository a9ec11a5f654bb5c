"""A solution's processes: how they are started, greeted and asked line by line, within the time of the whole item."""

import asyncio
import importlib.resources
import importlib.util
import json
import marshal
import math
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from reward_service.code.arguments import CaseVerdict, CodeArguments
from reward_service.code.inside.channel import Message
from reward_service.verifier.program import ExecutionConfig, Program, RunLimits, Running, Sandbox
from reward_service.verifier.submission import InfrastructureError

# A case that timed out with less than this share of its time spent computing may have waited for us.
_BUSY = 0.5
# What a process may take beside the time of its cases: to start, to load its modules.
START_S = 60.0
_PACKAGE = "reward_service.code.inside"
_FOLDER = _PACKAGE.replace(".", "/")
_FILE = "solution"
_FUTURE = re.compile(r"^from __future__ import (?:\([^()]*\)|[^()\n]*)$", re.MULTILINE)
_UNCHECKED = (1).to_bytes(4, "little")


class TimeBudget:
    """Seconds for one case and for all. `deadline` is the item's, on the event loop's clock.

    The solution's time is charged only while a case runs, so that a busy service takes nothing from it.
    """

    def __init__(self, *, case_s: float, total_s: float, deadline: float) -> None:
        self._case_s = case_s
        self._left_s = self._total_s = total_s
        self._taken_s = self._computed_s = 0.0
        self._sharing = 0
        self._returned = asyncio.Condition()
        self.deadline = deadline

    def next_s(self) -> float:
        """Seconds that the next case has; 0 if there is none left."""
        return max(0.0, min(self._case_s, self._left_s - self._taken_s))

    @property
    def left_s(self) -> float:
        """Seconds that all remaining cases have together."""
        return max(0.0, self._left_s)

    @property
    def was_idle(self) -> bool:
        """True if so much of the charged time went by without computing that a case may have timed out for that."""
        idle_s = self._total_s - self._left_s - self._computed_s
        return idle_s > _BUSY * min(self._case_s, self._total_s)

    def charge(self, seconds: float) -> None:
        """A case has taken that long."""
        self._left_s -= seconds

    def computed(self, cpu_s: float) -> None:
        """Processes of the item have used that much of a processor."""
        self._computed_s += cpu_s

    @asynccontextmanager
    async def share(self) -> AsyncIterator[float]:
        """The seconds of a case that runs beside others, which is to be charged within; 0 if there are none left.

        As long as others may give some back, it waits until there are enough for a whole case.
        """
        async with self._returned:
            # Counted as a number: what is left of sums of seconds need not be zero when all have been given back.
            await self._returned.wait_for(lambda: not self._sharing or self._left_s - self._taken_s >= self._case_s)
            seconds = self.next_s()
            self._sharing += 1
            self._taken_s += seconds
        try:
            yield seconds
        finally:
            self._sharing -= 1
            self._taken_s = self._taken_s - seconds if self._sharing else 0.0
            async with self._returned:
                self._returned.notify_all()

    @contextmanager
    def case(self) -> Iterator[float]:
        """Charges the time within, and gives the case's deadline.

        Raises InfrastructureError instead of TimeoutError where it was the item's deadline that came first.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        own = started + self.next_s()
        try:
            yield min(own, self.deadline)
        except TimeoutError:
            if own > self.deadline:
                raise late() from None
            raise
        finally:
            self.charge(clock() - started)


def late() -> InfrastructureError:
    """The item's deadline has come."""
    return InfrastructureError("deadline: the tests took longer than the item had; raise deadline_s")


def whole_seconds(seconds: float) -> float:
    """At least 1: a limit on CPU time is in whole seconds."""
    return float(max(1, math.ceil(seconds)))


@dataclass(frozen=True, kw_only=True)
class Harness:
    """The modules of the harness at the paths by which they import each other, and the operator's maxima.

    The longest line between the sides is what is kept of a program's output.
    """

    files: Mapping[str, bytes]
    execution: ExecutionConfig

    def program(
        self, *, module: str, files: Mapping[str, bytes], seconds: float, memory_mib: int, fresh: bool
    ) -> Program:
        """A process that runs a module of the harness, beside which it finds `files`. Its cases have `seconds`."""
        most = self.execution
        limits = replace(
            granted_limits(most),
            wall_s=min(START_S + seconds, most.max_wall_s),
            cpu_s=min(whole_seconds(START_S + seconds), most.max_cpu_s),
            memory_mib=memory_mib,
            output_bytes=most.max_output_bytes,
        )
        return Program(
            argv=("python", "main.py"),
            files={**self.files, **files, "main.py": _entry(module)},
            limits=limits,
            fresh=fresh,
        )


def granted_limits(execution: ExecutionConfig) -> RunLimits:
    """The usual limits on processes and files, as far as the operator grants them; the rest is each program's own."""
    usual = RunLimits()
    return replace(
        usual,
        processes=min(usual.processes, execution.max_processes),
        disk_mib=min(usual.disk_mib, execution.max_disk_mib),
    )


def load_harness(execution: ExecutionConfig) -> Harness:
    """Read the files of the harness, and compile them: each of its processes would, for a third of its start."""
    folder = importlib.resources.files(_PACKAGE)
    sources = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(".py")}
    files = {"reward_service/__init__.py": b"", "reward_service/code/__init__.py": b""}
    for name, source in sources.items():
        # A Python of another version looks for another name, or does not take the code, and reads the source.
        cached = f"__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
        files |= {f"{_FOLDER}/{name}": source, f"{_FOLDER}/{cached}": _compiled(source, name)}
    return Harness(files=files, execution=execution)


def _compiled(source: bytes, name: str) -> bytes:
    """As Python keeps compiled modules that need not be compared with their source (PEP 552)."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source) + marshal.dumps(code)


def _entry(module: str) -> bytes:
    # Nothing is run twice, so there is nothing to keep.
    return f"import sys\nsys.dont_write_bytecode = True\nfrom {_PACKAGE}.{module} import main\nmain()\n".encode()


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The code of one completion, and what its processes may take. `fresh`: they get sandboxes launched just now.

    `usual` are the limits that say nothing of its tests (see `granted_limits`).
    """

    language: str
    code: str
    memory_mib: int
    usual: RunLimits = field(default_factory=RunLimits)
    fresh: bool = False

    def program(self, *, stdin: bytes, wall_s: float, output_bytes: int) -> Program:
        """The whole program, run once."""
        name = f"{_FILE}.py" if self.language == "python" else _FILE
        limits = replace(
            self.usual,
            wall_s=wall_s,
            cpu_s=whole_seconds(wall_s),
            memory_mib=self.memory_mib,
            output_bytes=output_bytes,
        )
        files = {name: self._source()}
        return Program(argv=(self.language, name), files=files, stdin=stdin, limits=limits, fresh=self.fresh)

    def served(self, harness: Harness, *, seconds: float) -> Program:
        """The process that answers requests about the solution (`inside.host`)."""
        files = {f"{_FILE}.py": self._source()}
        return harness.program(
            module="host", files=files, seconds=seconds, memory_mib=self.memory_mib, fresh=self.fresh
        )

    def _source(self) -> bytes:
        return self.code.encode(errors="replace")


def solution_of(code: str, *, arguments: CodeArguments, execution: ExecutionConfig) -> Solution:
    """The solution with what is put before it, within what the operator grants."""
    return Solution(
        language=arguments.language,
        code=_after(arguments.prelude, code) if arguments.prelude else code,
        memory_mib=arguments.memory_mib,
        usual=granted_limits(execution),
    )


def _after(prelude: str, code: str) -> str:
    """The code after the prelude; before both what Python takes at the start alone, as `from __future__ import ..`."""
    first = "".join(f"{line}\n" for line in _FUTURE.findall(code))
    before = prelude if prelude.endswith("\n") else f"{prelude}\n"
    return first + before + _FUTURE.sub("", code)


class SolutionEnded(Exception):
    """The solution's process has ended, or has broken the exchange. `verdict`: on the case that it was at."""

    def __init__(self, message: str, *, verdict: CaseVerdict = CaseVerdict.ERROR) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True, kw_only=True)
class SolutionServer:
    """The process. `has_time`: its own limit leaves room to start and to wait beside the time of its cases."""

    running: Running
    has_time: bool

    async def names(self, *, deadline: float) -> list[str]:
        """The names that the solution defines. Raises SolutionEnded if it cannot be loaded, TimeoutError."""
        greeting = parsed(await self.line(deadline=deadline))
        names = greeting.get("ready")
        if not isinstance(names, list):
            raise SolutionEnded(str(greeting.get("failed", "it did not load")))
        return [name for name in names if isinstance(name, str)]

    async def line(self, *, deadline: float) -> bytes:
        """The next line. Raises SolutionEnded, TimeoutError, InfrastructureError if it is the sandbox that has died."""
        line = await self.running.readline(deadline=deadline)
        if not line:
            async with asyncio.timeout_at(deadline):
                ended = await self.running.ended()
            if ended.timed_out and self.has_time:
                raise InfrastructureError("the solution's process was held up for longer than its cases may take")
            verdict = (
                CaseVerdict.TIMEOUT
                if ended.timed_out
                else CaseVerdict.KILLED
                if ended.signal == signal.SIGKILL
                else CaseVerdict.ERROR
            )
            raise SolutionEnded("it ended", verdict=verdict)
        if not line.endswith(b"\n"):
            raise SolutionEnded("it wrote a line without end")
        return line

    async def send(self, line: bytes, *, deadline: float) -> None:
        """Raises TimeoutError if it does not read."""
        await self.running.write(line, deadline=deadline)


@asynccontextmanager
async def open_solution(
    *, sandbox: Sandbox, solution: Solution, harness: Harness, seconds: float
) -> AsyncIterator[SolutionServer]:
    """Start the solution's process, whose cases have `seconds`; leaving kills it."""
    program = solution.served(harness, seconds=seconds)
    async with sandbox.open(program) as running:
        yield SolutionServer(running=running, has_time=program.limits.wall_s >= START_S + seconds)


async def end(running: Running, budget: TimeBudget) -> None:
    """End a process, and count what it has computed. Raises NeverBegan."""
    budget.computed((await running.killed()).cpu_s)


def parsed(line: bytes) -> Message:
    """A line as an object. Raises SolutionEnded for anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SolutionEnded("it wrote a line that is not JSON") from error
    if not isinstance(message, dict):
        raise SolutionEnded("it wrote a line that is no object")
    return message
