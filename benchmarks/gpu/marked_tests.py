"""The tests that are marked `gpu`, in this process; only files that have such a test are collected."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu.rows import say

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/learner", "tests/generator", "tests/reward_service")
_TAIL = 600


class Telling:
    """A plugin of pytest that says each test that does not pass, and how many of each file did."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts the report of a phase of a test, and prints the errors of one that failed."""
        file, _, test = report.nodeid.partition("::")
        counts = self._counts.setdefault(file, Counter())
        if report.failed:
            counts["failed"] += 1
            lines = [line.strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            say(f"{file}: {test} ({report.when}, {report.duration:.0f} s)", " ".join(lines)[:_TAIL], "failed")
        elif report.skipped:
            counts["skipped"] += 1
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            say(f"{file}: {test}", why.removeprefix("Skipped: "), "skipped")
        elif report.when == "call":
            counts["passed"] += 1

    def pytest_sessionfinish(self) -> None:
        """The end of all."""
        for file, counts in self._counts.items():
            say(file, ", ".join(f"{count} {state}" for state, count in counts.items()))


def marked(folders: tuple[str, ...] = FOLDERS) -> list[str]:
    """Files with a test that is marked gpu."""
    return [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]


def main() -> int:
    """The exit code of pytest, but that no test is no failure."""
    # Warnings are other packages', of the versions that are installed here: they are shown and fail nothing.
    code = pytest.main(
        ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--timeout=100", *marked()], plugins=[Telling()]
    )
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
