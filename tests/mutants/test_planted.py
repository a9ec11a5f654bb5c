"""The planted faults can be planted: `make mutants` would else say nothing about them, and nobody would notice."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalog import Mutant, all_mutants, fault_of

MUTANTS = all_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_fault_stands_once_where_it_is_planted_and_the_file_is_python_after(mutant: Mutant) -> None:
    assert fault_of(mutant) is None


def test_no_fault_is_there_twice() -> None:
    names = Counter(mutant.id for mutant in MUTANTS)
    texts = Counter((mutant.file, mutant.old, mutant.new) for mutant in MUTANTS)

    assert [name for name, times in names.items() if times > 1] == []
    assert [text for text, times in texts.items() if times > 1] == []


def test_a_fault_that_cannot_be_planted_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    (tmp_path / "test_code.py").write_text("def test_a() -> None: ...", encoding="utf-8")

    def fault(old: str, new: str, *, file: str = "code.py", test: str = "test_code.py") -> str:
        mutant = Mutant(id="x", area="a", what="", file=file, old=old, new=new, tests=(test,))
        return fault_of(mutant, root=tmp_path) or "none"

    assert fault("a = 1", "a = 2") == "none"
    assert "stands 2 times in code.py" in fault("= 1", "= 2")
    assert "stands 0 times" in fault("c = 1", "c = 2")
    assert "is no Python" in fault("a = 1", "a = ")
    assert "says the same" in fault("a = 1", "a = 1  # one")
    assert "there is no gone.py" in fault("a = 1", "a = 2", file="gone.py")
    assert fault("a = 1", "a = 2", test="test_code.py::test_a") == "none"
    assert "there is no test_code.py::test_b" in fault("a = 1", "a = 2", test="test_code.py::test_b")
    assert "there is no gone_test.py" in fault("a = 1", "a = 2", test="gone_test.py")
