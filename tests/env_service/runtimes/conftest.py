"""Runtimes of this machine's own programs: nothing has to be built for them."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.interface import CommandEnd, Runtime, RuntimeCommand
from env_service.runtimes.pool import RuntimePool
from tests.process_ends import children_of

SMALL = RuntimeLimits(memory_mib=128, disk_mib=8, processes=24, command_s=20)
Shell = Callable[..., Awaitable[CommandEnd]]


@pytest.fixture
async def pool() -> AsyncIterator[RuntimePool]:
    """Runtimes with small limits, none of them warm."""
    made = RuntimePool(RuntimesConfig(spare=0, limits=SMALL))
    yield made
    await made.close()


@pytest.fixture
async def runtime(pool: RuntimePool) -> Runtime:
    """A runtime of the pool."""
    return await pool.start("host")


async def sh(runtime: Runtime, line: str, *, wall_s: float = 20.0) -> CommandEnd:
    """The end of a line of shell."""
    return await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-c", line), wall_s=wall_s))


async def said(runtime: Runtime, line: str) -> str:
    """All that a line of shell prints, errors too."""
    end = await sh(runtime, line)
    return (end.stdout + end.stderr).decode(errors="replace").strip()


def forge() -> int:
    """The process that forks the keepers of this one's pool."""
    (found,) = (
        pid for pid in children_of(os.getpid()) if b"runtimes.forge" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def keepers() -> list[int]:
    """The keepers of this process's runtimes."""
    return children_of(forge())
