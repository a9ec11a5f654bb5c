"""Cosine and ratio of norms by lag: by hand, and from gradients whose cosine is known beneath their noise."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.training.lag_gradients import (
    MIN_MEASUREMENTS,
    BucketMoments,
    LagReading,
    Moments,
    bucket_of,
    label_of,
    largest_lag,
    moments_of,
    reading_of,
)

SIZE = 256


def test_lags_are_in_buckets_of_doubling_width() -> None:
    assert [bucket_of(lag) for lag in range(10)] == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5]
    assert [largest_lag(bucket) for bucket in range(6)] == [0, 1, 2, 4, 8, 16]
    assert [label_of(bucket) for bucket in range(6)] == ["0", "1", "2", "3-4", "5-8", "9-16"]


def test_by_hand_noise_that_groups_do_not_share_is_taken_out() -> None:
    """z1 + z2 = (4, 0), whose square is 16: the scale. <z1, z2> = 3, <c1, c2> = 4, (c1 + c2) . (z1 + z2) = 8."""
    sketches = np.array([[2.0, 1.0], [0.0, 2.0], [2.0, -1.0], [2.0, 2.0], [9.0, 9.0]])
    moments = moments_of(sketches, [0, 4, 0, 4, 2])
    assert moments == {
        0: BucketMoments(units=2, own=10 / 16, pairs=6 / 16, cross=1.0),
        4: BucketMoments(units=2, own=12 / 16, pairs=8 / 16, cross=0.5),
    }
    reading = reading_of([moments], version=7)
    (old,) = reading.buckets
    assert old.cosine == pytest.approx(8 / math.sqrt(16 * 12))
    assert old.norm_ratio == pytest.approx(math.sqrt(16 / 12))
    assert reading.halves == pytest.approx(3 / 5), "the cosine of z1 and z2"
    assert (old.error, old.measurements, reading.newest) == (None, 1, 4)


def test_by_hand_units_of_three_groups_and_of_one_have_less_in_common_than_two_of_two() -> None:
    """Without noise, of a gradient (4, 0): 2 * 3 * 1 = 6 of 16. They amount to 16 / (9 + 1) equal units."""
    found = moments_of(np.array([[3.0, 0.0], [1.0, 0.0]]), [0, 0], sizes=[3, 1])
    assert found[0].units == pytest.approx(1.6)
    assert found[0].pairs == pytest.approx(6 / 16)
    assert found[0].signal == pytest.approx(1.0)


def test_halves_are_the_mean_over_all_ways_to_halve_the_groups() -> None:
    """Of four groups there are three; the mean of their dot products is over the mean of their squared lengths."""
    fresh = np.random.default_rng(3).normal(1.0, 1.0, (4, 5))
    ways = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    pairs = [(fresh[list(one)].sum(0), fresh[list(other)].sum(0)) for one, other in ways]
    lengths = [half @ half for way in pairs for half in way]
    reading = reading_of([moments_of(fresh, [0] * 4)], version=0)
    assert reading.halves == pytest.approx(np.mean([one @ other for one, other in pairs]) / np.mean(lengths))


def test_without_two_groups_of_lag_0_or_with_a_number_that_is_none_nothing_is_measured() -> None:
    fine = np.ones((3, 2))
    spoiled = np.array([[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]])
    assert moments_of(fine, [0, 1, 1]) == {}
    assert moments_of(fine, [1, 1, 1]) == {}
    assert moments_of(spoiled, [0, 1, 0]) == {}
    assert moments_of(np.zeros((3, 2)), [0, 0, 1]) == {}
    assert list(moments_of(fine, [0, 0, 1])) == [0]


def made(draws: np.random.Generator, *, cosine: float, ratio: float, noise: float, groups: int = 8) -> Moments:
    """A measurement of two buckets: in that of lag 5 to 8 the gradient has this cosine and norm to that of lag 0."""
    new, old = np.zeros((2, SIZE))
    new[0] = 1.0
    old[:2] = ratio * cosine, ratio * math.sqrt(1 - cosine**2)

    def parts(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        each: NDArray[np.float64] = gradient + draws.normal(0.0, noise / math.sqrt(SIZE), (groups, SIZE))
        return each / groups

    return moments_of(np.concatenate([parts(new), parts(old)]), [0] * groups + [4] * groups)


@pytest.mark.parametrize(("cosine", "ratio"), [(1.0, 1.0), (0.9, 1.5), (0.3, 0.5), (-0.5, 1.0)])
def test_the_estimates_are_those_beneath_noise_three_times_as_long_as_the_gradient(cosine: float, ratio: float) -> None:
    """Read off the gradients as they are, a cosine of 1 would be 8 / (8 + 9) of it here."""
    draws = np.random.default_rng(5)
    readings = [
        reading_of([made(draws, cosine=cosine, ratio=ratio, noise=3.0) for _ in range(8)], version=0) for _ in range(60)
    ]
    found = [each.at(4) for each in readings]
    cosines = [each.cosine for each in found if each is not None and each.cosine is not None]
    ratios = [each.norm_ratio for each in found if each is not None and each.norm_ratio is not None]
    errors = [each.error for each in found if each is not None and each.error is not None]
    assert len(cosines) == len(ratios) == len(errors) == 60
    assert np.mean(cosines) == pytest.approx(cosine, abs=0.04)
    assert np.mean(ratios) == pytest.approx(ratio, rel=0.06)
    assert np.mean(errors) == pytest.approx(np.std(cosines), rel=0.5), "the jackknife says how far they scatter"
    halves = [each.halves for each in readings if each.halves is not None]
    assert np.mean(halves) == pytest.approx(4 / (4 + 9), abs=0.04), "of four groups each"


def test_two_cosines_that_noise_would_hide_are_told_apart_by_their_errors() -> None:
    draws = np.random.default_rng(6)
    good, bad = (
        reading_of([made(draws, cosine=cosine, ratio=1.0, noise=3.0) for _ in range(8)], version=0).at(4)
        for cosine in (0.95, 0.2)
    )
    assert good is not None
    assert bad is not None
    assert not good.is_under(0.8)
    assert bad.is_under(0.8)


def test_a_measurement_counts_by_its_directions_and_not_by_how_long_its_gradients_are() -> None:
    sketches = np.random.default_rng(1).normal(1.0, 1.0, (6, 4))
    buckets = [0, 0, 0, 1, 1, 1]
    once, longer = moments_of(sketches, buckets), moments_of(1e3 * sketches, buckets)
    assert [longer[0].pairs, longer[1].cross] == pytest.approx([once[0].pairs, once[1].cross])


def test_an_error_wants_three_measurements_and_noise_alone_hides_a_cosine() -> None:
    draws = np.random.default_rng(7)
    history = [made(draws, cosine=0.9, ratio=1.0, noise=1.0) for _ in range(MIN_MEASUREMENTS)]
    few, enough = (reading_of(history[:count], version=0).at(4) for count in (2, 3))
    assert few is not None
    assert enough is not None
    assert few.error is None
    assert enough.error is not None
    apart = {bucket: BucketMoments(units=2, own=2.0, pairs=-0.5, cross=0.1) for bucket in (0, 4)}
    hidden = reading_of([apart], version=0)
    assert hidden.at(4) is not None
    assert (hidden.cosines, hidden.norm_ratios, hidden.text) == ({"halves of lag 0": -0.25}, {}, "")


def test_a_reading_in_a_line_and_as_a_step_holds_it() -> None:
    draws = np.random.default_rng(8)
    history = [made(draws, cosine=0.6, ratio=1.0, noise=0.0) for _ in range(3)]
    reading: LagReading = reading_of(history, version=9, wait_s=1.0, pass_s=2.0)
    assert reading.text == "0.60 ± 0.00 at lag 5-8 (halves of lag 0: 1.00)"
    assert reading.cosines == pytest.approx({"lag 5-8": 0.6, "halves of lag 0": 1.0})
    assert reading.errors == pytest.approx({"lag 5-8": 0.0}, abs=1e-6)
    assert reading.norm_ratios == pytest.approx({"lag 5-8": 1.0})
