"""Reading rows like SWE-bench's: a repository at a commit, an issue, tests that have to pass, a patch."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from env_service.runtimes.interface import RuntimeFile
from env_service.task_sets.git_trees import files_at, patched
from env_service.task_sets.records import (
    GUARDED,
    TEST_FILES,
    ComputerSetup,
    JudgedTask,
    NamedTests,
    PublishedSolution,
    SetupStep,
    TaskUnfit,
)

# History would show how it went on: there is one commit, if the image has git.
_ONE_COMMIT = (
    "command -v git >/dev/null || exit 0; rm -rf .git; git init -q && git add -A -f && "
    "git -c user.name=agent -c user.email=agent@localhost -c commit.gpgsign=false commit -q -m 'as it is'"
)


def _listed(told: object) -> object:
    """A list that some data sets write as JSON within JSON."""
    return json.loads(told) if isinstance(told, str) else told


TestIds = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class RepositoryRow(BaseModel):
    """A line of a file. Of a repository: `repo` at `base_commit`, or `files`, which are all of it. Fields of data sets
    that say nothing of how a task is done or judged may stand beside these.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    instance_id: str = Field(min_length=1)
    problem_statement: str = Field(min_length=1)
    repo: str = ""
    base_commit: str = ""
    files: dict[str, str] = {}
    patch: str = ""
    test_patch: str = ""
    test_files: dict[str, str] = {}
    must_change: TestIds = Field(alias="FAIL_TO_PASS", min_length=1)
    must_stay: TestIds = Field((), alias="PASS_TO_PASS")
    image: str = ""

    @field_validator("must_change", "must_stay")
    @classmethod
    def _are_ids(cls, ids: tuple[str, ...]) -> tuple[str, ...]:
        for each in ids:
            file, parts, _ = each.partition("::")
            if not parts or not file.endswith(".py") or file.startswith("/") or ".." in PurePosixPath(file).parts:
                raise ValueError(
                    f"{each!r} is no id of pytest's, such as tests/test_a.py::test_b; tests of other runners are "
                    "judged by a script: make a task in Harbor's format of it"
                )
        return ids

    @model_validator(mode="after")
    def _has_a_repository(self) -> "RepositoryRow":
        if bool(self.files) == bool(self.repo and self.base_commit):
            raise ValueError("expected either repo and base_commit, or files")
        return self


class RowSettings(BaseModel):
    """Settings that rows of a set share: see the options of the environment `repositories`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str
    images: dict[str, str] = {}
    repositories: Path
    folder: str
    in_image: bool
    setup: str
    environment: dict[str, str] = {}
    pytest_arguments: tuple[str, ...] = ()
    controls: Literal["altered", "added"] = "altered"
    allow: tuple[str, ...] = ()


def read_row(row: RepositoryRow, settings: RowSettings) -> JudgedTask:
    """The task of a row. Raises TaskUnfit."""
    files = _repository(row, settings)
    folder = settings.folder.rstrip("/")
    tests = {**patched(files, row.test_patch), **_texts(row.test_files)}
    named = {name.partition("::")[0] for name in (*row.must_change, *row.must_stay)}
    own = tuple(path.replace("[", "[[]") for path in sorted({*tests, *named}))
    return JudgedTask(
        name=row.instance_id,
        prompt=row.problem_statement,
        setup=_setup(row, settings, files),
        tests=NamedTests(
            files={f"{folder}/{path}": file for path, file in tests.items()},
            must_change=row.must_change,
            must_stay=row.must_stay,
            arguments=settings.pytest_arguments,
            altered=settings.controls == "altered",
        ),
        solution=PublishedSolution(files={f"{folder}/{path}": file for path, file in patched(files, row.patch).items()})
        if row.patch.strip()
        else None,
        carried=(folder,),
        guarded=(*GUARDED, *TEST_FILES, *own),
        allowed=settings.allow,
    )


def repository_of(row: RepositoryRow, settings: RowSettings) -> Path:
    """The folder with a row's repository: `owner/name`, `owner__name` or `name` below `repositories`, or a path."""
    below = settings.repositories
    owner, _, name = row.repo.rpartition("/")
    places = [below / row.repo, below / f"{owner}__{name}", below / name]
    for place in [each for path in places for each in (path, path.with_name(f"{path.name}.git"))]:
        if place.is_dir():
            return place
    raise TaskUnfit(
        f"{row.instance_id}: there is no repository {places[0]}; clone {row.repo} there, or set repositories"
    )


def _repository(row: RepositoryRow, settings: RowSettings) -> Mapping[str, RuntimeFile]:
    if row.files:
        return _texts(row.files)
    return files_at(repository_of(row, settings).resolve(), row.base_commit)


def _texts(files: Mapping[str, str]) -> dict[str, RuntimeFile]:
    return {path: RuntimeFile(text.encode()) for path, text in files.items()}


def _setup(row: RepositoryRow, settings: RowSettings, files: Mapping[str, RuntimeFile]) -> ComputerSetup:
    folder = settings.folder.rstrip("/")
    steps = [] if settings.in_image else [SetupStep(files={f"{folder}/{path}": file for path, file in files.items()})]
    lines = [settings.setup] if settings.setup else []
    for line in [*lines, _ONE_COMMIT]:
        run = ("/bin/sh", "-c", line)
        steps.append(SetupStep(run=run, cwd=folder, environment=settings.environment, said=line[:80]))
    image = row.image or settings.images.get(row.instance_id) or settings.images.get(row.repo) or settings.image
    return ComputerSetup(image=image, steps=tuple(steps), cwd=folder, environment=settings.environment)
