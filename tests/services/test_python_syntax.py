import ast
import gc
import re
from collections.abc import Iterator

import pytest

from services.python_syntax import expression_of, literal_of, module_of
from tests.test_layout import ROOT, WHOLE_TREE

_LONG = "\n".join(f"def f{number}(a, b={number}):\n    return [a, (b, {number})]" for number in range(200))


class _Untidy:
    """Garbage that parses when it is collected, as what formats a warning's source line does."""

    def __init__(self) -> None:
        self.myself = self

    def __del__(self) -> None:
        ast.parse("f(1)")


@pytest.fixture
def eager_collector() -> Iterator[None]:
    former = gc.get_threshold()
    gc.collect()
    gc.set_threshold(100, 1000, 1000)
    yield
    gc.set_threshold(*former)


@pytest.mark.usefixtures("eager_collector")
def test_garbage_that_parses_in_the_middle_does_not_make_a_sound_text_an_error() -> None:
    for _ in range(20):
        _Untidy()
        assert len(module_of(_LONG).body) == 200

    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        expression_of("1")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_text_that_is_no_python_is_a_syntax_error_and_the_collector_goes_on() -> None:
    with pytest.raises(SyntaxError):
        module_of("f(")

    assert gc.isenabled()


def test_a_literal_is_its_value_and_nothing_else_is_run() -> None:
    assert literal_of("  {'a': [1, (2.5, None)]}") == {"a": [1, (2.5, None)]}
    with pytest.raises(ValueError, match="malformed"):
        literal_of("exit(1)")


def test_nothing_else_in_the_tree_parses_python_by_itself() -> None:
    direct = re.compile(r"\bast\.(parse\(|literal_eval\((?!word|node))")
    found = {
        str(path.relative_to(ROOT))
        for folder in WHOLE_TREE
        for path in (ROOT / folder).rglob("*.py")
        if direct.search(path.read_text(encoding="utf-8"))
    }

    hooked = "benchmarks/trajectory_trace.py"  # it parses what is being imported, before anything else is
    assert found == {"services/python_syntax.py", "tests/services/test_python_syntax.py", hooked}
