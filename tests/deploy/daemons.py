"""Engines that a test starts in a folder of its own, may kill, and takes away: Debian's dockerd, and its Podman, the
latter also with crun, and as an ordinary user.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from services.local_processes import each_process
from tests.deploy.containers import ROOT, CommandFailed, EngineImpossible, run

CLIENT = "/usr/bin/docker"
_UNPACKED = ROOT / "build"
# Beside these it needs what a Debian has anyway, and an OCI runtime, of which runc comes with dockerd.
_PACKAGES = {
    "podman": (
        "podman",
        "conmon",
        "golang-github-containers-common",
        "golang-github-containers-image",
        "libgpgme11",
        "libsubid4",
    ),
    "crun": ("crun", "libyajl2"),
    "uidmap": ("uidmap",),
}
"""By a program of theirs, which is how their folder below build/ is called."""

_UNIFIED = Path("/sys/fs/cgroup/unified")

# Where nobody may raise a limit, one that is higher than this machine's is lowered to that.
_OCI_RUNTIME = """#!/bin/bash
most="\\"hard\\":$(ulimit -Hu),\\"soft\\":$(ulimit -Hu)"
for word; do
  case $last in --bundle|-b) file=$word/config.json;; --process|-p) file=$word;; *) file=;; esac
  [ ! -f "$file" ] || sed -Ei "s/(\\"RLIMIT_NPROC\\"),\\"hard\\":[0-9]+,\\"soft\\":[0-9]+/\\1,$most/" "$file"
  last=$word
done
exec {runc} "$@"
"""

_CONFIGURATION = """
[containers]
seccomp_profile = "{unpacked}/usr/share/containers/seccomp.json"
[engine]
conmon_path = ["{unpacked}/usr/bin/conmon"]
runtime = "{runtime}"
cgroup_manager = "cgroupfs"
events_logger = "file"
exit_command_delay = 10
tmp_dir = "{folder}/run/libpod"
[engine.runtimes]
{runtime} = ["{folder}/oci-runtime"]
[network]
network_backend = "cni"
cni_plugin_dirs = ["{folder}"]
network_config_dir = "{folder}/networks"
"""

_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/data"
runroot = "{folder}/run/storage"
"""

_ROOTS = ("/merged", "/rootfs")


class Daemon(ABC):
    """An engine in a folder, at its socket. `start` and `signal` may be called again and again."""

    quick_end = signal.SIGTERM
    """The signal by which one without containers ends at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, env=self._environment())
        deadline = time.monotonic() + 60
        while self("info").returncode:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def __call__(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [CLIENT, "-H", f"unix://{self.socket}", *words]
        return subprocess.run(command, capture_output=True, input=stdin, timeout=120)

    def signal(self, number: int) -> None:
        """Return when it has ended of a signal."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=60)

    def processes(self) -> list[int]:
        """Processes with its folder among their words: the engine's own, and the keepers of containers."""
        return [pid for pid, words in each_process("cmdline") if f"{self.folder}/".encode() in words]

    def mounts(self) -> list[str]:
        """Root file systems of containers that are mounted."""
        lines = Path(f"/proc/{self._seen_by()}/mounts").read_text().splitlines()
        places = [line.split()[1] for line in lines]
        return [place for place in places if place.startswith(f"{self.folder}/") and place.endswith(_ROOTS)]

    def end(self) -> None:
        """End it with all that it has."""
        if self._process is not None and self._process.poll() is None:
            containers = self("ps", "-aq").stdout.decode().split()
            if containers:
                self("rm", "-f", *containers)
            self.signal(self.quick_end)
        for pid in self.processes():  # what the keeper of a container's process leaves if the engine did not come back
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """Its command line."""

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _seen_by(self) -> int | str:
        """A process in whose mount namespace it mounts."""
        return "self"


class DockerDaemon(Daemon):
    """A docker engine without networks."""

    def signal(self, number: int) -> None:
        """Return when it has ended of a signal, and its containerd with it."""
        containerd = self._containerd()
        super().signal(number)
        _until(lambda: not Path(f"/proc/{containerd}").exists(), what="its remains would be taken for it")

    def kill_containerd(self) -> None:
        """Return when the engine has another one."""
        before = self._containerd()
        os.kill(before, signal.SIGKILL)
        _until(lambda: self._containerd() not in (0, before), what="there is no new containerd")

    def _containerd(self) -> int:
        return int((self.folder / "run/containerd/containerd.pid").read_text() or 0)

    def _command(self) -> Sequence[str]:
        folder = self.folder
        (folder / "pid").unlink(missing_ok=True)
        words = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/run", "--pidfile", f"{folder}/pid"]
        words += ["-H", f"unix://{self.socket}", "--bridge", "none", "--iptables=false", "--ip-forward=false"]
        # In a network of its own: without a bridge it would remove docker0, which is the other engine's.
        return ["unshare", "--net", "/usr/sbin/dockerd", *words]


class PodmanDaemon(Daemon):
    """Podman's service, of Debian's packages that are unpacked and not installed.

    What it mounts is in a mount namespace, which is there as long as `_holder`; in there, its libraries are found.
    """

    quick_end = signal.SIGKILL
    runtime = "runc"
    """The OCI runtime with which it runs containers."""
    packages: ClassVar[tuple[str, ...]] = ("podman",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        roots = [unpacked(name) for name in self.packages]
        self.path = os.pathsep.join([*(f"{root}/usr/bin" for root in roots), "/usr/sbin:/usr/bin:/sbin:/bin"])
        runtime = shutil.which(self.runtime, path=self.path)
        if runtime is None:
            raise EngineImpossible(f"podman needs {self.runtime}, which is missing")
        for name, text in (("containers.conf", _CONFIGURATION), ("storage.conf", _STORAGE)):
            (folder / name).write_text(text.format(unpacked=roots[0], folder=folder, runtime=self.runtime))
        (folder / "oci-runtime").write_text(_OCI_RUNTIME.replace("{runc}", runtime))
        (folder / "oci-runtime").chmod(0o755)
        policy = folder / "home/.config/containers/policy.json"
        policy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(roots[0] / "etc/containers/policy.json", policy)
        libraries = folder / "libraries"
        places = [f"{root}/usr/lib/{os.uname().machine}-linux-gnu" for root in roots]
        libraries.write_text("\n".join([*places, "include /etc/ld.so.conf", ""]))
        run(["/sbin/ldconfig", "-X", "-f", str(libraries), "-C", f"{libraries}.cache"], timeout_s=60)
        lines = [f"mount --bind {mine} {theirs}" for theirs, mine in self._mounted().items()]
        lines += [*self._prepared(), "echo", "exec sleep infinity"]
        command = ["unshare", "--mount", "sh", "-ec", "\n".join(lines)]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._program = roots[0] / "usr/bin/podman"

    def end(self) -> None:
        """End it with all that it has."""
        super().end()
        self._holder.kill()
        self._holder.communicate()

    def _mounted(self) -> Mapping[str, Path]:
        """Files of its folder by the places at which it sees them."""
        return {"/etc/ld.so.cache": self.folder / "libraries.cache"}

    def _prepared(self) -> Sequence[str]:
        """Lines of shell that are run in its mount namespace before it is."""
        return ()

    def _seen_by(self) -> int | str:
        return self._holder.pid

    def _command(self) -> Sequence[str]:
        words = ["system", "service", "--time", "0", f"unix://{self.socket}"]
        return ["nsenter", "--mount", "--target", str(self._holder.pid), *self._user(), str(self._program), *words]

    def _user(self) -> Sequence[str]:
        """Words before its command line by which it becomes another user."""
        return ()

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        settings = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf", "HOME": "home"}
        return {"PATH": self.path, **{name: f"{folder}/{file}" for name, file in settings.items()}}


class CrunPodmanDaemon(PodmanDaemon):
    """Podman as root with crun."""

    runtime = "crun"
    packages: ClassVar[tuple[str, ...]] = ("podman", "crun")

    def _prepared(self) -> Sequence[str]:
        # Of cgroups of both versions crun has either: where both have controllers, it refuses.
        controllers = _UNIFIED / "cgroup.controllers"
        return [f"umount {_UNIFIED}"] if controllers.exists() and controllers.read_text().strip() else []


class RootlessPodmanDaemon(CrunPodmanDaemon):
    """Podman as an ordinary user, with crun; a user who is known to it alone."""

    packages: ClassVar[tuple[str, ...]] = ("podman", "crun", "uidmap")
    _USER, _UID, _SUBORDINATE = "headway-test", 64010, 200000

    def __init__(self, folder: Path) -> None:
        for name in ("run", "data", "networks", "home"):
            (folder / name).mkdir()
        for name in ("passwd", "group"):
            (folder / name).write_text(Path("/etc", name).read_text() + self._line_of(name, home=folder / "home"))
        (folder / "subordinate").write_text(f"{self._USER}:{self._SUBORDINATE}:65536\n")
        super().__init__(folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, self._UID, self._UID, follow_symlinks=False)

    def end(self) -> None:
        """End it with all that it has, and the process that keeps its namespaces."""
        pause = self._pause()
        super().end()
        if pause is not None:
            with suppress(OSError):
                os.kill(pause, signal.SIGKILL)

    def _line_of(self, name: str, *, home: Path) -> str:
        who = f"{self._USER}:x:{self._UID}:"
        return f"{who}{self._UID}::{home}:/bin/sh\n" if name == "passwd" else f"{who}\n"

    def _mounted(self) -> Mapping[str, Path]:
        names = {"passwd": "passwd", "group": "group", "subuid": "subordinate", "subgid": "subordinate"}
        return {**super()._mounted(), **{f"/etc/{name}": self.folder / file for name, file in names.items()}}

    def _pause(self) -> int | None:
        found = self.folder / "run/libpod/pause.pid"
        return int(found.read_text()) if found.exists() else None

    def _seen_by(self) -> int | str:
        return self._pause() or super()._seen_by()

    def _user(self) -> Sequence[str]:
        return ["setpriv", f"--reuid={self._UID}", f"--regid={self._UID}", "--clear-groups"]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "XDG_RUNTIME_DIR": f"{self.folder}/run"}


def _until(look: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + 20
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def started(kind: type[Daemon]) -> Iterator[Daemon]:
    """An engine of a kind, which answers; all of it is gone afterwards. Raises EngineImpossible."""
    if os.geteuid() != 0:
        raise EngineImpossible("only root can start an engine")
    if not (Path("/usr/sbin/dockerd").exists() and Path(CLIENT).exists()):
        raise EngineImpossible("needs Debian's dockerd and its client")
    folder = Path(tempfile.mkdtemp(prefix="headway-engine-"))
    daemon: Daemon | None = None
    try:
        daemon = kind(folder)
        daemon.start()
        yield daemon
    finally:
        if daemon is not None:
            daemon.end()
        shutil.rmtree(folder, ignore_errors=True)


def unpacked(name: str) -> Path:
    """The folder of a program's packages, which are downloaded once. Raises EngineImpossible."""
    folder = _UNPACKED / name
    if not folder.exists():
        part = Path(f"{folder}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            run(["apt-get", "download", "-qq", *_PACKAGES[name]], timeout_s=240, cwd=part)
            for package in part.glob("*.deb"):
                run(["dpkg-deb", "-x", str(package), str(part)], timeout_s=60)
                package.unlink()
        except CommandFailed as error:
            raise EngineImpossible(f"Debian's {name} cannot be had: {error}") from error
        part.rename(folder)
    return folder
