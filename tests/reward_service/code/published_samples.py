"""Rows in the shapes of published data sets, with solutions. HumanEval is there itself; the others are ours."""

import base64
import gzip
import json
import pickle
import zlib
from pathlib import Path

from pydantic import JsonValue

Row = dict[str, JsonValue]

_HUMAN_EVAL = Path(__file__).parent / "human_eval" / "HumanEval.jsonl.gz"


def human_eval() -> list[Row]:
    """All 164 rows, as published (MIT licence, beside the file)."""
    return [json.loads(line) for line in gzip.open(_HUMAN_EVAL, "rt", encoding="utf-8")]


HUMAN_EVAL_PLUS: Row = {
    "task_id": "HumanEval/900",
    "prompt": 'from typing import List\n\n\ndef mean(xs: List[float]) -> float:\n    """The mean of numbers."""\n',
    "entry_point": "mean",
    "canonical_solution": "    return sum(xs) / len(xs)\n",
    "contract": "    assert xs\n",
    "base_input": [[[1.0, 2.0]]],
    "plus_input": [[[0.1, 0.2, 0.3]], [[5]]],
    "atol": 1e-6,
}
# As in the published form whose tests are one program.
HUMAN_EVAL_PLUS_TEST: Row = {
    "task_id": "HumanEval/900",
    "prompt": HUMAN_EVAL_PLUS["prompt"],
    "entry_point": "mean",
    "canonical_solution": HUMAN_EVAL_PLUS["canonical_solution"],
    "test": "def assertion(out, exp, atol):\n    assert abs(out - exp) <= atol\n\n\ndef check(candidate):\n"
    "    inputs = [[[1.0, 2.0]]]\n    results = [1.5]\n    for inp, exp in zip(inputs, results):\n"
    "        assertion(candidate(*inp), exp, 1e-6)\n",
}
MBPP: Row = {
    "task_id": 900,
    "text": "Write a function to check whether a number is a square.",
    "code": "import math\r\ndef root(n):\r\n\treturn math.isqrt(n)\r\ndef check(n):\r\n\treturn root(n) ** 2 == n",
    "test_list": ["assert check(9) == True", "assert math.isclose(check(8), 0)"],
    "test_setup_code": "",
    "challenge_test_list": ["assert not check(2)"],
}
MBPP_SANITIZED: Row = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 901,
    "prompt": "Write a function to tell whether a list holds the same twice.",
    "code": "def test_twice(xs):\n    return len(xs) != len(set(xs))",
    "test_imports": ["import math"],
    "test_list": ["assert test_twice([1, 1]) == True", "assert test_twice([math.pi]) == False"],
}
MBPP_PLUS: Row = {
    **MBPP_SANITIZED,
    "test": "inputs = [[[1, 1]], [[]]]\nresults = [True, False]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert test_twice(*inp) == exp\n",
}
APPS: Row = {
    "problem_id": 900,
    "question": "Given a and b, print their sum.",
    "solutions": json.dumps(
        ["a, b = map(int, input().split())\nprint(a + b)", "print(sum(map(int, input().split())))"]
    ),
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}),
    "difficulty": "introductory",
    "url": "https://example.com/sum",
    "starter_code": "",
}
APPS_CALLS: Row = {
    **APPS,
    "solutions": json.dumps(["class Solution:\n    def half(self, n: int) -> float:\n        return n / 2"]),
    "input_output": json.dumps({"fn_name": "half", "inputs": [[1], [4]], "outputs": [[0.5], [2]]}),
    "starter_code": "class Solution:\n    def half(self, n: int) -> float:\n",
}
TACO: Row = {
    **APPS,
    "solutions": json.dumps(["n = int(input())\nprint(n / 3)\nprint(n)"]),
    "input_output": json.dumps({"inputs": [["2"], ["3"]], "outputs": [["0.6666667", "2"], ["1.0", "3"]]}),
    "difficulty": "EASY",
    "tags": "['Mathematics']",
}


def packed(cases: list[Row]) -> str:
    """As the private tests of LiveCodeBench are."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


LIVE_CODE_BENCH: Row = {
    "question_title": "A. Sum",
    "question_content": "Print the sum of two numbers.",
    "platform": "codeforces",
    "question_id": "900_A",
    "contest_id": "900",
    "contest_date": "2024-01-01T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "30 4\n", "output": "34\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
LIVE_CODE_BENCH_CALLS: Row = {
    **LIVE_CODE_BENCH,
    "platform": "leetcode",
    "starter_code": "class Solution:\n    def pick(self, xs: List[int], n: int) -> List[int]:\n        ",
    "public_test_cases": json.dumps([{"input": "[1, 2, 3]\n2", "output": "[1, 2]", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "[4]\n0", "output": "[]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "pick"}),
}
# Rows that hold no solution, with one.
SOLVED = (
    (LIVE_CODE_BENCH, "print(sum(map(int, input().split())))"),
    (LIVE_CODE_BENCH_CALLS, "class Solution:\n    def pick(self, xs, n):\n        return xs[:n]"),
    # As their beginning has it, with what their graders put before it.
    (
        LIVE_CODE_BENCH_CALLS,
        "from __future__ import annotations\nclass Solution:\n    def pick(self, xs: List[int], n: int) -> List[int]:\n"
        "        deep = lambda n: n and deep(n - 1)\n        deep(5000)\n"
        "        return list(islice(xs, pow(n, 1, 99)))",
    ),
    (APPS_CALLS, "class Solution:\n    def half(self, n: int) -> Optional[float]:\n        return n / math.floor(2.5)"),
)
OWN = (HUMAN_EVAL_PLUS, HUMAN_EVAL_PLUS_TEST, MBPP, MBPP_SANITIZED, MBPP_PLUS, APPS, APPS_CALLS, TACO)
