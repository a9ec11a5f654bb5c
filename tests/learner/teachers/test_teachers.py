"""Teachers of a run: whose a group is, when it is asked for, and what becomes of the answer."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from learner.teachers.config import TeacherConfig
from learner.teachers.teachers import PolicyFleet, TeacherFailed, Teachers, TextRefused
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.waiting import Waiting
from tests.learner.samples import group, trajectory
from tests.learner.teachers.scripted_teacher import TOKENIZER, ScriptedTeacher, logprob


@asynccontextmanager
async def teachers(*configs: dict[str, Any], waits: Waiting | None = None, top: int = 0) -> AsyncIterator[Teachers]:
    made, waits = [TeacherConfig.model_validate(config) for config in configs], waits or Waiting()
    async with Teachers(made, tokenizer=TOKENIZER, waits=waits, registry=Metrics("learner"), top=top) as ours:
        yield ours


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  what is waited for has no event of its own
            await asyncio.sleep(0.005)


def two_turns() -> Trajectory:
    """Given 10 11, sampled 12 13, given 14, sampled 15; then the environment says 16 17."""
    return Trajectory(
        token_ids=np.arange(10, 18, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 0, 0], dtype=np.uint8),
        behavior_logprobs=np.zeros(8, dtype=np.float32),
        version_spans=(VersionSpan(version="3.0", start=2, end=6),),
        turns=(
            Turn(start=0, completion_start=2, end=4, finish_reason="stop", generator_ids=("g",)),
            Turn(start=4, completion_start=5, end=6, finish_reason="stop", generator_ids=("g",)),
        ),
        reward=RewardRecord(verifier="test", reward=1.0),
    )


async def test_a_group_gets_the_teachers_logprobs_at_trained_tokens_and_0_elsewhere() -> None:
    scripted = ScriptedTeacher()
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        found = await ours.scores(group(1, two_turns(), trajectory(0, 0, token_id=5)))
    assert found is not None
    # logprob(token, position) = -token / 8 - position / 1024
    expected = [0, 0, -12 / 8 - 2 / 1024, -13 / 8 - 3 / 1024, 0, -15 / 8 - 5 / 1024, 0, 0]
    assert found[0].logprobs.dtype == np.float32
    assert found[0].logprobs.tolist() == expected
    assert found[1].logprobs.tolist() == [0, 0, -5 / 8 - 2 / 1024, -5 / 8 - 3 / 1024]
    # nothing is trained after the sixth token, so that the teacher need not read on
    assert scripted.requests[0].sequences == ((10, 11, 12, 13, 14, 15), (5, 5, 5, 5))


async def test_a_group_gets_the_teachers_likeliest_tokens_in_the_places_of_trained_ones() -> None:
    async with ScriptedTeacher().running() as url, teachers({"name": "t", "urls": [url]}, top=2) as ours:
        found = await ours.scores(group(1, two_turns()))
    assert found is not None
    top = found[0].top
    assert top is not None
    assert top.token_ids.tolist() == [[0, 0], [0, 0], [0, 1], [0, 1], [0, 0], [0, 1], [0, 0], [0, 0]]
    assert top.logprobs[[2, 5]].tolist() == [[logprob(0, at), logprob(1, at)] for at in (2, 5)]
    assert not top.logprobs[[0, 1, 4, 6, 7]].any()


async def test_a_trajectory_of_which_nothing_is_trained_is_taught_nothing() -> None:
    scripted, old = ScriptedTeacher(), two_turns()
    old = old.model_copy(update={"loss_mask": np.zeros_like(old.loss_mask)})
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        found = await ours.scores(group(1, old, trajectory(0, 0, token_id=5)))
    assert found is not None
    assert (found[0].logprobs.tolist(), bool(found[1].logprobs.any())) == ([0] * 8, True)


async def test_an_answer_of_one_token_that_became_too_old_is_taught_nothing_beside_its_group() -> None:
    """Such a one ends where the opening does, but for that token."""
    scripted, old = ScriptedTeacher(), trajectory(0, token_id=5)
    old = old.model_copy(update={"loss_mask": np.zeros_like(old.loss_mask)})
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}, top=2) as ours:
        found = await ours.scores(group(1, old, trajectory(0, 0, token_id=5)))
    assert found is not None
    assert (found[0].logprobs.tolist(), bool(found[1].logprobs.any())) == ([0, 0, 0], True)
    assert scripted.requests[0].sequences == ((5, 5, 5), (5, 5, 5, 5))


async def test_a_group_that_cannot_be_asked_for_is_a_failure_with_a_name() -> None:
    """An empty prompt leaves a single token, and no request has less than two."""
    shown = group(1, trajectory(0)).model_copy(update={"teacher_prompt": ()})
    async with teachers({"name": "t", "urls": ["http://127.0.0.1:1"], "privileged": True}) as ours:
        with pytest.raises(TeacherFailed, match="lease 1 of addition cannot be shown to teacher t at http"):
            await ours.scores(shown)


async def test_what_was_asked_for_early_is_there_when_the_step_wants_it() -> None:
    scripted = ScriptedTeacher()
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        one = group(1)
        ours.prefetch(one)
        ours.prefetch(one)
        await until(lambda: scripted.requests and not scripted.under_way)
        assert await ours.scores(one) is not None
        assert len(scripted.requests) == 1


async def test_a_group_that_nobody_asked_for_is_asked_for_and_a_taken_one_again() -> None:
    scripted = ScriptedTeacher()
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        first, second = await ours.scores(group(1)), await ours.scores(group(1))
    assert first is not None
    assert second is not None
    assert [one.logprobs.tolist() for one in first] == [one.logprobs.tolist() for one in second]
    assert len(scripted.requests) == 2


async def test_attempts_and_incarnations_of_a_lease_are_groups_of_their_own() -> None:
    scripted = ScriptedTeacher()
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        same = [group(1), group(1, attempt=1), group(1, incarnation=4), group(2)]
        assert len(await ours.of_batch(same)) == 4
    assert len(scripted.requests) == 4


async def test_groups_are_routed_by_environment() -> None:
    sums, rest = ScriptedTeacher(), ScriptedTeacher()
    async with (
        sums.running() as first,
        rest.running() as second,
        teachers(
            {"name": "sums", "urls": [first], "environments": ["addition"]}, {"name": "rest", "urls": [second]}
        ) as ours,
    ):
        assert await ours.scores(group(1)) is not None
        assert (len(sums.requests), len(rest.requests)) == (1, 0)
        await ours.scores(group(1).model_copy(update={"environment": "chess"}))
        assert (len(sums.requests), len(rest.requests)) == (1, 1)
        assert {peer.url for peer in ours.peers()} == {first, second}


async def test_an_environment_without_a_teacher_is_named_when_its_group_is_to_be_trained() -> None:
    chess = {"name": "t", "urls": ["http://127.0.0.1:1"], "environments": ["chess"]}
    async with teachers(chess) as ours:
        ours.prefetch(group(1))
        with pytest.raises(TeacherFailed, match="environment addition has no teacher: t teaches chess"):
            await ours.scores(group(1))


async def test_a_teacher_in_a_folder_is_asked_nothing() -> None:
    async with teachers({"name": "t", "path": "model"}) as ours:
        ours.prefetch(group(1))
        assert await ours.of_batch([group(1)]) == [None]


async def test_a_batch_is_asked_for_at_once_and_answered_in_order() -> None:
    hold = asyncio.Event()
    scripted = ScriptedTeacher(hold=hold)
    groups = [group(number, trajectory(0, token_id=number)) for number in range(3)]
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ours.of_batch(groups))
            await until(lambda: scripted.under_way == 3)
            hold.set()
        found = await asked
    assert [one[0].logprobs.tolist() for one in found if isinstance(one, tuple)] == [
        [0, 0, logprob(number, 2)] for number in range(3)
    ]


async def test_a_group_that_was_dropped_is_forgotten() -> None:
    scripted = ScriptedTeacher(hold=asyncio.Event())
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        ours.prefetch(group(1))
        await until(lambda: scripted.under_way)
        ours.forget(group(1))
        ours.forget(group(2))
        scripted.hold = None
        assert await ours.scores(group(1)) is not None
    assert len(scripted.requests) == 2


async def test_a_glance_keeps_what_is_there_for_the_groups_own_step() -> None:
    """Lease 1 is of the batch, and was asked for by nobody; 2 and 3 wait for theirs, and 3 was dropped."""
    scripted = ScriptedTeacher()
    groups = [group(number, trajectory(0, token_id=number)) for number in (1, 2, 3)]
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        ours.prefetch(groups[1])
        found = await ours.glance(groups, batch=groups[:1])
        assert {at: one[0].logprobs.tolist() for at, one in found.items() if one} == {
            0: [0, 0, logprob(1, 2)], 1: [0, 0, logprob(2, 2)]
        }  # fmt: skip
        again = await ours.of_batch(groups[:2])
        told = [one[0].logprobs.tolist() for one in again if isinstance(one, tuple)]
        assert told == [[0, 0, logprob(1, 2)], [0, 0, logprob(2, 2)]]
    assert len(scripted.requests) == 2


async def test_a_group_that_is_dropped_during_a_glance_is_left_out_of_it() -> None:
    scripted = ScriptedTeacher(hold=asyncio.Event())
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        ours.prefetch(group(2))
        glance = asyncio.create_task(ours.glance([group(2), group(1)], batch=[group(1)]))
        await until(lambda: scripted.under_way == 2)
        ours.forget(group(2))
        assert scripted.hold is not None
        scripted.hold.set()
        assert list(await glance) == [1]


async def test_a_glance_at_what_a_teacher_refuses_raises_and_a_teacher_in_a_folder_is_asked_nothing() -> None:
    scripted = ScriptedTeacher(script=lambda _: 422)
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        with pytest.raises(TeacherFailed, match="teacher t refuses"):
            await ours.glance([group(1)], batch=[group(1)])
    async with teachers({"name": "t", "path": "model"}) as ours:
        assert await ours.glance([group(1), group(2)], batch=[group(1)]) == {0: None, 1: None}


async def test_one_groups_refusal_leaves_other_groups_alone() -> None:
    scripted = ScriptedTeacher(script=lambda number: 422 if number == 0 else None)
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        ours.prefetch(group(1))
        await until(lambda: scripted.requests)
        assert await ours.scores(group(2)) is not None
        with pytest.raises(TeacherFailed, match="teacher t refuses"):
            await ours.scores(group(1))


async def test_a_text_that_is_too_long_is_a_batchs_only_untaught_group_and_takes_no_part_in_comparisons() -> None:
    refusing, well = ScriptedTeacher(script=lambda _: "too_long"), ScriptedTeacher()
    async with refusing.running() as first, well.running() as second:
        configs: list[dict[str, Any]] = [
            {"name": "t", "urls": [first], "environments": ["addition"]}, {"name": "rest", "urls": [second]}
        ]  # fmt: skip
        async with teachers(*configs) as ours:
            long, short = group(1, two_turns()), group(2).model_copy(update={"environment": "chess"})
            assert list(await ours.glance([long, short], batch=[long, short])) == [1]
            refused, scores = await ours.of_batch([long, short])
            assert (ours.refused_tokens("t"), ours.refused_tokens("rest")) == (6, None)
    assert isinstance(refused, TextRefused)
    assert isinstance(scores, tuple)


async def test_a_step_that_waits_in_vain_ends_with_the_teachers_name_and_its_last_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with teachers({"name": "t", "urls": [address], "wait_s": 0.5}) as ours:
        with pytest.raises(TeacherFailed, match=rf"teacher t at {address} has given no answer for 0.5 s.*connect"):
            await ours.scores(group(1))


async def test_a_wait_for_a_teacher_is_seen_and_blocks_no_readiness() -> None:
    waits = Waiting()
    waits.started()
    scripted = ScriptedTeacher(hold=asyncio.Event())
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}, waits=waits) as ours:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ours.scores(group(1)))
            await until(lambda: scripted.under_way)
            assert [wait.whom for wait in waits.status()] == [f"teacher t at {url}"]
            assert waits.readiness().ready
            assert scripted.hold is not None
            scripted.hold.set()
        assert await asked is not None
        assert waits.status() == ()


async def test_leaving_ends_what_is_under_way() -> None:
    scripted = ScriptedTeacher(hold=asyncio.Event())
    async with scripted.running() as url, asyncio.timeout(60), teachers({"name": "t", "urls": [url]}) as ours:
        ours.prefetch(group(1))
        await until(lambda: scripted.under_way)


async def test_a_step_that_is_interrupted_stops_asking() -> None:
    scripted = ScriptedTeacher(hold=asyncio.Event())
    one: TrajectoryGroup = group(1)
    async with scripted.running() as url, teachers({"name": "t", "urls": [url]}) as ours:
        asked = asyncio.ensure_future(ours.scores(one))
        await until(lambda: scripted.under_way)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        scripted.hold = None
        assert await ours.scores(one) is not None


def hinted(number: int = 1) -> TrajectoryGroup:
    """A teacher sees 7 8 9 in the place of 10 11."""
    return group(number, two_turns()).model_copy(update={"teacher_prompt": (7, 8, 9)})


async def test_a_privileged_teacher_is_shown_its_own_prompt_and_answers_for_what_was_sampled() -> None:
    scripted = ScriptedTeacher(version="1.4")
    async with scripted.running() as url, teachers({"name": "t", "urls": [url], "privileged": True}, top=2) as ours:
        found = await ours.scores(hinted())
    assert found is not None
    assert scripted.requests[0].sequences == ((7, 8, 9, 12, 13, 14, 15),)
    # The teacher has each token a place later: logprob(token, position) = -token / 8 - position / 1024
    expected = [0, 0, logprob(12, 3), logprob(13, 4), 0, logprob(15, 6), 0, 0]
    assert found[0].logprobs.tolist() == expected
    assert found[0].top is not None
    assert found[0].top.logprobs[:, 1].tolist() == [0, 0, logprob(1, 3), logprob(1, 4), 0, logprob(1, 6), 0, 0]
    assert found[0].version == "1.4"


async def test_a_teacher_that_is_shown_a_solved_sibling_teaches_those_that_failed() -> None:
    scripted, failed = ScriptedTeacher(version="1.4"), {"reward": RewardRecord(verifier="test", reward=0.0)}
    members = (two_turns(), two_turns().model_copy(update=failed))
    solved = group(1, *members).model_copy(update={"teacher_prompt": (7, 8, 9), "solved_reward": 1.0})
    unsolved = group(2, *members).model_copy(update={"solved_reward": 2.0})
    async with scripted.running() as url, teachers({"name": "t", "urls": [url], "privileged": True}, top=2) as ours:
        found, silent = await ours.scores(solved), await ours.scores(unsolved)
    assert scripted.requests[0].sequences == ((7, 8, 9, 12, 13, 14, 15),), "the member that failed, and no other"
    assert len(scripted.requests) == 1
    assert found is not None
    assert silent is not None
    assert [each.taught for each in (*found, *silent)] == [False, True, False, False]
    assert found[1].logprobs.tolist() == [0, 0, logprob(12, 3), logprob(13, 4), 0, logprob(15, 6), 0, 0]
    tops = [each.top for each in silent]
    assert all(top is not None and top.token_ids.tolist() == [[0, 1]] * 8 for top in tops)
    assert all(top is not None and np.exp(top.logprobs).sum(1) == pytest.approx(0.5) for top in tops)


async def test_a_privileged_teacher_without_privileged_text_ends_the_run_by_name() -> None:
    scripted = ScriptedTeacher()
    async with scripted.running() as url, teachers({"name": "t", "urls": [url], "privileged": True}) as ours:
        with pytest.raises(TeacherFailed, match=r"teacher t .* lease 1 .* came without any: set teacher_hint of that"):
            await ours.scores(group(1))
    assert scripted.requests == []


async def test_the_policy_is_asked_at_the_generators_that_serve_it_at_the_moment() -> None:
    first, second = ScriptedTeacher(version="1.1"), ScriptedTeacher(version="1.2")
    config = TeacherConfig.model_validate({"name": "self", "policy": True})
    async with first.running() as one, second.running() as other, HttpClient() as client:
        serving: list[str] = []
        fleet = PolicyFleet(serving=lambda: serving, client=client, believed=lambda instance, version: True)
        async with Teachers(
            [config], tokenizer=TOKENIZER, waits=Waiting(), registry=Metrics("learner"), fleet=fleet
        ) as ours:
            early = asyncio.ensure_future(ours.scores(hinted(1)))
            await asyncio.sleep(0)
            serving.append(one)  # nobody was there when it was asked
            found = await early
            serving[:] = [other]
            later = await ours.scores(hinted(2))
    assert found is not None
    assert later is not None
    assert (found[0].version, later[0].version) == ("1.1", "1.2")
    assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_what_a_generator_said_that_is_not_believed_any_more_is_asked_of_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is quarantined while what it said of the first group is kept, and of the second is on its way."""
    bad = ScriptedTeacher(version="1.1", instance="bad-1", hold=asyncio.Event())
    good = ScriptedTeacher(version="1.2", instance="good-1")
    config = TeacherConfig.model_validate({"name": "self", "policy": True})
    distrusted: set[str] = set()
    async with bad.running() as one, good.running() as other, HttpClient() as client:
        serving = [one]
        fleet = PolicyFleet(lambda: serving, client, believed=lambda instance, version: instance not in distrusted)
        async with Teachers(
            [config], tokenizer=TOKENIZER, waits=Waiting(), registry=Metrics("learner"), fleet=fleet
        ) as ours:
            assert bad.hold is not None
            ours.prefetch(hinted(1))
            bad.hold.set()
            await until(lambda: bad.requests and not bad.under_way)
            bad.hold.clear()
            ours.prefetch(hinted(2))
            await until(lambda: bad.under_way)
            distrusted.add("bad-1")
            serving[:] = [other]
            bad.hold.set()
            assert await ours.glance([hinted(1)], batch=[]) == {}
            found = await ours.of_batch([hinted(1), hinted(2)])
    assert [[each.version for each in scores] for scores in found if isinstance(scores, tuple)] == [["1.2"], ["1.2"]]
    assert caplog.messages.count("lease 1 is taught again: the generator that did is not believed any more") == 1


async def test_the_proof_of_weights_that_taught_is_waited_for_and_one_that_never_comes_ends_the_run_by_name() -> None:
    scripted = ScriptedTeacher(version="1.1", instance="i")
    config = TeacherConfig.model_validate({"name": "self", "policy": True, "wait_s": 0.3})
    told: list[bool | None] = [None, True]
    async with scripted.running() as url, HttpClient() as client:
        fleet = PolicyFleet(lambda: [url], client, believed=lambda *_: told.pop(0) if len(told) > 1 else told[0])
        async with Teachers(
            [config], tokenizer=TOKENIZER, waits=Waiting(), registry=Metrics("learner"), fleet=fleet
        ) as ours:
            assert await ours.scores(hinted(1)) is not None
            assert len(scripted.requests) == 1
            told[:] = [None]
            unsolved = two_turns().model_copy(update={"reward": RewardRecord(verifier="test", reward=0.0)})
            last_is_silent = group(2, unsolved, two_turns()).model_copy(
                update={"teacher_prompt": (7, 8, 9), "solved_reward": 0.5}
            )
            with pytest.raises(TeacherFailed, match=r"for 0.3 s all answers .* not proven their weights, .* 1.1"):
                await ours.scores(last_is_silent)
            told[:], scripted.requests[:] = [False], []
            with pytest.raises(TeacherFailed, match=r"for 0.3 s all answers"):
                await ours.scores(hinted(3))
            assert len(scripted.requests) <= 5, "it is asked again after a pause"
