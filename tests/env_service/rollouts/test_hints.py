"""A teacher's prompt, with the hint in it."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from env_service.environments import catalog
from env_service.environments.interface import ChatMessage, Task, Verification
from env_service.environments.rules import Rules
from env_service.environments.task_configs import AdditionTasks, JsonlTasks
from env_service.environments.tokenization import Tokenization
from env_service.rollouts import judging
from env_service.rollouts.hints import hinted, solved_sibling
from env_service.rollouts.outcomes import DataFailure
from protocol.codec import decode, encode
from protocol.messages import FinishedLease
from tests.env_service.bench import MakeBench
from tests.env_service.peers import END, lease, part

SUM = Task(prompt="37+48=", verification=Verification("exact_match", {"answer": "085"}))


def test_a_hint_goes_before_plain_text_and_behind_the_last_message() -> None:
    assert hinted(SUM.prompt, "{privileged}=", SUM, environment="a") == "085=37+48="
    messages = (ChatMessage("system", "Add."), ChatMessage("user", "37 and 48?"))
    shown = hinted(messages, "It is {privileged}.", SUM, environment="a")
    assert shown == (messages[0], ChatMessage("user", "37 and 48?\n\nIt is 085."))


def test_a_tasks_own_text_goes_before_its_answer() -> None:
    task = Task(prompt="37+48=", verification=SUM.verification, privileged="carry one")
    assert hinted(task.prompt, "{privileged}: ", task, environment="a") == "carry one: 37+48="


def test_an_answer_that_is_a_number_is_text_in_a_hint() -> None:
    task = Task(prompt="37+48=", verification=Verification("exact_match", {"answer": 0}))
    assert hinted(task.prompt, "{privileged}: ", task, environment="a") == "0: 37+48="


def test_an_opening_without_messages_has_no_place_for_a_hint() -> None:
    with pytest.raises(DataFailure, match="environment a has a teacher_hint, and the task an opening without"):
        hinted((), "{privileged}", SUM, environment="a")


@pytest.mark.parametrize("arguments", [{}, {"answer": [85]}])
def test_a_task_without_such_text_is_refused_by_name(arguments: dict[str, Any]) -> None:
    task = Task(prompt="37+48=", verification=Verification("judge", dict(arguments)))
    with pytest.raises(DataFailure, match="environment sums has a teacher_hint, and the task no text for it"):
        hinted(task.prompt, "{privileged}", task, environment="sums")


def test_a_siblings_words_go_where_the_hint_has_them_and_need_no_text_of_the_task() -> None:
    silent = Task(prompt="37+48=", verification=Verification("judge", {}))
    assert hinted(silent.prompt, "{sibling}=", silent, environment="a", sibling="{privileged}") == "{privileged}=37+48="
    assert hinted(SUM.prompt, "{privileged},{sibling}: ", SUM, environment="a", sibling="85") == "085,85: 37+48="


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.0, 0.5, 1.0, 2.0, 2.0), 3),
        ((1.0, 0.0), 0),
        ((0.5, 0.9), None),
        ((None, 0.0), None),
        ((None, 1.0), 1),
        ((), None),
    ],
)
def test_the_best_of_those_that_solved_it_is_shown_and_of_equals_the_first(
    rewards: tuple[float | None, ...], expected: int | None
) -> None:
    assert solved_sibling(rewards, reward=1.0) == expected


def test_a_reward_of_hints_counts_where_a_sibling_is_shown() -> None:
    with pytest.raises(ValidationError, match=r"hint_reward is set, and teacher_hint has no \{sibling\} in it"):
        AdditionTasks(teacher_hint="{privileged}=", hint_reward=0.5)
    (made,) = catalog.build([AdditionTasks(teacher_hint="{sibling}=", hint_reward=0.5)]).values()
    assert (made.has_teacher_hint, made.rules.hint_reward) == (True, 0.5)
    (plain,) = catalog.build([AdditionTasks(teacher_hint="{privileged}=")]).values()
    assert plain.has_teacher_hint


@pytest.mark.parametrize(("answers", "shown"), [((2, 3), "2=1+1="), ((3, 2), "2=1+1="), ((3, 3), None)])
async def test_a_group_carries_the_words_of_its_solved_member_or_none_if_nobody_solved_it(
    bench: MakeBench,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[int, int],
    shown: str | None,
) -> None:
    """The tokens 2 and 3 are these digits. In the records of a large group texts may lack their ends, here all."""
    monkeypatch.setattr(judging, "_MAX_TEXT_BYTES", 0)
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "verifier": "exact_match", "answer": "2"}\n')
    entry = JsonlTasks.model_validate(
        {"source": "jsonl", "name": "file", "train_file": tmp_path / "t.jsonl", "chat": False,
         "teacher_hint": "{sibling}="}
    )  # fmt: skip
    made = await bench(
        lambda r: [part(index, [answers[index], END]) for index in range(r.n)],
        extra=list(catalog.build([entry]).values()),
    )
    asked = lease(environment="file", group_size=2).model_copy(update={"teacher_prompt": True})
    received = decode(encode(await made.finished(asked)))
    assert isinstance(received, FinishedLease)
    group = received.group
    assert [each.completion_text for each in group.trajectories] == ["", ""]
    assert group.solved_reward == 1.0
    told = None if group.teacher_prompt is None else Tokenization(model).decode([group.teacher_prompt])
    assert told == (None if shown is None else [shown])
    assert [group.teaches(one) for one in group.trajectories] == [shown is not None and each == 3 for each in answers]


def test_a_hint_that_shows_nothing_and_one_beside_several_texts_are_refused() -> None:
    with pytest.raises(ValidationError, match="which is the task's own text"):
        AdditionTasks(teacher_hint="the answer")
    with pytest.raises(ValidationError, match='history is "split"'):
        Rules(teacher_hint="{privileged}", history="split")


async def test_a_group_carries_a_teachers_prompt_over_the_wire_if_its_lease_asks_for_one(
    bench: MakeBench, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"prompt": "1+1=", "verifier": "exact_match", "answer": "2"}\n'
        '{"prompt": "1+1=", "verifier": "exact_match", "answer": "2", "privileged": "7"}\n'
    )
    given = {"source": "jsonl", "name": "file", "train_file": tmp_path / "t.jsonl", "chat": False}
    entry = JsonlTasks.model_validate(
        {**given, "evaluation_file": tmp_path / "t.jsonl", "teacher_hint": "{privileged}="}
    )
    made = await bench(lambda r: [part(0, [2, END])], extra=list(catalog.build([entry]).values()))

    for task, hint in enumerate(("2=", "7=")):
        asked = lease(environment="file", group_size=1, task_index=task).model_copy(update={"teacher_prompt": True})
        finished = await made.finished(asked)
        (trajectory,) = finished.group.trajectories
        own = trajectory.token_ids[: trajectory.turns[0].completion_start].tolist()
        received = decode(encode(finished))
        assert isinstance(received, FinishedLease)
        prompt = received.group.teacher_prompt
        assert prompt is not None
        assert list(prompt[2:]) == own, "the policy is not shown the hint"
        assert Tokenization(model).decode([prompt]) == [f"{hint}1+1="]
    plain = await made.finished(lease(environment="file", group_size=1, task_index=0))
    assert plain.group.teacher_prompt is None


async def test_a_task_without_text_for_a_hint_is_in_order_where_no_teacher_wants_it(
    bench: MakeBench, tmp_path: Path
) -> None:
    row = '{"prompt": "1+1=", "verifier": "judge", "arguments": {"rubric": "short"}}\n'
    (tmp_path / "t.jsonl").write_text(row)
    given = {"source": "jsonl", "name": "file", "train_file": tmp_path / "t.jsonl", "chat": False}
    entry = JsonlTasks.model_validate({**given, "teacher_hint": "{privileged}="})
    made = await bench(lambda r: [part(0, [2, END])], extra=list(catalog.build([entry]).values()))
    made.rewards[0].score = lambda completion, _: 0.0

    granted = lease(environment="file", group_size=1, task_index=0)
    assert (await made.finished(granted)).group.teacher_prompt is None
    failed = await made.failed(granted.model_copy(update={"teacher_prompt": True}))
    assert failed.reason.startswith("environment file has a teacher_hint, and the task no text for it")
