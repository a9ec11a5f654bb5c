"""Rows of a repository and an issue: read from git, with their patches, and judged by the tests that they name."""

import json
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from env_service.builtin.task_sets import RepositoryEnvironment, RepositoryOptions
from env_service.environments.interface import Action, text_of
from env_service.environments.task_files import TaskFileError
from env_service.runtimes.interface import RuntimeFile
from env_service.task_sets.git_trees import files_at, patched
from env_service.task_sets.records import NamedTests, TaskUnfit
from env_service.task_sets.rows import RepositoryRow, read_row
from env_service.task_sets.trying import fault_of
from tests.env_service.task_sets.conftest import HIDDEN, RIGHT, SOURCE, TESTS, row, task, with_pytest, worked


def run(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository, and the commit with the mistake; its next one has the repair and the test."""
    folder = tmp_path / "me/shop"
    (folder / "shop").mkdir(parents=True)
    (folder / "tests").mkdir()
    run(folder, "init", "-q")
    for path, text in {"shop/__init__.py": "", "shop/sums.py": SOURCE, "tests/test_sums.py": TESTS}.items():
        (folder / path).write_text(text)
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / "link").symlink_to("tool.sh")
    (folder / ".gitattributes").write_text("tests export-ignore\n")
    run(folder, "add", "-A")
    run(folder, "commit", "-q", "-m", "first")
    commit = run(folder, "rev-parse", "HEAD").strip()
    (folder / "shop/sums.py").write_text(RIGHT)
    (folder / "tests/test_sums.py").write_text(HIDDEN)
    run(folder, "commit", "-q", "-am", "second")
    return folder, commit


def swe_row(repository: tuple[Path, str], **changes: object) -> dict[str, object]:
    """A row as data sets write it."""
    folder, commit = repository
    return {
        "instance_id": "me__shop-1", "repo": "me/shop", "base_commit": commit, "version": "1", "hints_text": "",
        "patch": run(folder, "diff", commit, "HEAD", "--", "shop"),
        "test_patch": run(folder, "diff", commit, "HEAD", "--", "tests"),
        "problem_statement": "double doubles wrongly",
        "FAIL_TO_PASS": json.dumps(["tests/test_sums.py::test_double"]),
        "PASS_TO_PASS": json.dumps(["tests/test_sums.py::test_half"]),
        **changes,
    }  # fmt: skip


def options(below: Path, **more: object) -> RepositoryOptions:
    return RepositoryOptions.model_validate({"train_file": below / "rows.jsonl", "repositories": below, **more})


def test_all_files_of_a_commit_are_there_as_they_were(repository: tuple[Path, str]) -> None:
    files = files_at(*repository)

    assert files["shop/sums.py"] == RuntimeFile(SOURCE.encode())
    assert files["tool.sh"] == RuntimeFile(b"#!/bin/sh\n", 0o755)
    assert files["link"] == RuntimeFile(link="tool.sh")
    assert "tests/test_sums.py" in files, "whatever is left out of archives"
    with pytest.raises(TaskUnfit, match="git ls-tree"):
        files_at(repository[0], "0" * 40)


def test_a_patch_changes_adds_moves_and_removes(repository: tuple[Path, str]) -> None:
    folder, commit = repository
    run(folder, "mv", "tool.sh", "other.sh")
    run(folder, "rm", "-q", "link")
    (folder / "new file.txt").write_text("x\n")
    run(folder, "add", "-A")
    run(folder, "commit", "-q", "-m", "third")

    found = patched(files_at(folder, commit), run(folder, "diff", commit, "HEAD"))

    assert found == {
        "link": None,
        "new file.txt": RuntimeFile(b"x\n"),
        "other.sh": RuntimeFile(b"#!/bin/sh\n", 0o755),
        "shop/sums.py": RuntimeFile(RIGHT.encode()),
        "tests/test_sums.py": RuntimeFile(HIDDEN.encode()),
        "tool.sh": None,
    }


@pytest.mark.parametrize(
    "patch",
    ["--- a/../out\n+++ b/../out\n@@ -0,0 +1 @@\n+x\n", "--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n", "nonsense"],
)
def test_a_patch_that_leads_out_or_does_not_fit_is_refused(patch: str) -> None:
    with pytest.raises(TaskUnfit, match="git apply"):
        patched({}, patch)


def test_a_row_is_read_with_its_patches(tmp_path: Path, repository: tuple[Path, str]) -> None:
    given = RepositoryRow.model_validate(swe_row(repository))

    made = read_row(given, options(tmp_path, image="mine", images={"me/shop": "other"}, folder="/testbed").rows)

    assert made.setup.image == "other"
    assert made.setup.steps[0].files["/testbed/shop/sums.py"] == RuntimeFile(SOURCE.encode())
    assert isinstance(made.tests, NamedTests)
    assert made.tests.files == {"/testbed/tests/test_sums.py": RuntimeFile(HIDDEN.encode())}
    assert made.tests.all == ("tests/test_sums.py::test_double", "tests/test_sums.py::test_half")
    assert made.solution is not None
    assert made.solution.files == {"/testbed/shop/sums.py": RuntimeFile(RIGHT.encode())}
    in_image = read_row(given, options(tmp_path, in_image=True).rows)
    assert not any(step.files for step in in_image.setup.steps)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"FAIL_TO_PASS": '["test_a (app.tests.A)"]'}, "is no id of pytest's"),
        ({"FAIL_TO_PASS": '["../test_a.py::test_b"]'}, "is no id of pytest's"),
        ({"FAIL_TO_PASS": []}, "at least 1 item"),
        ({"base_commit": ""}, "either repo and base_commit, or files"),
        ({"files": {"a": "b"}}, "either repo and base_commit, or files"),
    ],
)
def test_a_row_that_is_none_is_refused(repository: tuple[Path, str], changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RepositoryRow.model_validate(swe_row(repository, **changes))


def test_rows_without_their_repository_are_said_and_left_out(tmp_path: Path, repository: tuple[Path, str]) -> None:
    rows = [swe_row(repository), swe_row(repository, repo="else/where")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))

    made = RepositoryEnvironment.tasks(options(tmp_path))

    assert made.train_tasks == 1
    (refused,) = made.refused
    assert refused.startswith(
        f"{tmp_path}/rows.jsonl:2: me__shop-1: there is no repository {tmp_path}/else/where; clone"
    )
    with pytest.raises(TaskFileError, match="no task is fit"):
        RepositoryEnvironment.tasks(options(tmp_path, repositories=tmp_path / "none"))


@pytest.mark.usefixtures("pool")
async def test_a_row_from_git_is_solved_by_its_patch_and_only_so(tmp_path: Path, repository: tuple[Path, str]) -> None:
    given = read_row(RepositoryRow.model_validate(swe_row(repository)), options(tmp_path).rows)

    assert await fault_of(given) == ""
    assert await fault_of(with_pytest(given)) == ""


@pytest.mark.usefixtures("pool")
async def test_a_row_whose_patch_does_not_help_or_is_not_needed_is_said() -> None:
    wrong = task(patch="--- /dev/null\n+++ b/note\n@@ -0,0 +1 @@\n+x\n")
    assert (await fault_of(wrong)).splitlines()[0] == (
        "its tests give 0 after its solution; 1 of 2 do not pass: tests/test_sums.py::test_double (failed)"
    )
    idle = task(FAIL_TO_PASS=["tests/test_sums.py::test_half"], PASS_TO_PASS=[])
    assert await fault_of(idle) == "its tests give 1 before anything is done"
    assert "has no solution" in await fault_of(task(patch=""))
    missing = task(FAIL_TO_PASS=["tests/test_sums.py::test_none"])
    assert "tests/test_sums.py::test_none (not run)" in await fault_of(missing)


@pytest.mark.usefixtures("pool")
async def test_the_agent_finds_one_commit_and_no_history(tmp_path: Path, repository: tuple[Path, str]) -> None:
    given = read_row(RepositoryRow.model_validate(swe_row(repository)), options(tmp_path).rows)

    verdict = await worked(given, "git log --oneline | wc -l > log; git status --short >> log; cp log tool.sh")

    kept = {path: content for _, path, _, content in verdict.work.snapshot.entries}
    assert kept["work/tool.sh"].decode().split() == ["1", "??", "log"]


@pytest.mark.usefixtures("pool")
async def test_a_setup_runs_before_the_agent_comes(tmp_path: Path) -> None:
    settings = options(tmp_path, setup="echo $WHO > made", environment={"WHO": "me"})
    given = read_row(row(), settings.rows)

    verdict = await worked(given, "cat made > seen")

    kept = {path: content for _, path, _, content in verdict.work.snapshot.entries}
    assert kept["work/seen"] == b"me\n"


@pytest.mark.usefixtures("pool")
async def test_the_share_of_tests_that_pass_can_be_the_reward(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(row().model_dump_json(by_alias=True) + "\n")
    settings = options(tmp_path, reward="fraction")
    environment = RepositoryEnvironment(settings)
    opening = await environment.reset(RepositoryEnvironment.tasks(settings).task("train", 0), 0)
    assert "double doubles wrongly" in text_of(opening.prompt)

    step = await environment.step(Action("I do nothing."))
    await environment.close()

    assert (step.stop, step.reward) == ("failed", 0.5)
    assert step.metrics == {"passed_tests": 0.5, "tampered": 0.0, "kept_out": 0.0}
