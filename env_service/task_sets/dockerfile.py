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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from env_service.runtimes.interface import RuntimeFile
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
_OF_ANOTHER_IMAGE = re.compile(r"(?:--\S+\s+)*--from=")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(kw_only=True)
class _ImageBuild:
    """State of a build behind its last instruction."""

    context: Path
    place: str
    image: str = ""
    cwd: str = "/"
    workdir: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    steps: list[SetupStep] = field(default_factory=list)


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
    build = _ImageBuild(context=path.parent, place=str(path), image=built)
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
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskUnfit(f"cannot read {path}: {error}") from error
    begun, first = "", 0
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("#") or (not begun and not line.strip()):
            continue
        first = first or number
        if line.rstrip().endswith("\\"):
            begun += line.rstrip()[:-1] + " "
            continue
        word, _, rest = (begun + line).strip().partition(" ")
        if re.search(r"<<-?[\"']?\w", rest) and word.upper() in ("RUN", "COPY", "ADD"):
            raise TaskUnfit(f"{path}:{first}: a text in the Dockerfile (<<) is not read here; put it into a file")
        yield first, word.upper(), rest.strip()
        begun, first = "", 0


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
        place = str(PurePosixPath(build.cwd) / _filled(build, rest).strip("\"'"))
        build.cwd = build.workdir = os.path.normpath(place)
        build.steps.append(SetupStep(run=("/bin/sh", "-c", f"mkdir -p {shlex.quote(build.cwd)}")))
    elif word == "SHELL":
        words = _words_of_json(rest)
        if not words:
            raise _unfit(build, f"SHELL {rest} cannot be read: expected a list of words in JSON")
        build.shell = tuple(words)
    elif word == "ARG":
        for name, value in _pairs(build, rest):
            build.arguments.setdefault(name, value)
    else:
        build.environment |= dict(_pairs(build, rest))


def _pairs(build: _ImageBuild, rest: str) -> list[tuple[str, str]]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise _unfit(build, f"it cannot be read: {error}") from error
    if words and "=" not in words[0] and len(words) > 1:
        return [(words[0], _filled(build, rest.partition(" ")[2].strip()))]
    return [(word.partition("=")[0], _filled(build, word.partition("=")[2])) for word in words]


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
    into = target.endswith(("/", "/.", ".")) or len(sources) > 1
    files: dict[str, RuntimeFile] = {}
    for source in sources:
        files |= _copied(build, word, source, place, into=into)
    if mode is not None:
        files = {path: RuntimeFile(file.content, mode, file.link) for path, file in files.items()}
    build.steps.append(SetupStep(files=files))


def _copied(build: _ImageBuild, word: str, source: str, place: str, *, into: bool) -> dict[str, RuntimeFile]:
    if "://" in source:
        raise _unfit(build, f"{word} {source} wants the network: put the file beside the Dockerfile")
    if word == "ADD" and source.endswith(_ARCHIVES):
        raise _unfit(build, f"ADD {source} would be unpacked: unpack it beside the Dockerfile")
    if ".." in PurePosixPath(source).parts:
        raise _unfit(build, f"{word} {source} leads out of the folder")
    pattern = source.strip("/") or "."
    found = [build.context] if pattern == "." else sorted(build.context.glob(pattern))
    if not found:
        hint = ""
        if next(iter(build.context.parent.glob(pattern)), None) is not None:
            hint = "; it is in the task's folder, and a Dockerfile copies from environment/ alone"
        raise _unfit(build, f"{word} {source}: there is no such file in {build.context}{hint}")
    files: dict[str, RuntimeFile] = {}
    for path in found:
        if path.is_dir() and not path.is_symlink():
            files |= {os.path.normpath(f"{place}/{name}"): file for name, file in files_in(path).items()}
        else:
            inside = into or len(found) > 1
            files[os.path.normpath(f"{place}/{path.name}" if inside else place)] = _file(path)
    return files


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
