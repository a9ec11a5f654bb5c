"""The guard: when it lowers the bound on the lag, when it lets it rise again, and that it does not flap."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.training.config import GuardConfig
from learner.training.guard import NEW_GUARD, Guard, GuardChange, GuardState, readings_of

CONFIG = GuardConfig(
    min_effective_sample_share=0.0625, max_behavior_kl=1.0, max_mismatch_kl=0.1, patience=2, recovery_steps=3
)


@dataclass(frozen=True)
class GivenMetrics:
    """Metrics of a step, as the guard reads them."""

    effective_sample_share: float | None = 0.9
    behavior_kl: float | None = 0.01
    mismatch_kl: float | None = 0.001
    importance_ratio_max: float | None = 1.5


FINE = GivenMetrics()
BAD = GivenMetrics(behavior_kl=1.5)
BETWEEN = GivenMetrics(behavior_kl=0.9)
"""Inside the limit of 1, but not by the margin of a quarter."""


def guard(*, max_lag: int = 8, config: GuardConfig = CONFIG, state: GuardState = NEW_GUARD) -> Guard:
    return Guard(config, max_lag=max_lag, state=state)


def feed(one: Guard, *steps: GivenMetrics, lag: int | None = None) -> list[GuardChange]:
    """The changes that steps of the bound's own lag, or of `lag`, bring about."""
    changes = [one.observe(step, lag=one.max_lag if lag is None else lag) for step in steps]
    return [change for change in changes if change is not None]


# Where the limits are


@pytest.mark.parametrize(
    ("measured", "beyond", "well_within"),
    [
        # 0.0625 ** 0.75 = 0.125: a quarter of the way to 1, in nats
        (GivenMetrics(effective_sample_share=0.06), True, False),
        (GivenMetrics(effective_sample_share=0.0625), False, False),
        (GivenMetrics(effective_sample_share=0.12), False, False),
        (GivenMetrics(effective_sample_share=0.13), False, True),
        (GivenMetrics(behavior_kl=1.01), True, False),
        (GivenMetrics(behavior_kl=1.0), False, False),
        (GivenMetrics(behavior_kl=0.76), False, False),
        (GivenMetrics(behavior_kl=0.75), False, True),
        (GivenMetrics(mismatch_kl=0.11), True, False),
        (GivenMetrics(mismatch_kl=0.08), False, False),
        (GivenMetrics(mismatch_kl=0.07), False, True),
        (GivenMetrics(mismatch_kl=None), False, True),
        (GivenMetrics(importance_ratio_max=1e6), False, True),
        (GivenMetrics(effective_sample_share=math.nan), True, False),
        (GivenMetrics(behavior_kl=math.inf), True, False),
    ],
)
def test_what_is_beyond_a_limit_and_what_is_well_within(
    measured: GivenMetrics, beyond: bool, well_within: bool
) -> None:
    readings = list(readings_of(measured, CONFIG))
    assert any(reading.beyond for reading in readings) == beyond
    assert all(reading.well_within for reading in readings) == well_within


def test_a_limit_on_the_largest_ratio_counts_once_it_is_set() -> None:
    """16 ** 0.75 = 8."""
    config = GuardConfig(max_importance_ratio=16.0)
    ratios = (16.5, 16.0, 8.5, 8.0)
    readings = [list(readings_of(GivenMetrics(importance_ratio_max=ratio), config))[-1] for ratio in ratios]
    assert [reading.beyond for reading in readings] == [True, False, False, False]
    assert [reading.well_within for reading in readings] == [False, False, False, True]


# What it does, step by step: `.` fine, `x` beyond a limit, `~` between, `?` nothing measured

STEPS = {".": FINE, "x": BAD, "~": BETWEEN, "?": GivenMetrics(None, None, None, None)}


@pytest.mark.parametrize(
    ("max_lag", "steps", "bounds"),
    [
        (4, "....", [4, 4, 4, 4]),
        (4, "x.x.", [4, 4, 4, 4]),
        (4, "x~x~", [4, 4, 4, 4]),
        (4, "xx", [4, 2]),
        (4, "x?x", [4, 4, 2]),
        (4, "xxxxxx", [4, 2, 2, 1, 1, 0]),
        (8, "xxxx", [8, 4, 4, 2]),
        (5, "xx", [5, 2]),
        (1, "xx", [1, 0]),
        (0, "xxxx", [0, 0, 0, 0]),
        # 3 healthy steps for the first version; after a rise that held, 3 more for the next
        (2, "xx......", [2, 1, 1, 1, 2, 2, 2, 2]),
        (4, "xx.~...", [4, 2, 2, 2, 2, 2, 3]),
        (4, "xx..?.", [4, 2, 2, 2, 2, 3]),
        # it falls again after a rise: then 6 healthy steps for the next rise
        (2, "xx...xx......", [2, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 2]),
    ],
)
def test_the_bound_after_each_step(max_lag: int, steps: str, bounds: list[int]) -> None:
    one = guard(max_lag=max_lag)
    seen = []
    for step in steps:
        one.observe(STEPS[step], lag=one.max_lag)
        seen.append(one.max_lag)
    assert seen == bounds


def test_the_bound_falls_from_the_lag_that_did_the_harm() -> None:
    """A bound of 8 of which a run uses 3 is not lowered to 4, which would change nothing."""
    one = guard()
    (change,) = feed(one, BAD, BAD, lag=3)
    assert (change.before, change.after, one.max_lag) == (8, 1, 1)


def test_after_a_long_time_at_the_configured_bound_a_relapse_is_forgotten() -> None:
    one = guard(max_lag=1)
    feed(one, *[BAD] * 2, *[FINE] * 3, *[BAD] * 2, *[FINE] * 6)
    assert (one.max_lag, one.state.relapses) == (1, 1)
    feed(one, *[FINE] * 6)
    assert one.state.relapses == 0
    feed(one, *[BAD] * 2, *[FINE] * 3)
    assert one.max_lag == 1


def test_a_guard_that_is_off_does_nothing() -> None:
    one = guard(config=GuardConfig(enabled=False), state=GuardState(max_lag=1))
    assert feed(one, *[BAD] * 100) == []
    assert (one.max_lag, one.state) == (8, NEW_GUARD)


# What it says


def test_it_says_the_number_the_limit_and_the_bounds_once_per_change() -> None:
    texts = [change.text for change in feed(guard(max_lag=2), *[BAD] * 4, *[FINE] * 6)]
    assert texts == [
        "behavior_kl is 1.5, over its limit of 1, for 2 steps in a row: the lag bound falls from 2 to 1",
        "behavior_kl is 1.5, over its limit of 1, for 2 steps in a row: the lag bound falls from 1 to 0; steps now "
        "wait until generators serve the learner's version",
        "the lag bound rises from 0 to 1: 3 healthy steps",
        "the lag bound rises from 1 to 2, the configured bound: 3 healthy steps",
    ]


def test_it_names_the_share_that_fell_and_a_measure_that_is_no_number() -> None:
    (change,) = feed(guard(), *[GivenMetrics(effective_sample_share=0.01234)] * 2)
    assert change.text.startswith("effective_sample_share is 0.0123, under its limit of 0.0625, for 2 steps")
    (change,) = feed(guard(), *[GivenMetrics(behavior_kl=math.nan)] * 2)
    assert change.text.startswith("behavior_kl is nan, no number beside its limit of 1, for 2 steps")


def test_at_0_it_says_once_that_lag_is_not_the_cause_and_what_may_be() -> None:
    one = guard(max_lag=0)
    numerics = GivenMetrics(mismatch_kl=0.3)
    (change,) = feed(one, *[numerics] * 50)
    assert (change.kind, change.before, change.after) == ("powerless", 0, 0)
    assert "mismatch_kl is 0.3, over its limit of 0.1" in change.text
    assert "compare dtype, quantization and kernels" in change.text
    assert feed(one, *[FINE] * 3) == []
    (again,) = feed(one, *[BAD] * 10)
    assert "Lower the learning rate" in again.text


def test_at_0_it_says_that_groups_trained_again_may_be_the_cause_whose_bound_it_cannot_lower() -> None:
    (change,) = feed(Guard(CONFIG, max_lag=0, reused_lag=16), *[BAD] * 2, lag=9)
    assert "groups that are trained again lag up to 16: lower reuse.max_lag" in change.text
    (change,) = feed(Guard(CONFIG, max_lag=0, reused_lag=16), *[GivenMetrics(mismatch_kl=0.3)] * 2)
    assert "lag is not the cause" in change.text
    *_, lowered = feed(Guard(CONFIG, max_lag=1, reused_lag=16), *[BAD] * 4)
    assert "lag is not the cause" in lowered.text, "none is trained again then"


# Over a restart


@pytest.mark.parametrize("at", range(12))
def test_a_guard_that_goes_on_from_its_state_does_what_it_would_have_done(at: int) -> None:
    steps = [STEPS[step] for step in "xx...xx.~....xxxx..........."]
    whole = guard()
    changes = feed(whole, *steps)
    first = guard()
    before = feed(first, *steps[:at])
    second = guard(state=GuardState(**json.loads(json.dumps(asdict(first.state)))))
    assert before + feed(second, *steps[at:]) == changes
    assert second.state == whole.state


def test_a_run_that_goes_on_with_another_max_lag_keeps_to_it() -> None:
    held = GuardState(max_lag=5)
    assert guard(max_lag=2, state=held).max_lag == 2
    assert guard(max_lag=9, state=held).max_lag == 5
    assert guard(max_lag=9, state=GuardState()).max_lag == 9
    one = guard(max_lag=2, state=held)
    assert feed(one, *[FINE] * 3) == []
    assert one.state.max_lag is None


# What holds whatever the run does

seeded = settings(max_examples=200, deadline=None)
kinds = st.sampled_from(".x~?")


@seeded
@given(steps=st.lists(st.tuples(kinds, st.integers(0, 8)), max_size=200), max_lag=st.integers(0, 8))
def test_the_bound_keeps_to_its_range_at_least_halves_and_rises_by_one(
    steps: Sequence[tuple[str, int]], max_lag: int
) -> None:
    one, moved_at = guard(max_lag=max_lag), [-CONFIG.patience]
    for at, (kind, lag) in enumerate(steps):
        before = one.max_lag
        change = one.observe(STEPS[kind], lag=min(lag, before))
        assert 0 <= one.max_lag <= max_lag
        if change is None or change.kind == "powerless":
            assert one.max_lag == before
            continue
        assert (change.before, change.after) == (before, one.max_lag)
        assert one.max_lag == before + 1 if change.kind == "loosened" else one.max_lag <= before // 2
        moved_at.append(at)
    assert all(later - earlier >= CONFIG.patience for earlier, later in pairwise(moved_at))
    assert one.state.tightened + one.state.loosened == len(moved_at) - 1


@seeded
@given(steps=st.lists(kinds, max_size=200), max_lag=st.integers(0, 8))
def test_every_run_that_becomes_healthy_gets_its_configured_bound_back(steps: Sequence[str], max_lag: int) -> None:
    """By at most 8 rises, each after at most 3 * 16 healthy steps."""
    one = guard(max_lag=max_lag)
    feed(one, *[STEPS[step] for step in steps])
    feed(one, *[FINE] * 8 * 48)
    assert one.max_lag == max_lag


@seeded
@given(lead=st.lists(kinds, max_size=100), tolerated=st.integers(0, 7))
def test_a_run_that_bears_less_lag_than_configured_does_not_flap(lead: Sequence[str], tolerated: int) -> None:
    """A step is beyond the limit exactly where its lag is more than the run bears; the bound is always used up.

    So the bound b falls to half after 2 steps with b one above what is borne, and rises again by one or more versions.
    Each such fall doubles the healthy steps that a rise takes, up to 3 * 16 after four. From then on a cycle of fall
    and rises is at least 48 + 2 steps long, of which 2 are beyond the limit; it has at most one change every 25 steps.
    """
    one = guard()
    feed(one, *[STEPS[step] for step in lead])

    def run(count: int) -> tuple[int, int]:
        changes = beyond = 0
        for _ in range(count):
            step = BAD if one.max_lag > tolerated else FINE
            beyond += step is BAD
            changes += len(feed(one, step))
        return changes, beyond

    run(2000)
    changes, beyond = run(1000)
    assert beyond <= 2 * (1000 // 50 + 1)
    assert changes <= 1000 // 25 + 1
    assert one.max_lag <= tolerated + 1
