"""Running one command in a container: how it is wrapped, what it prints, when it is over.

A shell of the image tells the command's process id on stderr, goes to its folder, and becomes it: an engine can start
commands and not kill them. The folder is entered by that shell and not by the engine, which would follow a link there
with descriptors of its own still open.

A command is killed with its group of processes. Of OCI runtimes, runc makes a session for each command; with crun it is
in the group of the engine's own keeper, outside of the container. There, setsid of the image makes it one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from env_service.runtimes.engine_api import ANSWER_S, EngineApi, EngineUnreachable
from env_service.runtimes.interface import RuntimeCommand
from services.isolation.streams import DroppedPace

KILLED = 137
# setsid of one that leads a group already would go on as another process.
_WRAP = (
    'echo "$$" >&2; cd -- "$1" || exit 126; shift; read -r _ _ _ _ headway_group _ </proc/$$/stat; '
    '[ "$headway_group" = "$$" ] || ! command -v setsid >/dev/null || set -- setsid -- "$@"; exec "$@"'
)
TRY_GROUP = """
read -r _ _ _ _ group _ </proc/$$/stat
if [ "$group" != $$ ]; then
  echo "a command cannot be killed with all that it starts: it needs a group of processes of its own, which this OCI \
runtime (crun) does not make; have setsid (util-linux) in the image, or take runc"
fi
"""
"""Lines of shell that print a line if commands have no group of processes of their own."""
_STOP_S = 20.0
# A process that a command has left may hold its output open.
_LAST_OUTPUT_S = 0.2
# Of the engine's answers to a command that it cannot start, that of one that is to blame on what is inside.
_INSIDE = "OCI runtime"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 1.0
_GIVEN_UP_S = 5.0


class DoesNotStart(Exception):
    """Raised of a command that the engine could not start; the text is the engine's. `inside`: what is in the container
    is to blame, and not the engine.
    """

    def __init__(self, text: str, *, inside: bool) -> None:
        super().__init__(text or "it ended without a word")
        self.inside = inside


class DoesNotEnd(Exception):
    """Raised of a command that goes on although it has been killed; `pid` is the engine's, 0 if it tells none."""

    def __init__(self, pid: int) -> None:
        super().__init__("a command in it did not end when it was killed")
        self.pid = pid


class OutputStream(Protocol):
    """The stream of a command, of an engine or a cluster."""

    def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Parts of what is printed, with 1 for stdout and 2 for stderr, until the end."""
        ...


Stream = TypeVar("Stream", bound=OutputStream)


@dataclass
class CommandOutput:
    """Output of a command as far as it is kept, and its process id in the container, which comes first."""

    most: int
    pid: str = ""
    cut: bool = False
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def collect(self, stream: OutputStream) -> None:
        """Take all frames, and keep what there is room for; the rest at a bounded pace, which holds up its writer."""
        head, pace = bytearray(), DroppedPace()
        async for kind, part in stream.frames():
            if kind == 2 and not self.began.is_set():
                head += part
                line, found, rest = bytes(head).partition(b"\n")
                if not found and len(head) < 64:
                    continue
                self.pid, part = (line.decode(), rest) if line.isdigit() else ("", bytes(head))
                self.began.set()
            kept = self.stderr if kind == 2 else self.stdout
            room = self.most - len(kept)
            kept += part[:room]
            if len(part) > room:
                self.cut = True
                await asyncio.sleep(pace.pause_s(len(part) - room))

    async def begun(self, collecting: asyncio.Future[None], *, within_s: float) -> bool:
        """True if its process id has come, which is waited for until `collecting` ends or the time is over."""
        began = asyncio.ensure_future(self.began.wait())
        try:
            await asyncio.wait((began, collecting), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            began.cancel()
        return self.began.is_set()


@dataclass(frozen=True, kw_only=True)
class EndedCommand:
    """A command that is over; `exit_code` as a shell tells it, with 128 added to a signal."""

    exit_code: int
    timed_out: bool
    output: CommandOutput
    wall_s: float


def wrapped(command: RuntimeCommand) -> Sequence[str]:
    """The words by which a command is started."""
    return ("/bin/sh", "-c", _WRAP, "sh", command.cwd, *command.argv)


async def run_command(
    api: EngineApi,
    container: str,
    command: RuntimeCommand,
    *,
    user: str,
    wall_s: float,
    output_bytes: int,
    kill: Callable[[str], None],
) -> EndedCommand:
    """A command from its start to its end; `kill` has a group of processes killed. Raises EngineError, DoesNotStart and
    DoesNotEnd.
    """
    settings = {
        "AttachStdin": bool(command.stdin),
        "AttachStdout": True,
        "AttachStderr": True,
        "Cmd": list(wrapped(command)),
        "Env": [f"{name}={value}" for name, value in command.environment.items()],
        "User": user,
        "WorkingDir": "/",
    }
    running = await api.make_exec(container, settings)
    output = CommandOutput(most=output_bytes)
    async with collected(api.start_exec(running), output, kill=kill) as (stream, collecting):
        if command.stdin:
            stream.send(command.stdin)
            stream.finish()
        if not await output.begun(collecting, within_s=ANSWER_S):
            if not collecting.done():
                raise EngineUnreachable(f"a command has not begun after {ANSWER_S:g} s")
            collecting.result()
            said = output.stdout.decode(errors="replace").strip()
            raise DoesNotStart(said, inside=_INSIDE in said or bool((await api.exec_state(running)).Pid))
        if not output.pid:  # by Podman, or by another shell than the image's
            await asyncio.wait((collecting,), timeout=_LAST_OUTPUT_S)
            raise DoesNotStart(output.stderr.decode(errors="replace").strip(), inside=True)
        return await _over(api, running, collecting, output, wall_s=wall_s, kill=kill)


@asynccontextmanager
async def collected(
    opening: AbstractAsyncContextManager[Stream], output: CommandOutput, *, kill: Callable[[str], None]
) -> AsyncIterator[tuple[Stream, asyncio.Future[None]]]:
    """The stream of a command, and the taking of its output. A command that is given up is killed, also on its way in:
    it goes on whether anybody holds its stream or not.
    """
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(stack.enter_async_context(opening))

        async def collect() -> None:
            await output.collect(await asyncio.shield(starting))

        collecting = asyncio.ensure_future(collect())
        try:
            yield await asyncio.shield(starting), collecting
        except BaseException:
            await output.begun(collecting, within_s=_GIVEN_UP_S)
            kill(output.pid)
            raise
        finally:
            for task in (collecting, starting):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _over(
    api: EngineApi,
    running: str,
    collecting: asyncio.Future[None],
    output: CommandOutput,
    *,
    wall_s: float,
    kill: Callable[[str], None],
) -> EndedCommand:
    began, look_s, timed_out = time.monotonic(), _FIRST_LOOK_S, False
    while True:
        left_s = began + wall_s - time.monotonic()
        if timed_out:
            kill(output.pid)  # again: of a group, somebody may just have been made
            if left_s < -_STOP_S:
                raise DoesNotEnd((await api.exec_state(running)).Pid or 0)
        elif left_s <= 0:
            timed_out, look_s = True, _FIRST_LOOK_S
            continue
        printing, pause_s = not collecting.done(), look_s if timed_out else min(look_s, left_s)
        await (asyncio.wait((collecting,), timeout=pause_s) if printing else asyncio.sleep(pause_s))
        if printing and collecting.done():  # as a rule, it is over
            look_s = _FIRST_LOOK_S
        told = await api.exec_state(running)
        if not told.Running:
            await asyncio.wait((collecting,), timeout=_LAST_OUTPUT_S)
            if collecting.done():
                collecting.result()
            code = KILLED if told.ExitCode is None else told.ExitCode
            return EndedCommand(exit_code=code, timed_out=timed_out, output=output, wall_s=time.monotonic() - began)
        look_s = min(2 * look_s, _LAST_LOOK_S)
