"""Programs that read standard input and print, as in competitions."""

from collections.abc import Awaitable, Callable

import pytest

from reward_service.verifier.submission import Score

Judged = Callable[..., Awaitable[Score]]

pytestmark = pytest.mark.asyncio(loop_scope="module")

# "Given n and n prices, print the largest profit of one purchase and one later sale."
PRICES: dict[str, object] = {
    "kind": "stdio",
    "cases": [
        {"stdin": "6\n7 1 5 3 6 4\n", "stdout": "5\n"},
        {"stdin": "5\n7 6 4 3 1\n", "stdout": "0\n"},
        {"stdin": "1\n3\n", "stdout": "0\n"},
        {"stdin": "4\n1 1000000000000000000000 2 3\n", "stdout": "999999999999999999999\n"},
    ],
}
RIGHT = """
import sys

def main():
    _, *prices = map(int, sys.stdin.read().split())
    lowest, best = prices[0], 0
    for price in prices:
        lowest = min(lowest, price)
        best = max(best, price - lowest)
    print(best)

if __name__ == "__main__":
    main()
"""


async def test_a_right_program_gets_the_full_reward(judge: Judged) -> None:
    score = await judge(RIGHT, PRICES)
    assert score.reward == 1.0
    assert score.components["passed"] == score.components["cases"] == 4.0


async def test_a_program_that_is_right_in_some_cases_gets_their_share(judge: Judged) -> None:
    wrong = "n = int(input())\na = list(map(int, input().split()))\nprint(max(a) - min(a))"
    score = await judge(wrong, PRICES)
    assert score.reward == 0.5
    assert score.components["wrong"] == 2.0


async def test_all_or_nothing_gives_nothing_for_some(judge: Judged) -> None:
    wrong = "n = int(input())\na = list(map(int, input().split()))\nprint(max(a) - min(a))"
    score = await judge(wrong, PRICES, reward="all")
    assert score.reward == 0.0
    assert score.components["fraction"] == 0.5


async def test_cases_count_by_their_weights(judge: Judged) -> None:
    cases = [{"stdin": "1", "stdout": "1", "weight": 3.0}, {"stdin": "2", "stdout": "5", "weight": 1.0}]
    score = await judge("print(input())", {"kind": "stdio", "cases": cases})
    assert score.reward == 0.75


async def test_unicode_goes_through_both_ways(judge: Judged) -> None:
    case = {"stdin": "żółw 🐢 e\u0301\n", "stdout": "\u0301e 🐢 włóż\n"}
    score = await judge("print(input()[::-1])", {"kind": "stdio", "cases": [case]})
    assert score.reward == 1.0


@pytest.mark.parametrize(
    ("compare", "printed", "reward"),
    [
        ("exact", "1 2\n3\n", 1.0),
        ("exact", "1 2\n3", 0.0),
        ("lines", "1 2  \n3\n\n\n", 1.0),
        ("lines", "1  2\n3\n", 0.0),
        ("lines", " 1 2\n3\n", 0.0),
        ("tokens", "1  2 3", 1.0),
        ("tokens", "1 2 3 4", 0.0),
        ("tokens", "1.0 2 3", 0.0),
        ("numbers", "1.0000001 2e0 3", 1.0),
        ("numbers", "1.1 2 3", 0.0),
        ("numbers", "1 2", 0.0),
    ],
)
async def test_outputs_are_compared_as_asked(judge: Judged, compare: str, printed: str, reward: float) -> None:
    tests = {"kind": "stdio", "compare": compare, "cases": [{"stdout": "1 2\n3\n"}]}
    score = await judge(f"import sys\nsys.stdout.write({printed!r})", tests)
    assert score.reward == reward


@pytest.mark.parametrize("compare", ["exact", "lines", "tokens", "numbers"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_ends_of_lines_are_one_and_the_same(judge: Judged, compare: str, end: str) -> None:
    case = {"stdout": f"1{end}2{end}"}
    tests = {"kind": "stdio", "compare": compare, "cases": [case, case]}
    program = "import sys\nsys.stdout.buffer.write({!r})"
    for printed in (b"1\n2\n", b"1\r\n2\r\n"):
        assert (await judge(program.format(printed), tests)).reward == 1.0
    assert (await judge(program.format(b"1\r2\r"), tests)).reward == (0.0 if compare in ("exact", "lines") else 1.0)


async def test_a_program_that_prints_the_answer_and_then_crashes_fails(judge: Judged) -> None:
    score = await judge("print(1)\nraise SystemExit(3)", {"kind": "stdio", "cases": [{"stdout": "1\n"}]})
    assert score.reward == 0.0
    assert score.components["errors"] == 1.0


HOSTILE = {
    "loops": "while True: pass",
    "sleeps": "import time\ntime.sleep(10000)",
    "recurses": "def f(n): return f(n + 1)\nf(0)",
    "recurses without a limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
    "takes all memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "takes all memory at once": "x = bytearray(1 << 40)",
    "prints without end": "while True: print('x' * 10000)",
    "prints a long line": "print('2' * (1 << 24))",
    "fails to compile": "def f(:",
    "is nested deeply": "x = " + "(" * 5000 + ")" * 5000,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_case_that_goes_wrong_costs_that_case_alone(judge: Judged, name: str) -> None:
    source = f"n = input()\nif n == 'bad':\n    exec({HOSTILE[name]!r}, {{}})\nprint(n)"
    cases = [{"stdin": "bad\n", "stdout": "2\n"}, {"stdin": "2\n", "stdout": "2\n"}]
    score = await judge(source, {"kind": "stdio", "cases": cases}, timeout_s=5.0)
    assert score.components["passed"] == 1.0, score
    assert score.reward == 0.5


@pytest.mark.parametrize(("timeout_s", "total_timeout_s"), [(1.0, 2.0), (1.2, 4.8)])
async def test_time_that_all_cases_share_runs_out(judge: Judged, timeout_s: float, total_timeout_s: float) -> None:
    cases = [{"stdin": str(n), "stdout": "1"} for n in range(20)]
    tests = {"kind": "stdio", "cases": cases}
    score = await judge("while True: pass", tests, timeout_s=timeout_s, total_timeout_s=total_timeout_s)
    assert score.reward == 0.0
    assert score.components["timeouts"] == 20.0
