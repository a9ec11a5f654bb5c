"""`python -m tests.mutants [--only ID ...] [--tests-only | --seeds N]`: who finds the planted faults.

Each is planted in a temporary copy of the tree; the tree itself is never changed.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.e2e.processes import ROOT
from tests.mutants.catalog import Mutant, all_mutants, fault_of
from tests.mutants.table import MutantResult, former_finders, former_seeds, keep, kept_results, survivors, table
from tests.mutants.trying import CopyOfTree, MutantFinding, Unusable

# Results of the run whose table is committed.
_FORMER = ROOT / "benchmarks" / "results" / "mutants.jsonl"
_TESTS_TIMEOUT_S = 300.0
_SEED_TIMEOUT_S = 120.0
_PLAIN_TIMEOUT_S = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a fault survived the unit tests, 2 if one cannot be planted or says nothing."""
    arguments = _parser().parse_args(argv)
    mutants = [each for each in all_mutants() if not arguments.only or each.id in arguments.only]
    if unknown := set(arguments.only or ()) - {each.id for each in mutants}:
        print(f"error: there is no fault {', '.join(sorted(unknown))}; --list names them", file=sys.stderr)
        return 2
    if arguments.list:
        for each in mutants:
            print(f"{each.id:40} {each.what}")
        return 0
    faults = [f"{each.id}: {fault}" for each in mutants if (fault := fault_of(each)) is not None]
    if faults:
        print("error: these cannot be planted", *faults, sep="\n  ", file=sys.stderr)
        return 2
    code = _commit()
    results = kept_results(arguments.kept, code=code) if arguments.kept is not None else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = CopyOfTree.made(Path(folder) / "tree")
        try:
            _Trials(tree, results, arguments, code=code).run(mutants)
        except Unusable as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        finally:
            tree.close()
    text = table(mutants, results, code=code, seeds=range(1, arguments.seeds + 1))
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    return 1 if survivors(mutants, results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="ID", help="this fault, and others that are named so")
    parser.add_argument("--seeds", type=int, default=150, help="of the simulator, for each fault that it can show")
    parser.add_argument("--tests-only", action="store_true", help="no seeds")
    parser.add_argument("--seeds-only", action="store_true", help="no unit tests")
    parser.add_argument("--kept", type=Path, help="file with a line for each result: what it has is not tried again")
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--list", action="store_true", help="name the faults")
    return parser


class _Trials:
    """Adds to `results` who finds a fault, and keeps that if a file is given."""

    def __init__(
        self, tree: CopyOfTree, results: dict[str, MutantResult], arguments: argparse.Namespace, *, code: str
    ) -> None:
        self._tree = tree
        self._results = results
        self._arguments = arguments
        self._code = code

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Tries all mutants. A failure without a fault finds none: the tests must pass, and such seeds are passed
        over.
        """
        if not self._arguments.seeds_only:
            self._by_tests([each for each in mutants if self._of(each).tests is None])
        if not self._arguments.tests_only:
            self._by_seeds([each for each in mutants if each.simulated and self._of(each).seeds is None])

    def _by_tests(self, mutants: Sequence[Mutant]) -> None:
        if not mutants:
            return
        _say("the tests without any fault")
        plain = self._tree.pytest(_together(mutants), timeout_s=_PLAIN_TIMEOUT_S)
        if plain.by is not None:
            raise Unusable(f"{plain.by} fails without any fault: mend it first")
        finders = former_finders(_FORMER, self._arguments.kept)
        for number, mutant in enumerate(mutants, start=1):
            with self._tree.planted(mutant):
                found = self._found(mutant, first=finders.get(mutant.id))
            _note(mutant, found, f"{number} of {len(mutants)}")
            self._keep(replace(self._of(mutant), tests=found))

    def _found(self, mutant: Mutant, *, first: str | None) -> MutantFinding:
        """By the test that found it before, if that is one of its tests still and fails still; else by any of them."""
        if first is not None and any(_is_of(first, each) for each in mutant.tests):
            with suppress(Unusable):  # it has another name now
                found = self._tree.pytest([first], timeout_s=_TESTS_TIMEOUT_S)
                if found.by is not None:
                    return found
        return self._tree.pytest(mutant.tests, timeout_s=_TESTS_TIMEOUT_S)

    def _by_seeds(self, mutants: Sequence[Mutant]) -> None:
        for tenants in (False, True):
            self._by_seeds_of([each for each in mutants if each.tenants == tenants], tenants=tenants)

    def _by_seeds_of(self, mutants: Sequence[Mutant], *, tenants: bool) -> None:
        finders = former_seeds(_FORMER, self._arguments.kept)
        plain: dict[int, bool] = {}
        for number, mutant in enumerate(mutants, start=1):
            usual = range(1, self._arguments.seeds + 1)
            first = finders.get(mutant.id, [])
            order = [*first, *(seed for seed in usual if seed not in first)]
            found = self._by_seeds_that_hold(mutant, order, plain, tenants=tenants)
            _note(mutant, found, f"{number} of {len(mutants)}")
            self._keep(replace(self._of(mutant), seeds=found))

    def _by_seeds_that_hold(
        self, mutant: Mutant, order: Sequence[int], plain: dict[int, bool], *, tenants: bool
    ) -> MutantFinding:
        """The finding of the first seed that fails with the fault and holds without it. What is known of seeds without
        any fault is in `plain`.
        """
        left, took_s = list(order), 0.0
        while True:
            failing = {seed for seed, holds in plain.items() if not holds}
            with self._tree.planted(mutant):
                found = self._tree.simulate(left, timeout_s=_SEED_TIMEOUT_S, tenants=tenants, passed_over=failing)
            took_s += found.seconds
            if found.by is None:
                return replace(found, how=f"{len(set(order) - failing)} seeds held", seconds=took_s)
            seed = int(found.by.removeprefix("seed "))
            if seed not in plain:
                ((_, wrong),) = self._tree.seeds([seed], timeout_s=_SEED_TIMEOUT_S, tenants=tenants)
                plain[seed] = wrong is None
                if wrong is not None:
                    _say(f"seed {seed} fails without any fault, and is passed over: {wrong}")
            if plain[seed]:
                return replace(found, seconds=took_s)
            left = left[left.index(seed) + 1 :]

    def _of(self, mutant: Mutant) -> MutantResult:
        return self._results.get(mutant.id) or MutantResult(id=mutant.id)

    def _keep(self, result: MutantResult) -> None:
        self._results[result.id] = result
        if self._arguments.kept is not None:
            keep(result, self._arguments.kept, code=self._code)


def _together(mutants: Sequence[Mutant]) -> list[str]:
    """The tests of all of them, each once: what is part of a folder or file that is named, too, is left out."""
    named = sorted({test for mutant in mutants for test in mutant.tests})
    return [test for test in named if not any(test.startswith((f"{other}/", f"{other}::")) for other in named)]


def _is_of(test: str, named: str) -> bool:
    return test == named or test.startswith((f"{named}/", f"{named}::"))


def _note(mutant: Mutant, found: MutantFinding, which: str) -> None:
    _say(f"{which}: {mutant.id}: {found.by or 'SURVIVED'}, {found.how} ({found.seconds:.0f} s)")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return f"commit `{asked.stdout.strip()}`" if asked.returncode == 0 else "files of no commit"


if __name__ == "__main__":
    sys.exit(main())
