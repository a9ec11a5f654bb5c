"""Making rows of a repository's own history: commits that change code and tests, of which the tests show the change.

    env-service tasks REPOSITORY --out rows.jsonl [--image NAME] [--commits 200] [--most 50] …

For each of the newest commits that change files of tests and others, the commit's tests run twice in a runtime: before
the change and after it. Tests that fail before and pass after are those that have to pass; those that pass both times
have to go on passing. A commit without any of the first kind is no task. The issue is the commit's message:
read what came out, and write issues where a message says too little, or what to do.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TextIO

from pydantic import ValidationError

from env_service.environments.interface import EnvironmentUnavailable
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.images import HOST, ImageFault
from env_service.runtimes.interface import RuntimeEnded, RuntimeFile, RuntimeRefused
from env_service.runtimes.pool import RuntimePool, use_runtimes
from env_service.task_sets.carrying import is_guarded
from env_service.task_sets.git_trees import files_at, git
from env_service.task_sets.judging import judged
from env_service.task_sets.preparing import prepared
from env_service.task_sets.records import TEST_FILES, JudgedTask, NamedTests, TaskUnfit
from env_service.task_sets.rows import RepositoryRow, RowSettings, read_row
from services.isolation.faults import CannotIsolate

_AT_ONCE = 2
_LONGEST_PATCH = 200_000


@dataclass(frozen=True, kw_only=True)
class MinedCommit:
    """A commit that may be a task: its parent, its message, and its changes to code and to tests as patches."""

    commit: str
    parent: str
    message: str
    patch: str
    test_patch: str
    test_files: tuple[str, ...]


def main(words: Sequence[str], *, out: TextIO = sys.stdout) -> int:
    """Run the command; the exit code is 0, 1 if no task was found, or 2 for what cannot be done."""
    given = arguments(words)
    try:
        return asyncio.run(mined(given, pool_of(given), out))
    except (ImageFault, TaskUnfit, CannotIsolate, EnvironmentUnavailable) as error:
        sys.stderr.write(f"env-service: {error}\n")
        return 2


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="env-service",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual, limits = RuntimesConfig(), RuntimeLimits()
    parser.add_argument("command", choices=("tasks",))
    parser.add_argument("repository", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the file that is written")
    parser.add_argument("--image", default=HOST, help="image with Python, pytest and what the code needs")
    parser.add_argument("--images", type=Path, default=usual.folder, help="folder of the images")
    parser.add_argument("--commits", type=int, default=200, help="how many of the newest commits are looked at")
    parser.add_argument("--most", type=int, default=50, help="how many tasks are wanted")
    parser.add_argument("--setup", default="", help="a command that runs in the repository before its tests")
    parser.add_argument("--path", default="", help="PYTHONPATH of the tests, such as /work/src")
    parser.add_argument("--memory-mib", type=int, default=limits.memory_mib)
    parser.add_argument("--command-s", type=float, default=limits.command_s, help="longest time of the tests")
    return parser.parse_args(words)


def pool_of(given: argparse.Namespace) -> RuntimePool:
    """Runtimes with the limits that are asked for, as those of this process."""
    own = RuntimeLimits(memory_mib=given.memory_mib, command_s=given.command_s)
    return use_runtimes(RuntimePool(RuntimesConfig(folder=given.images, limits=own, spare=0)))


async def mined(given: argparse.Namespace, pool: RuntimePool, out: TextIO) -> int:
    """Write the tasks that are found, saying of each commit why or why not, and end the pool. Raises as `start`."""
    repository = given.repository.resolve()
    settings = RowSettings(
        image=given.image,
        repositories=repository.parent,
        folder="/work",
        in_image=False,
        setup=given.setup,
        controls="added",
        environment={"PYTHONPATH": given.path} if given.path else {},
    )
    found: list[RepositoryRow] = []
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(commit: MinedCommit) -> None:
        async with places:
            if len(found) >= given.most:
                return
            row, why = await row_of(commit, repository.name, settings)
            out.write(f"{commit.commit[:12]} {commit.message.splitlines()[0][:60]}: {why}\n")
            if row is not None and len(found) < given.most:
                found.append(row)

    try:
        await pool.open()
        await asyncio.gather(*map(one, candidates(repository, most=given.commits)))
    finally:
        await pool.close()
    given.out.write_text("".join(f"{_line(row)}\n" for row in found), encoding="utf-8")
    out.write(f"{len(found)} tasks in {given.out}")
    if found:
        out.write(f", which were tried by these settings:\n\n{_run_file(given, settings)}")
    else:
        out.write("\n")
    return 0 if found else 1


def _run_file(given: argparse.Namespace, settings: RowSettings) -> str:
    """The tables of a run file by which the tasks are judged as they were here; what is as usual is left out."""
    usual, limits = RuntimesConfig(), RuntimeLimits()
    options = {"train_file": given.out.resolve(), "repositories": settings.repositories, "image": settings.image}
    tables: dict[str, dict[str, object]] = {
        "environments.options": {**options, **({"setup": settings.setup} if settings.setup else {})},
        "environments.options.environment": dict(settings.environment),
        "runtimes": {"folder": given.images.resolve()} if given.images != usual.folder else {},
        "runtimes.limits": {
            name: getattr(given, name)
            for name in ("memory_mib", "command_s")
            if getattr(given, name) != getattr(limits, name)
        },
    }
    return "\n".join(
        f"[env-service.{table}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in keys.items())
        for table, keys in tables.items()
        if keys
    )


def _toml(value: object) -> str:
    return str(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)


def _line(row: RepositoryRow) -> str:
    told = row.model_dump(by_alias=True, exclude_defaults=True)
    return json.dumps(told, ensure_ascii=False)


def candidates(repository: Path, *, most: int) -> Iterator[MinedCommit]:
    """Commits, the newest first, that change tests in Python and code, and have one parent. Raises TaskUnfit."""
    told = git(repository, "log", "--no-merges", f"-{most}", "--format=%H%x00%P%x00%B%x01").decode(errors="replace")
    for entry in filter(str.strip, told.split("\x01")):
        commit, parents, message = entry.strip().split("\0", 2)
        if len(parents.split()) != 1:
            continue
        changed = git(repository, "diff", "--name-only", "-z", "--no-renames", parents, commit).decode(errors="replace")
        paths = [path for path in changed.split("\0") if path]
        tests = [path for path in paths if is_guarded(path, TEST_FILES)]
        code = [path for path in paths if path not in tests]
        runnable = tuple(path for path in tests if is_guarded(PurePosixPath(path).name, TEST_FILES))
        if not any(path.endswith(".py") for path in code) or not runnable:
            continue
        yield MinedCommit(
            commit=commit,
            parent=parents,
            message=message.strip() or "(no message)",
            patch=_diff(repository, parents, commit, code),
            test_patch=_diff(repository, parents, commit, tests),
            test_files=runnable,
        )


def _diff(repository: Path, old: str, new: str, paths: Sequence[str]) -> str:
    words = ("diff", "--binary", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", old, new, "--", *paths)
    return git(repository, *words).decode(errors="surrogateescape")


async def row_of(commit: MinedCommit, name: str, settings: RowSettings) -> tuple[RepositoryRow | None, str]:
    """The row of a commit, or None, and in words why. Raises RuntimeLost, RuntimesBusy and ImageFault."""
    if len(commit.patch) + len(commit.test_patch) > _LONGEST_PATCH:
        return None, "its change is too large"
    try:
        return await _row_of(commit, name, settings)
    except (TaskUnfit, RuntimeRefused, RuntimeEnded, ValidationError, UnicodeEncodeError) as error:
        return None, str(error).splitlines()[0]


async def _row_of(commit: MinedCommit, name: str, settings: RowSettings) -> tuple[RepositoryRow | None, str]:
    there = files_at(settings.repositories / name, commit.commit)
    files = tuple(path for path in commit.test_files if path in there)
    if not files:
        return None, "its tests are removed"
    row = RepositoryRow.model_validate(
        {
            "instance_id": f"{name}-{commit.commit[:12]}",
            "problem_statement": commit.message,
            "repo": name,
            "base_commit": commit.parent,
            "patch": commit.patch,
            "test_patch": commit.test_patch,
            "FAIL_TO_PASS": [f"{path}::any" for path in files],
        }
    )
    before = await _outcomes(row, settings, solved=False)
    after = await _outcomes(row, settings, solved=True)
    changed = sorted(test for test, end in after.items() if end == "passed" and before.get(test) != "passed")
    stayed = sorted(test for test, end in after.items() if end == "passed" and before.get(test) == "passed")
    if not changed:
        return None, "no test shows it" if after else "its tests do not run in this image"
    found = row.model_copy(update={"must_change": tuple(changed), "must_stay": tuple(stayed)})
    return found, f"{len(changed)} tests show it, {len(stayed)} stay"


async def _outcomes(row: RepositoryRow, settings: RowSettings, *, solved: bool) -> Mapping[str, str]:
    """Ends of all tests of the files, by their ids."""
    task = read_row(row, settings)
    assert task.solution is not None
    begun = await prepared(task.setup)
    return (await judged(replace(task, tests=_and_solution(task, solved=solved)), begun, begun)).outcomes


def _and_solution(task: JudgedTask, *, solved: bool) -> NamedTests:
    """The tests, with the files of the solution among those that are laid over."""
    assert isinstance(task.tests, NamedTests)
    assert task.solution is not None
    files: dict[str, RuntimeFile | None] = dict(task.solution.files) if solved else {}
    return replace(task.tests, files={**files, **task.tests.files})
