"""The tests that are marked `gpu`; only files that have such a test are collected."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu.rows import say

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests",)
LIMIT_S = 120
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


def run(file: str) -> int:
    """The exit code of pytest, but that no test is no failure."""
    # Warnings are other packages', of the versions that are installed here: they are shown and fail nothing.
    code = pytest.main(
        ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", file],
        plugins=[Telling()],
    )
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def main() -> int:
    """1 if a test failed. Each file has a process of its own: one that hangs in a library keeps no other waiting."""
    if len(sys.argv) > 1 and sys.argv[1] == "--file":
        return run(sys.argv[2])
    command = [sys.executable, "-m", "benchmarks.gpu.marked_tests", "--file"]
    started = [subprocess.Popen([*command, file]) for file in marked()]
    return min(1, sum(process.wait() != 0 for process in started))


if __name__ == "__main__":
    sys.exit(main())
