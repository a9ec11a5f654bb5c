"""Runtimes by the engines that tests have: their settings, what is asked of them, and a service that dies."""

import asyncio
import io
import shutil
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from env_service.runtimes.config import ContainerEngineConfig, RuntimeLimits, RuntimesConfig
from env_service.runtimes.engine_api import EngineApi, EngineInfo
from env_service.runtimes.engine_kind import LABEL
from env_service.runtimes.interface import CommandEnd, Runtime, RuntimeCommand
from env_service.runtimes.pool import RuntimePool
from services.isolation.faults import CannotIsolate
from tests.env_service.runtimes.programs import libraries_of

LIMITS = RuntimeLimits(memory_mib=128, disk_mib=8, processes=24, command_s=20)


class TriedEngine(NamedTuple):
    """An engine at its socket, the name that an image with python3 has there, and its command line."""

    socket: Path
    image: str
    command: Callable[..., object]


# A service with two runtimes, each with a process that outlives its command, which is found by its words.
SERVICE = """
import asyncio, sys
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.interface import RuntimeCommand
from env_service.runtimes.pool import RuntimePool
async def main():
    pool = RuntimePool(RuntimesConfig.model_validate_json(sys.argv[1]))
    made = [await pool.start("host") for _ in range(2)]
    for each in made:
        await each.exec(RuntimeCommand(argv=("sh", "-c", "(sleep SECONDS >/dev/null 2>&1 &)")))
    print("stands", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def config_of(socket: Path, image: str, **changed: object) -> RuntimesConfig:
    engine = ContainerEngineConfig(socket=socket, images={"host": image})
    return RuntimesConfig(kind="engine", spare=0, limits=LIMITS, engine=engine).model_copy(update=changed)


async def sh(runtime: Runtime, line: str, *, wall_s: float = 20.0) -> CommandEnd:
    return await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-c", line), wall_s=wall_s))


async def said(runtime: Runtime, line: str) -> str:
    end = await sh(runtime, line)
    return (end.stdout + end.stderr).decode(errors="replace").strip()


async def ids(socket: Path, *, running: bool = False) -> list[str]:
    """Containers of any service's runtimes."""
    async with EngineApi(socket) as api:
        await api.agree()
        return [each.Id for each in await api.containers(label=LABEL) if not running or each.State == "running"]


async def refusal_of(tried: TriedEngine) -> str:
    """Says why an engine is not taken for runtimes; empty if it is."""
    pool = RuntimePool(config_of(tried.socket, tried.image))
    pool.need("host")
    try:
        await pool.open()
    except CannotIsolate as error:
        return str(error)
    finally:
        await pool.close()
    return ""


def info_of(socket: Path) -> EngineInfo:
    """Ask an engine to describe itself."""

    async def asked() -> EngineInfo:
        async with EngineApi(socket) as api:
            await api.agree()
            return await api.info()

    return asyncio.run(asked())


def small_image() -> bytes:
    """A root file system with this machine's shell, and little else."""
    programs = [Path(found) for name in ("dash", "sleep", "rm", "cat", "setsid") if (found := shutil.which(name))]
    packed = io.BytesIO()
    with closing(tarfile.open(fileobj=packed, mode="w")) as archive:
        for path in [*programs, *libraries_of(programs)]:
            archive.add(path.resolve(), arcname=str(path).lstrip("/"))
        for path in programs:
            archive.add(path.resolve(), arcname=f"bin/{path.name}")
        archive.add(programs[0].resolve(), arcname="bin/sh")
    return packed.getvalue()
