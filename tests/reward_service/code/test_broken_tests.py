"""Tests that no solution can pass are an error of the data; a solution that lacks what they use has failed."""

import pytest

from reward_service.verifier.submission import DataError
from tests.reward_service.code.conftest import Judged

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = "def f(x):\n    return 2 * x\n"
PROMPT = '''import math


def half(x: float) -> float:
    return x / 2


def f(x: int) -> int:
    """Twice the number.
    >>> f(2)
    4
    """
'''


def check(code: str, **more: object) -> dict[str, object]:
    return {"kind": "check", "entry_point": "f", "cases": [{"code": code}], **more}


def asserts(*codes: str, **more: object) -> dict[str, object]:
    return {"kind": "assert", "cases": [{"code": code} for code in codes], **more}


def files(source: str) -> dict[str, object]:
    return {"kind": "pytest", "files": {"test_f.py": source}}


@pytest.mark.parametrize(
    "tests",
    [
        check("def check(f):\n    import no_such_module\n    assert f(1) == 2"),
        check("import no_such_module\ndef check(f):\n    assert f(1) == 2"),
        check("def check(f):\n    assert f(1) == expected"),
        check("def check(f):\n    assert math.isclose(f(1), 2)"),
        check("def check(f):\n    value = value + 1\n    assert f(1) == 2"),
        check("def check(f):\n    from math import no_such_name"),
        check("def check(f): assert helper(f(1))"),
        check("def check(f): assert f(1) == 2", setup="helper = undefined"),
        asserts("assert math.isclose(f(1), 2)"),
        asserts("assert f(1) == expected"),
        asserts("assert f(1) == 2", "assert g(1) == 2", entry_points=["f"]),
        asserts("import no_such_module"),
        files("from solution import f\ndef test_f(): assert math.isclose(f(1), 2)"),
        files("from solution import f\ndef test_f(): assert f(1) == expected"),
        files("from solution import f\ndef test_f(missing_fixture): assert f(1) == 2"),
        files("from solution import f\ndef test_f():\n    import no_such_module"),
        files("import no_such_module\nfrom solution import f\ndef test_f(): assert f(1) == 2"),
    ],
)
async def test_tests_that_lack_something_themselves_are_an_error_of_the_data(
    isolated: Judged, tests: dict[str, object]
) -> None:
    with pytest.raises(DataError):
        await isolated(RIGHT, tests)


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def g(x): return x", check("def check(f): assert f(1) == 2")),
        ("def g(x): return x", asserts("assert f(1) == 2")),
        ("def g(x): return x", asserts("assert 2 == sum(map(f, [1]))", entry_points=["f"])),
        (RIGHT, asserts("assert f(1) == 2 and Basket().count() == 0")),
        (RIGHT, asserts("assert isinstance(f(1), Basket)")),
        ("def g(x): return x", asserts("assert value == 2", setup="value = f(1)")),
        ("def f(x): return x + undefined", check("def check(f): assert f(1) == 2")),
        ("def f(x): return x + undefined", asserts("assert f(1) == 2")),
        ("def f(x):\n    import no_such_module", asserts("assert f(1) == 2")),
        ("def f(x): return x + undefined", files("from solution import f\ndef test_f(): assert f(1) == 2")),
        ("def g(x): return x", files("from solution import f\ndef test_f(): assert f(1) == 2")),
        ("def g(x): return x", files("from solution import *\ndef test_f(): assert f(1) == 2")),
        ("def g(x): return x", files("def test_f():\n    from solution import f\n    assert f(1) == 2")),
        ("import no_such_module", check("def check(f): assert f(1) == 2")),
    ],
)
async def test_a_solution_that_lacks_something_has_failed(
    isolated: Judged, code: str, tests: dict[str, object]
) -> None:
    assert (await isolated(code, tests)).reward == 0.0


@pytest.mark.parametrize(
    ("code", "tests", "prelude"),
    [
        (RIGHT, check("def check(candidate): assert candidate(1) == f(1) == 2"), ""),
        (RIGHT, check("def check(candidate): assert half(candidate(1)) == math.floor(1.5)"), PROMPT),
        ("    return 2 * x\n", check("def check(candidate): assert half(candidate(1)) == 1"), PROMPT),
        ("class Solution:\n    def f(self, x): return 2 * x", check("def check(f): assert f(1) == 2"), ""),
        (
            "class Solution:\n    def f(self, x): return 2 * x",
            check("def check(f): assert f(1) == Solution().f(1) == 2", entry_point="Solution().f"),
            "",
        ),
        (
            "class Solution:\n    def f(self, x): return 2 * x",
            check("def check(f): assert f(1) == 2", entry_point="Solution.f"),
            "import math\nclass Solution:\n    def f(self, x):\n",
        ),
    ],
)
async def test_check_finds_the_solution_by_name_and_what_its_prompt_defines(
    isolated: Judged, code: str, tests: dict[str, object], prelude: str
) -> None:
    prelude = "" if "class Solution" in code else prelude
    assert (await isolated(code, tests, prelude=prelude)).reward == 1.0


async def test_what_the_prompt_defines_is_not_the_solutions(isolated: Judged) -> None:
    tests = check("def check(candidate): assert half(candidate(1)) == 1")
    assert (await isolated("def half(x): return 1\ndef f(x): return 5", tests, prelude=PROMPT)).reward == 0.0
