"""The rule by which the bound on the lag falls and rises with gradients, alone and beside the limits of the guard."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import pytest

from learner.training.config import GuardConfig
from learner.training.guard import Guard, GuardChange, GuardState
from learner.training.lag_gradients import WINDOW, BucketMoments, Moments, bucket_of
from learner.training.lag_rule import PATIENCE, GradientLag, GradientLagState, GradientRule

RULE = GradientRule(adapts=True, min_cosine=0.8)


@dataclass(frozen=True)
class LimitedMetrics:
    """Metrics of a step, of which one has a limit that matters here."""

    behavior_kl: float = 0.01
    effective_sample_share: float | None = None
    mismatch_kl: float | None = None
    importance_ratio_max: float | None = None


FINE = LimitedMetrics()


def measured(lag: int, cosine: float, *, spread: float = 0.0) -> Moments:
    """A measurement without noise, whose largest lag this is. With `spread` the pairs differ, and so make an error."""
    new = BucketMoments(units=2, own=0.5, pairs=0.5, cross=1.0)
    if lag == 0:
        return {0: new}
    return {0: new, bucket_of(lag): BucketMoments(units=2, own=0.5, pairs=0.5, cross=cosine + spread)}


def follow(one: GradientLag, *cosines: float, lag: int | None = None) -> list[int]:
    """The bound after each measurement of the largest lag that it allows, or of `lag`."""
    bounds = []
    for version, cosine in enumerate(cosines):
        one.observe(measured(one.bound if lag is None else lag, cosine), version=version)
        bounds.append(one.bound)
    return bounds


def test_it_falls_by_a_bucket_after_two_measurements_under_the_limit_that_have_an_error() -> None:
    """The first two have none yet. What is measured at 4 counts from its own third one on."""
    one = GradientLag(RULE, max_lag=8)
    assert follow(one, *[0.5] * 3) == [8, 8, 8]
    assert follow(one, 0.5) == [4]
    assert follow(one, *[0.5] * 4) == [4, 4, 4, 2]


def test_between_limit_and_margin_it_stays_and_counts_nothing_any_further() -> None:
    """Well over is 0.85."""
    one = GradientLag(RULE, max_lag=8, state=GradientLagState(bound=4))
    assert follow(one, *[0.82] * 30) == [4] * 30
    assert (one.state.beyond, one.state.within) == (0, 0)


def test_an_error_as_large_as_the_distance_moves_nothing() -> None:
    one = GradientLag(RULE, max_lag=8)
    for number in range(20):
        one.observe(measured(8, 0.7, spread=0.6 * (-1) ** number), version=number)
    assert one.bound == 8
    assert one.state.beyond == 0


def test_where_halves_of_lag_0_have_next_to_nothing_in_common_nothing_is_concluded() -> None:
    noisy = {bucket: replace(one, own=5.0) for bucket, one in measured(8, 0.1).items()}
    one = GradientLag(RULE, max_lag=8)
    for number in range(9):
        reading = one.observe(noisy, version=number)
        assert reading.halves == pytest.approx(0.1)
    assert (one.bound, one.state.beyond) == (8, 0)


def test_it_rises_again_to_the_configured_bound_and_after_a_relapse_takes_twice_as_long() -> None:
    one = GradientLag(RULE, max_lag=6)
    follow(one, *[0.5] * 4)
    assert one.bound == 4
    assert follow(one, *[0.95] * 4) == [4, 4, 4, 6], "the next bucket is that of 8, beyond the configured bound"
    assert one.state.bound is None
    follow(one, *[0.5] * 4)
    assert (one.bound, one.state.relapses) == (4, 1)
    assert follow(one, *[0.95] * 4) == [4, 4, 4, 6], "four in a row, of which each has an error by now"


def test_what_was_measured_before_a_fall_is_not_held_against_a_rise() -> None:
    one = GradientLag(RULE, max_lag=8)
    follow(one, *[0.1] * 4)
    assert all(max(moments) <= bucket_of(4) for moments in one.state.history)
    follow(one, *[0.95] * 4)
    assert one.bound == 8
    follow(one, *[0.95] * 3)
    assert one.bound == 8


def test_less_lag_than_the_bound_allows_says_nothing_of_more_and_may_still_be_too_much() -> None:
    one = GradientLag(RULE, max_lag=8, state=GradientLagState(bound=4))
    assert follow(one, *[1.0] * 9, lag=1) == [4] * 9
    assert follow(GradientLag(RULE, max_lag=8), *[0.5] * 4, lag=2) == [8, 8, 8, 1]


def test_at_0_nothing_is_old_and_lag_is_tried_again_ever_later() -> None:
    one = GradientLag(RULE, max_lag=1)
    follow(one, *[0.5] * 4)
    assert one.bound == 0
    assert follow(one, *[0.0] * 2) == [0, 1]
    follow(one, *[0.5] * 4)
    assert follow(one, *[0.0] * 4) == [0, 0, 0, 1]


@pytest.mark.parametrize("max_lag", [1, 2, 3, 5, 8, 12])
def test_it_is_never_above_the_configured_bound_nor_below_0(max_lag: int) -> None:
    one = GradientLag(RULE, max_lag=max_lag)
    bounds = follow(one, *([0.2] * 40 + [0.99] * 60))
    assert min(bounds) == 0
    assert max(bounds) == max_lag
    assert bounds[-1] == max_lag


def test_what_only_measures_moves_nothing() -> None:
    one = GradientLag(GradientRule(adapts=False), max_lag=8)
    assert follow(one, *[0.1] * 9) == [8] * 9
    assert len(one.state.history) == WINDOW


def guard(*, max_lag: int = 8, state: GuardState | None = None) -> Guard:
    return Guard(GuardConfig(patience=1, recovery_steps=1), max_lag=max_lag, state=state or GuardState(), rule=RULE)


def compare(one: Guard, *cosines: float) -> list[GuardChange]:
    changes = [one.compare(measured(one.max_lag, cosine), version=0)[1] for cosine in cosines]
    return [change for change in changes if change is not None]


def test_the_guard_takes_the_lesser_bound_and_says_what_moved_it() -> None:
    one = guard()
    (fell,) = compare(one, *[0.5] * 4)
    assert (fell.kind, fell.before, fell.after) == ("tightened", 8, 4)
    assert fell.text == (
        "gradient_cosine is 0.5, under its limit of 0.8, for 2 measurements in a row: the lag bound falls from 8 to 4"
    )
    assert one.observe(FINE, lag=4) is None, "the limits know of nothing to take back"
    limited = one.observe(LimitedMetrics(behavior_kl=1.5), lag=4)
    assert limited is not None
    assert (limited.before, limited.after, one.max_lag) == (4, 2, 2)
    assert compare(one, *[0.95] * 4) == [], "at 2 the bound of gradients does not rise"
    rises = [one.observe(FINE, lag=2) for _ in range(4)]
    assert [None if each is None else each.after for each in rises] == [3, 4, None, None], "held by the gradients"
    (rose,) = compare(one, *[0.95] * 4)
    assert rose.text.startswith("the lag bound rises from 4 to ")
    assert rose.text.endswith(f": {PATIENCE} healthy measurements")


def test_a_resume_goes_on_with_what_was_measured() -> None:
    def numbers(bounds: Sequence[GuardChange]) -> list[tuple[int, int]]:
        return [(change.before, change.after) for change in bounds]

    whole, first = guard(), guard()
    cosines = [0.5] * 4 + [0.95] * 5 + [0.5] * 6
    expected = numbers(compare(whole, *cosines))
    found = compare(first, *cosines[:7])
    kept = GuardState.read(json.loads(json.dumps(asdict(first.state))))
    assert kept == first.state
    found += compare(guard(state=kept), *cosines[7:])
    assert numbers(found) == expected
    assert len(expected) > 2


def test_a_checkpoint_without_measurements_is_read() -> None:
    assert GuardState.read({"max_lag": 2, "tightened": 1}) == GuardState(max_lag=2, tightened=1)
    assert guard().state.gradients is None
