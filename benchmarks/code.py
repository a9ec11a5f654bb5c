"""Cost of an item of the verifier `code`, by kind of tests, with nothing else in the sandbox.

    .venv/bin/python -m benchmarks.code [--rounds N] [--sandbox required|unsafe] [--write]

The kinds take turns. Each is a small solution with a few cases; the solution and its tests start anew every time. With
--write the table goes to benchmarks/results/code.md.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Literal

from benchmarks.machine import described_machine
from reward_service.code.arguments import CodeArguments
from reward_service.code.code_judge import CodeJudge
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.program import ExecutionConfig

RESULT = Path(__file__).with_name("results") / "code.md"
SOLUTION = "```python\ndef f(x):\n    return x\nif __name__ == '__main__':\n    print(input())\n```"
PAUSE_S = 0.2
DEADLINE_S = 120.0
TESTS: dict[str, dict[str, object]] = {
    "stdio, 4 cases": {"kind": "stdio", "cases": [{"stdin": "1", "stdout": "1"}] * 4},
    "call, 10 cases": {"kind": "call", "entry_point": "f", "cases": [{"arguments": [1], "expected": 1}] * 10},
    "assert, 3 cases": {"kind": "assert", "cases": [{"code": "assert f(1) == 1"}] * 3},
    "check": {"kind": "check", "entry_point": "f", "cases": [{"code": "def check(c):\n    assert c(1) == 1"}]},
    "pytest, 1 test": {
        "kind": "pytest",
        "files": {"test_f.py": "from solution import f\ndef test_f():\n    assert f(1) == 1\n"},
    },
}


def main() -> None:
    """Print a table of medians and nine tenths, and write it if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sandbox", choices=("required", "unsafe"), default="required")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/code.md")
    given = parser.parse_args()
    report = _report(asyncio.run(measure(rounds=given.rounds, kind=given.sandbox)), given)
    print(report)
    if given.write:
        RESULT.write_text(report, encoding="utf-8")


async def measure(*, rounds: int, kind: Literal["required", "unsafe"]) -> dict[str, list[float]]:
    """Judge every kind in turn. Milliseconds of each item, by kind."""
    execution = ExecutionConfig()
    taken: dict[str, list[float]] = {name: [] for name in TESTS}
    async with open_sandboxes(kind=kind, config=execution) as sandboxes:
        assert sandboxes is not None
        judge = CodeJudge(sandbox=sandboxes.programs, execution=execution)
        for _ in range(rounds):
            for name, tests in TESTS.items():
                await asyncio.sleep(PAUSE_S)
                taken[name].append(await _item_ms(judge, tests))
    return taken


def _report(taken: dict[str, list[float]], given: argparse.Namespace) -> str:
    rows = [
        f"| {name} | {statistics.median(times):.0f} | {sorted(times)[int(0.9 * (len(times) - 1))]:.0f} |"
        for name, times in taken.items()
    ]
    lines = [
        "# An item of `code`",
        "",
        f"{given.rounds} of each kind, one at a time, sandbox = {given.sandbox!r}. {described_machine()}.",
        "",
        "| tests | median, ms | nine tenths below, ms |",
        "|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


async def _item_ms(judge: CodeJudge, tests: dict[str, object]) -> float:
    arguments = CodeArguments.model_validate({"tests": tests, "timeout_s": 60.0, "total_timeout_s": 60.0})
    started = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    score = await judge.score(SOLUTION, arguments, deadline=deadline)
    assert score.reward == 1.0, score
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    main()
