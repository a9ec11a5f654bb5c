"""Engines that a test starts in a folder of its own, may kill, and takes away: Debian's dockerd and its Podman."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.deploy.containers import ROOT, CommandFailed, EngineImpossible, run

CLIENT = "/usr/bin/docker"
_UNPACKED = ROOT / "build" / "podman"
# Beside these it needs what a Debian has anyway, and an OCI runtime, which comes with dockerd.
_PACKAGES = (
    "podman",
    "conmon",
    "golang-github-containers-common",
    "golang-github-containers-image",
    "libgpgme11",
    "libsubid4",
)

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
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
exit_command_delay = 10
tmp_dir = "{folder}/run/libpod"
[engine.runtimes]
runc = ["{folder}/oci-runtime"]
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
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if f"{self.folder}/".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        runc = shutil.which("runc", path="/usr/sbin:/usr/bin:/sbin")
        if runc is None:
            raise EngineImpossible("podman needs runc, which is missing")
        unpacked, libraries = unpacked_podman(), folder / "libraries"
        for name, text in (("containers.conf", _CONFIGURATION), ("storage.conf", _STORAGE)):
            (folder / name).write_text(text.format(unpacked=unpacked, folder=folder))
        (folder / "oci-runtime").write_text(_OCI_RUNTIME.replace("{runc}", runc))
        (folder / "oci-runtime").chmod(0o755)
        policy = folder / "home/.config/containers/policy.json"
        policy.parent.mkdir(parents=True)
        shutil.copy(unpacked / "etc/containers/policy.json", policy)
        libraries.write_text(f"{unpacked}/usr/lib/{os.uname().machine}-linux-gnu\ninclude /etc/ld.so.conf\n")
        run(["/sbin/ldconfig", "-X", "-f", str(libraries), "-C", f"{libraries}.cache"], timeout_s=60)
        bound = f"mount --bind {libraries}.cache /etc/ld.so.cache && echo && exec sleep infinity"
        command = ["unshare", "--mount", "sh", "-c", bound]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._program = unpacked / "usr/bin/podman"

    def end(self) -> None:
        """End it with all that it has."""
        super().end()
        self._holder.kill()
        self._holder.communicate()

    def _seen_by(self) -> int | str:
        return self._holder.pid

    def _command(self) -> Sequence[str]:
        words = ["system", "service", "--time", "0", f"unix://{self.socket}"]
        return ["nsenter", "--mount", "--target", str(self._holder.pid), str(self._program), *words]

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        settings = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf", "HOME": "home"}
        return {"PATH": os.environ["PATH"], **{name: f"{folder}/{file}" for name, file in settings.items()}}


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


def unpacked_podman() -> Path:
    """The folder of Podman's packages, which are downloaded once. Raises EngineImpossible."""
    if not (_UNPACKED / "usr/bin/podman").exists():
        shutil.rmtree(_UNPACKED, ignore_errors=True)
        part = Path(f"{_UNPACKED}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            run(["apt-get", "download", "-qq", *_PACKAGES], timeout_s=240, cwd=part)
            for package in part.glob("*.deb"):
                run(["dpkg-deb", "-x", str(package), str(part)], timeout_s=60)
                package.unlink()
        except CommandFailed as error:
            raise EngineImpossible(f"Debian's podman cannot be had: {error}") from error
        part.rename(_UNPACKED)
    return _UNPACKED
