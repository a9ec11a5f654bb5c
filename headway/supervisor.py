"""Child processes started together and stopped together, with nothing left behind.

    signals, ends of children ──▶ _Inbox ──┐
    what children write ──▶ Source ────────┴─▶ one thread, one select ──▶ Sink ──▶ own stdout and stderr

Each child has a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, which then stops all
in good order. Should the supervisor itself be killed, the kernel sends the children SIGTERM.

How often, and how soon, a child that has died is started again is on the record of `Restarts`.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, TracebackType
from typing import Self

from headway.child_output import Bar, Sink, Source, turn
from services.local_processes import each_process, fields_of
from services.process import NEVER_SERVED, START_AGAIN, WRONG_SETTINGS, parent_death_signal, signal_name

logger = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.01
_FLUSH_S = 0.25
_KILL_S = 0.5
_MOST_DOUBLINGS = 30
_UNREADABLE = 2
_NUMBER = re.compile(r"\d+")
_STOPPED_BY = "stopped by an error: "
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RestartPolicy:
    """At most `most` restarts of one process without `stable_s` seconds of life between them.

    The first comes `first_s` seconds after the death, each further one twice as long after it, `longest_s` at most.
    """

    most: int = 5
    first_s: float = 1.0
    longest_s: float = 30.0
    stable_s: float = 60.0


@dataclass(frozen=True)
class Restart:
    """The `number`-th restart, from 1, `after_s` seconds from now."""

    number: int
    after_s: float


class Restarts:
    """The restarts of several processes, by name. `now` is in seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._in_row: Counter[str] = Counter()
        self._deaths: Counter[str] = Counter()
        self._started_at: dict[str, float] = {}

    def started(self, name: str, *, now: float) -> None:
        """The process runs."""
        self._started_at[name] = now

    def count(self, name: str) -> int:
        """Number of times that it has died so far."""
        return self._deaths[name]

    def ended(self, name: str, *, now: float) -> Restart | None:
        """The process has died; None if it is not to be started again."""
        self._deaths[name] += 1
        if now - self._started_at[name] >= self._policy.stable_s:
            self._in_row[name] = 0
        if self._in_row[name] >= self._policy.most:
            return None
        self._in_row[name] += 1
        doublings = min(self._in_row[name] - 1, _MOST_DOUBLINGS)  # short of overflow
        after_s = min(self._policy.longest_s, self._policy.first_s * 2.0**doublings)
        return Restart(number=self._in_row[name], after_s=after_s)


@dataclass(frozen=True)
class Relative:
    """A child of this process, own or taken over."""

    pid: int
    session: int


def adopt_orphans() -> None:
    """From here on, descendants of this process whose parent ends become its children, and not init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> Iterator[Relative]:
    """The children of this process, dead ones that nobody has waited for included."""
    for pid, stat in each_process("stat"):
        _, parent, _, session, *_ = fields_of(stat)
        if int(parent) == os.getpid():
            yield Relative(pid=pid, session=int(session))


def kill_children(wanted: Callable[[Relative], bool], *, deadline: float) -> bool:
    """Kills the wanted children, and those that become wanted children by it, until `deadline` (monotonic).

    Returns whether none is left.
    """
    while found := [child for child in children() if wanted(child)]:
        for child in found:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


@dataclass(frozen=True)
class ProcessCommand:
    """A process to be run. When all are stopped, those with the lowest `stop_stage` are stopped first.

    The end of the leader, if there is one, ends all, but for a death by a signal or the code START_AGAIN. What it
    writes to its standard output is its result, and is shown when it has ended. `again` tells the arguments for each
    start after the first, if they are others. `environment` is added to this process's own.
    """

    name: str
    arguments: tuple[str, ...]
    stop_stage: int = 0
    is_leader: bool = False
    again: Callable[[], tuple[str, ...]] | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StopLimits:
    """Stopping takes `stop_s` seconds at most, each stage of it `stage_s`, and a leader's results `leader_s` more."""

    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    stage_s: float = 4.0
    stop_s: float = 8.0
    leader_s: float = 70.0


class Supervisor:
    """Runs `commands` until the leader has ended, SIGINT, SIGTERM or SIGHUP comes, or a child cannot be kept alive.

    A child that ends is started again, the leader only if a signal has ended it or it asks for it by its code. One that
    ends with code 78 or 2 (wrong settings) ends all, as does one that has died twice of the same before it was ever of
    use (code 70), and why is said once more at the end. A second SIGINT kills what
    has not stopped yet. To be made and run in the main thread, once. The bar is shown until they are stopped.
    """

    def __init__(
        self, commands: Sequence[ProcessCommand], *, limits: StopLimits | None = None, bar: Bar | None = None
    ) -> None:
        self._limits = limits or StopLimits()
        self._due = dict.fromkeys(commands, 0.0)
        self._restarts = Restarts(self._limits.restarts)
        self._children: list[_Child] = []
        self._err, self._out = self._sinks = (Sink(2, bar=bar), Sink(1, bar=bar))
        self._bar = bar
        self._strangers: frozenset[int] = frozenset()
        self.was_stopped = False  # by a signal, and not by the leader's end
        self.is_hopeless = False  # it would end again as it did
        self._last_sentence = ""
        self._died_of: dict[str, str] = {}

    def run(self) -> int:
        """Blocks until all have ended; returns the leader's exit code (128 + n if signal n ended it).

        0 after a signal, 2 if a child's configuration is wrong, 1 if one cannot be started or kept alive.
        """
        adopt_orphans()
        self._strangers = frozenset(child.pid for child in children())
        with _Inbox() as inbox:
            code = 1
            try:
                with self._bar or contextlib.nullcontext():
                    code = self._watch(inbox)
            finally:
                self._bar = None
                self._stop_all(inbox, quiet=code == 0 and inbox.stop is None)
        if self._last_sentence:  # of what scrolled by since, it is what matters
            logger.error("%s", self._last_sentence)
        return code

    def _watch(self, inbox: "_Inbox") -> int:
        while inbox.stop is None:
            for child in sorted(self._children, key=lambda child: not child.command.is_leader):
                code = child.process.poll()
                if code is not None and (verdict := self._ended(child, code)) is not None:
                    return verdict
            if not self._start_due():
                return 1
            self._turn(inbox, until=min(self._due.values(), default=None))
        self.was_stopped = True
        logger.info("stopping: %s", inbox.stop.name)
        return 0

    def _start_due(self) -> bool:
        """Starts one child whose time has come; False if it cannot be started."""
        now = time.monotonic()
        command = next((command for command, when in self._due.items() if when <= now), None)
        if command is None:
            return True
        is_restart = self._restarts.count(command.name) > 0
        if is_restart and not self._kill_orphans():
            logger.warning("%s is not started yet: processes of its former start are still running", command.name)
            self._due[command] = now + _KILL_S
            return True
        del self._due[command]
        arguments = command.arguments
        if is_restart and command.again is not None:
            arguments = command.again()
        try:
            self._children.append(_Child(command, arguments, err=self._err, out=self._out))
        except (OSError, subprocess.SubprocessError) as error:
            logger.error("cannot start %s: %s", command.name, error)
            return False
        self._restarts.started(command.name, now=now)
        return True

    def _ended(self, child: "_Child", code: int) -> int | None:
        """The meaning of a child's end: an exit code for all, or None to go on."""
        command = child.command
        if command.is_leader:
            for source in self._sources():  # what others wrote before its end is shown before its result
                source.drain()
        self._bury(child)
        if code in (WRONG_SETTINGS, _UNREADABLE):
            logger.error("%s cannot be run with these settings: stopping all", command.name)
            self._last_sentence = child.complaint()
            return _UNREADABLE
        if command.is_leader and code >= 0 and code != START_AGAIN:
            return code
        if self._died_so_before(child, code):
            logger.error("%s died twice of the same error before it ever served: stopping all", command.name)
            self._last_sentence, self.is_hopeless = child.complaint(), True
            return 1
        return self._again(child, code)

    def _died_so_before(self, child: "_Child", code: int) -> bool:
        """Tells of a child's first two deaths that they are the same, but for numbers, before it was of any use.

        One that has ended otherwise may have served, and what it dies of then may pass.
        """
        said = _NUMBER.sub("0", child.complaint()) if code == NEVER_SERVED else ""
        before = self._died_of.setdefault(child.command.name, said)
        return bool(said) and said == before and self._restarts.count(child.command.name) == 1

    def _again(self, child: "_Child", code: int) -> int | None:
        """Has a child that has died started again, unless it did so too often: then an exit code for all."""
        command, how = child.command, _how_it_ended(code)
        restart = self._restarts.ended(command.name, now=time.monotonic())
        most = self._limits.restarts.most
        if restart is None:
            after = f", after {most} restarts" if most else ""
            logger.error("%s %s%s: stopping all. Its last lines:%s", command.name, how, after, child.last_words())
            return (code if code > 0 else 128 - code) if command.is_leader else 1
        logger.warning(
            "%s %s; started again in %g s (%d of %d)", command.name, how, restart.after_s, restart.number, most,
            extra={"same": (command.name, self._restarts.count(command.name))},
        )  # fmt: skip
        self._due[command] = time.monotonic() + restart.after_s
        return None

    def _bury(self, child: "_Child", *, quiet: bool = False) -> None:
        """Ends what a child that has ended left running, and shows the rest of its output."""
        self._children.remove(child)
        child.kill_group()
        self._kill_orphans()
        child.close(discard=quiet)
        self._flush()

    def _kill_orphans(self) -> bool:
        """Kills whoever lost its parent, unless it is of the session of a child that runs; whether none is left."""
        own = {child.process.pid for child in self._children} | self._strangers

        def is_orphan(relative: Relative) -> bool:
            return relative.pid not in own and relative.session not in own

        return kill_children(is_orphan, deadline=time.monotonic() + _KILL_S)

    def _stop_all(self, inbox: "_Inbox", *, quiet: bool) -> None:
        """Stops all in their order. If `quiet`, what a child writes from here on is shown only if it fails."""
        end = time.monotonic() + self._limits.stop_s
        for child in self._children if quiet else ():
            child.hold()
        for stage in sorted({child.command.stop_stage for child in self._children}):
            for child in self._of_stage(stage):
                child.process.terminate()
            self._await(inbox, self._leaders, until=time.monotonic() + self._limits.leader_s, quiet=quiet)
            end = max(end, time.monotonic() + self._limits.stop_s - self._limits.stage_s)
            until = min(end, time.monotonic() + self._limits.stage_s)
            self._await(inbox, partial(self._of_stage, stage), until=until, quiet=quiet)
        self._await(inbox, lambda: self._children, until=end, quiet=quiet)
        for child in tuple(self._children):
            logger.warning("%s does not stop and is killed", child.command.name)
            child.kill_group()
            try:
                child.process.wait(timeout=_KILL_S)
            except subprocess.TimeoutExpired:  # it is in the middle of a system call that does not end
                logger.error("%s does not end: process %d is left behind", child.command.name, child.process.pid)
            self._bury(child)
        self._kill_orphans()
        self._flush()

    def _leaders(self) -> "list[_Child]":
        return [child for child in self._children if child.command.is_leader]

    def _of_stage(self, stage: int) -> "list[_Child]":
        return [child for child in self._children if child.command.stop_stage == stage]

    def _await(self, inbox: "_Inbox", running: "Callable[[], list[_Child]]", *, until: float, quiet: bool) -> None:
        """Waits until none of the running is left, for the time `until`, or for somebody in a hurry."""
        while True:
            for child in tuple(self._children):
                code = child.process.poll()
                if code is not None:
                    self._bury(child, quiet=quiet and code in (0, -signal.SIGTERM))
            if not running() or time.monotonic() >= until or inbox.hurry:
                return
            self._turn(inbox, until=until)

    def _turn(self, inbox: "_Inbox", *, until: float | None) -> None:
        timeout_s = None if until is None else max(0.0, until - time.monotonic())
        turn(self._sources(), self._sinks, wake=inbox.descriptor, timeout_s=timeout_s, bar=self._bar)
        inbox.empty()
        self._reap(inbox)

    def _reap(self, inbox: "_Inbox") -> None:
        """Takes the exit codes of orphans that were taken over and have ended: nobody asks for them, and without it
        each stays in the table of processes.
        """
        if not inbox.child_ended:
            return
        inbox.child_ended = False
        own = {child.process.pid for child in self._children} | self._strangers
        for relative in children():
            if relative.pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(relative.pid, os.WNOHANG)

    def _sources(self) -> list[Source]:
        return [source for child in self._children for source in child.sources]

    def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_S
        for sink in self._sinks:
            sink.flush(deadline=deadline)


class _Child:
    """A process that runs, and its output."""

    def __init__(self, command: ProcessCommand, arguments: Sequence[str], *, err: Sink, out: Sink) -> None:
        self.command = command
        self.process = subprocess.Popen(
            arguments,
            env={**os.environ, **dict(command.environment)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=partial(_tie_to, os.getpid()),
        )
        assert self.process.stderr is not None
        assert self.process.stdout is not None
        # In this order: what a child logs before its result is shown before it.
        self.sources = (
            Source(self.process.stderr, err),
            Source(self.process.stdout, out, held=command.is_leader),
        )

    def hold(self) -> None:
        """Shows what it has written, and keeps what it writes from here on."""
        for source in self.sources:
            source.drain()
            source.hold()

    def last_words(self) -> str:
        """The newest lines of its standard error, each indented on a line of its own."""
        return "".join(f"\n    {line}" for line in self.sources[0].last_lines) or " none"

    def complaint(self) -> str:
        """Its last words of why it ended: the sentence after the clock, its name and the severity."""
        lines = self.sources[0].last_lines
        said = next((line for line in reversed(lines) if _STOPPED_BY in line), lines[-1] if lines else "")
        sentence = said.rpartition(_STOPPED_BY)[2] if _STOPPED_BY in said else said.partition(": ")[2] or said
        return f"{self.command.name}: {sentence.strip()}"

    def kill_group(self) -> None:
        """Kills it, if it still runs, and those of its own children that are still in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self, *, discard: bool) -> None:
        """Takes the rest of its output."""
        for source in self.sources:
            source.close(discard=discard)


class _Inbox:
    """Signals, as something that select can wait for. Its handlers raise nothing, so that no start is cut in two."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self.hurry = False
        self.child_ended = False
        """True from a child's end until somebody has looked for it."""

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Under nohup, SIGHUP is ignored and stays so.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        wanted = {*_STOPPING, signal.SIGCHLD} - ignored
        self._before = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    @property
    def descriptor(self) -> int:
        """Ready to be read when a signal has come."""
        return self._reader.fileno()

    def empty(self) -> None:
        """Makes `descriptor` not ready."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.child_ended = self.child_ended or number == signal.SIGCHLD
        if number in _STOPPING:
            self.hurry = self.hurry or (number == signal.SIGINT and self.stop is not None)
            self.stop = self.stop or signal.Signals(number)


def _tie_to(parent: int) -> None:
    """Runs in the child between fork and exec: its end follows the parent's, also if that comes right now."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent_death_signal()
    if os.getppid() != parent:
        os._exit(1)


def _how_it_ended(code: int) -> str:
    return f"has ended with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
