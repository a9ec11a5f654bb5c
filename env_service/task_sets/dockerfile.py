"""Reading a Dockerfile as steps of a runtime: as much of it as can be done without a network, a daemon and root.

    FROM NAME            the image that the settings name for NAME
    ARG, ENV, WORKDIR    as they are
    COPY, ADD            files of the folder beside it
    RUN                  by the shell, without a network
    CMD, ENTRYPOINT, EXPOSE, LABEL, USER, …    nothing: a runtime has one user, and commands are given to it

The rest is refused by name, with what can be done instead.
"""

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from env_service.runtimes.interface import RuntimeFile
from env_service.task_sets.dockerignore import left_out
from env_service.task_sets.records import IMAGE_PATH, ComputerSetup, SetupStep, TaskUnfit

NetworkSteps = Literal["refuse", "skip"]
_WITHOUT_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME", "USER")
# First words of commands that fetch something.
_FETCHES = re.compile(
    r"(?:^|[;&|(]|\bsudo|\bxargs|-[mc])\s*(?:(?:[A-Z_]+=\S*)\s+)*"
    r"(apt-get|apt|apk|yum|dnf|pip3?|uv|uvx|npm|npx|yarn|pnpm|conda|mamba|curl|wget|git\s+clone|cargo\s+install|"
    r"go\s+(?:get|install)|gem|bundle)\b(?!\s*--version)"
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?[-+])([^}]*))?\}|(\w+))")
# Parts of words as Docker reads them: quotes protect, and a backslash the one character behind it.
_PIECE = re.compile(
    r"(?P<single>'[^']*')|(?P<double>\"(?:\\.|[^\"\\])*\")|(?P<space>\s+)|(?P<escaped>\\.)|(?P<lone>['\"])"
    r"|(?P<plain>[^'\"\s\\]+|\\$)",
    re.DOTALL,
)
_GOES_ON = re.compile(r"\\[ \t]*\Z")
_OF_ANOTHER_IMAGE = re.compile(r"(?:--\S+\s+)*--from=")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_FOLDERS_OF_ALL_IMAGES = (
    *("/", "/bin", "/etc", "/home", "/lib", "/opt", "/root", "/sbin", "/srv", "/tmp", "/usr", "/usr/bin", "/usr/lib"),
    *("/usr/local", "/usr/local/bin", "/usr/local/lib", "/usr/sbin", "/usr/share", "/var", "/var/lib", "/var/log"),
)


@dataclass(kw_only=True)
class _ImageBuild:
    """State of a build behind its last instruction. `ignored` tells of a path in the context that is left out of it;
    `folders` are the places that are known to be some.
    """

    context: Path
    place: str
    ignored: Callable[[str], bool]
    image: str = ""
    cwd: str = "/"
    workdir: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    steps: list[SetupStep] = field(default_factory=list)
    folders: set[str] = field(default_factory=lambda: set(_FOLDERS_OF_ALL_IMAGES))

    def make_folder(self, path: str) -> None:
        """Know that there is a folder, and those that it is in."""
        self.folders |= {path, *map(str, PurePosixPath(path).parents)}


def read_dockerfile(
    path: Path,
    *,
    images: Mapping[str, str],
    built: str = "",
    network_steps: NetworkSteps = "refuse",
    usual_cwd: str = "/app",
) -> ComputerSetup:
    """The computer that a Dockerfile describes. `images`: names of images here by those of FROM. `built`: an image that
    is what the Dockerfile makes, of which WORKDIR and ENV are then still taken. `usual_cwd`: where it names none.

    Raises TaskUnfit with the line that cannot be done.
    """
    build = _ImageBuild(context=path.parent, place=str(path), image=built, ignored=left_out(path))
    for number, word, rest in _instructions(path):
        build.place = f"{path}:{number}"
        if word == "FROM":
            _from(build, rest, images=images, built=built)
        elif word == "RUN":
            if not built:
                _run(build, rest, network_steps=network_steps)
        elif word in ("COPY", "ADD"):
            # Of another image, which would be fetched, it is as what RUN fetches.
            if not built and not (network_steps == "skip" and _OF_ANOTHER_IMAGE.match(rest)):
                _copy(build, word, rest)
        elif word in ("ENV", "ARG", "WORKDIR", "SHELL"):
            _set(build, word, rest)
        elif word not in _WITHOUT_EFFECT:
            raise _unfit(build, _unknown(word))
    if not build.image:
        raise _unfit(build, "there is no FROM")
    cwd = build.workdir or usual_cwd
    there = SetupStep(run=("/bin/sh", "-c", f"mkdir -p {shlex.quote(cwd)}"))
    return ComputerSetup(image=build.image, steps=(*build.steps, there), cwd=cwd, environment=build.environment)


def _unknown(word: str) -> str:
    if word == "ONBUILD":
        return "ONBUILD is not done here; leave it out, or build an image elsewhere"
    return (
        f"{word} is no instruction of Docker's; if it belongs to a text that a line above begins with <<, the word "
        "behind << has to follow without a space"
    )


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, word and rest of each instruction, its lines joined."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskUnfit(f"cannot read {path}: {error}") from error
    begun, first = "", 0
    for number, line in enumerate([each.removesuffix("\r") for each in lines], start=1):
        # Also between the lines of one instruction comments and empty lines are nothing.
        if line.lstrip().startswith("#") or not line.strip():
            continue
        # What follows is appended as it is: `\n\` at an end of line writes files line by line.
        first, begun = first or number, begun + (line if first else line.lstrip())
        if _GOES_ON.search(begun):
            begun = _GOES_ON.sub("", begun)
            continue
        yield _instruction(path, first, begun)
        begun, first = "", 0
    if begun.strip():
        yield _instruction(path, first, begun)


def _instruction(path: Path, line: int, text: str) -> tuple[int, str, str]:
    """Line, word and rest. Raises TaskUnfit for one with a text of several lines."""
    word, *rest = text.split(maxsplit=1)
    told = rest[0].strip() if rest else ""
    if re.search(r"<<-?[\"']?\w", told) and word.upper() in ("RUN", "COPY", "ADD"):
        raise TaskUnfit(f"{path}:{line}: a text in the Dockerfile (<<) is not read here; put it into a file")
    return line, word.upper(), told


def _from(build: _ImageBuild, rest: str, *, images: Mapping[str, str], built: str) -> None:
    words = [word for word in _filled(build, rest).split() if not word.startswith("--")]
    if build.steps or (build.image and not built):
        raise _unfit(build, f"a build in several stages: build it elsewhere, and name the image: {_named(build)}")
    if built:
        return
    name = words[0] if words else ""
    image = images.get(name) or images.get("*")
    if image is None:
        known = ", ".join(sorted(images)) or "none"
        raise _unfit(
            build,
            f"there is no image here for FROM {name}; images names: {known}; build one by `env-service runtime build` "
            f"and add {{ {name!r} = IMAGE }} to images, where '*' stands for all others",
        )
    build.image = image


def _named(build: _ImageBuild) -> str:
    return f"images = {{ {build.context.parent.name!r} = IMAGE }}"


def _set(build: _ImageBuild, word: str, rest: str) -> None:
    if word == "WORKDIR":
        place = str(PurePosixPath(build.cwd) / _words(build, rest, split=False)[0])
        build.cwd = build.workdir = os.path.normpath(place)
        build.make_folder(build.cwd)
        build.steps.append(SetupStep(run=("/bin/sh", "-c", f"mkdir -p {shlex.quote(build.cwd)}")))
    elif word == "SHELL":
        words = _words_of_json(rest)
        if not words:
            raise _unfit(build, f"SHELL {rest} cannot be read: expected a list of words in JSON")
        build.shell = tuple(words)
    elif word == "ARG":
        # One without a value takes that of an ARG before FROM, if there is one.
        build.arguments |= {name: value for name, is_set, value in _partitioned(build, rest) if is_set}
    else:
        build.environment |= _variables(build, rest)


def _variables(build: _ImageBuild, rest: str) -> dict[str, str]:
    """The variables that ENV sets: NAME=VALUE, or in the older form a name, and all that follows as its value."""
    name, *value = rest.split(maxsplit=1)[:2] or [""]
    if "=" not in name and value:
        return {name: _words(build, value[0], split=False)[0]}
    return {name: value for name, _, value in _partitioned(build, rest)}


def _partitioned(build: _ImageBuild, rest: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in _words(build, rest)]


def _words(build: _ImageBuild, text: str, *, split: bool = True) -> list[str]:
    """The words of a text without their quotes, with the values of variables; without `split` all of it as one.

    Raises TaskUnfit for a quote that does not end.
    """
    words: list[str] = []
    word: str | None = None
    for found in _PIECE.finditer(text):
        piece = found[0]
        if found.lastgroup == "space" and split:
            words += [] if word is None else [word]
            word = None
            continue
        if found.lastgroup == "lone":
            raise _unfit(build, f"it cannot be read: no closing quotation mark for {text[found.start() :][:80]}")
        word = (word or "") + _read(build, piece, kind=found.lastgroup or "")
    return [*words, word] if word is not None else words or ([] if split else [""])


def _read(build: _ImageBuild, piece: str, *, kind: str) -> str:
    if kind == "single":
        return piece[1:-1]
    if kind == "escaped":
        return piece[1:]
    if kind == "double":
        parts = re.split(r"(\\[\"$\\])", piece[1:-1])
        return "".join(part[1:] if at % 2 else _filled(build, part) for at, part in enumerate(parts))
    return _filled(build, piece)


def _filled(build: _ImageBuild, text: str) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[4]
        known = {"PATH": IMAGE_PATH, **build.arguments, **build.environment}.get(name)
        if found[2] and found[2].endswith("-"):
            return known or found[3]
        if found[2]:
            return found[3] if known else ""
        return known or ""

    return _VARIABLE.sub(value, text)


def _run(build: _ImageBuild, rest: str, *, network_steps: NetworkSteps) -> None:
    if rest.startswith("--"):
        raise _unfit(build, f"RUN {rest.split()[0]} is not done here; leave it out, or build an image elsewhere")
    # What is no JSON is a line of the shell, such as a test by [ … ].
    words = tuple(_words_of_json(rest) or (*build.shell, rest))
    fetches = _FETCHES.search(rest)
    if fetches is not None and network_steps == "skip":
        return
    if fetches is not None:
        raise _unfit(
            build,
            f"RUN {rest[:80]} wants the network ({fetches[1]}), and a runtime has none: build an image that has what "
            f"it installs, name it ({_named(build)}, or for its FROM), and skip such lines: network_steps = 'skip'",
        )
    environment = {**build.arguments, **build.environment}
    build.steps.append(
        SetupStep(run=words, cwd=build.cwd, environment=environment, said=f"{build.place}: RUN {rest[:80]}")
    )


def _words_of_json(rest: str) -> list[str]:
    """The words of a list in JSON; none of what is no such list."""
    try:
        words = json.loads(rest) if rest.startswith("[") else None
    except ValueError:
        return []
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _copy(build: _ImageBuild, word: str, rest: str) -> None:
    words = _words_of_json(rest) or _filled(build, rest).split()
    mode = None
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        if name == "--chmod" and value.isdigit():
            mode = int(value, 8)
        elif name != "--chown":  # a runtime has one user
            raise _unfit(build, f"{word} {name} is not done here; leave it out, or build an image elsewhere")
    *sources, target = words or [""]
    if not sources:
        raise _unfit(build, f"{word} needs what is copied, and where to")
    place = str(PurePosixPath(build.cwd) / target)
    named_so = target.endswith(("/", "/.", "/..")) or target in (".", "..")
    into = named_so or len(sources) > 1 or os.path.normpath(place) in build.folders
    files: dict[str, RuntimeFile] = {}
    for source in sources:
        files |= _copied(build, word, source, place, into=into)
    if mode is not None:
        files = {path: RuntimeFile(file.content, mode, file.link) for path, file in files.items()}
    for path in files:
        build.make_folder(str(PurePosixPath(path).parent))
    build.steps.append(SetupStep(files=files))


def _copied(build: _ImageBuild, word: str, source: str, place: str, *, into: bool) -> dict[str, RuntimeFile]:
    if "://" in source:
        raise _unfit(build, f"{word} {source} wants the network: put the file beside the Dockerfile")
    if word == "ADD" and source.endswith(_ARCHIVES):
        raise _unfit(build, f"ADD {source} would be unpacked: unpack it beside the Dockerfile")
    if ".." in PurePosixPath(source).parts:
        raise _unfit(build, f"{word} {source} leads out of the folder")
    pattern = source.strip("/") or "."
    there = [build.context] if pattern == "." else sorted(build.context.glob(pattern))
    found = {path: told for path in there if (told := _sent(build, path)) is not None}
    if not found:
        hint = "; .dockerignore leaves it out" if there else ""
        if not there and next(iter(build.context.parent.glob(pattern)), None) is not None:
            hint = "; it is in the task's folder, and a Dockerfile copies from environment/ alone"
        raise _unfit(build, f"{word} {source}: there is no such file in {build.context}{hint}")
    files: dict[str, RuntimeFile] = {}
    for path, told in found.items():
        inside = into or len(found) > 1
        at = f"{place}/{path.name}" if inside and not _is_folder(path) else place
        files |= {os.path.normpath(f"{at}/{name}"): file for name, file in told.items()}
    return files


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sent(build: _ImageBuild, path: Path) -> dict[str, RuntimeFile] | None:
    """The files of a path in the context, by their paths from there on; None for one that .dockerignore leaves out."""
    files = files_in(path) if _is_folder(path) else {"": _file(path)}
    sent = {name: file for name, file in files.items() if not build.ignored(_below(build, path / name))}
    return sent if sent or not build.ignored(_below(build, path)) else None


def _below(build: _ImageBuild, path: Path) -> str:
    return path.relative_to(build.context).as_posix()


def files_in(folder: Path) -> dict[str, RuntimeFile]:
    """The files of a folder by their paths in it, links as links."""
    found = {}
    for parent, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted([*names, *links]):
            path = Path(parent, name)
            if path.is_symlink() or path.is_file():
                found[str(path.relative_to(folder))] = _file(path)
    return found


def _file(path: Path) -> RuntimeFile:
    if path.is_symlink():
        return RuntimeFile(link=os.readlink(path))
    return RuntimeFile(path.read_bytes(), stat.S_IMODE(path.stat().st_mode) | 0o600)


def _unfit(build: _ImageBuild, why: str) -> TaskUnfit:
    return TaskUnfit(f"{build.place}: {why}")
