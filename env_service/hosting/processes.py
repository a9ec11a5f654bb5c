"""A child process that runs environments, seen from the parent: calls in turn, each within its time.

    a conversation ── Seat ──▶ Child ── one call at a time ──▶ child.py
                                 └─ no answer in time, or none of ours: where it was is read, and it is killed

A death costs the conversation whose call was under way; others that sat in the same process hear that it is gone.
"""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from env_service.environments.interface import EnvironmentFailed
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.child import ENTRIES
from env_service.hosting.messages import HostCall, HostReply, HostUnavailable, raise_fault, reply_of
from services.worker_process import WorkerDied, WorkerProcess, WorkerUnavailable, worker_environment

_OURS = f'File "{Path(__file__).parent}/'
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
_LOOK_S = 0.02
_LOOKS = 50
_MOST_OF_ITS_TIME = 0.9
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def command_of(entries: Sequence[ClassTasks], stacks: Path) -> tuple[str, ...]:
    """The module of a child, and its arguments but the last."""
    return ("env_service.hosting.child", str(stacks), ENTRIES.dump_json(tuple(entries), exclude_unset=True).decode())


def environment_of_a_child() -> dict[str, str]:
    """The environment of a child: the variables of this process, without its settings, which hold secrets."""
    seen = worker_environment(inherit=True)
    return {name: value for name, value in seen.items() if not name.startswith("HEADWAY_")}


class Child:
    """A process that runs the environments of some entries. It is started at need, and again after it was killed.

    `shared`: a call that is cancelled goes on to its end, or its limit, since others have conversations there; else it
    ends the process.
    """

    def __init__(
        self, entries: Sequence[ClassTasks], *, stacks: Path, start_timeout_s: float, shared: bool = False
    ) -> None:
        self._stacks = stacks
        self._shared = shared
        self._going_on: set[asyncio.Task[HostReply]] = set()
        self._worker = WorkerProcess(
            command=command_of(entries, stacks),
            environment=environment_of_a_child(),
            start_timeout_s=start_timeout_s,
            what="its environments",
        )
        self._turn = asyncio.Lock()
        self.life = 0
        self.seats = 0

    @property
    def process_id(self) -> int | None:
        """Of the process, if there is one."""
        return self._worker.process_id

    @property
    def is_alive(self) -> bool:
        """True if it runs."""
        return self._worker.is_alive

    async def start(self) -> None:
        """Start it; returns before it has loaded. Raises WorkerUnavailable."""
        async with self._turn:
            await self._worker.start()

    async def stop(self) -> None:
        """Kill it."""
        self.life += 1
        await self._worker.stop()

    async def end(self) -> None:
        """Kill it for good, with the file that it left."""
        await self.stop()
        self._stacks.unlink(missing_ok=True)

    async def ask(self, call: HostCall, seat: "Seat", *, limit_s: float) -> HostReply:
        """The reply to a call. Raises EnvironmentFailed and EnvironmentUnavailable: what the environment did, or that
        its process is away.
        """
        line = _line_of(call)
        ends = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(ends):
                await self._turn.acquire()
        except TimeoutError:
            raise HostUnavailable(f"its process was busy with other conversations for {limit_s:g} s") from None
        exchange = self._in_turn(call, line, seat, limit_s=limit_s, ends=ends)
        if self._shared:
            work = asyncio.get_running_loop().create_task(exchange)
            self._going_on.add(work)
            work.add_done_callback(self._going_on.discard)
            reply = await asyncio.shield(work)
        else:
            reply = await exchange
        raise_fault(reply)
        return reply

    async def _in_turn(self, call: HostCall, given: bytes, seat: "Seat", *, limit_s: float, ends: float) -> HostReply:
        """The reply; the turn is free when it is there."""
        try:
            return await self._exchange(call, given, seat, limit_s=limit_s, ends=ends)
        finally:
            self._turn.release()

    async def _exchange(self, call: HostCall, given: bytes, seat: "Seat", *, limit_s: float, ends: float) -> HostReply:
        await self._loaded(seat, ends)
        sent, completed = asyncio.get_running_loop().time(), False
        try:
            async with asyncio.timeout_at(ends):
                line = await self._worker.exchange(given)
            reply = reply_of(line)
            completed = True
            return reply
        except TimeoutError:
            if ends - sent < _MOST_OF_ITS_TIME * limit_s:
                raise HostUnavailable("its process was busy, and is started again") from None
            stack = await self._where()
            text = f"the environment's {call.kind} did not come back within {limit_s:g} s{_place(stack)}"
            raise EnvironmentFailed("hung", text, traceback=stack) from None
        except WorkerDied as error:
            raise self._death(error, call) from error
        finally:
            if not completed:
                await self.stop()

    async def _loaded(self, seat: "Seat", ends: float) -> None:
        if seat.life is not None and seat.life != self.life:
            raise HostUnavailable("its process was ended, with all conversations in it", kind="killed")
        try:
            async with asyncio.timeout_at(ends):
                await self._worker.ready()
        except TimeoutError:
            raise HostUnavailable("its process was still starting") from None
        except WorkerDied as error:
            raise HostUnavailable(f"its process died while it started: {error}") from error
        except WorkerUnavailable as error:
            raise HostUnavailable(str(error)) from error
        seat.life = self.life

    def _death(self, error: WorkerDied, call: HostCall) -> Exception:
        text = f"the environment's process died in its {call.kind}: {error}"
        if any(name in str(error) for name in _FROM_OUTSIDE):
            return HostUnavailable(f"{text}, from outside or for want of memory", kind="killed")
        stack = self._stack()
        return EnvironmentFailed("crashed", f"{text}{_place(stack)}", traceback=stack)

    async def _where(self) -> str:
        """Place in the environment's code from which it does not come back."""
        if (process_id := self._worker.process_id) is None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGUSR1)
        for _ in range(_LOOKS):
            await asyncio.sleep(_LOOK_S)
            if (stack := self._stack()).endswith("\n"):
                return stack
        return self._stack()

    def _stack(self) -> str:
        """The traceback that the child has written of its code, innermost first, without our own."""
        try:
            lines = self._stacks.read_text(errors="replace").splitlines(keepends=True)
        except OSError:
            return ""
        ours = next((index for index, line in enumerate(lines) if _OURS in line), len(lines))
        return "".join(lines[:ours])


def _line_of(call: HostCall) -> bytes:
    """The call as a line of JSON. Raises EnvironmentFailed for what cannot be one, such as half a character in a task:
    nobody else's process is to suffer for it.
    """
    try:
        return call.model_dump_json().encode()
    except ValueError as error:
        raise EnvironmentFailed("nonsense", f"the environment's {call.kind} cannot be sent to it: {error}") from error


def _place(stack: str) -> str:
    frames = list(_FRAME.finditer(stack))
    found = next((frame for frame in frames if "/lib/python" not in frame["file"]), frames[0] if frames else None)
    return f" ({found['file']}:{found['line']}, in {found['function']})" if found else ""


@dataclass
class Seat:
    """A conversation's place in a child. `life` is the child's when the conversation began: after a death, another."""

    child: Child
    life: int | None = None

    async def ask(self, call: HostCall, *, limit_s: float) -> HostReply:
        """As `Child.ask`."""
        return await self.child.ask(call, self, limit_s=limit_s)

    @property
    def is_there(self) -> bool:
        """True if the process in which the conversation began still runs."""
        return self.child.is_alive and self.life in (None, self.child.life)
