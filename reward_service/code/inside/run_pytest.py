"""Runs test files with pytest on a solution in another process."""

import os
import sys

import pytest

from reward_service.code.inside.channel import Channel, Message, Reporter, text_of
from reward_service.code.inside.faults import is_of_the_tests
from reward_service.code.inside.peer import SolutionModule, SolutionPeer, is_claimed
from reward_service.code.inside.plain import Json

_FOLDER = "tests"
# What a run of a few tests does not need; the cache would write files.
_WITHOUT = ("cacheprovider", "doctest", "junitxml", "pastebin", "stepwise", "faulthandler", "legacypath", "setupplan")


class TestRun:
    """A plugin that reports each test, and leaves out those that an earlier run has reported."""

    __test__ = False

    def __init__(self, *, peer: SolutionPeer, reporter: Reporter, module: SolutionModule, known: list[str]) -> None:
        self._peer = peer
        self._reporter = reporter
        self._module = module
        self._known = frozenset(known)
        self._numbers: dict[str, int] = {}
        self._phases: dict[str, str] = {}
        self._error = ""
        self.broken = ""
        self.faulty = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.failed:
            self.broken = self.broken or str(report.longrepr)[-400:]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """All tests by name, before those are left out that have been run."""
        names = [item.nodeid for item in items]
        self._numbers = {name: number for number, name in enumerate(names)}
        if not self.broken:
            self._reporter.collected(names)
        items[:] = [item for item in items if item.nodeid not in self._known]
        vars(self._module)["_hw_strict"] = True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._phases, self._error = {}, ""
        self._reporter.begin(self._numbers[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called when one of a test's three phases has ended. An expected failure counts as skipped."""
        expected = hasattr(report, "wasxfail")
        self._phases[report.when or ""] = "skipped" if expected and report.skipped else report.outcome
        if report.failed and not self._error:
            self._error = str(report.longrepr)[-400:]
        if expected and report.skipped:
            self._phases["setup"] = "skipped"

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Note a test that lacks a name, a module or a fixture itself: no solution can pass it."""
        error = None if call.excinfo is None else call.excinfo.value
        if error is None or self.faulty:
            return
        lacking = is_of_the_tests(error) and getattr(error, "name", None) != self._module.__name__
        if isinstance(error, NameError) and not is_claimed(str(error.name)):
            lacking = lacking and not _imports_all(item)
        if lacking or isinstance(error, pytest.FixtureLookupError):
            self.faulty = f"{item.nodeid}: {text_of(error)}"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended. One that was to be skipped is not counted; one that skips itself has failed."""
        skipped = self._phases.get("setup") == "skipped" and "failed" not in self._phases.values()
        passed = all(self._phases.get(phase) == "passed" for phase in ("setup", "call", "teardown"))
        self._reporter.end(self._numbers[nodeid], passed=None if skipped else passed, error=self._error)


def run(*, channel: Channel, start: Message) -> None:
    """All tests that are not known, each with a report."""
    reporter = Reporter(channel=channel, nonce=str(start["nonce"]))
    peer = SolutionPeer(channel)
    name = str(start["module"])
    module = SolutionModule(name=name, peer=peer, names=_strings(start["names"]))
    sys.modules[name] = module
    plugin = TestRun(peer=peer, reporter=reporter, module=module, known=_strings(start["known"]))
    os.chdir(_FOLDER)
    without = [part for plugin_name in _WITHOUT for part in ("-p", f"no:{plugin_name}")]
    options = ["-q", "--capture=sys", "--assert=plain", "--tb=line", "-c", os.devnull, "--rootdir", "."]
    status = pytest.main([*without, *options, "."], plugins=[plugin])
    if plugin.broken or status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
        reporter.broken(plugin.broken or f"pytest ended with {status!r}", touched=peer.touched)
    elif plugin.faulty:
        reporter.broken(plugin.faulty, touched=False)
    else:
        reporter.done()


def _imports_all(item: pytest.Item) -> bool:
    """True if a test may have its names from the solution without naming them."""
    source = item.path.read_text(encoding="utf-8", errors="replace")
    return "import *" in source


def _strings(given: Json) -> list[str]:
    assert isinstance(given, list)
    return [str(part) for part in given]


def main() -> None:
    """The process of the tests."""
    channel = Channel.take()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run(channel=channel, start=channel.receive())


if __name__ == "__main__":
    main()
