"""One place for a program, on the service's side: the keeper of its sandbox, and what runs in it.

offered (a sandbox waits) -> taken by a program -> ended -> the next is offered
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import reward_service.sandbox.keeper as keeper
from reward_service.sandbox.cgroups import Group, Parents
from reward_service.sandbox.streams import close_all
from reward_service.verifier import InfrastructureError

logger = logging.getLogger(__name__)

START_S = 90.0
_STOP_S = 20.0

# Beside the program, its group holds the keeper, bubblewrap and the first process of the namespace.
_OWN_PROCESSES = 4
_OWN_MEMORY = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How keepers launch sandboxes. `mounts`: folders that their user could not reach, and where they see them."""

    isolated: bool
    command: Sequence[str]
    options: Sequence[str]
    filter: bytes
    environment: dict[str, str]
    disk_mib: int
    mounts: Sequence[tuple[str, str]] = ()


class Place:
    """A place, used by one program at a time. `uid` is the user that it drops to, of None stays the service's."""

    def __init__(self, *, launch: Launch, name: str, uid: int | None, parents: Parents | None) -> None:
        self._launch = launch
        self._name = name
        self._uid = uid
        self._parents = parents
        self._group: Group | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._offer: asyncio.Future[list[int]] | None = None
        self._end: asyncio.Future[int] | None = None
        self._memory_kills = 0

    async def start(self) -> None:
        """Start its keeper if there is none. Does not wait for a sandbox. Raises InfrastructureError."""
        if self._process is not None:
            return
        loop = asyncio.get_running_loop()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            if self._parents is not None and self._group is None:
                self._group = Group(self._parents, name=self._name)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", _path_of(keeper.__file__), self._settings(its.fileno()),
                pass_fds=(its.fileno(),), stdin=asyncio.subprocess.DEVNULL, env={},
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"cannot start the keeper of a sandbox: {error}") from error
        finally:
            its.close()
        self._control = ours
        self._offer, self._end = loop.create_future(), loop.create_future()
        loop.add_reader(ours, self._hear)

    async def offered(self, *, disk_mib: int) -> list[int]:
        """The descriptors of a waiting sandbox: command, stdin, stdout, stderr, which are the caller's from here on.

        Raises InfrastructureError if there is none.
        """
        if self._offer is not None and self._offer.done() and self._offer.exception() is not None:
            await self.stop()  # it died while nobody looked
        await self.start()
        handles = await self._next_offer()
        if disk_mib == self._launch.disk_mib:
            return handles
        # Before its pipes are closed, which ends it.
        self._say(keeper.DISK + str(disk_mib).encode())
        close_all(handles)
        return await self._next_offer()

    async def _next_offer(self) -> list[int]:
        assert self._offer is not None
        try:
            async with asyncio.timeout(START_S):
                handles = await asyncio.shield(self._offer)
        except TimeoutError:
            await self.stop()
            raise InfrastructureError(f"no sandbox was ready within {START_S:g} s") from None
        except InfrastructureError:
            await self.stop()
            raise
        self._offer = asyncio.get_running_loop().create_future()
        return handles

    def limit(self, *, memory_mib: int, processes: int) -> None:
        """Set what the next program's processes may take together. Raises OSError if its group does not take that."""
        if self._group is None:
            self._say(keeper.WATCH + str(memory_mib << 20).encode())
            return
        self._group.limit(memory_bytes=(memory_mib << 20) + _OWN_MEMORY, processes=processes + _OWN_PROCESSES)
        self._memory_kills = self._group.memory_kills()
        self._say(keeper.WATCH + b"0")

    def kill(self) -> None:
        """Kill what runs; it has ended a little later."""
        self._say(keeper.KILL)

    async def ended(self) -> int:
        """The wait status of the sandbox's process, when nothing of it is left. Raises InfrastructureError if the
        keeper has died in between; if that was for lack of memory, the program's end is that it was killed."""
        assert self._end is not None
        try:
            return await asyncio.shield(self._end)
        except InfrastructureError:
            if self._group is not None and self._group.memory_kills() > self._memory_kills:
                return int(signal.SIGKILL)
            raise

    async def clear(self) -> None:
        """Make sure that nothing runs, and let the next sandbox be launched."""
        if self._end is None:
            return
        if not self._end.done():
            self.kill()
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.shield(self._end)
        except (TimeoutError, InfrastructureError):
            await self.stop()
            return
        self._end = asyncio.get_running_loop().create_future()
        self._say(keeper.NEXT)

    async def stop(self) -> None:
        """End the keeper and all that it has launched, and remove its group."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                logger.error("the keeper %s does not end, and is killed", self._name)
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._process = None
        if self._offer is not None and self._offer.done() and self._offer.exception() is None:
            close_all(self._offer.result())
        for future in (self._offer, self._end):
            if future is not None:
                future.cancel()
        self._offer, self._end = None, None
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
            self._group = None

    def _settings(self, control: int) -> str:
        settings = keeper.Settings(
            parent=os.getpid(),
            control=control,
            uid=self._uid,
            cgroups=[] if self._group is None else self._group.processes_files,
            isolated=self._launch.isolated,
            command=list(self._launch.command),
            options=list(self._launch.options),
            filter=self._launch.filter.hex(),
            environment=self._launch.environment,
            mounts=list(self._launch.mounts),
            disk_mib=self._launch.disk_mib,
        )
        return json.dumps(settings._asdict())

    def _say(self, word: bytes) -> None:
        if self._control is not None:
            with suppress(OSError):  # a keeper that is gone is heard of
                self._control.send(word)

    def _hear(self) -> None:
        assert self._control is not None
        assert self._offer is not None
        assert self._end is not None
        try:
            message, handles, _, _ = socket.recv_fds(self._control, 8192, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            message, handles = b"", []
        if message == keeper.READY and not self._offer.done():
            self._offer.set_result(handles)
        elif message.startswith(keeper.ENDED) and not self._end.done():
            self._end.set_result(int(message[len(keeper.ENDED) :]))
        else:
            close_all(handles)
            said = message.removeprefix(keeper.FAILED).decode(errors="replace")
            self._lose(f"a sandbox cannot be launched: {said}" if said else "the keeper of the sandbox has died")

    def _lose(self, reason: str) -> None:
        assert self._control is not None
        asyncio.get_running_loop().remove_reader(self._control)
        for future in (self._offer, self._end):
            if future is not None and not future.done():
                future.set_exception(InfrastructureError(reason))
                future.exception()  # it may be nobody's concern


def _path_of(file: str | None) -> str:
    assert file is not None
    return str(Path(file))
