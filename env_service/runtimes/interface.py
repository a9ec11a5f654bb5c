"""The contract between runtimes and who uses them: a computer with a shell, files and limits, for one task.

    runtime = await runtimes().start("python")      # waits for room; a warm one, if one stands ready
    await runtime.copy_in({"work/main.py": b"…"})
    end = await runtime.exec(("python3", "main.py"))
    files = await runtime.copy_out("work")
    later = await runtime.snapshot()                # files, not processes; `start(…, snapshot=later)` is a fork
    await runtime.stop()

What runs inside can read and write its own files only, and reach nobody. A runtime that was ended from inside stays
ended, and that is the doing of whoever was inside: RuntimeEnded. One that was killed, or whose keeper was, is lost by
nobody's fault here: RuntimeLost, a failure of infrastructure.
"""

import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pydantic import ConfigDict, TypeAdapter

from env_service.environments.interface import EnvironmentFull, EnvironmentUnavailable

_FASTEST = 1
_Entry = tuple[str, str, int, bytes]
_SNAPSHOT: TypeAdapter[tuple[str, tuple[_Entry, ...]]] = TypeAdapter(
    tuple[str, tuple[_Entry, ...]], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
)


class RuntimeLost(EnvironmentUnavailable):
    """Raised where a runtime is gone, or could not be started, by no doing of who is inside."""

    kind = "runtime"


class RuntimesBusy(EnvironmentFull):
    """Raised where no room for another runtime came up in time."""


class RuntimeEnded(Exception):
    """Raised of a runtime that was ended from inside."""


class RuntimeRefused(ValueError):
    """A path, a command or files that a runtime does not take; the text is for whoever asked."""


@dataclass(frozen=True, kw_only=True)
class RuntimeCommand:
    """A command line, run in the folder `cwd` until its first process ends, or `wall_s` seconds are over.

    `wall_s` and `output_bytes`, kept of what it prints, are at most those of the settings, which are meant by None.
    `argv[0]` is looked up in the image's PATH. Processes that it leaves behind go on.

    `trusted`, in a ListeningRuntime: a program of the service's choice, not of the policy's. Its bounds are those that
    it is given, whatever the settings say, and of its output the end is kept, not the beginning.
    """

    argv: tuple[str, ...]
    cwd: str = "/work"
    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    wall_s: float | None = None
    output_bytes: int | None = None
    trusted: bool = False


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """End of a command: by `exit_code` or by `signal`. `starved`: something was killed since there was no memory."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    cut: bool = False
    timed_out: bool = False
    starved: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class RuntimeSnapshot:
    """Files of a runtime that differ from its image's. `entries` are the kind's own, `image` is the name of that."""

    image: str
    entries: tuple[_Entry, ...] = field(repr=False)

    def packed(self) -> bytes:
        """As bytes, compressed."""
        return zlib.compress(_SNAPSHOT.dump_json((self.image, self.entries)), _FASTEST)

    @classmethod
    def unpacked(cls, packed: bytes) -> "RuntimeSnapshot":
        """Of such bytes."""
        return cls(*_SNAPSHOT.validate_json(zlib.decompress(packed)))


@dataclass(frozen=True)
class RuntimeFile:
    """A file as it goes in or out. `link`: where it leads to, of a symbolic link."""

    content: bytes = b""
    mode: int = 0o644
    link: str = ""


class Runtime(Protocol):
    """A computer for one task. All of it raises RuntimeLost and RuntimeEnded; and RuntimeRefused, as said."""

    image: str

    async def exec(self, command: RuntimeCommand) -> CommandEnd:
        """Run a command to its end. Raises RuntimeRefused for one that is too long."""
        ...

    async def copy_in(self, files: Mapping[str, RuntimeFile | bytes]) -> None:
        """Write files by their paths, with the folders that they need. Raises RuntimeRefused, as for a full disk."""
        ...

    async def copy_out(self, path: str, *, most_bytes: int = 16 << 20) -> Mapping[str, RuntimeFile]:
        """The files in a folder by their paths in there, links as links; of a file, itself by the name "".

        Raises RuntimeRefused if there is nothing, or more than `most_bytes`.
        """
        ...

    async def snapshot(self) -> RuntimeSnapshot:
        """Its files, for runtimes that begin with them."""
        ...

    async def stop(self) -> None:
        """End it and all that runs in it."""
        ...


@runtime_checkable
class ListeningRuntime(Protocol):
    """A runtime in which the service can listen."""

    async def listen(self) -> socket.socket:
        """A socket that listens on the loopback of the runtime, where only who is inside can connect to it.

        Raises RuntimeLost and RuntimeEnded; and RuntimeRefused for a kind that has none.
        """
        ...
