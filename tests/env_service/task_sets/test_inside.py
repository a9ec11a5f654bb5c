"""Without pytest, plain functions, plain classes and those of unittest are run; with it, what pytest says counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from env_service.task_sets import inside

TESTS = """import unittest


def test_good():
    pass


def test_bad():
    raise SystemExit(0)


class TestPlain:
    def test_good(self):
        pass

    def test_bad(self):
        assert False


class Cases(unittest.TestCase):
    def test_good(self):
        pass

    def test_bad(self):
        self.fail()

    @unittest.skip("no")
    def test_skipped(self):
        pass
"""
ENDS = {
    "test_good": "passed", "test_bad": "failed", "TestPlain::test_good": "passed", "TestPlain::test_bad": "failed",
    "Cases::test_good": "passed", "Cases::test_bad": "failed", "Cases::test_skipped": "skipped",
}  # fmt: skip


def ends(folder: Path, *words: str, without_pytest: bool = False) -> dict[str, str]:
    """Outcomes as the program writes them, run as in a runtime."""
    results = folder / "results.json"
    blocked = "import sys; sys.modules['pytest'] = None; " if without_pytest else ""
    runs = "runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"{blocked}import runpy, sys; sys.argv[0] = {inside.__file__!r}; {runs}"
    subprocess.run(
        [sys.executable, "-c", code, str(results), str(folder), str(folder), *words], check=True, capture_output=True
    )
    return dict(json.loads(results.read_text()))


@pytest.mark.parametrize("without_pytest", [True, False])
def test_tests_of_every_kind_are_told_of_by_their_ids(tmp_path: Path, without_pytest: bool) -> None:
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")

    found = ends(tmp_path, "test_all.py", "test_broken.py", "test_none.py", without_pytest=without_pytest)

    wanted = {f"test_all.py::{name}": end for name, end in ENDS.items()}
    assert {name: found.get(name) for name in wanted} == wanted
    assert {name.partition("::")[0] for name in found if found[name] == "passed"} == {"test_all.py"}


def test_expected_failures_pass_and_what_fails_behind_a_test_counts(tmp_path: Path) -> None:
    text = (
        "import pytest\n\n@pytest.fixture\ndef late():\n    yield\n    assert False\n\n"
        "def test_late(late):\n    pass\n\n@pytest.mark.xfail\ndef test_expected():\n    assert False\n"
    )
    (tmp_path / "test_all.py").write_text(text)

    assert ends(tmp_path, "test_all.py", "--", "-p", "no:randomly") == {
        "test_all.py::test_late": "failed",
        "test_all.py::test_expected": "passed",
    }


def test_without_a_file_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "test_all.py").write_text(TESTS)

    assert ends(tmp_path, "test_none.py") == {}
