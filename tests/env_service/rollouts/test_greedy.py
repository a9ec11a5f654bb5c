"""Greedy answers beside a group, over real sockets against scripted generators; and who cannot have one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_service.app import hello_of
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.rules import Rules
from env_service.environments.task_configs import AdditionTasks, LevelTasks, MixTasks
from env_service.rollouts import rollout
from env_service.rollouts.conversation import Speaker
from env_service.rollouts.greedy import greedy
from protocol.codec import decode, encode
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FinishedLease, Lease
from tests.env_service.bench import MakeBench
from tests.env_service.peers import END, lease, part
from tests.env_service.rollouts.test_conversation import TrajectoryWords, offered


def compared(granted: Lease) -> Lease:
    return granted.model_copy(update={"greedy_baseline": True})


def right_if_greedy(request: GenerateRequest) -> Sequence[GeneratePart]:
    text = (0, 8, 5, END) if request.sampling.temperature == 0 else (1, 1, END)
    return [part(index, text) for index in range(request.n)]


async def test_one_more_answer_is_sampled_at_temperature_0_and_only_its_worth_is_sent(bench: MakeBench) -> None:
    made = await bench(right_if_greedy)
    finished = await made.finished(compared(lease(group_size=3)))

    asked = sorted((r.n, r.sampling.temperature, r.purpose) for r in made.generators[0].requests)
    assert asked == [(1, 0.0, "evaluate"), (3, 1.0, "train")]
    assert len({r.request_id for r in made.generators[0].requests}) == 2
    group = finished.group
    assert [one.completion_text for one in group.trajectories] == ["11"] * 3
    baseline = group.greedy_baseline
    assert baseline is not None
    assert (baseline.reward.verifier, baseline.sampled_tokens) == (group.trajectories[0].reward.verifier, 4)
    assert [(span.version, span.end - span.start) for span in baseline.version_spans] == [("1.3", 4)]
    assert baseline.generator_ids == ("g0",)
    judged = {item.completion for request in made.rewards[0].requests for item in request.items}
    assert judged == {"085", "11"}
    received = decode(encode(finished))
    assert isinstance(received, FinishedLease)
    assert received.group.greedy_baseline == baseline


async def test_a_verifier_that_compares_a_group_does_not_see_the_greedy_answer_in_it(bench: MakeBench) -> None:
    made = await bench(right_if_greedy)
    await made.finished(compared(lease(group_size=3)))
    items = [item for request in made.rewards[0].requests for item in request.items]
    assert [(item.completion, item.group_size) for item in items if item.group] == [("11", 3)] * 3
    assert len({item.group for item in items}) == 2
    assert [item.completion for item in items if not item.group] == ["085"]


async def test_the_age_of_a_greedy_answer_is_no_age_of_the_rollout(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody trains its tokens: neither is the lease dropped for them, nor does the trainer wait."""
    made = await bench(right_if_greedy)
    speakers: list[Speaker] = []

    def spoken_for(speaker: Speaker) -> Speaker:
        speakers.extend((speaker, greedy(speaker)))
        return speakers[-1]

    monkeypatch.setattr(rollout, "greedy", spoken_for)
    await made.finished(compared(lease(group_size=3)))
    policy, alone = (each.progress.oldest_version() for each in speakers)
    assert (policy, alone) == ("1.3", None)


async def test_a_lease_that_asks_for_none_gets_none(bench: MakeBench) -> None:
    made = await bench(right_if_greedy)
    group = (await made.finished(lease())).group
    assert group.greedy_baseline is None
    assert [r.sampling.temperature for r in made.generators[0].requests] == [1.0]


async def test_each_turn_of_the_greedy_answer_is_greedy(chat_bench: MakeBench, chat_model: Path) -> None:
    """Two conversations of two turns each, and the greedy one: six turns, of which the first ones of the group are one
    request. What the environment gives for each turn is added up for all of them alike.
    """
    words = TrajectoryWords(chat_model, "one stop", "one stop", "one stop")
    made = await chat_bench(words, extra=[offered(Rules())])
    group = (await made.finished(compared(lease(environment="counting", group_size=2)))).group

    asked = [(r.n, r.sampling.temperature) for r in made.generators[0].requests]
    assert sorted(asked) == [(1, 0.0), (1, 0.0), (1, 1.0), (1, 1.0), (2, 1.0)]
    assert group.greedy_baseline is not None
    assert {one.reward.reward for one in group.trajectories} == {group.greedy_baseline.reward.reward}


async def test_with_redundant_conversations_the_greedy_one_is_waited_for(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    words = TrajectoryWords(chat_model, *["stop"] * 4)
    made = await chat_bench(words, extra=[offered(Rules(redundant=1))])
    group = (await made.finished(compared(lease(environment="counting", group_size=2)))).group
    assert len(group.trajectories) == 2
    assert group.greedy_baseline is not None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rules": Rules(branch_after=(1,))}, "branches"),
        ({"players": ("x", "o")}, "is a game of several players"),
        ({"agent": object}, "is an agent"),
    ],
)
async def test_an_environment_that_cannot_have_one_is_refused_by_name(
    bench: MakeBench, change: dict[str, Any], named: str
) -> None:
    (plain,) = catalog.build([AdditionTasks(name="mine")]).values()
    made = await bench(extra=[replace(plain, **change)])
    failed = await made.failed(compared(lease(environment="mine")))
    assert failed.data_fault
    assert f"environment mine {named}" in failed.reason
    assert made.generators[0].requests == []


def test_a_hello_says_of_which_environments_there_are_no_greedy_answers_mixes_of_them_included(
    chat_model: Path,
) -> None:
    (plain,) = catalog.build([AdditionTasks(name="plain")]).values()
    branching = replace(plain, name="tree", rules=Rules(branch_after=(1,), teacher_hint="{privileged}"))
    mixed = replace(plain, name="mixed", members=(plain, branching))
    entries = [{"source": "addition", "name": name} for name in ("plain", "tree", "mixed")]
    config = EnvServiceConfig.model_validate({"model": chat_model, "environments": entries})
    hello = hello_of(config, {each.name: each for each in (plain, branching, mixed)}, port=1)
    said = {each.name: each.no_greedy_answer for each in hello.environments}
    assert {each.name for each in hello.environments if each.teacher_hint} == {"tree"}
    assert said["plain"] == ""
    assert said["tree"] == said["mixed"]
    assert said["tree"].startswith("environment tree branches (branch_after), and")


def test_a_mix_and_a_ladder_name_their_members() -> None:
    parts = [{"environment": "a"}, {"environment": "b"}]
    mix = MixTasks.model_validate({"name": "mix", "source": "mix", "parts": parts})
    ladder = LevelTasks.model_validate({"name": "ladder", "source": "levels", "levels": ["a", "b"]})
    made = catalog.build([AdditionTasks(name="a"), AdditionTasks(name="b"), mix, ladder])
    assert [[each.name for each in made[name].members] for name in ("mix", "ladder")] == [["a", "b"]] * 2


async def test_a_greedy_answer_that_could_not_be_judged_is_sent_with_its_error(bench: MakeBench) -> None:
    made = await bench(right_if_greedy)
    made.rewards[0].score = lambda completion, _: "ill" if completion == "085" else 0.0
    group = (await made.finished(compared(lease()))).group
    assert [one.reward.reward for one in group.trajectories] == [0.0, 0.0]
    assert group.greedy_baseline is not None
    assert group.greedy_baseline.reward.error == "ill"
