"""Building images: from Debian's packages, a folder, or an image in OCI's layout; none of it needs root or a daemon.

    env-service runtime build NAME --packages python3-minimal,git
    env-service runtime build NAME --root FOLDER
    env-service runtime build NAME --oci FOLDER      # as of `skopeo copy docker://… oci:FOLDER`
    env-service runtime list
    env-service runtime check TASKS.jsonl            # are the tasks of a file solved by their solutions, and only so?

`--images FOLDER` and `--uid` are env-service.runtimes.folder and .uid where those are not the usual ones.

Packages are fetched by this machine's apt, from its sources, with all that they depend on, and unpacked: their scripts
are not run, so that one which needs to be configured is better built elsewhere and taken by `--root` or `--oci`.
"""

import argparse
import copy
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from pydantic import JsonValue

from env_service.environments.task_files import OBJECT
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.images import (
    HOST,
    ImageFault,
    ImageRecord,
    complete_root,
    digest_of,
    image_names,
    write_record,
)

_BASE = (
    "base-files", "base-passwd", "coreutils", "dash", "diffutils", "findutils", "grep", "gzip", "hostname", "libc-bin",
    "mawk", "procps", "sed", "tar",
)  # fmt: skip
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
# What scripts of the base packages would have made: folders of base-files, links, and files.
_FOLDERS = ("media", "mnt", "opt", "root", "srv", "usr/local/bin", "usr/local/lib", "usr/local/share", "var/local")
_LINKS = {"usr/bin/sh": "dash", "usr/bin/awk": "mawk"}
_MASTERS = {"etc/passwd": "usr/share/base-passwd/passwd.master", "etc/group": "usr/share/base-passwd/group.master"}
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_OF_THE_KERNEL = ("proc", "sys", "dev")
_NAME = "letters, digits, '.', '_' and '-'"


def main(words: Sequence[str], *, out: TextIO = sys.stdout) -> int:
    """Run the command; the exit code is 0, or 2 for what cannot be built."""
    parser = argparse.ArgumentParser(
        prog="env-service",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("group", choices=("runtime",))
    parser.add_argument("command", choices=("build", "list"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--packages", default="")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--oci", type=Path)
    usual = RuntimesConfig()
    parser.add_argument("--images", type=Path, default=usual.folder)
    parser.add_argument("--uid", type=int, default=usual.uid if os.geteuid() == 0 else os.geteuid())
    given = parser.parse_args(words)
    try:
        if given.command == "list":
            out.write("".join(f"{name}\n" for name in [HOST, *image_names(given.images)]))
            return 0
        record = build(given.name, images=given.images, user=given.uid, packages=given.packages, root=given.root,
                       oci=given.oci)  # fmt: skip
    except ImageFault as error:
        sys.stderr.write(f"env-service: {error}\n")
        return 2
    out.write(f"{given.name}: {given.images / 'roots' / record.root}\n")
    return 0


def build(
    name: str, *, images: Path, user: int, packages: str = "", root: Path | None = None, oci: Path | None = None
) -> ImageRecord:
    """Build an image from one of the three. Raises ImageFault."""
    if not name or not all(each.isalnum() or each in "._-" for each in name) or name.startswith((".", HOST + ".")):
        raise ImageFault(f"the name of an image is of {_NAME}, got {name!r}")
    if name == HOST:
        raise ImageFault(f"{HOST} is the image of this machine itself: choose another name")
    sources = [what for what in (packages, root, oci) if what]
    if len(sources) != 1:
        raise ImageFault(f"got {len(sources)} sources; expected one of --packages, --root and --oci")
    environment: Mapping[str, str] = {}
    (images / "roots").mkdir(parents=True, exist_ok=True)
    with _new_root(images / "roots") as made:
        if packages:
            _from_packages(made, [each for each in packages.replace(",", " ").split() if each])
        elif root is not None:
            _from_folder(made, root)
        elif oci is not None:
            environment = _from_oci(made, oci)
        if not (made / "bin/sh").exists() and not (made / "usr/bin/sh").exists():
            raise ImageFault("the root has no /bin/sh, which every runtime needs")
        complete_root(made, user=user)
        digest = digest_of(made)
        place = images / "roots" / f"{digest}-{user}"
        if not place.exists():
            made.rename(place)
    record = ImageRecord(root=place.name, environment=dict(environment), source=str(sources[0]))
    write_record(images, name, record)
    return record


@contextmanager
def _new_root(folder: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _from_folder(made: Path, root: Path) -> None:
    if not root.is_dir():
        raise ImageFault(f"--root: there is no folder {root}")

    def left_out(folder: str, names: list[str]) -> list[str]:
        top = Path(folder) == root
        special = [name for name in names if not _is_plain(Path(folder, name))]
        return [name for name in names if name in special or (top and name in _OF_THE_KERNEL)]

    shutil.copytree(root, made, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    for name in _OF_THE_KERNEL:
        if (root / name).is_dir():
            (made / name).mkdir(mode=0o755)


def _is_plain(path: Path) -> bool:
    return path.is_symlink() or path.is_file() or path.is_dir()


def _from_packages(made: Path, packages: Sequence[str]) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ImageFault("--packages needs apt-get and dpkg-deb, which are not here: use --root or --oci")
    for name, target in _MERGED.items():
        (made / target).mkdir(parents=True, exist_ok=True)
        (made / name).symlink_to(target)
    with tempfile.TemporaryDirectory() as folder:
        for package in _fetched(Path(folder), [*_BASE, *packages]):
            with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                unpack_layer(process.stdout, made)
            if process.returncode != 0:
                raise ImageFault(f"{package.name} cannot be unpacked")
    configure(made)


def configure(root: Path) -> None:
    """Add to a root of packages what the scripts of the base packages, which are not run, would have made."""
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for link, target in _LINKS.items():
        if not (root / link).exists():
            (root / link).symlink_to(target)
    for file, master in _MASTERS.items():
        if not (root / file).exists():
            shutil.copyfile(root / master, root / file)


def _fetched(folder: Path, packages: Sequence[str]) -> list[Path]:
    """Files of the packages and of all that they depend on, as on a machine that has none."""
    (folder / "partial").mkdir()
    (folder / "status").touch()
    command = ["apt-get", "install", "--download-only", "--yes", "--no-install-recommends", "--quiet"]
    for option in (f"Dir::State::status={folder}/status", f"Dir::Cache::archives={folder}", "Debug::NoLocking=1"):
        command += ["-o", option]
    ended = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        said = "; ".join(line for line in ended.stderr.splitlines() if line.startswith("E:"))
        raise ImageFault(f"apt-get: {said or ended.stderr.strip()[-500:]}; is `apt-get update` due?")
    return sorted(folder.glob("*.deb"))


def _from_oci(made: Path, oci: Path) -> Mapping[str, str]:
    """Apply the layers of an image in OCI's layout; returns the environment that it sets."""
    index = _json(oci / "index.json")
    manifest = _blob(oci, _first(index, "manifests"))
    if "manifests" in manifest:  # of several machines
        manifest = _blob(oci, _first(manifest, "manifests"))
    layers = manifest.get("layers")
    assert isinstance(layers, list)
    for layer in layers:
        assert isinstance(layer, dict)
        kind = str(layer.get("mediaType"))
        if not kind.endswith((".tar", ".tar+gzip", ".tar.gzip")):
            raise ImageFault(f"--oci: a layer is of {kind}; expected tar or tar+gzip: copy the image with such layers")
        with _path_of(oci, layer).open("rb") as file:
            plain = gzip.GzipFile(fileobj=file) if kind.endswith("gzip") else file
            unpack_layer(io.BufferedReader(plain), made)
    config = manifest.get("config")
    assert isinstance(config, dict)
    inner = _json(_path_of(oci, config)).get("config")
    told = inner.get("Env") if isinstance(inner, dict) else None
    return dict(str(each).split("=", 1) for each in told) if isinstance(told, list) else {}


def _first(index: Mapping[str, JsonValue], key: str) -> Mapping[str, JsonValue]:
    """The entry for this machine, or the only one."""
    listed = index.get(key)
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")
    for entry in entries:
        platform = entry.get("platform")
        if isinstance(platform, dict) and platform.get("architecture") == machine:
            return entry
    if len(entries) != 1:
        raise ImageFault(f"--oci: there are {len(entries)} images, none of them named as one for {machine}")
    return entries[0]


def _blob(oci: Path, entry: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    return _json(_path_of(oci, entry))


def _path_of(oci: Path, entry: Mapping[str, JsonValue]) -> Path:
    kind, _, digest = str(entry.get("digest")).partition(":")
    if not kind.isalnum() or not digest.isalnum():
        raise ImageFault(f"--oci: {entry.get('digest')!r} is no digest")
    return oci / "blobs" / kind / digest


def _json(path: Path) -> Mapping[str, JsonValue]:
    try:
        return OBJECT.validate_python(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ImageFault(f"--oci: {path} cannot be read: {error}; expected an image in OCI's layout") from error


def unpack_layer(stream: IO[bytes], root: Path) -> None:
    """Unpack a layer over a root: what it marks as removed goes, devices are left out. Raises ImageFault."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as layer:
            layer.extraction_filter = _as_it_is
            for member in layer:
                _unpack(layer, member, root)
    except (tarfile.TarError, OSError) as error:
        raise ImageFault(f"a layer cannot be unpacked: {error}") from error


def _unpack(layer: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    place, name = root / member.name.lstrip("/"), Path(member.name).name
    if not name:  # the root itself
        return
    leads_to = [place.parent, *([root / member.linkname.lstrip("/")] if member.islnk() else [])]
    if name == ".." or not all(each.resolve().is_relative_to(root.resolve()) for each in leads_to):
        raise ImageFault(f"a layer has {member.name}, which leads out of the root")
    if name == _OPAQUE:
        _clear(place.parent)
    elif name.startswith(_WHITEOUT):
        _remove(place.with_name(name.removeprefix(_WHITEOUT)))
    elif member.isdev() or (member.isdir() and place.is_symlink()):  # such a folder is there already
        return
    else:
        if place.is_symlink():
            place.unlink()
        own = copy.copy(member)
        own.name, own.mode, own.uid, own.gid = member.name.lstrip("/"), member.mode & 0o777, os.geteuid(), os.getegid()
        own.linkname = member.linkname.lstrip("/") if member.islnk() else member.linkname
        own.uname = own.gname = ""
        layer.extract(own, root)


def _as_it_is(member: tarfile.TarInfo, _path: str) -> tarfile.TarInfo:
    """For Pythons that would filter, which not all do: what leads out has been refused."""
    return member


def _clear(folder: Path) -> None:
    for each in folder.iterdir():
        _remove(each)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
