"""Levels of outcomes: moments by hand, who counts as another, and which of several levels is believed."""

from collections.abc import Mapping

import numpy as np
import pytest

from learner.trust.levels import FEWEST_TOKENS, Levels, Moments

LAGS = 2


def moments(levels: Mapping[str, float], *, tokens: int = 2000, groups: int = 20, lag: int = 0) -> Moments:
    """Moments of an outcome that is as given at each token of a process, in trajectories of 10."""
    each = np.arange(tokens)
    return Moments.of(
        np.repeat(list(levels.values()), tokens)[None],
        np.repeat(np.arange(len(levels)) * LAGS + lag, tokens),
        texts=np.tile(each // 10, len(levels)),
        groups=np.tile(each % groups, len(levels)),
        shape=(len(levels), LAGS),
    )


def seen(*steps: tuple[Mapping[str, float], int]) -> Levels:
    """Levels after steps, each with so many tokens of a process."""
    levels = Levels()
    for each, tokens in steps:
        levels.see(list(each), moments(each, tokens=tokens))
    return levels


def median(
    levels: Levels, name: str, *, lag: int = 0, sign: float = 1.0, left_out: tuple[str, ...] = ()
) -> float | None:
    """The others' level as `name` is compared with it."""
    found = levels.of_others(left_out=left_out).of(levels.names.index(name), lag, 0, sign=sign)
    return None if found is None else found[0]


def test_moments_by_hand() -> None:
    """Trajectories of 1 and 2 tokens with sums 3 and 6: all means are 3, so the mean is exact by their spread."""
    found = Moments.of(
        np.array([[3.0, 2.0, 4.0]]), np.zeros(3, int), texts=np.array([7, 8, 8]), groups=np.zeros(3, int), shape=(1, 1)
    )

    assert (found.tokens[0, 0], found.groups[0, 0], found.sizes[0, 0]) == (3, 1, 5)
    assert (found.sums[0, 0, 0], found.squares[0, 0, 0], found.mixed[0, 0, 0]) == (9, 45, 15)
    assert found.means[0, 0, 0] == 3
    assert found.variances[0, 0, 0] == 0


def test_the_variance_of_a_mean_is_by_trajectory_and_not_by_token() -> None:
    """Sums 0 and 4 of two tokens each around 2: (2^2 + 2^2) / 4^2 = 0.5."""
    found = Moments.of(
        np.array([[0.0, 0.0, 2.0, 2.0]]), np.zeros(4, int), texts=np.array([0, 0, 1, 1]), groups=np.zeros(4, int),
        shape=(1, 1),
    )  # fmt: skip

    assert found.variances[0, 0, 0] == pytest.approx(0.5)


def test_moments_are_told_apart_by_process_and_lag() -> None:
    found = Moments.of(
        np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([0, 1, 3, 3]), texts=np.zeros(4, int), groups=np.zeros(4, int),
        shape=(2, 2),
    )  # fmt: skip

    assert found.sums[..., 0].tolist() == [[1, 2], [0, 7]]


def test_the_others_are_all_but_oneself_and_those_left_out() -> None:
    levels = seen(({"a": 9.0, "b": 1.0, "c": 5.0}, 2000))

    assert median(levels, "a", left_out=("c",)) == 1.0
    assert median(levels, "c", left_out=("c", "b")) == 9.0


@pytest.mark.parametrize(
    ("others", "expected"), [([4.0], 4.0), ([0.0, 4.0], 4.0), ([0.0, 4.0, 9.0], 4.0), ([0.0, 3.0, 4.0, 9.0], 4.0)]
)
@pytest.mark.parametrize("own", [-1.0, 3.5, 10.0])
def test_of_several_levels_the_median_is_believed_and_of_two_the_larger(
    own: float, others: list[float], expected: float
) -> None:
    levels = seen(({"a": own, **{str(number): mean for number, mean in enumerate(others)}}, 2000))

    assert median(levels, "a") == expected


def test_with_a_sign_the_median_is_of_the_other_end() -> None:
    levels = seen(({"a": 0.0, "b": 1.0, "c": 3.0}, 2000))

    assert median(levels, "a", sign=-1.0) == -1.0


def test_the_variance_is_that_of_a_median() -> None:
    """Of each process 2 trajectories of 1 token, 0 and 2, 500 times: (1 + 1) 500 / 1000^2 = 0.001."""
    values = np.tile([0.0, 2.0], 500)
    levels = Levels()
    names = [str(number) for number in range(5)]
    found = Moments.of(
        np.tile(values, 5)[None], np.repeat(np.arange(5), 1000), texts=np.arange(5000), groups=np.arange(5000),
        shape=(5, 1),
    )  # fmt: skip
    levels.see(names, found)

    level = levels.of_others().of(0, 0, 0)

    assert level is not None
    assert level == pytest.approx((1.0, 0.001 * np.pi / 2 / 4))


@pytest.mark.parametrize(("tokens", "groups"), [(FEWEST_TOKENS - 10, 20), (2000, 7)])
def test_too_few_tokens_or_groups_of_the_others_say_nothing(tokens: int, groups: int) -> None:
    levels = Levels()
    levels.see(["a", "b"], moments({"a": 1.0, "b": 1.0}, tokens=tokens, groups=groups))

    assert median(levels, "a") is None


def test_another_lag_says_nothing() -> None:
    assert median(seen(({"a": 1.0, "b": 1.0}, 2000)), "a", lag=1) is None


def test_former_steps_fill_up_what_the_present_one_lacks_and_no_more() -> None:
    """500 tokens of 4 and 500 of 2."""
    levels = seen(({"a": 0.0, "b": 2.0}, 2000), ({"a": 0.0, "b": 4.0}, 500))
    assert median(levels, "a") == pytest.approx(3.0)

    levels.see(["a", "b"], moments({"a": 0.0, "b": 8.0}))
    assert median(levels, "a") == 8.0


def test_a_process_that_is_gone_is_a_measure_for_a_while_and_then_forgotten() -> None:
    levels = seen(({"a": 0.0, "b": 2.0}, 2000), ({"a": 1.0}, 2000))
    assert median(levels, "a") == 2.0

    for _ in range(40):
        levels.see(["a"], moments({"a": 1.0}))
    assert levels.names == ("a",)
    assert median(levels, "a") is None


def test_rows_follow_their_processes_when_the_order_of_names_changes() -> None:
    levels = seen(({"a": 1.0, "b": 2.0, "c": 9.0}, 2000))
    levels.see(["c", "a"], moments({"c": 9.0, "a": 1.0}, tokens=200))

    assert levels.names == ("c", "a", "b")
    assert median(levels, "c") == pytest.approx(2.0)
    assert median(levels, "b") == pytest.approx(9.0)
