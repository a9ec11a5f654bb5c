"""A repository's history becomes tasks: commits whose tests show what they change."""

import io
import json
import tomllib
from pathlib import Path

import pytest

from env_service.builtin.task_sets import RepositoryOptions
from env_service.task_sets import mining
from env_service.task_sets.rows import RepositoryRow, read_row
from env_service.task_sets.trying import fault_of
from tests.env_service.task_sets.conftest import HIDDEN, RIGHT, SOURCE, TESTS
from tests.env_service.task_sets.test_rows import run


def commit(folder: Path, message: str, **files: str) -> str:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run(folder, "add", "-A")
    run(folder, "commit", "-q", "-m", message)
    return run(folder, "rev-parse", "HEAD").strip()


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str]:
    """A repository with one commit that is a task, and others that are none; and the parent of that one."""
    folder = tmp_path / "shop-tools"
    folder.mkdir()
    run(folder, "init", "-q")
    code = {"shop__init_dot_py": "", "shop__sums_dot_py": SOURCE, "tests__test_sums_dot_py": TESTS}
    parent = commit(folder, "first", **code)
    commit(folder, "double doubles\n\nIt added one.", shop__sums_dot_py=RIGHT, tests__test_sums_dot_py=HIDDEN)
    commit(folder, "words only", README_dot_md="x\n")
    commit(folder, "no test shows it", shop__sums_dot_py=f"{RIGHT}\n# more\n", tests__test_sums_dot_py=f"{HIDDEN}\n")
    return folder, parent


def test_commits_that_change_code_and_tests_may_be_tasks(history: tuple[Path, str]) -> None:
    folder, parent = history

    found = list(mining.candidates(folder, most=10))

    assert [each.message.splitlines()[0] for each in found] == ["no test shows it", "double doubles"]
    assert (found[1].parent, found[1].test_files) == (parent, ("tests/test_sums.py",))
    assert "+++ b/shop/sums.py" in found[1].patch
    assert "tests" not in found[1].patch
    assert "+++ b/tests/test_sums.py" in found[1].test_patch
    assert [each.message for each in mining.candidates(folder, most=1)] == ["no test shows it"]


async def test_a_file_of_rows_comes_out_that_their_patches_solve(history: tuple[Path, str], tmp_path: Path) -> None:
    folder, parent = history
    said, out = io.StringIO(), tmp_path / "rows.jsonl"
    words = [
        "tasks",
        str(folder),
        "--out",
        str(out),
        "--memory-mib",
        "192",
        "--setup",
        "touch 'a b'",
        "--path",
        "/work/src",
    ]

    given = mining.arguments(words)
    assert await mining.mined(given, mining.pool_of(given), said) == 0

    (line,) = out.read_text().splitlines()
    row = RepositoryRow.model_validate_json(line)
    assert json.loads(line)["FAIL_TO_PASS"] == ["tests/test_sums.py::test_double"]
    assert (row.must_stay, row.base_commit) == (("tests/test_sums.py::test_half",), parent)
    assert row.problem_statement == "double doubles\n\nIt added one."
    assert "double doubles: 1 tests show it, 1 stay\n" in said.getvalue()
    assert "no test shows it: no test shows it\n" in said.getvalue()
    settings = tomllib.loads(said.getvalue().partition(f"1 tasks in {out}, which were tried by these settings:\n")[2])
    again = RepositoryOptions.model_validate(settings["env-service"]["environments"]["options"])
    assert (again.train_file, again.repositories, again.image) == (out, tmp_path, "host")
    assert (again.setup, again.environment) == ("touch 'a b'", {"PYTHONPATH": "/work/src"})
    assert settings["env-service"]["runtimes"] == {"limits": {"memory_mib": 192}}
    pool = mining.pool_of(given)
    try:
        assert await fault_of(read_row(row, again.rows)) == ""
    finally:
        await pool.close()


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mining.main(["tasks", str(tmp_path), "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "env-service: git log" in capsys.readouterr().err
