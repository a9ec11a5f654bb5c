"""Assert statements, as in MBPP, and check(candidate), as in HumanEval."""

from collections.abc import Awaitable, Callable

import pytest

from reward_service.verifier.submission import DataError, Score

Judged = Callable[..., Awaitable[Score]]

pytestmark = pytest.mark.asyncio(loop_scope="module")

# "Write a function to find the shared elements from the given two lists."
SIMILAR: dict[str, object] = {
    "kind": "assert",
    "cases": [
        {"code": "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))"},
        {"code": "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))"},
        {"code": "assert set(similar_elements((11, 12, 14, 13),(17, 15, 14, 13))) == set((13, 14))"},
    ],
}
# HumanEval's form, with a helper that only the prompt has.
ZERO: dict[str, object] = {
    "kind": "check",
    "entry_point": "find_zero",
    "setup": "import math\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))",
    "cases": [
        {
            "code": "METADATA = {}\ndef check(candidate):\n    import random\n    rng = random.Random(42)\n"
            "    for _ in range(20):\n        coeffs = [rng.randint(-10, 10), rng.choice([-3, 2, 5])]\n"
            "        solution = candidate(list(coeffs))\n        assert math.fabs(poly(coeffs, solution)) < 1e-4\n"
        }
    ],
}

# Their time is waited out.
ENDLESS = {"while True: pass", "return (n for n in iter(int, 1))"}
ENDLESS_S = 2.5


def asserts(*codes: str, **more: object) -> dict[str, object]:
    return {"kind": "assert", "cases": [{"code": code} for code in codes], **more}


async def test_a_right_function_gets_the_full_reward(judge: Judged) -> None:
    code = "def similar_elements(a, b):\n    return tuple(set(a) & set(b))"
    assert (await judge(code, SIMILAR)).reward == 1.0


async def test_a_wrong_function_gets_the_share_of_what_holds(judge: Judged) -> None:
    code = "def similar_elements(a, b):\n    return (4, 5) if 4 in a and 5 in a else (3, 4)"
    score = await judge(code, SIMILAR)
    assert score.reward == pytest.approx(2 / 3)
    assert score.components["wrong"] == 1.0


async def test_a_right_candidate_passes_the_check(judge: Judged) -> None:
    assert (await judge("def find_zero(xs):\n    return -xs[0] / xs[1]", ZERO)).reward == 1.0


async def test_a_solution_does_not_replace_a_helper_of_the_check(judge: Judged) -> None:
    code = "def poly(xs, x):\n    return 0\ndef find_zero(xs):\n    return 0"
    assert (await judge(code, ZERO)).reward == 0.0


async def test_a_prompt_is_completed_with_its_head_as_prelude(judge: Judged) -> None:
    prelude = 'from typing import List\n\ndef total(xs: List[int]) -> int:\n    """The sum."""'
    tests = {"kind": "check", "entry_point": "total", "cases": [{"code": "def check(c):\n    assert c([1, 2]) == 3"}]}
    assert (await judge("    return sum(xs)", tests, prelude=prelude)).reward == 1.0


async def test_a_method_of_a_class_is_checked_on_an_instance(judge: Judged) -> None:
    tests = {"kind": "check", "entry_point": "Solution.f", "cases": [{"code": "def check(c):\n    assert c(1) == 2"}]}
    assert (await judge("class Solution:\n    def f(self, x): return x + 1", tests)).reward == 1.0


async def test_a_function_named_like_a_builtin_is_found_as_entry_point(judge: Judged) -> None:
    tests = asserts("assert sum(10, 15) == 6", entry_points=["sum"])
    code = "def sum(a, b):\n    return 6"
    assert (await judge(code, tests)).reward == 1.0
    assert (await judge(code, asserts("assert sum(10, 15) == 6"))).reward == 0.0


async def test_the_setup_is_run_on_the_side_of_the_tests(judge: Judged) -> None:
    tests = asserts("assert near(root(4), 2)", setup="import math\ndef near(a, b):\n    return math.isclose(a, b)")
    assert (await judge("def root(x):\n    return x ** 0.5", tests)).reward == 1.0
    cheat = "def near(a, b):\n    return True\ndef root(x):\n    return 0"
    assert (await judge(cheat, tests)).reward == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import os; os._exit(0)",
        "x = []\n        while True: x.append(bytearray(1 << 24))",
        "return f(x)",
        "return 'x' * (1 << 26)",
        "return (n for n in iter(int, 1))",
    ],
)
async def test_a_case_that_goes_wrong_costs_that_case_alone(judge: Judged, code: str) -> None:
    tests = asserts("assert f(1) == 1", "assert list(f(0)) == []", "assert f(2) == 2")
    timeout_s = ENDLESS_S if code in ENDLESS else 5.0
    score = await judge(f"def f(x):\n    if x == 0:\n        {code}\n    return x", tests, timeout_s=timeout_s)
    assert score.components["passed"] == 2.0, score


async def test_a_solution_that_does_not_load_fails_all_cases(judge: Judged) -> None:
    for code in ("def similar_elements(a, b:", "while True: pass", "import nothing_like_it"):
        score = await judge(code, SIMILAR, timeout_s=ENDLESS_S if code in ENDLESS else 5.0)
        assert (score.reward, score.components["cases"]) == (0.0, 3.0)


@pytest.mark.parametrize(
    "tests",
    [
        asserts(),
        asserts("assert f(1) =="),
        asserts("assert f(1) == 1", setup="raise ValueError"),
        asserts("assert f(1) == 1", setup="import os; os._exit(0)"),
        asserts("assert f(1) == 1", setup="import missing_module"),
    ],
)
async def test_broken_tests_are_an_error_of_the_data(judge: Judged, tests: dict[str, object]) -> None:
    with pytest.raises(DataError, match="the tests"):
        await judge("def f(x):\n    return x", tests)


async def test_a_reference_that_fails_shows_that_the_tests_are_broken(judge: Judged) -> None:
    with pytest.raises(DataError, match="passes 1 of 2 cases"):
        await judge(
            "def f(x):\n    return x",
            asserts("assert f(1) == 1", "assert f(1) == 2"),
            reference="def f(x):\n    return x",
        )


async def test_a_reference_that_passes_changes_nothing(judge: Judged) -> None:
    tests = asserts("assert f(1) == 1", "assert f(2) == 2")
    assert (await judge("def f(x):\n    return 1", tests, reference="def f(x):\n    return x")).reward == 0.5
