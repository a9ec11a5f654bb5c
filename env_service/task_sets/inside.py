"""Runs tests inside a runtime and writes how each of them ended: laid there as a file, and no part of the service.

    python3 inside.py RESULTS FOLDER PLACE FILE … [-- ARGUMENT …]

It runs in FOLDER; files, and the ids of their tests, count from PLACE. With pytest where the image has it; without,
plain functions `test_*` and classes of unittest. What the tests need is loaded before the folder is on the path, at its
end, so that no file in it stands for one of Python's.
"""

from __future__ import annotations  # images may have older Pythons

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from functools import partial


class Outcomes:
    """The plugin of pytest that keeps how each test ended, by its id."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: object) -> None:
        """Keep the worst of what a test's beginning, call and end said; an expected failure is a pass."""
        name, when = str(getattr(report, "nodeid", "")), getattr(report, "when", "")
        outcome = str(getattr(report, "outcome", "failed"))
        if outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "passed"
        if when == "call" or outcome != "passed":
            self.found[name] = "failed" if "failed" in (outcome, self.found.get(name)) else outcome


def plain_outcomes(place: str, files: list[str]) -> dict[str, str]:
    """Ends of the tests of files below a place, without pytest."""
    found: dict[str, str] = {}
    for at, file in enumerate(files):
        try:
            spec = importlib.util.spec_from_file_location(f"tests_{at}", os.path.join(place, file))
            if spec is None or spec.loader is None:
                continue
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except BaseException:  # noqa: BLE001  whatever the code under test raises
            traceback.print_exc()
            continue
        for name, test in plain_tests(module):
            try:
                found[f"{file}::{name}"] = test() or "passed"
            except BaseException:  # noqa: BLE001  as above
                traceback.print_exc()
                found[f"{file}::{name}"] = "failed"
    return found


def plain_tests(module: object) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Names of a module's tests, and what runs each, and returns how it ended if that is not as usual."""
    for name, made in list(vars(module).items()):
        if inspect.isclass(made) and issubclass(made, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(made):
                yield f"{name}::{method}", partial(case_ended, made(method))
        elif inspect.isclass(made) and name.startswith("Test"):
            methods = [each for each in dir(made) if each.startswith("test")]
            yield from ((f"{name}::{each}", partial(method_ended, made, each)) for each in methods)
        elif name.startswith("test") and inspect.isfunction(made):
            yield name, partial(discarded, made)


def case_ended(case: unittest.TestCase) -> str:
    """The end of a test of unittest's."""
    ended = unittest.TestResult()
    case.run(ended)
    for _, said in [*ended.errors, *ended.failures]:
        sys.stdout.write(said)
    return ("skipped" if ended.skipped else "passed") if ended.wasSuccessful() else "failed"


def method_ended(made: type, name: str) -> None:
    """Run a test of a class that is nobody's."""
    getattr(made(), name)()


def discarded(test: Callable[[], object]) -> None:
    """Run a test, whatever it returns."""
    test()


def main(words: list[str]) -> None:
    """Run the tests of the files and write the outcomes."""
    results, folder, place, *rest = words
    cut = rest.index("--") if "--" in rest else len(rest)
    files, arguments = rest[:cut], rest[cut + 1 :]
    os.chdir(folder)
    files = [file for file in files if os.path.exists(os.path.join(place, file))]
    try:
        pytest = importlib.import_module("pytest")
    except ImportError:
        pytest = None
    sys.path.append(folder)
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    if not files:
        found: dict[str, str] = {}
    elif pytest is None:
        found = plain_outcomes(place, files)
    else:
        kept = Outcomes()
        usual = [f"--rootdir={place}", "-p", "no:cacheprovider", "--maxfail=0", "--continue-on-collection-errors"]
        paths = [os.path.join(place, file) for file in files]
        pytest.main([*usual, "-q", "--tb=short", *arguments, *paths], plugins=[kept])
        found = kept.found
    with open(results, "w", encoding="utf-8") as file_of_results:
        json.dump(found, file_of_results)


if __name__ == "__main__":
    main(sys.argv[1:])
