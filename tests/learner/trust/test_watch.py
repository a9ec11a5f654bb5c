"""The test of generators in a run: steps of groups go in, the evidence and who is not believed come out."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.event_loop import EventLoopParts
from learner.leases.intake import TakenBatch
from learner.training.batch import Origin, TrainSequence
from learner.training.models import TokenValues
from learner.trust.evidence import Suspicion, TrustTest
from learner.trust.watch import TrustWatch
from protocol.trajectories import TrajectoryGroup
from tests.learner.samples import INSTANCE, group, trajectory
from tests.learner.trainings import NothingToTrain, settings_of, training_of

VERSION = 4
FOUND = Suspicion("g", "g-1", "gap", 17.0, 100, 0.2, 0.05)


class WatchedEvidence:
    """Remembers what a watch tells."""

    def __init__(self) -> None:
        self.evidence: list[Mapping[str, float]] = []
        self.suspicions: list[Suspicion] = []

    def watch(self) -> TrustWatch:
        """A watch that holds a generator alone to a mean gap of 0.1 nats."""
        test = TrustTest(threshold=16.0, tolerance=1.5, dtype="float32", alone=0.1)
        return TrustWatch(test, measured=self.evidence.append, suspected=self.suspicions.append)


def batch(instance: str = INSTANCE) -> TakenBatch:
    """Eight groups of two trajectories, of two tokens of the present version each."""
    groups = [
        group(number, *[trajectory(VERSION, VERSION, instance=instance) for _ in range(2)]) for number in range(8)
    ]
    return TakenBatch(version=VERSION, groups=tuple(groups), lags=(0,) * 8)


def places(groups: Sequence[TrajectoryGroup]) -> list[tuple[int, int, int, int]]:
    return [(number, index, 0, 4) for number in range(len(groups)) for index in range(2)]


def learner_says(logprob: float, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Of so many trajectories, nothing of their prompts."""
    return np.tile(np.array([np.nan, np.nan, logprob, logprob], dtype=np.float32), count)


def step(watch: TrustWatch, *, logprob: float, instance: str = INSTANCE) -> list[Suspicion]:
    groups = batch(instance).groups
    ours = learner_says(logprob, 2 * len(groups))
    return watch.step(groups, places(groups), ours=ours, entropies=np.full_like(ours, np.nan), version=VERSION)


def test_a_test_that_fails_is_said_once_and_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    told = WatchedEvidence()
    watch, groups = told.watch(), batch().groups
    short = learner_says(-1.0, 1)
    for _ in range(2):
        assert watch.step(groups, places(groups), ours=short, entropies=short, version=VERSION) == []
    assert step(watch, logprob=-9.0) == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"generators are not tested any more, since the test of step {VERSION + 1} failed: ")


def test_a_generator_that_states_other_logprobs_is_named_once_and_noted_from_there_on() -> None:
    told = WatchedEvidence()
    watch = told.watch()
    found = [one for _ in range(5) for one in step(watch, logprob=-1.2)]

    assert [(one.name, one.instance, one.test) for one in found] == [("g", "g-1", "gap")]
    assert (found[0].level, found[0].expected) == pytest.approx((0.7, 0.1))
    assert watch.notes == (found[0].text,)
    assert watch.notes[0].startswith("generator g samples otherwise than it says: its logprobs are 0.7 nats from")
    assert told.evidence[-1]["g"] > 16


def test_a_generator_that_was_restarted_begins_anew() -> None:
    told = WatchedEvidence()
    watch = told.watch()
    for _ in range(5):
        step(watch, logprob=-1.2)
    assert watch.notes

    step(watch, logprob=-0.5, instance="another process")

    assert watch.notes == ()
    assert told.evidence[-1] == {"g": 0.0}


def test_one_that_states_the_learners_own_is_not() -> None:
    told = WatchedEvidence()
    watch = told.watch()

    assert [one for _ in range(5) for one in step(watch, logprob=-0.5)] == []
    assert watch.notes == ()
    assert told.evidence[-1] == {"g": 0.0}


async def test_a_step_of_the_trainer_is_tested_and_the_event_loop_is_told_who_is_suspected() -> None:
    told, taken = WatchedEvidence(), batch()
    count = 2 * len(taken.groups)
    ours = learner_says(-3.0, count)
    mask = np.array([False, False, True, True])
    sequences = [
        TrainSequence(
            token_ids=np.zeros(4, dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=np.zeros(4, dtype=np.float32),
            lags=np.zeros(4, dtype=np.int32),
            origin=Origin(number // 2, number % 2),
        )
        for number in range(count)
    ]
    parts: Any = NothingToTrain()
    parts.tokens = TokenValues(learner_logprobs=ours, entropies=np.full_like(ours, np.nan), advantages=ours)
    training = training_of(settings_of(), parts=parts, trust=told.watch())
    for _ in range(5):
        await asyncio.to_thread(training._test_generators, taken, sequences)
    await asyncio.sleep(0)

    assert [one.name for one in told.suspicions] == ["g"]


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_suspicion_is_recorded_and_expels_only_where_that_is_asked_for(quarantine: bool) -> None:
    calls: list[tuple[object, ...]] = []
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(trust=SimpleNamespace(quarantine=quarantine)),
        records=SimpleNamespace(suspicion=lambda found, **how: calls.append((found.name, how["quarantined"]))),
        recovered=SimpleNamespace(ledger=SimpleNamespace(version=7)),
        fleet=SimpleNamespace(quarantine=lambda name, instance, *, reason: calls.append((name, instance, reason))),
    )
    EventLoopParts._suspected(parts, FOUND)

    assert calls == [("g", quarantine), ("g", "g-1", FOUND.text)][: 1 + quarantine]


def test_a_line_has_no_numbers_that_json_does_not_know() -> None:
    shown = Suspicion("g", "g-1", "repeat", 17.0, 100, float("nan"), float("nan")).shown()

    assert shown == {
        "generator_id": "g", "instance": "g-1", "test": "repeat", "evidence": 17.0, "tokens": 100, "level": None,
        "expected": None,
    }  # fmt: skip
