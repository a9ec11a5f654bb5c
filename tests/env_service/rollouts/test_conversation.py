"""Rollouts of several turns, over real sockets, against scripted generators."""

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from env_service.environments.interface import (
    Action,
    ChatMessage,
    Environment,
    OfferedEnvironment,
    Opening,
    Step,
    Task,
    Verification,
)
from env_service.environments.rules import History, Rules
from env_service.environments.tokenization import Tokenization
from env_service.rollouts import summaries
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.speech import last_object, value_in
from protocol.codec import decode, encode
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FailedLease, FinishedLease
from protocol.trajectories import SUMMARY_STATE, Purpose, Trajectory
from tests.env_service.bench import Bench, MakeBench, benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import ScriptedRewards, eventually, lease, part


class ConversationTasks:
    """Any number of tasks."""

    train_tasks = 10
    evaluation_tasks = 0

    def task(self, purpose: Purpose, index: int) -> Task:
        return Task(seed=index)


class Counting:
    """Counts the policy's turns; the word `stop` ends it, `bad` is invalid, others are faults."""

    started: ClassVar[list["Counting"]] = []

    def __init__(self) -> None:
        self.turn = 0
        self.closed = False
        self.started.append(self)

    def reset(self, task: Task, seed: int) -> Opening:
        return Opening((ChatMessage("user", "go"),), state="0")

    async def step(self, action: Action) -> Step:
        self.turn += 1
        word = action.text
        if word == "boom":
            raise ValueError("a bug of mine")
        if word == "hang":
            await asyncio.Event().wait()
        if word == "cancelled":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        if word == "cancels":
            _cancel_the_caller()
            await asyncio.sleep(1)
        if word == "quit":
            sys.exit("I quit")
        if word == "numpy":
            array = np.array(0.25, dtype=np.float32)
            return Step(
                reward=array,  # type: ignore[arg-type]
                stop="stopped",
                invalid=np.bool_(True),  # type: ignore[arg-type]
                metrics={"steps": np.int32(1), "score": torch.tensor(2.0)},  # type: ignore[dict-item]
            )
        if word == "odd":
            return "not a step"  # type: ignore[return-value]
        if word == "judge":
            return Step(verification=Verification("exact_match", {"answer": "judge"}), reward=0.25)
        if word == "stop":
            return Step(reward=1.0, stop="stopped", metrics={"steps": float(self.turn), "score": 2.0})
        return Step(
            (ChatMessage("user", f"turn {self.turn}"),),
            reward=0.5,
            state=str(self.turn),
            invalid=word == "bad",
            metrics={"steps": self.turn, "score": 1.0},
        )

    def close(self) -> None:
        self.closed = True


class HalfSaying(Counting):
    """Says half a character, in an error or in the name of a metric."""

    async def step(self, action: Action) -> Step:
        if action.text == "half":
            raise ValueError("no such move: \ud83d")
        if action.text == "named":
            return Step(stop="stopped", metrics={"\ud83d": 1.0})
        return await super().step(action)


def _cancel_the_caller() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def offered(rules: Rules | None = None, start: Callable[[], Environment] = Counting) -> OfferedEnvironment:
    return OfferedEnvironment(
        name="counting", tasks=ConversationTasks(), start=start, rules=rules or Rules(), metrics={"score": "sum"}
    )


class TrajectoryWords:
    """A generator's script: what each trajectory says, turn by turn. `versions` are those of its turns."""

    def __init__(self, model: Path, *said: str) -> None:
        self._tokenization = Tokenization(model)
        self._end = self._tokenization.special_tokens["<|im_end|>"]
        self._said = [line.split() for line in said]

    def tokens(self, word: str) -> list[int]:
        return [*self._tokenization.encode_after("", word), self._end]

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        if "." not in request.request_id.rpartition("/")[2]:
            return [part(index, self.tokens(line[0])) for index, line in enumerate(self._said)]
        index, turn = map(int, request.request_id.rpartition("/")[2].split("."))
        return [part(0, self.tokens(self._said[index][turn]), version=f"1.{3 + turn}")]


async def rolled_out(
    chat_bench: MakeBench, model: Path, *said: str, rules: Rules | None = None, **settings: float
) -> tuple[Bench, tuple[Trajectory, ...]]:
    made = await chat_bench(TrajectoryWords(model, *said), extra=[offered(rules)], **settings)
    group = (await made.finished(lease(environment="counting", group_size=len(said)))).group
    return made, group.trajectories


def counted(made: Bench, what: str, **labels: str) -> object:
    return made.metrics.registry.get_sample_value(f"headway_env_service_{what}", labels)


async def test_each_trajectory_goes_its_own_way_and_adds_up_its_rewards(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    made, (long, short) = await rolled_out(chat_bench, chat_model, "one two bad stop", "stop")

    assert [turn.reward for turn in long.turns] == [0.5, 0.5, 0.5, 1.0]
    assert [turn.state for turn in long.turns] == ["0", "1", "2", "3"]
    assert [long.reward.reward, short.reward.reward] == [2.5, 1.0]
    assert [long.stop_reason, short.stop_reason] == ["stopped", "stopped"]
    assert long.reward.verifier == "counting"
    assert long.reward.components == {"steps": 4.0, "score": 5.0, "turns": 4.0, "invalid_actions": 1.0}
    assert long.token_versions()[long.loss_mask == 1].tolist()[:1] == [3]
    assert long.oldest_version == 3
    assert len({span.version for span in long.version_spans}) == 4
    assert counted(made, "turns_total", environment="counting") == 5
    assert counted(made, "invalid_actions_total", environment="counting") == 1


async def test_a_conversation_reads_as_the_template_writes_it(chat_bench: MakeBench, chat_model: Path) -> None:
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "one stop")

    (text,) = Tokenization(chat_model).decode([trajectory.token_ids.tolist()], special=True)
    assert text == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\nstop<|im_end|>"
    )
    assert trajectory.completion_text == "one\n\nturn 1\n\nstop"


class PlainCounting(Counting):
    """The same in plain text."""

    def reset(self, task: Task, seed: int) -> Opening:
        return Opening("go")

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        return step if step.ends else replace(step, observation=f"turn {self.turn} of many")


async def test_plain_text_of_an_environment_stands_whole_between_the_turns(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "one two stop"), extra=[offered(start=PlainCounting)])
    (trajectory,) = (await made.finished(lease(environment="counting", group_size=1))).group.trajectories

    tokenization = Tokenization(chat_model)
    given = [trajectory.token_ids[turn.start : turn.completion_start].tolist() for turn in trajectory.turns]
    assert given == [tokenization.encode_after("", said) for said in ("go", "turn 1 of many", "turn 2 of many")]


@pytest.mark.parametrize("history", ["append", "split"])
async def test_an_environment_tells_the_template_what_it_wants_in_every_turn(tmp_path: Path, history: History) -> None:
    from transformers import PreTrainedTokenizerFast

    model = model_with("thinking_kept_empty", tmp_path)
    told = {"enable_thinking": False}
    environment = replace(offered(Rules(history=history)), template_arguments=told)
    theirs = PreTrainedTokenizerFast.from_pretrained(model)
    words = [("user", "go"), ("assistant", "one"), ("user", "turn 1"), ("assistant", "two"), ("user", "turn 2")]
    messages = [{"role": role, "content": content} for role, content in words]

    async with benches(model) as make:
        made = await make(TrajectoryWords(model, "one two stop"), extra=[environment])
        await made.finished(lease(environment="counting", group_size=1))

    for turn, request in enumerate(made.generators[0].requests):
        text = theirs.apply_chat_template(
            messages[: 2 * turn + 1], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert Tokenization(model).decode([request.prompt_token_ids], special=True) == [text]
    assert len(made.generators[0].requests) == 3


async def test_nobody_waits_for_the_turns_of_others(chat_bench: MakeBench, chat_model: Path) -> None:
    words = TrajectoryWords(chat_model, "one two three stop", "stop")
    held = asyncio.Event()

    def script(request: GenerateRequest) -> Sequence[GeneratePart]:
        if request.n == 2:
            return words(request)[:1]
        return words(request) if "." in request.request_id else [part(0, words.tokens("stop"))]

    made = await chat_bench(script, extra=[offered()], silence_s=60.0)
    generator = made.generators[0]
    generator.hold, generator.holds = held, lambda request: request.n == 2
    running = asyncio.create_task(made.run(lease(environment="counting")))
    await eventually(lambda: len(generator.requests) == 4)

    assert not running.done()
    held.set()
    assert isinstance(await running, FinishedLease)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("boom", r"environment counting: ValueError: a bug of mine \(.*test_conversation.py:\d+, in step\)"),
        ("hang", r"the environment's step did not come back within 0.2 s"),
        ("odd", r"the environment's step returned str, expected a Step"),
        ("cancelled", r"its code let out CancelledError \(.*expected a result or an Exception: catch it there"),
        ("cancels", "its code cancelled the task that waits for it; expected a result or an Exception"),
        ("quit", r"its code let out SystemExit: I quit \(.*test_conversation.py:\d+, in step\)"),
    ],
)
async def test_an_environment_at_fault_costs_that_trajectory_alone(
    chat_bench: MakeBench, chat_model: Path, word: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, (spoilt, whole) = await rolled_out(
        chat_bench, chat_model, f"one {word}", "one two stop", environment_timeout_s=0.2
    )

    assert spoilt.reward.reward is None
    assert spoilt.reward.error_kind == "data"
    assert spoilt.reward.error is not None
    assert re.search(said, spoilt.reward.error)
    assert whole.reward.reward == 2.0
    kind = {"boom": "raised", "hang": "hung", "odd": "nonsense"}.get(word, "raised")
    assert counted(made, "environment_faults_total", environment="counting", kind=kind) == 1
    where = "a step of environment counting raised at 'boom', of a game that began with '"
    assert (where in caplog.text) == (word == "boom")


async def test_a_verifier_may_judge_at_the_end_on_top_of_the_turns(chat_bench: MakeBench, chat_model: Path) -> None:
    made, (trajectory,) = await rolled_out(chat_bench, chat_model, "one judge")

    assert trajectory.reward.reward == 1.75
    assert trajectory.reward.verifier == "exact_match"
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.25]
    (item,) = made.rewards[0].requests[0].items
    assert item.completion == "judge"
    said = [(message.role, message.content) for message in item.messages]
    assert said == [("user", "go"), ("assistant", "one"), ("user", "turn 1")]


async def test_a_verifier_is_told_no_messages_where_the_prompt_says_them(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    made, _ = await rolled_out(chat_bench, chat_model, "judge")
    (item,) = made.rewards[0].requests[0].items
    assert (item.completion, item.prompt, item.messages) == ("judge", "go", ())


@pytest.mark.parametrize(
    ("rules", "reason", "turns"),
    [
        (Rules(max_turns=2), "turn_limit", 2),
        (Rules(max_invalid=1), "invalid_actions", 3),
        (Rules(trajectory_tokens=45), "token_budget", 2),
    ],
)
async def test_a_limit_cuts_a_conversation_off(
    chat_bench: MakeBench, chat_model: Path, rules: Rules, reason: str, turns: int
) -> None:
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "one two bad four five stop", rules=rules)

    assert (trajectory.stop_reason, trajectory.truncated, len(trajectory.turns)) == (reason, True, turns)
    assert trajectory.turns[-1].end == len(trajectory.token_ids)


async def test_half_a_character_in_what_an_environment_says_costs_its_trajectory_alone(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    halves = offered(start=HalfSaying)
    made = await chat_bench(TrajectoryWords(chat_model, "half", "named", "stop"), extra=[halves])
    group = (await made.finished(lease(environment="counting", group_size=3))).group
    half, named, well = group.trajectories
    assert "ValueError: no such move: ?" in (half.reward.error or "")
    assert r"has a metric '\ud83d', expected a name of whole characters" in (named.reward.error or "")
    assert well.reward.reward == 1.0

    made = await chat_bench(TrajectoryWords(chat_model, "half"), extra=[halves])
    failed = await made.failed(lease(environment="counting", group_size=1))
    assert failed.reason.startswith("ValueError: no such move: ? (")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"move": 1} or {"move": "\\ud83d"}', None),
        ('{"move": "\\ud83d"} or {"move": "\\ud83d\\ude00"}', {"move": "\U0001f600"}),
        ('{"move": NaN}', None),
        ("none", None),
    ],
)
def test_an_object_that_no_message_holds_is_none(text: str, found: object) -> None:
    assert last_object(text) == found


@pytest.mark.parametrize(
    ("text", "form", "found"),
    [
        ("<think><move>up</move>?</think>\n<move>down</move>", "tag:move", "down"),
        ("<move>up</move>? No.</think> <move>down", "tag:move", "down"),
        ("<think>not <move>up</move></think> I give up", "tag:move", None),
        ("<think>perhaps <move>up</move>", "tag:move", None),
        ("<move>up</move>", "tag:move", "up"),
        ('<think>{"move": 1}</think>{"move": 2}', "json", {"move": 2}),
        ('{"move": 1}</think> none', "json", None),
        ("<think>a</think> b", "text", "<think>a</think> b"),
    ],
)
def test_an_action_is_not_taken_from_a_thought(text: str, form: str, found: object) -> None:
    assert value_in(text, form) == found


async def test_a_budget_bounds_the_first_turn_too(chat_bench: MakeBench, chat_model: Path) -> None:
    made, _ = await rolled_out(chat_bench, chat_model, "stop", "stop")
    given = len(made.generators[0].requests[0].prompt_token_ids)

    made, _ = await rolled_out(chat_bench, chat_model, "stop", "stop", rules=Rules(trajectory_tokens=given + 3))
    (first,) = made.generators[0].requests
    assert (first.n, first.sampling.max_tokens) == (2, 3)

    for stop in ((), ("never",)):  # of the whole group in one request, and of each by itself
        made = await chat_bench(
            TrajectoryWords(chat_model, "stop"), extra=[offered(Rules(trajectory_tokens=given, stop=stop))]
        )
        failed = await made.failed(lease(environment="counting", group_size=1))
        assert failed.data_fault
        assert f"has {given} tokens, and its rules' trajectory_tokens are {given}" in failed.reason
        assert made.generators[0].requests == []


async def test_time_that_runs_out_keeps_the_turns_that_were_sampled(chat_bench: MakeBench, chat_model: Path) -> None:
    _, (trajectory,) = await rolled_out(
        chat_bench, chat_model, "one hang", rules=Rules(conversation_timeout_s=0.5), environment_timeout_s=20.0
    )

    assert (trajectory.stop_reason, len(trajectory.turns)) == ("time_limit", 2)


async def test_numbers_of_numpy_and_torch_are_numbers(chat_bench: MakeBench, chat_model: Path) -> None:
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "numpy", rules=Rules(invalid_penalty=0.125))

    assert (trajectory.reward.error, trajectory.reward.reward) == (None, 0.125)
    assert trajectory.reward.components == {"steps": 1.0, "score": 2.0, "turns": 1.0, "invalid_actions": 1.0}


async def test_an_invalid_action_costs_the_penalty(chat_bench: MakeBench, chat_model: Path) -> None:
    rules = Rules(action="tag:go", invalid_penalty=0.125)
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "one <go>x</go> stop", rules=rules)

    assert [turn.reward for turn in trajectory.turns] == [0.375, 0.5, 0.875]


async def test_several_contexts_are_one_trajectory(chat_bench: MakeBench, chat_model: Path) -> None:
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "one two stop", rules=Rules(history="split"))

    assert len(trajectory.sequence_starts) == 2
    assert [turn.start for turn in trajectory.turns] == [0, *trajectory.sequence_starts]


async def test_the_policy_sums_up_in_a_turn_of_its_own_and_goes_on_from_that(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    """Its second turn, `two`, is no action: the environment, and the limit of turns, hear of `one` and `stop`."""
    rules = Rules(history="summarize", context_tokens=16, max_turns=2)
    _, (trajectory,) = await rolled_out(chat_bench, chat_model, "one two stop", rules=rules)

    assert trajectory.completion_text == f"one\n\n{summaries.REQUEST.content}\n\ntwo\n\nturn 1\n\nstop"
    assert [turn.state for turn in trajectory.turns] == ["0", SUMMARY_STATE, "1"]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0, 1.0]
    assert trajectory.stop_reason == "stopped"
    assert trajectory.reward.components["steps"] == 2.0
    (start,) = trajectory.sequence_starts
    (text,) = Tokenization(chat_model).decode([trajectory.token_ids[start:].tolist()], special=True)
    assert text == (
        "<|im_start|>user\ngo\n\nSummary of what happened so far, written by yourself:\ntwo\n\n"
        "What came then:\nturn 1<|im_end|>\n<|im_start|>assistant\nstop<|im_end|>"
    )


async def test_plain_text_cannot_be_summed_up_and_says_so(chat_bench: MakeBench, chat_model: Path) -> None:
    rules = Rules(history="summarize", context_tokens=16)
    made = await chat_bench(TrajectoryWords(chat_model, "stop"), extra=[offered(rules, start=PlainCounting)])

    failed = await made.run(lease(environment="counting"))
    assert isinstance(failed, FailedLease)
    assert 'opens with plain text, and its rules have history = "summarize"' in failed.reason


async def test_a_group_of_several_turns_survives_the_wire(chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "one stop", "stop"), extra=[offered(Rules(history="split"))])

    sent = await made.finished(lease(environment="counting"))

    received = decode([bytes(frame) for frame in encode(sent)])
    assert repr(received) == repr(sent)


async def test_environments_are_closed_at_the_end_however_it_came(chat_bench: MakeBench, chat_model: Path) -> None:
    Counting.started.clear()
    await rolled_out(chat_bench, chat_model, "stop", "one boom")

    assert [environment.closed for environment in Counting.started] == [True, True]


async def test_a_heartbeat_tells_the_oldest_version_of_all_turns(chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(
        TrajectoryWords(chat_model, "one two three hang"), extra=[offered()], environment_timeout_s=30.0
    )
    progress = RolloutProgress()

    running = asyncio.create_task(made.rollout.run(lease(environment="counting", group_size=1), progress))
    await eventually(lambda: len(made.generators[0].requests) == 4 and progress.waits_for == "environment")

    assert progress.oldest_version() == "1.3"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_turn_goes_on_at_another_generator_and_so_does_the_next(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    words = TrajectoryWords(chat_model, "one stop")

    def dies(request: GenerateRequest) -> Sequence[GeneratePart | None]:
        (whole,) = words(request)
        return [part(0, whole.token_ids[:1], last=False), None]

    rest = words.tokens("one")[1:]

    def second(request: GenerateRequest) -> Sequence[GeneratePart]:
        return words(request) if request.request_id.endswith(".1") else [part(0, rest, version="1.5")]

    made = await chat_bench(dies, second, extra=[offered()], rewards=[ScriptedRewards(lambda *_: 0.0)])
    (trajectory,) = (await made.finished(lease(environment="counting", group_size=1))).group.trajectories

    assert trajectory.turns[0].generator_ids == ("g0", "g1")
    first = trajectory.turns[0]
    assert trajectory.token_ids[first.completion_start : first.end].tolist() == words.tokens("one")
    assert trajectory.oldest_version == 3
    assert [span.version for span in trajectory.version_spans][:2] == ["1.3", "1.5"]


async def test_a_task_of_a_mix_is_rolled_out_by_the_environment_that_has_it(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    own = offered()

    def at(purpose: Purpose, index: int) -> tuple[OfferedEnvironment, int]:
        return own, index - 3

    mix = OfferedEnvironment(name="mix", tasks=ConversationTasks(), start=own.start, parts=at)
    made = await chat_bench(TrajectoryWords(chat_model, "one stop"), extra=[own, mix])
    group = (await made.finished(lease(environment="mix", task_index=5, group_size=1))).group

    assert (group.environment, group.task_index) == ("mix", 5)
    assert group.trajectories[0].reward.verifier == "counting"
    assert counted(made, "turns_total", environment="counting") == 2


async def test_the_first_to_finish_make_the_group_and_the_others_are_broken_off(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    words = TrajectoryWords(chat_model, "stop", "one hang", "boom", "one stop")
    made = await chat_bench(words, extra=[offered(Rules(redundant=2))], environment_timeout_s=30.0)
    group = (await made.finished(lease(environment="counting", group_size=2))).group

    assert sorted((len(one.turns), one.stop_reason) for one in group.trajectories) == [(1, "stopped"), (2, "stopped")]
    assert counted(made, "redundant_trajectories_total", environment="counting") == 2
    most = sum(len(words.tokens(word)) for word in ("one", "hang", "boom"))
    lost = counted(made, "redundant_tokens_total", environment="counting")
    assert isinstance(lost, float)
    assert 0 <= lost <= most
    assert all(environment.closed for environment in Counting.started[-4:])


@pytest.mark.parametrize("word", ["cancelled", "cancels"])
async def test_of_redundant_conversations_one_that_cancels_is_at_fault(
    chat_bench: MakeBench, chat_model: Path, word: str
) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, word, "stop"), extra=[offered(Rules(redundant=1))])
    group = (await made.finished(lease(environment="counting", group_size=1))).group

    assert [one.reward.reward for one in group.trajectories] == [1.0]


async def test_where_too_many_are_spoilt_the_group_holds_some_of_those(chat_bench: MakeBench, chat_model: Path) -> None:
    made = await chat_bench(TrajectoryWords(chat_model, "boom", "odd", "stop"), extra=[offered(Rules(redundant=1))])
    group = (await made.finished(lease(environment="counting", group_size=2))).group

    assert [one.reward.reward is None for one in group.trajectories] == [False, True]
