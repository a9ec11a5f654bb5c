from collections.abc import Awaitable, Callable

from reward_service.verifier import Score

Judged = Callable[..., Awaitable[Score]]


async def test_stdio(judge: Judged) -> None:
    s = await judge(
        "print(int(input())*2)",
        {"kind": "stdio", "cases": [{"stdin": "3\n", "stdout": "6\n"}, {"stdin": "3\n", "stdout": "7\n"}]},
    )
    assert s.reward == 0.5, s


async def test_call(judge: Judged) -> None:
    s = await judge(
        "def f(x):\n  return [x*2, (1,2)]",
        {
            "kind": "call",
            "entry_point": "f",
            "cases": [{"arguments": [3], "expected": [6, [1, 2]]}, {"arguments": [3], "expected": 7}],
        },
    )
    assert s.reward == 0.5, s


async def test_assert(judge: Judged) -> None:
    s = await judge(
        "def f(x):\n  return x*2", {"kind": "assert", "cases": [{"code": "assert f(3)==6"}, {"code": "assert f(2)==5"}]}
    )
    assert s.reward == 0.5, s


async def test_check(judge: Judged) -> None:
    s = await judge(
        "def f(x):\n  return x*2",
        {"kind": "check", "entry_point": "f", "cases": [{"code": "def check(candidate):\n  assert candidate(3)==6"}]},
    )
    assert s.reward == 1, s


async def test_pytest(judge: Judged) -> None:
    s = await judge(
        "def f(x):\n  return x*2",
        {
            "kind": "pytest",
            "files": {
                "test_a.py": "from solution import f\ndef test_a():\n  assert f(3)==6\ndef test_b():\n  assert f(2)==5\n"
            },
        },
    )
    assert s.reward == 0.5, s
