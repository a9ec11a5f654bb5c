"""Function calls with expected values."""

from collections.abc import Awaitable, Callable

import pytest

from reward_service.verifier.submission import DataError, Score

Judged = Callable[..., Awaitable[Score]]

pytestmark = pytest.mark.asyncio(loop_scope="module")

# "Given a list of intervals, merge those that overlap."
MERGE: dict[str, object] = {
    "kind": "call",
    "entry_point": "merge",
    "cases": [
        {"arguments": [[[1, 3], [2, 6], [8, 10], [15, 18]]], "expected": [[1, 6], [8, 10], [15, 18]]},
        {"arguments": [[[1, 4], [4, 5]]], "expected": [[1, 5]]},
        {"arguments": [[]], "expected": []},
        {"arguments": [[[4, 7], [1, 4]]], "expected": [[1, 7]]},
    ],
}
RIGHT = """
from typing import List

class Solution:
    def merge(self, intervals: List[List[int]]) -> List[List[int]]:
        merged = []
        for start, end in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        return merged
"""


def returns(expression: str, expected: object, **more: object) -> tuple[str, dict[str, object]]:
    """A function that returns an expression, and tests that expect a value of it."""
    tests = {"kind": "call", "entry_point": "f", "cases": [{"expected": expected}], **more}
    return f"def f():\n    return {expression}", tests


async def test_a_right_method_gets_the_full_reward(judge: Judged) -> None:
    score = await judge(RIGHT, MERGE)
    assert score.reward == 1.0


async def test_a_function_gets_the_share_of_the_calls_that_are_right(judge: Judged) -> None:
    wrong = RIGHT.replace("sorted(intervals)", "intervals").replace("class Solution:", "class Solution: # no sort")
    score = await judge(wrong, MERGE)
    assert score.reward == 0.75
    assert score.components["wrong"] == 1.0


async def test_calls_count_by_their_weights(judge: Judged) -> None:
    cases = [{"arguments": [1], "expected": 1, "weight": 3.0}, {"arguments": [2], "expected": 1}]
    score = await judge("f = lambda x: x", {"kind": "call", "entry_point": "f", "cases": cases})
    assert score.reward == 0.75


async def test_keyword_arguments_are_passed(judge: Judged) -> None:
    cases = [{"arguments": [7], "keywords": {"by": 2}, "expected": 3}]
    score = await judge("def f(x, *, by): return x // by", {"kind": "call", "entry_point": "f", "cases": cases})
    assert score.reward == 1.0


@pytest.mark.parametrize(
    ("expression", "expected", "reward"),
    [
        ("2 ** 200", "2 ** 200", 0.0),
        ("2 ** 200", str(2**200), 1.0),
        ("2 ** 200 + 1", str(2**200), 0.0),
        ("10 ** 5000", "1" + "0" * 4000, 0.0),
        ("(1, 2)", "(1, 2)", 1.0),
        ("[1, 2]", "(1, 2)", 0.0),
        ("{1: (2, 3), 'a': {4}}", "{'a': {4}, 1: (2, 3)}", 1.0),
        ("{1: 2}", "{'1': 2}", 0.0),
        ("frozenset([1, 2])", "{2, 1}", 1.0),
        ("{(1, 2), (3,)}", "{(3,), (1, 2)}", 1.0),
        ("float('nan')", "1e400 - 1e400", 0.0),
        ("1.0", "1", 1.0),
        ("True", "1", 1.0),
        ("'1'", "1", 0.0),
        ("b'\\xff'", "b'\\xff'", 1.0),
        ("0.1 + 0.2", "0.3", 0.0),
        ("None", "None", 1.0),
        ("None", "0", 0.0),
        ("complex(1, 2)", "1 + 2j", 1.0),
        ("'z\\ud800é'", "'z\\ud800é'", 1.0),
        ("{0.5: [1]}", "{0.5: [1]}", 1.0),
    ],
)
async def test_python_values_are_compared_as_python_does(
    judge: Judged, expression: str, expected: str, reward: float
) -> None:
    code, tests = returns(expression, expected, literals="python", tuples_are_lists=False)
    if expected in ("2 ** 200", "1e400 - 1e400"):
        with pytest.raises(DataError, match="not a Python literal"):
            await judge(code, tests)
        return
    assert (await judge(code, tests)).reward == reward


@pytest.mark.parametrize(
    ("expression", "expected", "reward"),
    [
        ("(1, (2, 3))", [1, [2, 3]], 1.0),
        ("[0.1 + 0.2, 1e300 * 1e10]", [0.3, 1e308 * 10], 1.0),
        ("[0.31]", [0.3], 0.0),
        ("float('nan')", float("nan"), 1.0),
        ("(x * x for x in range(4))", [0, 1, 4, 9], 1.0),
        ("map(str, [1, 2])", ["1", "2"], 1.0),
        ("[zip([1], [2])]", [[[1, 2]]], 1.0),
        ("{'a': 1}.keys()", ["a"], 1.0),
        ("__import__('collections').Counter('aab')", {"b": 1, "a": 2}, 1.0),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", [1, 2], 1.0),
        ("__import__('enum').IntEnum('E', 'A').A", 1, 1.0),
        ("object()", None, 0.0),
        ("f", None, 0.0),
    ],
)
async def test_json_values_have_tuples_and_iterators_as_lists(
    judge: Judged, expression: str, expected: object, reward: float
) -> None:
    code, tests = returns(expression, expected, tolerance={})
    assert (await judge(code, tests)).reward == reward


async def test_a_coroutine_function_is_run(judge: Judged) -> None:
    cases = [{"arguments": [1], "expected": 2}]
    score = await judge("async def f(x): return x + 1", {"kind": "call", "entry_point": "f", "cases": cases})
    assert score.reward == 1.0


BAD_CALLS = {
    "raises": "raise ValueError",
    "loops": "while True: pass",
    "recurses": "return f(x)",
    "takes all memory": "y = []\n        while True: y.append(bytearray(1 << 24))",
    "returns itself in a list": "y = []; y.append(y); return y",
    "returns much": "return 'x' * (1 << 26)",
    "returns without end": "import itertools; return itertools.count()",
    "yields without end": "return (n for n in iter(int, 1))",
    "dies": "import os; os._exit(0)",
    "prints without end": "\n        while True: print('x' * 1000)",
}


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_a_call_that_goes_wrong_costs_that_call_alone(judge: Judged, name: str) -> None:
    code = f"def f(x):\n    if x == 0:\n        {BAD_CALLS[name]}\n    return x"
    cases = [{"arguments": [x], "expected": x} for x in (1, 0, 2)]
    timeout_s = 2.5 if name in ("loops", "prints without end") else 5.0  # theirs is waited out
    score = await judge(code, {"kind": "call", "entry_point": "f", "cases": cases}, timeout_s=timeout_s)
    assert score.components["passed"] == 2.0, score


async def test_what_a_solution_remembers_of_a_call_is_there_in_the_next(judge: Judged) -> None:
    cases = [{"expected": 1}, {"expected": 2}]
    code = "n = 0\ndef f():\n    global n\n    n += 1\n    return n"
    score = await judge(code, {"kind": "call", "entry_point": "f", "cases": cases})
    assert score.reward == 1.0


@pytest.mark.parametrize("code", ["", "def g(x): return x", "import missing_module", "def f(x: return x", "1 / 0"])
async def test_a_solution_without_the_function_gets_nothing(judge: Judged, code: str) -> None:
    score = await judge(code or "pass", MERGE)
    assert score.reward == 0.0
    assert score.components["errors"] == 4.0


@pytest.mark.parametrize("literal", ["f(", "__import__('os')", "(" * 5000, "[1] * 3"])
async def test_a_literal_that_cannot_be_read_is_an_error_of_the_data(judge: Judged, literal: str) -> None:
    code, tests = returns("1", literal, literals="python")
    with pytest.raises(DataError, match="literal"):
        await judge(code, tests)
