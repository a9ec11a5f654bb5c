"""Results of an earlier run that the table keeps."""

from dataclasses import replace
from pathlib import Path

from tests.mutants.catalog import all_mutants
from tests.mutants.table import MutantResult, former_finders, former_seeds, keep, kept_results, survivors
from tests.mutants.trying import MutantFinding


def test_results_are_of_one_commit_and_who_found_a_fault_is_known_at_the_next(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    assert not former_finders(file)
    assert not kept_results(file, code="b")
    for id, by in (("found", "tests/a.py::test_of[a case]"), ("found", "tests/b.py::test"), ("survived", None)):
        keep(MutantResult(id=id, tests=MutantFinding(by, "", 1.0)), file, code="commit a")
    keep(
        MutantResult(id="hung", tests=MutantFinding("tests/a.py tests/b.py", "not done within 300 s", 300.0)),
        file,
        code="b",
    )
    keep(MutantResult(id="cases", tests=MutantFinding("tests/a.py::test_of[a", "failed", 1.0)), file, code="b")

    assert former_finders(file) == {"found": "tests/b.py::test", "cases": "tests/a.py::test_of"}
    assert set(kept_results(file, code="b")) == {"hung", "cases"}


def test_seeds_that_found_a_fault_before_are_known_at_the_next_commit(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    assert not former_seeds(file)
    for id, by in (("found", "seed 7"), ("found", "seed 12"), ("found", "seed 7"), ("survived", None)):
        keep(MutantResult(id=id, seeds=MutantFinding(by, "", 1.0)), file, code="a")
    keep(MutantResult(id="by tests", tests=MutantFinding("tests/a.py::test", "failed", 1.0)), file, code="a")

    assert former_seeds(file) == {"found": [7, 12]}


def test_a_fault_that_the_unit_tests_were_not_shown_has_not_survived_them() -> None:
    findings = {"found": MutantFinding("tests/a.py::test", "failed", 1.0), "survived": MutantFinding(None, "", 1.0)}
    results = {id: MutantResult(id=id, tests=finding) for id, finding in findings.items()}
    results["by seeds alone"] = MutantResult(id="by seeds alone")
    mutants = [replace(all_mutants()[0], id=id) for id in (*results, "not tried")]

    assert survivors(mutants, results) == ["survived"]
