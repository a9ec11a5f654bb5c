"""Images: root file systems by name, shared read-only by all runtimes of them.

    FOLDER/NAME.json             the image's record, which names a root by its content
    FOLDER/roots/sha256-…/       a root; two images of the same content have one

The image `host` is in no folder: it is this machine's own /usr and this process's own Python, both read-only, under an
empty root. It needs nothing built, and is for trying things; what is on this machine is what its tasks find.
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

HOST = "host"
AGENT = 1000
"""The user that programs see themselves run as, whoever that is outside."""
WORK, HOME = "/work", "/home/agent"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MERGED = ("bin", "sbin", "lib", "lib64")
_NEEDED = {"proc": 0o755, "dev": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "work": 0o755, "home/agent": 0o755}
_PART = 1 << 20


class ImageFault(ValueError):
    """An image cannot be used or built; the text says what is wrong and what to do."""


class RuntimesOff(ImageFault):
    """An environment needs runtimes, and this process has none."""


class ImageRecord(BaseModel):
    """Contents of NAME.json: the root's folder, what every program sees of an environment, and where it was from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str
    environment: dict[str, str] = {}
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A root file system, and folders of the machine that are bound over it, by their places inside."""

    name: str
    root: Path
    environment: Mapping[str, str]
    bound: Mapping[str, Path] = field(default_factory=dict)


def find_image(name: str, *, folder: Path, staging: Path, user: int) -> Image:
    """The image of a name. `staging`: a folder in which that of the host is made. Raises ImageFault."""
    if name == HOST:
        return _host_image(staging / "host", user=user)
    try:
        record = ImageRecord.model_validate_json((folder / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join([HOST, *image_names(folder)])
        raise ImageFault(
            f"there is no image {name!r} in {folder}; expected one of: {known}; make it by `env-service runtime build "
            f"{name}`"
        ) from None
    except (OSError, ValidationError) as error:
        raise ImageFault(f"the image {name!r} in {folder} cannot be read: {error}; build it again") from error
    root = folder / "roots" / record.root
    if not root.is_dir():
        raise ImageFault(f"the image {name!r} has lost its root {root}; build it again")
    owner = root.stat().st_uid
    if owner != user:
        raise ImageFault(
            f"the image {name!r} belongs to user {owner}, and runtimes run as {user} here, who could change nothing in "
            f"it: build it again as this user, or set env-service.runtimes.uid to {owner} where the service is root"
        )
    environment = {"PATH": SEARCH_PATH, "HOME": HOME, "LANG": "C.UTF-8", **record.environment}
    return Image(name=name, root=root.resolve(), environment=environment)


def image_names(folder: Path) -> list[str]:
    """Names of the images in a folder."""
    return sorted(path.stem for path in folder.glob("*.json"))


def complete_root(root: Path, *, user: int) -> None:
    """Add what every runtime needs to a root, and give all of it to the user that runtimes are. Raises ImageFault."""
    for name, mode in _NEEDED.items():
        place = root / name
        if not place.is_dir():
            place.mkdir(parents=True)
        place.chmod(mode)
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    for file, line in (("passwd", f"agent:x:{AGENT}:{AGENT}::{HOME}:/bin/sh"), ("group", f"agent:x:{AGENT}:")):
        text = (etc / file).read_text(encoding="utf-8") if (etc / file).is_file() else ""
        if f":{AGENT}:" not in text:
            (etc / file).write_text(f"{text}{line}\n", encoding="utf-8")
    if not (etc / "hosts").exists():
        (etc / "hosts").write_text("127.0.0.1 localhost\n", encoding="utf-8")
    _give(root, user)


def _give(root: Path, user: int) -> None:
    """All of a root to one user, who can read, write and search all of it."""
    changes = os.geteuid() == 0
    for path, _, files in os.walk(root):
        os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) | 0o700)
        for name in [".", *files]:
            inside = os.path.join(path, name)
            if changes:
                os.chown(inside, user, user, follow_symlinks=False)
            mode = os.lstat(inside).st_mode
            if stat.S_ISREG(mode):
                os.chmod(inside, (stat.S_IMODE(mode) | 0o600) & 0o777)  # no set-user-id: it would do nothing
    if changes:
        for path, folders, _ in os.walk(root):
            for name in folders:
                os.chown(os.path.join(path, name), user, user, follow_symlinks=False)


def digest_of(root: Path) -> str:
    """A hash of all names, modes, links and contents below a root."""
    whole = hashlib.sha256()
    for line in _lines(root):
        whole.update(line.encode("utf-8", "surrogateescape"))
    return f"sha256-{whole.hexdigest()}"


def _lines(root: Path) -> Iterator[str]:
    for path, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(folders) + sorted(files):
            inside = os.path.join(path, name)
            status = os.lstat(inside)
            mode = stat.S_IMODE(status.st_mode)
            told = ""
            if stat.S_ISLNK(status.st_mode):
                told = os.readlink(inside)
            elif stat.S_ISREG(status.st_mode):
                told = _hash_of(inside)
            yield f"{os.path.relpath(inside, root)}\0{stat.S_IFMT(status.st_mode):o} {mode:o}\0{told}\n"


def _hash_of(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_PART):
            found.update(part)
    return found.hexdigest()


def write_record(folder: Path, name: str, record: ImageRecord) -> None:
    """Give a root a name, in place of the one that had it."""
    new = folder / f".{name}.json.new"
    new.write_text(json.dumps(record.model_dump(), indent=1) + "\n", encoding="utf-8")
    new.replace(folder / f"{name}.json")


def _host_image(root: Path, *, user: int) -> Image:
    """This machine's programs under an empty root, which is made once."""
    prefix = Path(sys.base_prefix)
    bound = {"/usr": Path("/usr")} if prefix == Path("/usr") else {"/usr": Path("/usr"), "/opt/python": prefix}
    # Links that the programs of /usr go by, such as that of awk.
    alternatives = Path("/etc/alternatives")
    if not root.is_dir():
        root.mkdir(mode=0o755)
        for place in bound:
            (root / place.strip("/")).mkdir(parents=True)
        for name in _MERGED:
            if (Path("/usr") / name).is_dir():
                (root / name).symlink_to(f"usr/{name}")
        complete_root(root, user=user)
    if alternatives.is_dir():
        (root / "etc/alternatives").mkdir(exist_ok=True)
        bound["/etc/alternatives"] = alternatives
    environment = {"PATH": f"/opt/python/bin:{SEARCH_PATH}", "HOME": HOME, "LANG": "C.UTF-8"}
    if any((prefix / "lib").glob("libpython*.so*")):
        environment["LD_LIBRARY_PATH"] = "/opt/python/lib"
    return Image(name=HOST, root=root, environment=environment, bound=bound)
