"""Rollouts against scripted generators and reward services."""

import asyncio
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from env_service.environments import catalog
from env_service.environments.interface import (
    Action,
    ChatMessage,
    OfferedEnvironment,
    Prompt,
    Step,
    Task,
    TaskSource,
    Verification,
)
from env_service.environments.jsonl import SingleTurn
from env_service.environments.task_configs import AdditionTasks, JsonlTasks, LevelTasks, Tasks
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import RolloutProgress
from protocol.codec import decode, encode
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FinishedLease
from protocol.status import ErrorBody, ErrorDetail
from protocol.trajectories import Purpose, VersionSpan
from tests.env_service.bench import MakeBench, Script, exact, well
from tests.env_service.peers import END, ScriptedRewards, lease, part


async def test_a_lease_becomes_a_group_with_tokens_versions_and_rewards(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(0, [0, 8, 5, END]), part(1, [1, 1, END], version="1.4")])

    group = (await made.finished(lease(lease_id=9, attempt=2))).group

    prompt = list(made.generators[0].requests[0].prompt_token_ids)
    first, second = group.trajectories
    assert (group.lease_id, group.attempt, group.purpose, group.task_index) == (9, 2, "train", 0)
    assert first.token_ids.tolist() == [*prompt, 0, 8, 5, END]
    assert first.loss_mask.tolist() == [0] * len(prompt) + [1] * 4
    assert first.behavior_logprobs.tolist() == [0.0] * len(prompt) + [-0.5] * 4
    assert first.version_spans == (VersionSpan(version="1.3", start=6, end=10),)
    assert second.token_versions().tolist() == [-1] * 6 + [4] * 3
    assert first.turns[0].completion_start == 6
    assert first.turns[0].generator_ids == ("g0",)
    assert [len(group.prompt_text), first.completion_text, second.completion_text] == [6, "085", "11"]
    assert all(trajectory.reward.reward is not None for trajectory in group.trajectories)


async def test_turns_and_scoring_have_their_times_in_order(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(0, [0, 8, 5, END]), part(1, [1, 1, END])])

    group = (await made.finished(lease())).group

    assert group.scoring_s is not None
    for trajectory in group.trajectories:
        (turn,) = trajectory.turns
        assert turn.asked_s is not None
        assert turn.ended_s is not None
        in_order = [0, turn.asked_s, turn.ended_s, *group.scoring_s, group.rollout_s + 0.001]  # times are rounded
        assert in_order == sorted(in_order)


async def test_a_stop_text_of_a_file_s_tasks_ends_a_completion(bench: MakeBench, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "verifier": "exact_match", "answer": "12"}\n')
    given = {"source": "jsonl", "name": "file", "train_file": tmp_path / "t.jsonl", "chat": False, "stop": ["78"]}
    entry = JsonlTasks.model_validate(given)
    whole = (VersionSpan(version="1.3", start=0, end=4),)
    made = await bench(
        lambda r: [
            part(0, [1, 2, 7], last=False),
            part(0, [8], last=False).model_copy(update={"version_spans": whole}),
            None,
        ],
        extra=list(catalog.build([entry]).values()),
    )

    (trajectory,) = (await made.finished(lease(environment="file", group_size=1, task_index=0))).group.trajectories

    completion = trajectory.token_ids[trajectory.turns[0].completion_start :].tolist()
    assert (completion, trajectory.completion_text, trajectory.turns[0].finish_reason) == ([1, 2, 7, 8], "12", "stop")


async def test_the_level_of_the_newest_lease_is_shown(bench: MakeBench, model: Path) -> None:
    entries: list[Tasks] = [
        AdditionTasks(name="easy"),
        AdditionTasks(name="hard"),
        LevelTasks(source="levels", name="all", levels=("easy", "hard")),
    ]
    offered = catalog.build(entries)
    made = await bench(extra=list(offered.values()))
    second = offered["all"].task_count("train") // 2

    def level() -> float | None:
        labels = {"environment": "all"}
        found: float | None = made.metrics.registry.get_sample_value("headway_env_service_environment_level", labels)
        return found

    assert level() is None
    for number, task, shown in ((1, 0, 0), (3, second, 1), (2, 5, 1), (4, 7, 0)):
        await made.finished(lease(lease_id=number, environment="all", task_index=task))
        assert level() == shown, "a lease that comes late changes nothing"
    evaluation = lease(lease_id=5, environment="all", task_index=1).model_copy(update={"purpose": "evaluate"})
    await made.finished(evaluation)
    assert level() == 0


async def test_a_finished_group_survives_the_wire(bench: MakeBench) -> None:
    made = await bench()

    sent = await made.finished(lease())

    received = decode([bytes(frame) for frame in encode(sent)])
    assert isinstance(received, FinishedLease)
    assert np.array_equal(received.group.trajectories[0].token_ids, sent.group.trajectories[0].token_ids)


async def test_the_prompt_is_what_the_tokenizer_makes_of_the_task_and_decodes_to_it(
    bench: MakeBench, model: Path
) -> None:
    made = await bench()

    group = (await made.finished(lease(task_index=5))).group

    trajectory = group.trajectories[0]
    start = trajectory.turns[0].completion_start
    tokenization = Tokenization(model)
    assert tokenization.encode(group.prompt_text)[1] == trajectory.token_ids[:start].tolist()
    assert tokenization.decode([trajectory.token_ids.tolist()]) == [group.prompt_text + trajectory.completion_text]


async def test_the_end_token_is_trained_on(bench: MakeBench) -> None:
    made = await bench()

    trajectory = (await made.finished(lease())).group.trajectories[0]

    assert trajectory.token_ids[-1] == END
    assert trajectory.loss_mask[-1] == 1


async def test_parts_are_put_together_and_the_last_spans_count(bench: MakeBench) -> None:
    def in_parts(_: GenerateRequest) -> Sequence[GeneratePart]:
        spans = (VersionSpan(version="1.3", start=0, end=2), VersionSpan(version="1.5", start=2, end=3))
        last = GeneratePart(
            index=0, token_ids=(END,), behavior_logprobs=(-1.0,), version_spans=spans, finish_reason="stop"
        )
        return [part(0, [1, 2], last=False), last]

    made = await bench(in_parts)

    trajectory = (await made.finished(lease(group_size=1))).group.trajectories[0]

    assert trajectory.token_ids[6:].tolist() == [1, 2, END]
    assert trajectory.token_versions()[6:].tolist() == [3, 3, 5]
    assert trajectory.oldest_version == 3


async def test_a_group_is_scored_in_one_request(bench: MakeBench) -> None:
    made = await bench()

    await made.finished(lease(group_size=8))

    assert [len(request.items) for request in made.rewards[0].requests] == [8]


async def test_evaluation_is_seeded_by_its_lease_and_training_is_not(bench: MakeBench) -> None:
    made = await bench()

    await made.finished(lease(purpose="train"))
    await made.finished(lease(purpose="evaluate"))

    assert [request.sampling.seed for request in made.generators[0].requests] == [None, 7]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda r: 503, id="503"),
        pytest.param(lambda r: 401, id="401"),
        pytest.param(lambda r: [ErrorBody(error=ErrorDetail(kind="engine", message="died"))], id="error line"),
        pytest.param(lambda r: [part(7, [1, END])], id="unknown index"),
        pytest.param(
            lambda r: [GeneratePart(index=0, token_ids=(1,), behavior_logprobs=(-1.0,), finish_reason="stop")],
            id="no stamp",
        ),
        pytest.param(
            lambda r: [part(0, [1]).model_copy(update={"behavior_logprobs": (-1.0, -2.0)})], id="logprobs too many"
        ),
        pytest.param(lambda r: [GeneratePart(index=0, finish_reason="abort")], id="aborted"),
        pytest.param(
            lambda r: [part(0, [1]).model_copy(update={"behavior_logprobs": (float("inf"),)})], id="infinite logprob"
        ),
        pytest.param(lambda r: [GeneratePart(index=0, finish_reason="stop")], id="empty"),
    ],
)
async def test_a_generator_that_fails_is_replaced_by_another(bench: MakeBench, broken: Script) -> None:
    made = await bench(broken, well)

    group = (await made.finished(lease())).group

    assert {trajectory.turns[0].generator_ids for trajectory in group.trajectories} == {("g1",)}
    assert group.trajectories[0].token_ids[6:].tolist() == [0, 8, 5, END]
    assert len(made.generators[0].requests) == 1


async def test_a_silent_generator_is_replaced_by_another(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(0, [1], last=False)], well, silence_s=0.2)
    made.generators[0].hold = asyncio.Event()

    group = (await made.finished(lease())).group

    assert [trajectory.turns[0].generator_ids for trajectory in group.trajectories] == [("g0", "g1"), ("g1",)]
    assert group.trajectories[0].token_ids[6:].tolist() == [1, 8, 5, END]
    made.generators[0].hold.set()


async def test_a_lease_fails_as_infrastructure_when_all_attempts_are_used_up(bench: MakeBench) -> None:
    made = await bench(lambda r: 500, lambda r: 500)

    failed = await made.failed(lease(lease_id=4, attempt=1))

    assert (failed.lease_id, failed.attempt, failed.data_fault) == (4, 1, False)
    assert "3 attempts at generators failed" in failed.reason
    assert [pause > 0 for pause in made.pauses] == [True, True]


async def test_a_prompt_that_the_generator_refuses_is_a_fault_of_the_data(bench: MakeBench) -> None:
    made = await bench(lambda r: 422, well)

    failed = await made.failed(lease())

    assert failed.data_fault
    assert "scripted 422" in failed.reason
    assert made.generators[1].requests == []


async def test_a_rollout_that_takes_too_long_fails_as_infrastructure(bench: MakeBench) -> None:
    made = await bench(timeout_s=0.4)
    made.fleet.replace([])

    failed = await made.failed(lease())

    assert not failed.data_fault
    assert re.fullmatch(r"not finished within 0.4 s: \S+ s of them it was waiting for the generators", failed.reason)


async def test_a_scoring_error_is_a_record_and_no_reward_of_zero(bench: MakeBench) -> None:
    made = await bench(
        lambda r: [part(0, [1, END]), part(1, [2, END])],
        rewards=[ScriptedRewards(lambda text, _: "cannot parse" if text == "1" else 0.5)],
    )

    first, second = (await made.finished(lease())).group.trajectories

    assert (first.reward.reward, first.reward.error, first.reward.error_kind) == (None, "cannot parse", "data")
    assert second.reward.reward == 0.5


async def test_another_reward_service_is_asked_when_one_fails(bench: MakeBench) -> None:
    made = await bench(rewards=[ScriptedRewards(exact, statuses=[500]), ScriptedRewards(exact)])

    await made.finished(lease())

    assert [len(judge.requests) for judge in made.rewards] == [1, 1]
    assert made.pauses == []


async def test_reward_services_that_fail_again_and_again_fail_the_lease_as_infrastructure(bench: MakeBench) -> None:
    made = await bench(rewards=[ScriptedRewards(exact, statuses=[500] * 9)])

    failed = await made.failed(lease())

    assert not failed.data_fault
    assert "3 attempts at reward services failed" in failed.reason


async def test_a_request_that_the_reward_service_refuses_is_a_fault_of_the_data(bench: MakeBench) -> None:
    made = await bench(rewards=[ScriptedRewards(exact, statuses=[422])])

    assert (await made.failed(lease())).data_fault


async def test_what_each_verifier_gave_is_counted(bench: MakeBench) -> None:
    said = iter((1.0, 0.0, "no number"))

    def say(*_: object) -> float | str:
        word = next(said)
        assert isinstance(word, float | str)
        return word

    made = await bench(rewards=[ScriptedRewards(say)])

    await made.finished(lease(group_size=3))

    def counted(what: str, **labels: str) -> object:
        return made.metrics.registry.get_sample_value(f"headway_env_service_{what}", labels)

    assert counted("verifier_reward_count", environment="addition", verifier="exact_match") == 2
    assert counted("verifier_positive_reward_total", environment="addition", verifier="exact_match") == 1.0
    assert counted("verifier_negative_reward_total", environment="addition", verifier="exact_match") == 0.0
    assert counted("verifier_errors_total", verifier="exact_match", kind="data") == 1
    assert counted("reward_request_items_sum") == 3


class _OneTask:
    """Tasks with a single one for training."""

    train_tasks = 1
    evaluation_tasks = 0

    def __init__(self, prompt: Prompt = "1+1=") -> None:
        self._prompt = prompt

    def task(self, purpose: Purpose, index: int) -> Task:
        return Task(prompt=self._prompt, verification=Verification("exact_match", {"answer": "2"}))


class _RaisingTask(_OneTask):
    def task(self, purpose: Purpose, index: int) -> Task:
        raise RuntimeError("no such puzzle")


class _TimingOut(SingleTurn):
    def step(self, action: Action) -> Step:
        raise TimeoutError("a database did not answer")


class _Talkative(SingleTurn):
    def step(self, action: Action) -> Step:
        return Step((ChatMessage("user", "go on"),))


class _Asynchronous(SingleTurn):
    async def reset(self, task: Task, seed: int) -> Prompt:  # type: ignore[override]
        return super().reset(task, seed)


class _Unseeded(SingleTurn):
    """Opens otherwise each time."""

    opened = itertools.count()

    def reset(self, task: Task, seed: int) -> Prompt:
        return f"{next(self.opened)}+1="


def _cancelling() -> SingleTurn:
    raise asyncio.CancelledError("the task that it waited for")


def _offered(name: str, tasks: TaskSource, start: Callable[[], SingleTurn] = SingleTurn) -> OfferedEnvironment:
    return OfferedEnvironment(name=name, tasks=tasks, start=start)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (_offered("odd", _RaisingTask()), "RuntimeError: no such puzzle"),
        (_offered("odd", _OneTask(), _TimingOut), "TimeoutError: a database did not answer"),
        (_offered("odd", _OneTask(), _Talkative), "opened with plain text and went on with messages"),
        (_offered("odd", _OneTask(), _Unseeded), "the environment opens differently for the same task and seed"),
        (_offered("odd", _OneTask(), _cancelling), "environment odd: its code cancelled the task that waits for it"),
        (_offered("other", _OneTask()), "there is no environment 'odd'"),
    ],
)
async def test_an_environment_that_fails_is_a_fault_of_the_data(
    bench: MakeBench, environment: OfferedEnvironment, reason: str
) -> None:
    made = await bench(extra=[environment])

    failed = await made.failed(lease(environment="odd"))

    assert failed.data_fault
    assert reason in failed.reason
    made_a_task = not any(each in reason for each in ("no such puzzle", "there is no"))
    assert failed.task.endswith('\ngiven: {"answer": "2"}') == made_a_task


async def test_a_task_index_beyond_the_tasks_is_a_fault_of_the_data(bench: MakeBench) -> None:
    made = await bench()

    failed = await made.failed(lease(task_index=8_000))

    assert failed.data_fault
    assert "has 8000 tasks to train, got index 8000" in failed.reason


async def test_an_environment_may_be_asynchronous_and_speak_in_messages(bench: MakeBench) -> None:
    messages = (ChatMessage("user", "1+1="),)
    made = await bench(extra=[_offered("chat", _OneTask(messages), _Asynchronous)])

    group = (await made.finished(lease(environment="chat"))).group

    assert group.prompt_text == "<|end|><|user|>1+1=\n<|assistant|>"
    assert made.rewards[0].requests[0].items[0].prompt == "1+1="


class _Stuck(SingleTurn):
    """Its step does not come back before `release` is set; `begun` is set when it is called."""

    release = threading.Event()
    begun = threading.Event()

    def step(self, action: Action) -> Step:
        self.begun.set()
        self.release.wait()
        return super().step(action)


class _Dreaming(SingleTurn):
    async def step(self, action: Action) -> Step:  # type: ignore[override]
        await asyncio.Event().wait()
        return super().step(action)


@pytest.mark.parametrize("kind", [_Stuck, _Dreaming])
async def test_an_environment_that_never_comes_back_is_a_fault_of_the_data_and_holds_up_nobody(
    bench: MakeBench, kind: type[SingleTurn]
) -> None:
    _Stuck.release.clear()
    _Stuck.begun.clear()
    made = await bench(extra=[_offered("odd", _OneTask(), kind)], environment_timeout_s=1.0)
    try:
        stuck = asyncio.create_task(made.failed(lease(environment="odd")))
        others = [asyncio.create_task(made.finished(lease(lease_id=number))) for number in range(3)]
        failed = await stuck
        assert failed.data_fault
        assert failed.reason == "the environment's step did not come back within 1 s"
        assert [(await each).group.lease_id for each in others] == [0, 1, 2]
    finally:
        _Stuck.release.set()


async def test_the_thread_of_a_cancelled_rollout_that_is_stuck_is_left_to_itself(bench: MakeBench) -> None:
    _Stuck.release.clear()
    _Stuck.begun.clear()
    made = await bench(extra=[_offered("odd", _OneTask(), _Stuck)], environment_timeout_s=1.0)
    try:
        stuck = asyncio.create_task(made.rollout.run(lease(environment="odd"), RolloutProgress()))
        assert await asyncio.to_thread(_Stuck.begun.wait, 20)
        stuck.cancel()
        assert (await made.finished(lease(lease_id=4))).group.lease_id == 4
    finally:
        _Stuck.release.set()


async def test_a_rollout_that_ends_in_its_environment_is_a_fault_of_the_data(bench: MakeBench) -> None:
    made = await bench(extra=[_offered("odd", _OneTask(), _Dreaming)], timeout_s=0.5)
    failed = await made.failed(lease(environment="odd"))
    assert failed.data_fault
    assert re.fullmatch(r"not finished within 0.5 s: \S+ s of them it was waiting for its environment", failed.reason)


async def test_what_one_verifier_judges_of_a_task_is_asked_as_a_group(bench: MakeBench) -> None:
    made = await bench()

    await made.finished(lease(group_size=4))
    await made.finished(lease(lease_id=1, group_size=4))
    await made.finished(lease(lease_id=2, group_size=1))

    first, second, alone = (request.items for request in made.rewards[0].requests)
    assert [item.group_size for item in (*first, *second, *alone)] == [4] * 8 + [1]
    assert [len({item.group for item in each}) for each in (first, second)] == [1, 1]
    assert first[0].group != second[0].group
    assert alone[0].group == ""
