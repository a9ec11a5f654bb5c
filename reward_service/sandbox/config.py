"""The table [reward-service.execution]: what a program that the service runs may take, and what it finds."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.config import ConfigModel

SandboxKind = Literal["required", "off", "unsafe"]


class InterpreterConfig(ConfigModel):
    """A command that programs may name: an entry of [[reward-service.execution.interpreters]]."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", description="name by which a program asks for it")
    path: Path = Field(description="where it is; outside of /usr its folder must be among execution.folders")


class ExecutionConfig(ConfigModel):
    """The sandbox: how many programs at once, the most that one may ask for, and what is in it."""

    concurrency: int = Field(4, ge=1, le=1024, description="programs at once; a sandbox waits ready for each")
    spare: int = Field(2, ge=0, le=1024, description="sandboxes that wait ready beyond that, while others are cleared")
    max_waiting: int = Field(256, ge=0, description="calls of /v1/execute that wait; more are turned away with 429")
    max_wall_s: float = Field(120.0, gt=0, description="most seconds that one program may ask for")
    max_cpu_s: float = Field(120.0, gt=0, description="most CPU seconds for each of its processes")
    max_memory_mib: int = Field(2048, ge=64, description="most memory, in MiB")
    max_processes: int = Field(128, ge=1, le=4096, description="most processes and threads of one program")
    max_output_bytes: int = Field(1 << 20, ge=1024, description="most bytes kept of stdout, and of stderr")
    max_disk_mib: int = Field(256, ge=1, description="most MiB of files that one program may write")
    python: Path | None = Field(None, description="the Python that programs run on; the service's own if not given")
    packages: tuple[str, ...] = Field(
        ("pytest", "pluggy", "iniconfig", "packaging", "pygments"),
        description="installed distributions that programs may import, their requirements included one by one",
    )
    interpreters: tuple[InterpreterConfig, ...] = Field(
        (InterpreterConfig(name="sh", path=Path("/bin/sh")),), description="commands beside python: name, path"
    )
    folders: tuple[Path, ...] = Field(
        (), description="folders that programs can read, at the same path; everybody must be able to"
    )
    first_uid: int = Field(
        64100, ge=1000, le=4_000_000_000, description="as root, programs run under user ids from this one on, one each"
    )
    cgroup: str = Field(
        "auto", description="folder below which cgroups are made; auto: the service's own cgroup; off: none are made"
    )
    max_sessions: int = Field(8, ge=0, le=1024, description="sessions at once, each a sandbox of its own; 0: none")
    session_idle_s: float = Field(300.0, gt=0, description="seconds without a call after which a session ends")
    session_s: float = Field(3600.0, gt=0, description="seconds after which a session ends in any case")
