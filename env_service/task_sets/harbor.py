"""Reading tasks in Harbor's format, as they are: a folder for each.

    task.toml          names, times, variables
    instruction.md     the prompt
    environment/       a Dockerfile and what it copies
    tests/             test.sh, which writes /logs/verifier/reward.txt or reward.json, and what it needs
    solution/          solve.sh, the published solution

Keys are those of schema 1.4 (harbor 0.25). What cannot be had in a runtime is refused by name (several services, GPUs,
steps, MCP servers); what says something of machines that runtimes have settings of their own for (CPUs, memory, disk)
is left to those.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from env_service.runtimes.interface import RuntimeFile
from env_service.task_sets.carrying import OF_THE_IMAGE
from env_service.task_sets.controls import names_of_tests
from env_service.task_sets.dockerfile import NetworkSteps, files_in, read_dockerfile
from env_service.task_sets.installers import PROGRAMS, stand_ins
from env_service.task_sets.records import (
    GUARDED,
    ComputerSetup,
    JudgedTask,
    NamedTests,
    PublishedSolution,
    ScriptTests,
    TaskUnfit,
)
from protocol.codec import describe
from services.lines import lines_of

TESTS, SOLUTION = "/tests", "/solution"
HarborJudge = Literal["script", "pytest"]
_DEEPEST = 6
_NEVER_KEPT = (*OF_THE_IMAGE, "tests", "solution", "logs", "judge", "proc", "dev", "sys")
_COMPOSED = "docker-compose.yaml"  # of other names, harbor takes them for files of the task
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_CANARY = re.compile(r"^\s*(?:<!--.*canary.*-->|#.*canary.*)\s*$", re.IGNORECASE)


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _NetworkPart(_Part):
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] | None = None


class _VerifierPart(_NetworkPart):
    timeout_sec: float = Field(600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, JsonValue] | None = None
    collect: tuple[dict[str, JsonValue], ...] = ()

    @property
    def is_separate(self) -> bool:
        """True if tests run in an image of their own, which a table says without the mode, too."""
        return self.environment_mode == "separate" or self.environment is not None


class _EnvironmentPart(_NetworkPart):
    os: str = "linux"
    tpu: dict[str, JsonValue] | None = None
    healthcheck: dict[str, JsonValue] | None = None
    build_timeout_sec: float = Field(600.0, gt=0)
    docker_image: str | None = None
    gpus: int | None = 0
    env: dict[str, str] = {}
    mcp_servers: tuple[dict[str, JsonValue], ...] = ()
    workdir: str | None = None


class _SolutionPart(_Part):
    env: dict[str, str] = {}


class _TaskPart(_Part):
    name: str = ""


class HarborFile(_Part):
    """The keys of task.toml that count here; others say nothing of how a task is done or judged."""

    task: _TaskPart = _TaskPart()
    agent: _NetworkPart = _NetworkPart()
    verifier: _VerifierPart = _VerifierPart()
    environment: _EnvironmentPart = _EnvironmentPart()
    solution: _SolutionPart = _SolutionPart()
    steps: tuple[dict[str, JsonValue], ...] = ()
    artifacts: tuple[JsonValue, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Absolute paths of what the agent leaves for its judges; none where programs are, or tests."""
        told = [each.get("source") if isinstance(each, dict) else each for each in self.artifacts]
        paths = [os.path.normpath(each) for each in told if isinstance(each, str) and each.startswith("/")]
        return tuple(path for path in paths if path.split("/")[1] not in ("", *_NEVER_KEPT))


def harbor_folders(folder: Path) -> list[Path]:
    """Folders of tasks: the folder itself, or those below it, in order."""
    if (folder / "task.toml").is_file():
        return [folder]
    below = [path.parent for depth in range(1, _DEEPEST + 1) for path in folder.glob("*/" * depth + "task.toml")]
    return sorted(path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def no_tasks_in(folder: Path) -> str:
    """Says what was expected in a folder without tasks, and what to do where they are in an older form."""
    told = f"{folder} holds no task: expected folders with a task.toml"
    if any(next(iter(folder.glob(f"{'*/' * depth}task.yaml")), None) is not None for depth in range(_DEEPEST + 1)):
        told += f"; those with a task.yaml are Terminal-Bench's first form: `harbor task migrate -i {folder} -o NEW`"
    return told


def read_harbor_task(
    folder: Path,
    *,
    images: Mapping[str, str],
    network_steps: NetworkSteps = "refuse",
    variables: Mapping[str, str] | None = None,
    carry: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    judge: HarborJudge = "script",
) -> JudgedTask:
    """The task in a folder. `images`: names of images here, by those of FROM, of `docker_image`, or of the task, whose
    image is then what its Dockerfile makes. `variables` fill `${NAME}` in task.toml. `judge`: tests/test.sh, or
    the tests of tests/test_*.py by pytest, all of which have to pass.

    Raises TaskUnfit.
    """
    if (folder / "task.yaml").is_file() and not (folder / "task.toml").is_file():
        raise TaskUnfit(no_tasks_in(folder))
    given = _read(folder)
    _refuse(given, folder)
    known = dict(variables or {})
    own = _resolved(given.environment.env, known, folder)
    setup = _setup(given, folder, images=images, network_steps=network_steps)
    environment = {"HOME": "/home/agent", **setup.environment, **own}
    programs = stand_ins(environment["HOME"]) if network_steps == "skip" else {}
    setup = replace(setup, environment=environment, timeout_s=given.environment.build_timeout_sec)
    return JudgedTask(
        name=given.task.name or folder.name,
        prompt=_prompt(folder),
        setup=setup,
        tests=_tests(
            folder,
            judge,
            _resolved(given.verifier.env, known, folder),
            wall_s=given.verifier.timeout_sec,
            programs=programs,
        ),
        solution=_solution(folder, _resolved(given.solution.env, known, folder), programs),
        carried=tuple(dict.fromkeys((setup.cwd, *given.kept, *carry))),
        guarded=GUARDED,
        allowed=allow,
    )


def _tests(
    folder: Path,
    judge: HarborJudge,
    environment: Mapping[str, str],
    *,
    wall_s: float,
    programs: Mapping[str, RuntimeFile],
) -> ScriptTests | NamedTests:
    files, below = _laid(folder / "tests", TESTS), folder / "tests"
    if judge == "script":
        script = files.get(f"{TESTS}/test.sh")
        if script is None:
            raise TaskUnfit(f"{folder}: there is no tests/test.sh, which judges a task")
        text = _text(script, below / "test.sh")
        return ScriptTests(
            script=text,
            files={**files, **programs},
            environment=environment,
            programs=PROGRAMS if programs else "",
            wall_s=wall_s,
        )
    names: list[str] = []
    for path in sorted(below.glob("test_*.py")):
        try:
            found = names_of_tests(_text(files[f"{TESTS}/{path.name}"], path))
        except SyntaxError as error:
            raise TaskUnfit(f"{path} cannot be read: {error}") from error
        names += [f"{path.name}::{name}" for name in found]
    if not names:
        raise TaskUnfit(f"{folder}: there are no tests in tests/test_*.py, and judge is 'pytest'")
    laid: dict[str, RuntimeFile | None] = dict(files)
    named = tuple(names)
    return NamedTests(files=laid, must_change=named, folder=TESTS, environment=environment, wall_s=wall_s)


def _read(folder: Path) -> HarborFile:
    path = folder / "task.toml"
    try:
        return HarborFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskUnfit(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise TaskUnfit(f"{path}: {describe(error)}") from error


def _refuse(given: HarborFile, folder: Path) -> None:
    """Raises TaskUnfit for what a runtime is not."""
    environment, verifier = given.environment, given.verifier
    hosts = {host for part in (environment, given.agent, verifier) for host in part.allowed_hosts or ()}
    unfit = {
        "tasks in several steps are not done here; make a task of each": given.steps,
        f"it wants {environment.gpus} GPUs, and a runtime has none": environment.gpus,
        "it wants a TPU, and a runtime has none": environment.tpu,
        f"it is for {environment.os}, and a runtime is Linux": environment.os.lower() != "linux",
        "its MCP servers cannot be reached from a runtime, which has no network": environment.mcp_servers,
        f"it has to reach {', '.join(sorted(hosts))}, and a runtime has no network": hosts,
        "its healthcheck waits for a service that its image starts, and a runtime starts none": environment.healthcheck,
        "verifier.environment_mode is 'separate', or verifier.environment is there, an image of the tests' own; leave "
        "it out: tests run in a fresh copy in any case": verifier.is_separate,
        "verifier.collect has commands between the work and its tests, which are not run here": verifier.collect,
        "trajectory.json has a conversation that the agent goes on from, which is not shown to it here": (
            folder / "trajectory.json"
        ).exists(),
        f"environment/{_COMPOSED} has services or mounts of its own, and a runtime is one computer with nothing of "
        "others; if it only builds the Dockerfile, remove it": (folder / "environment" / _COMPOSED).exists(),
    }
    for why, holds in unfit.items():
        if holds:
            raise TaskUnfit(f"{folder}: {why}")


def _setup(given: HarborFile, folder: Path, *, images: Mapping[str, str], network_steps: NetworkSteps) -> ComputerSetup:
    file, image = folder / "environment/Dockerfile", given.environment.docker_image
    built = images.get(folder.name) or images.get(given.task.name, "") or images.get(image or "", "")
    if file.is_file():
        setup = read_dockerfile(file, images=images, built=built, network_steps=network_steps)
    else:
        found = built or (images.get("*", "") if image else "")
        if not found:
            raise TaskUnfit(
                f"{folder}: it has no environment/Dockerfile, and images names none for {image or folder.name}; build "
                f"one by `env-service runtime build` and add {{ {image or folder.name!r} = IMAGE }} to images"
            )
        setup = ComputerSetup(image=found, cwd="/app")
    return replace(setup, cwd=given.environment.workdir) if given.environment.workdir else setup


def _prompt(folder: Path) -> str:
    path = folder / "instruction.md"
    try:
        lines = lines_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TaskUnfit(f"{path} cannot be read: {error}") from error
    while lines and (_CANARY.match(lines[0]) or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise TaskUnfit(f"{path} is empty, and is what the policy is told")
    return "\n".join(lines).strip()


def _laid(folder: Path, place: str) -> dict[str, RuntimeFile]:
    return {f"{place}/{path}": file for path, file in files_in(folder).items()} if folder.is_dir() else {}


def _solution(
    folder: Path, environment: Mapping[str, str], programs: Mapping[str, RuntimeFile]
) -> PublishedSolution | None:
    files = _laid(folder / "solution", SOLUTION)
    script = files.get(f"{SOLUTION}/solve.sh")
    if script is None:
        return None
    text = _text(script, folder / "solution/solve.sh")
    return PublishedSolution(
        files={**files, **programs}, script=text, environment=environment, programs=PROGRAMS if programs else ""
    )


def _text(file: RuntimeFile, path: Path) -> str:
    try:
        return file.content.decode()
    except UnicodeDecodeError as error:
        raise TaskUnfit(f"{path} is no text") from error


def _resolved(values: Mapping[str, str], variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Values with their variables, which are never this process's own: those may be secrets."""

    def value(found: re.Match[str]) -> str:
        told = variables.get(found[1], found[2])
        if told is None:
            raise TaskUnfit(f"{folder}: task.toml wants the variable {found[1]}: add it to variables")
        return told

    return {name: _VARIABLE.sub(value, text) for name, text in values.items()}
