"""Makes runtimes by a container engine.

A container dies with this process, since its stdin does; what an unlucky instant leaves is known by its label, and
removed by the next service. An engine that dies takes its runtimes with it, which is nobody's fault here, and makes new
ones as soon as it answers again.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Set
from contextlib import suppress
from pathlib import Path

from env_service.runtimes.config import PODMAN_SECCOMP, RuntimesConfig
from env_service.runtimes.engine_api import (
    EngineApi,
    EngineError,
    EngineInfo,
    EngineRefused,
    ImageDescription,
    ListedContainer,
)
from env_service.runtimes.engine_commands import TRY_GROUP
from env_service.runtimes.engine_limits import limits_fault, limits_trial
from env_service.runtimes.engine_runtime import FIRST, ContainerLaunch, EngineRuntime
from env_service.runtimes.images import HOME, HOST, ImageFault
from env_service.runtimes.interface import RuntimeCommand, RuntimeLost, RuntimeSnapshot
from env_service.runtimes.kinds import WITHOUT, Ended, PooledRuntime
from services.isolation.faults import CannotIsolate
from services.isolation.owners import Owner

logger = logging.getLogger(__name__)

LABEL = "headway.runtime"
"""Label of every runtime; its value is the mark of the service that it is of, and the machine on which that one runs:
an engine may serve several machines, whose process ids say nothing of each other.
"""

_DISK_LOOK_S = 2.0
# Times as long as a count of files took.
_LEFT_ALONE = 3.0
_AGAIN_S = 1.0
_SWEEP_S = 60.0
_ENDED = ("exited", "dead", "stopped")
_GOES_ON = ("running", "paused")
# A container that does not run may be about to.
_YOUNG_S = 600.0
_SHM_MIB = 64
# An engine's own part of a command, and the first process.
_OWN_PROCESSES = 16
_SHARES = 256  # of the usual 1024: whoever serves, samples or trains on this machine goes first
_TRY = """
read -r _ _ version _ </proc/version
if [ "$version" = "KERNEL" ]; then own_kernel=no; else own_kernel=OWN; fi
status() { while read -r name value; do [ "$name" = "$1" ] && echo "$value"; done </proc/self/status; }
case "$(status Uid:)" in USER[!0-9]*) ;; *) echo "it runs as user $(status Uid:)";; esac
case "$(status CapEff:)$(status CapBnd:)" in *[1-9a-f]*) echo "it has capabilities";; esac
case "$(status NoNewPrivs:)" in 1) ;; *) echo "programs can give it privileges";; esac
case "$(status Seccomp:)$own_kernel" in 2*|*yes) ;; *) echo "there is no filter of system calls";; esac
while read -r name rest; do
  case $name in lo:*|Inter*|face*) ;; *) echo "a network is there: $name";; esac
done </proc/net/dev
if (echo x >/proc/sys/kernel/core_pattern) 2>/dev/null; then echo "settings of the kernel are writable"; fi
for each in /var/run/docker.sock /run/docker.sock /run/podman; do
  if [ -e "$each" ]; then echo "the engine is within reach: $each"; fi
done
if [ $own_kernel = no ] && unshare --user true 2>/dev/null; then
  echo "programs can make user namespaces, which have capabilities"
fi
if ! (echo x >/work/.try && rm /work/.try); then echo "its files cannot be changed"; fi
"""


class EngineKind:
    """Implements `RuntimeKind`."""

    def __init__(self, config: RuntimesConfig) -> None:
        user, _, group = config.engine.user.partition(":")
        self.trial = _trial(config, kernel="")
        self.remedy = f"See docs/runtimes.md for what an engine needs; {WITHOUT}"
        self.memory_mib = config.limits.memory_mib
        self._config = config
        self._api = EngineApi(config.engine.socket)
        self._launch = ContainerLaunch(
            api=self._api, limits=config.limits, user=int(user), group=int(group), left=self._leave
        )
        self._mark = label_of(Owner.this())
        self._settings: dict[str, Mapping[str, object]] = {}
        self._asking, self._removing = asyncio.Lock(), asyncio.Lock()
        self._has_quota: bool | None = None
        self._runtimes: set[EngineRuntime] = set()
        self._left: set[str] = set()
        self._refused: set[str] = set()
        self._ended_before: Set[str] = frozenset()
        self._loops: list[asyncio.Task[None]] = []

    def check(self, image: str) -> None:
        """Raises ImageFault for the image of this machine, which no engine has; others are looked up at the start."""
        self._name_of(image)

    async def open(self, images: Set[str]) -> None:
        """Reach the engine, clear what a killed service left, look up images. Raises CannotIsolate and ImageFault."""
        await self._api.__aenter__()
        try:
            await self._api.agree()
            info = await self._api.info()
        except EngineError as error:
            raise CannotIsolate(
                f"env-service.runtimes.kind is 'engine', and no container engine answers: {error}; start one, let this "
                "user reach its socket, or set env-service.runtimes.engine.socket (Podman's of oneself: "
                "/run/user/UID/podman/podman.sock)"
            ) from error
        if not any("seccomp" in each and "unconfined" not in each for each in info.SecurityOptions or ()):
            raise CannotIsolate(
                f"the container engine at {self._api.socket} filters no system calls: start it with its default "
                "seccomp profile"
            )
        is_podman = self._api.is_podman
        if fault := limits_fault(info, is_podman=is_podman) or _runtime_fault(self._config, info, is_podman=is_podman):
            raise CannotIsolate(f"the container engine at {self._api.socket} is not taken: {fault}")
        self.trial = _trial(self._config, kernel=info.KernelVersion)
        try:
            await self._sweep()
            for image in sorted(images):
                await self._settings_of(image)
        except EngineError as error:
            raise CannotIsolate(f"the container engine at {self._api.socket} does not do: {error}") from error
        self._loops.append(asyncio.ensure_future(_again(self._hear_of_kills, pause_s=_AGAIN_S)))
        self._loops.append(asyncio.ensure_future(_again(self._look_at_sizes, pause_s=_DISK_LOOK_S)))
        self._loops.append(asyncio.ensure_future(_again(self._count_files, pause_s=_DISK_LOOK_S)))
        self._loops.append(asyncio.ensure_future(_again(self._remove_left, pause_s=_AGAIN_S)))
        self._loops.append(asyncio.ensure_future(_again(self._sweep, pause_s=_SWEEP_S, first_s=_SWEEP_S)))

    async def launch(self, image: str, snapshot: RuntimeSnapshot | None, *, name: str, ended: Ended) -> EngineRuntime:
        """Raises RuntimeLost and ImageFault."""

        def gone(runtime: PooledRuntime) -> None:
            self._runtimes.discard(found)
            ended(runtime)

        try:
            await self._remove_left()
            settings = await self._settings_of(image)
        except EngineError as error:
            raise RuntimeLost(f"a runtime of image {image} cannot be started: {error}") from error
        found = EngineRuntime(self._launch, image, name=f"headway-{name}-{uuid.uuid4().hex[:12]}", ended=gone)
        self._runtimes.add(found)
        await found.start(settings, snapshot)
        return found

    async def close(self) -> None:
        """Let go of the engine."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        with suppress(EngineError):  # then it is for the next service
            await self._remove_left()
        await self._api.__aexit__()

    def _name_of(self, image: str) -> str:
        """The engine's name of an image. Raises ImageFault."""
        known = self._config.engine.images
        if image == HOST and HOST not in known:
            raise ImageFault(
                f"the image {HOST!r} is this machine's own programs, which no container has: name another one, "
                f'or say which one is meant: env-service.runtimes.engine.images.{HOST} = "IMAGE"'
            )
        return known.get(image, image)

    async def _settings_of(self, image: str) -> Mapping[str, object]:
        """Settings with which containers of an image are made. Raises ImageFault and EngineError."""
        name = self._name_of(image)
        async with self._asking:
            if image not in self._settings:
                try:
                    told = await self._api.image(name)
                except EngineRefused as error:
                    if error.status != 404:
                        raise
                    raise ImageFault(
                        f"the container engine at {self._api.socket} has no image {name!r}: pull or build it there"
                    ) from error
                if told.Config is not None and told.Config.Volumes:
                    raise ImageFault(
                        f"the image {name!r} has volumes ({', '.join(sorted(told.Config.Volumes))}), which no limit "
                        "and no snapshot would see: build one without VOLUME"
                    )
                settings = _settings(self._config, told, mark=self._mark, for_podman=self._api.is_podman)
                if self._has_quota is None:
                    self._has_quota = await self._takes_quota(settings)
                self._settings[image] = _with_quota(settings, self._config) if self._has_quota else settings
        return self._settings[image]

    async def _takes_quota(self, settings: Mapping[str, object]) -> bool:
        """True if the engine's storage can limit what a container writes."""
        try:
            probe = await self._api.create(f"headway-{uuid.uuid4().hex[:12]}", _with_quota(settings, self._config))
        except EngineRefused as error:
            logger.info("the engine's storage limits no disk (%s): what runtimes write is looked at instead", error)
            return False
        await self._api.remove(probe)
        return True

    async def _sweep(self) -> None:
        """Remove what services that have ended left."""
        here, listed = Owner.this(), await self._api.containers(label=LABEL)
        orphans = [each.Id for each in listed if _is_orphan(each, here, ended_before=self._ended_before)]
        known = {runtime.container for runtime in self._runtimes}
        # Its answer was lost, and it was made after this service had asked for its removal.
        orphans += [each.Id for each in listed if self._is_mine(each) and each.Id not in known and _is_old(each)]
        self._ended_before = frozenset(each.Id for each in listed if each.State in _ENDED)
        self._refused &= {each.Id for each in listed}
        removed = [await self._is_removed(each) for each in orphans].count(True)
        if removed:
            logger.warning("removed %d containers that nobody had removed, as of a killed service", removed)

    def _is_mine(self, listed: ListedContainer) -> bool:
        return (listed.Labels or {}).get(LABEL) == self._mark

    def _leave(self, container: str) -> None:
        """Remember one that could not be removed, as while the engine is down."""
        self._left.add(container)

    async def _remove_left(self) -> None:
        async with self._removing:
            for container in list(self._left):
                await self._is_removed(container)
                self._left.discard(container)

    async def _is_removed(self, container: str) -> bool:
        """Remove one; False if the engine refuses, which is said once. That keeps nobody from a runtime, and the next
        look may find it again.
        """
        try:
            await self._api.remove(container)
        except EngineRefused as error:
            if container not in self._refused:
                logger.warning("the container %s is left for now: it cannot be removed: %s", container, error)
            self._refused.add(container)
            return False
        return True

    async def _hear_of_kills(self) -> None:
        async for event in self._api.kills(f"{LABEL}={self._mark}"):
            for runtime in self._runtimes:
                if runtime.container == event.Actor.ID:
                    runtime.count_kill(for_memory=event.Action == "oom")

    async def _look_at_sizes(self) -> None:
        """End runtimes that have written more than they may."""
        limits = self._config.limits
        if not self._runtimes or self._has_quota:
            return
        listed = await self._api.containers(label=f"{LABEL}={self._mark}", sizes=True)
        full = {each.Id for each in listed if (each.SizeRw or 0) > limits.disk_mib << 20}
        for runtime in self._runtimes:
            if runtime.container in full:
                runtime.end(f"it wrote more than {limits.disk_mib} MiB (env-service.runtimes.limits.disk_mib)")

    async def _count_files(self) -> None:
        """End runtimes that have made more files than they may: small ones take more of a disk than the engine tells.

        For that, an engine may look at each file of an image, so it is left alone for most of the time.
        """
        most = self._config.limits.files
        for runtime in list(self._runtimes):
            if not (runtime.container and runtime.stands):
                continue
            began = time.monotonic()
            with suppress(EngineError):  # it has gone meanwhile, or cannot be counted: the others are
                if await self._api.count_changes(runtime.container, most=most) > most:
                    runtime.end(f"it made more than {most} files (env-service.runtimes.limits.files)")
            await asyncio.sleep(_LEFT_ALONE * (time.monotonic() - began))


def _trial(config: RuntimesConfig, *, kernel: str) -> RuntimeCommand:
    """The walls as they are tried in a container on a machine with a `kernel`, as `uname -r` tells it."""
    user, _, _ = config.engine.user.partition(":")
    # Where the setting names gVisor, or a virtual machine, there is another kernel, in which nothing is filtered.
    may_be_own = "yes" if config.engine.oci_runtime else "no"
    walls = _TRY.replace("USER", user).replace("KERNEL", kernel).replace("OWN", may_be_own)
    limits = limits_trial(config.limits, processes=config.limits.processes + _OWN_PROCESSES, cpus=config.engine.cpus)
    # Another kernel has cgroups of its own.
    script = f"{walls}{TRY_GROUP}if [ $own_kernel = yes ]; then exit 0; fi\n{limits}"
    return RuntimeCommand(argv=("/bin/sh", "-c", script), cwd="/")


def _runtime_fault(config: RuntimesConfig, info: EngineInfo, *, is_podman: bool) -> str:
    """Says why containers would not run with the OCI runtime of the settings; empty if they would."""
    asked, has = config.engine.oci_runtime, info.DefaultRuntime
    if not is_podman or asked in ("", has):
        return ""
    return (
        f"env-service.runtimes.engine.oci_runtime is {asked!r}, and Podman runs all containers with {has!r}; "
        f'the two have to be one: say runtime = "{asked}" below [engine] in that machine\'s containers.conf, or leave '
        "the setting out"
    )


async def _again(work: Callable[[], Coroutine[object, object, None]], *, pause_s: float, first_s: float = 0.0) -> None:
    """Do work again and again, with a pause between and before the first time, also after the engine was away."""
    await asyncio.sleep(first_s)
    while True:
        with suppress(EngineError):
            await work()
        await asyncio.sleep(pause_s)


def label_of(owner: Owner) -> str:
    """The value of the label of a service's runtimes."""
    return f"{owner.mark}@{_machine()}"


def _machine() -> str:
    """The boot of this machine: the same within its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _is_orphan(listed: ListedContainer, here: Owner, *, ended_before: Set[str]) -> bool:
    """True if the service of a container has ended, or is not known to live and the container has ended a while ago."""
    mark, _, machine = (listed.Labels or {}).get(LABEL, "").partition("@")
    owner = Owner.of(mark)
    if owner is None:
        return False
    if machine == _machine() and owner.namespace == here.namespace:
        return owner.is_gone
    # Of one that has just ended, a service may still ask how.
    return listed.Id in ended_before or (listed.State not in _GOES_ON and _is_old(listed))


def _is_old(listed: ListedContainer) -> bool:
    return time.time() - listed.Created > _YOUNG_S


def _with_quota(settings: Mapping[str, object], config: RuntimesConfig) -> Mapping[str, object]:
    host = settings["HostConfig"]
    assert isinstance(host, dict)
    return {**settings, "HostConfig": {**host, "StorageOpt": {"size": f"{config.limits.disk_mib}M"}}}


def _settings(config: RuntimesConfig, image: ImageDescription, *, mark: str, for_podman: bool) -> Mapping[str, object]:
    set_there = {each.partition("=")[0] for each in (image.Config and image.Config.Env) or ()}
    usual = {"HOME": HOME, "LANG": "C.UTF-8"}
    return {
        "Image": image.Id,
        "Entrypoint": ["/bin/sh", "-c", FIRST],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in usual.items() if name not in set_there],
        "User": config.engine.user,
        "WorkingDir": "/",
        "Hostname": "runtime",
        "Labels": {LABEL: mark},
        "StopSignal": "SIGKILL",  # an engine that is stopped need not wait for it
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": False,
        "AttachStderr": False,
        "NetworkDisabled": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _walls(config, for_podman=for_podman),
    }


def _walls(config: RuntimesConfig, *, for_podman: bool) -> dict[str, object]:
    limits, engine = config.limits, config.engine
    filtered = [f"seccomp={engine.podman_seccomp or PODMAN_SECCOMP}"] if for_podman else []
    memory, disk = limits.memory_mib << 20, limits.disk_mib << 20
    ulimits = {
        "core": (0, 0),
        "cpu": (limits.cpu_s, limits.cpu_s + 1),
        "fsize": (disk, disk),
        "memlock": (0, 0),
        "nofile": (limits.open_files, limits.open_files),
    }
    walls: dict[str, object] = {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", *filtered],
        "Privileged": False,
        "CgroupnsMode": "private",
        "IpcMode": "private",
        "ShmSize": min(limits.disk_mib, _SHM_MIB) << 20,
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": int(engine.cpus * 1e9),
        "CpuShares": _SHARES,
        "PidsLimit": limits.processes + _OWN_PROCESSES,
        "OomScoreAdj": 500,
        "Ulimits": [{"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in ulimits.items()],
        "RestartPolicy": {"Name": "no"},
        # Whoever is inside can write to the first process's output, which would be kept.
        "LogConfig": {"Type": "none", "Config": {}},
    }
    return {**walls, "Runtime": engine.oci_runtime} if engine.oci_runtime else walls
