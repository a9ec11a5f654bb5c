"""Baselines: the completions with which our tasks are compared."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.evaluation.judging import ComparisonOpponent, opponents_of, read_answers, surroundings
from learner.evaluation.results import NotComparable, Sample, TaskSamples


def task(index: int, prompt: str) -> TaskSamples:
    sample = Sample(completion="x", reward=1.0, answer=None, length=1, truncated=False)
    return TaskSamples(task_index=index, prompt=prompt, samples=(sample,))


def chat(prompt: str) -> str:
    return f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_of_lines_is_read_by_prompt(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(
        '{"prompt": "a", "completion": "1"}\n\n{"prompt": "b", "completion": "ü", "more": 3}\n'
        '{"prompt": "a", "completion": "2"}\n'
    )
    assert read_answers(path) == {"a": ["1", "2"], "b": ["ü"]}
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as some editors begin a file
    assert read_answers(path) == {"a": ["1", "2"], "b": ["ü"]}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is empty"),
        ('{"prompt": "a", "completion": "1"}\n{"prompt": "a"}\n', "line 2: completion: Field required"),
        ('{"prompt": 1, "completion": "1"}\n', "line 1: prompt: Input should be a valid string"),
        ("prompt\n", "line 1: Invalid JSON"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(NotComparable, match=rf"answers\.jsonl.*{named}"):
        read_answers(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match=r"gone\.jsonl"):
        read_answers(tmp_path / "gone.jsonl")


def test_prompts_of_a_file_are_found_inside_the_chat_template() -> None:
    answers = {"2 + 2": ["4"], "2 + 20": ["22"], "other": ["?"]}
    tasks = [task(0, chat("2 + 2")), task(3, chat("2 + 20")), task(4, chat("12 + 25"))]
    assert opponents_of(tasks, answers) == {
        0: ComparisonOpponent("2 + 2", ("4",)),
        3: ComparisonOpponent("2 + 20", ("22",)),
    }


def test_prompts_without_a_template_are_found_as_they_are() -> None:
    answers = {"2 + 2=": ["4", "four"], "12 + 2=": ["14"]}
    tasks = [task(0, "12 + 2="), task(1, "2 + 2="), task(2, "22 + 2=")]
    assert opponents_of(tasks, answers) == {
        0: ComparisonOpponent("12 + 2=", ("14",)),
        1: ComparisonOpponent("2 + 2=", ("4", "four")),
    }


def test_without_a_common_prompt_there_is_no_opponent() -> None:
    assert opponents_of([task(0, chat("a b c"))], {"d e f": ["1"]}) == {}
    assert opponents_of([], {"d e f": ["1"]}) == {}


@given(st.sets(st.text(alphabet="ab1+ ", min_size=3, max_size=8), min_size=3, max_size=12))
def test_the_template_that_most_tasks_show_is_found(prompts: set[str]) -> None:
    tasks = [task(index, chat(prompt)) for index, prompt in enumerate(sorted(prompts))]
    before, after = surroundings(tasks, prompts)
    assert f"{before}{{}}{after}" == chat("{}")
    assert len(opponents_of(tasks, {prompt: ["x"] for prompt in prompts})) == len(prompts)
