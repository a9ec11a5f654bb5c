"""Tokens of a step as the test looks at them: whose, how old, and which are left out."""

import math

import numpy as np
import pytest

from learner.trust.tokens import step_tokens
from protocol.trajectories import Trajectory, TrajectoryGroup, VersionSpan
from tests.learner.samples import group, trajectory


def with_spans(one: Trajectory, *spans: VersionSpan) -> Trajectory:
    return one.model_copy(update={"version_spans": spans})


def test_each_token_has_its_process_its_lag_and_what_both_sides_say() -> None:
    whole = group(0, trajectory(4, 4, 6), trajectory(5, instance="h-1"))

    found = step_tokens(
        [whole],
        [(0, 0, 0, 5), (0, 1, 0, 3)],
        ours=np.array([math.nan, math.nan, -0.1, -0.2, -0.3, math.nan, math.nan, -0.4], dtype=np.float32),
        entropies=np.array([math.nan, math.nan, 1, 2, 3, math.nan, math.nan, 4], dtype=np.float32),
        version=6,
    )

    assert found.instances == ("g-1", "h-1")
    assert found.names == ("g", "g")
    assert found.processes.tolist() == [0, 0, 0, 1]
    assert found.lags.tolist() == [2, 2, 0, 1]
    assert found.theirs.tolist() == [-0.5] * 4
    assert found.ours == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert found.entropies.tolist() == [1, 2, 3, 4]
    assert found.groups.tolist() == [0] * 4
    assert len(set(found.texts.tolist())) == 2
    assert not found.old_cache.any()


def test_a_token_of_which_the_learner_says_nothing_is_left_out() -> None:
    whole = group(0, trajectory(4, 4))
    ours = np.array([math.nan, math.nan, math.nan, -0.2])

    found = step_tokens([whole], [(0, 0, 0, 4)], ours=ours, entropies=ours, version=4)

    assert found.ours.tolist() == [-0.2]


def test_a_span_with_an_older_cache_is_marked() -> None:
    spans = (
        VersionSpan(version="3.4", start=2, end=3, instance="g-1"),
        VersionSpan(version="3.5", start=3, end=4, instance="g-1", cache="3.4"),
    )
    whole = group(0, with_spans(trajectory(4, 4), *spans))

    found = step_tokens([whole], [(0, 0, 0, 4)], ours=np.zeros(4), entropies=np.zeros(4), version=5)

    assert found.old_cache.tolist() == [False, True]
    assert found.lags.tolist() == [1, 0]


def test_a_sequence_that_begins_in_the_middle_of_its_trajectory_has_its_own_stamps() -> None:
    whole = group(0, trajectory(4, 5, 6))

    found = step_tokens([whole], [(0, 0, 3, 2)], ours=np.zeros(2), entropies=np.zeros(2), version=6)

    assert found.lags.tolist() == [1, 0]


def test_without_an_instance_a_process_goes_by_its_generators_name() -> None:
    whole = group(0, trajectory(4, instance=""))

    found = step_tokens([whole], [(0, 0, 0, 3)], ours=np.zeros(3), entropies=np.zeros(3), version=4)

    assert found.instances == ("g",)


def _digests(whole: TrajectoryGroup) -> list[tuple[int, int, float]]:
    count = len(whole.trajectories)
    ours = np.full(4 * count, -0.25)
    found = step_tokens([whole], [(0, number, 0, 4) for number in range(count)], ours=ours, entropies=ours, version=4)
    return [(text.prompt, text.whole, text.logprob) for text in found.whole]


def test_a_whole_trajectory_has_digests_and_the_larger_logprob() -> None:
    first, other, again = _digests(group(0, trajectory(4, 4), trajectory(4, 4, token_id=6), trajectory(4, 4)))

    assert first == again
    assert first[:2] != other[:2]
    assert first[2] == pytest.approx(-0.5)


def test_a_trajectory_of_two_processes_is_nobodys_as_a_whole() -> None:
    spans = tuple(VersionSpan(version="3.4", start=at, end=at + 1, instance=f"g-{at}") for at in (2, 3))

    assert _digests(group(0, with_spans(trajectory(4, 4), *spans))) == []
