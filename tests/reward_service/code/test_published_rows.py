"""Published rows become tasks that their published solutions pass, and others do not."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import JsonValue

from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.task_configs import JsonlTasks
from headway import command
from headway.file_commands import convert_data
from reward_service.code.arguments import CodeArguments
from reward_service.code.published_rows import Choices, UnknownRow, task_of
from services.config.sources import ConfigError
from tests.reward_service.code.conftest import Judged
from tests.reward_service.code.published_samples import (
    APPS,
    LIVE_CODE_BENCH,
    LIVE_CODE_BENCH_CALLS,
    MBPP,
    OWN,
    SOLVED,
    human_eval,
)

Arguments = dict[str, JsonValue]

# Those whose tests use what the prompt defines, or the function itself by name; and some of all others.
CHOSEN = sorted({32, 33, 38, 50, *range(0, 164, 20)})


def arguments_of(row: dict[str, JsonValue]) -> Arguments:
    task = task_of(row, Choices(reference=True))
    arguments = task["arguments"]
    assert isinstance(arguments, dict)
    CodeArguments.model_validate(arguments)
    return arguments


async def rewards(judged: Judged, pairs: list[tuple[str, Arguments]]) -> list[float]:
    limits = {"timeout_s": 60.0, "total_timeout_s": 200.0}
    scores = await asyncio.gather(
        *(judged(code, **{**arguments, **limits, "reference": None}) for code, arguments in pairs)
    )
    return [score.reward for score in scores]


@pytest.mark.asyncio(loop_scope="module")
async def test_human_eval_as_published_is_solved_by_its_solutions_alone(isolated: Judged) -> None:
    rows = human_eval()
    assert len([arguments_of(row) for row in rows]) == 164
    right = [(str(rows[number]["canonical_solution"]), arguments_of(rows[number])) for number in CHOSEN]
    # The same as a whole program, which repeats the prompt.
    whole = [(f"{rows[number]['prompt']}{code}", given) for number, (code, given) in zip(CHOSEN, right, strict=True)]
    wrong = [("    return None\n", given) for _, given in right[:6]]
    assert await rewards(isolated, [*right, *whole[:6]]) == [1.0] * (len(right) + 6)
    assert await rewards(isolated, wrong) == [0.0] * len(wrong)


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_other_shapes_are_solved_by_their_solutions_alone(isolated: Judged) -> None:
    pairs = [(str((given := arguments_of(row))["reference"]), given) for row in OWN]
    pairs += [(code, arguments_of(row)) for row, code in SOLVED]
    assert await rewards(isolated, pairs) == [1.0] * len(pairs)
    assert await rewards(isolated, [("def nothing(): pass", given) for _, given in pairs]) == [0.0] * len(pairs)


@pytest.mark.asyncio(loop_scope="module")
async def test_any_zero_of_a_polynomial_is_right_where_the_published_solution_finds_one(isolated: Judged) -> None:
    row = {name: value for name, value in human_eval()[32].items() if name != "test"}
    given = arguments_of({**row, "base_input": [[[-6, 11, -6, 1]]], "plus_input": [[[-24, 50, -35, 10, -1, 0]]]})
    found = [(f"def find_zero(xs):\n    return {zero}", given) for zero in ("1", "2.0", "1.5")]
    assert await rewards(isolated, found) == [1.0, 1.0, 0.0]


def test_a_line_of_an_input_is_one_whatever_its_strings_hold() -> None:
    case: JsonValue = {"input": '"a\u2028b"\n2\n', "output": '"a"', "testtype": "functional"}
    tests = arguments_of({**LIVE_CODE_BENCH_CALLS, "public_test_cases": [case]})["tests"]
    assert isinstance(tests, dict)
    assert isinstance(tests["cases"], list)
    assert tests["cases"][0] == {"arguments": ["a\u2028b", 2], "expected": "a"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "?", "answer": "!"}, "answer, question"),
        ({**APPS, "input_output": ""}, "input_output"),
        ({**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        ({**MBPP, "code": "def f(:"}, "no Python"),
        ({**MBPP, "test_list": []}, "at least one test"),
        ({**LIVE_CODE_BENCH, "private_test_cases": "eJwrTs1TKEstyk7VSwYAFuUDrQ=="}, "private_test_cases"),
        ({**LIVE_CODE_BENCH, "public_test_cases": "[1]"}, "public_test_cases"),
        ({**human_eval()[0], "test": None}, "expected a string"),
    ],
)
def test_a_row_that_is_no_task_says_why(row: dict[str, JsonValue], problem: str) -> None:
    with pytest.raises(UnknownRow, match=problem):
        task_of(row, Choices())


def test_the_command_writes_a_task_file_that_environments_read(tmp_path: Path) -> None:
    rows, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
    rows.write_text("\n\n".join(map(json.dumps, OWN)) + "\n", encoding="utf-8-sig")  # as some editors begin a file
    assert convert_data([str(rows), str(tasks), "--extract", "whole", "--reward=fraction"]) == 0
    source = JsonlTaskSource(JsonlTasks(name="code", source="jsonl", train_file=tasks))
    assert source.train_tasks == len(OWN)
    written = [json.loads(line) for line in tasks.read_text().splitlines()]
    assert all("reference" not in task["arguments"] for task in written)
    assert {(task["arguments"]["extract"], task["arguments"]["reward"]) for task in written} == {("whole", "fraction")}


def test_the_command_reads_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, tasks = tmp_path / "rows.parquet", tmp_path / "tasks.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist([MBPP]), rows)
    assert convert_data([str(rows), str(tasks)]) == 0
    assert json.loads(tasks.read_text()) == json.loads(json.dumps(task_of(MBPP, Choices())))


def test_rows_that_are_unknown_are_named_by_line_and_nothing_is_written(tmp_path: Path) -> None:
    rows, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
    rows.write_text(f'{json.dumps(APPS)}\n{{"a": 1}}\n\n{{"b": 2}}\n')
    with pytest.raises(ConfigError) as told:
        command._run(["data", "convert", str(rows), str(tasks)])
    assert [problem.partition(": ")[0] for problem in told.value.problems] == [f"{rows}, line 2", f"{rows}, line 4"]
    assert not tasks.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "expected headway data convert"),
        (["a", "b", "c"], "expected headway data convert"),
        (["--all", "a"], "--all: expected"),
        (["a", "--extract", "none"], "expected one of last, first, whole"),
        (["/nowhere/rows.jsonl"], "cannot be read"),
        (["/nowhere/rows.parquet"], "cannot be read"),
    ],
)
def test_wrong_words_are_told(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as told:
        convert_data(words)
    assert problem in " ".join(told.value.problems)
