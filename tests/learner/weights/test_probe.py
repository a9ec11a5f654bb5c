"""The texts of a probe, and what the gap of a generator's logprobs says."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.weights.probe import Probe, ProbeGap, Prober, Texts, texts_of
from protocol.trajectories import TrajectoryGroup
from tests.learner.samples import group, trajectory


def groups(*rewards: tuple[float, ...]) -> list[TrajectoryGroup]:
    """A group for each tuple; the tokens of a trajectory are 10 times its group's number, plus its own."""
    return [
        group(
            number,
            *(trajectory(1, 1, 1, reward=reward, token_id=10 * number + own) for own, reward in enumerate(of_group)),
        )
        for number, of_group in enumerate(rewards)
    ]


def test_the_texts_are_the_best_of_each_group_first_until_there_are_enough_tokens() -> None:
    made = groups((0.0, 1.0), (1.0, 0.0), (0.0, 0.5))
    assert [text[0] for text in texts_of(made, tokens=20)] == [1, 10, 21, 0]
    assert texts_of(made, tokens=8) == ((1, 1), (10, 10), (21, 21), (0, 0)), "a text is a quarter of all at most"
    assert texts_of([*made, *made], tokens=1000) == texts_of(made, tokens=1000), "no text is there twice"


def test_a_text_is_looked_at_by_the_version_before_the_one_that_it_is_published_with() -> None:
    version = 0

    def logprobs(texts: Texts) -> list[float]:
        return [-100.0 * version - token for text in texts for token in text[1:]]

    prober = Prober(first=(7, 8, 9), tokens=20, logprobs=logprobs)
    assert prober.probe() == Probe(texts=((7, 8, 9),), logprobs=(-8.0, -9.0))
    version = 1
    prober.renew(groups((1.0,)))
    assert prober.probe() == Probe(texts=((7, 8, 9),), logprobs=(-108.0, -109.0), before=(-8.0, -9.0))
    version = 2
    prober.renew(groups((1.0,), (0.0,)))
    assert prober.probe() == Probe(texts=((0,) * 5,), logprobs=(-200.0,) * 4, before=(-100.0,) * 4)
    version = 3
    assert prober.probe().texts == ((0,) * 5, (10,) * 5)
    version = 4
    assert prober.probe().before == (-300.0,) * 4 + (-310.0,) * 4, "without a new batch the texts stay"


def test_an_engine_is_asked_for_no_text_that_it_cannot_hold() -> None:
    probe = Probe(texts=((1, 2, 3), (4, 5)), logprobs=(-1.0, -2.0, -3.0), before=(-4.0, -5.0, -6.0))
    assert probe.within(4) is probe
    assert probe.within(3) == Probe(texts=((4, 5),), logprobs=(-3.0,), before=(-6.0,))
    assert probe.within(2) == Probe()


def test_a_gap_is_the_mean_and_a_high_quantile_and_not_the_largest() -> None:
    ours = np.full(100, -1.0)
    theirs = ours + 0.1 * np.where(np.arange(100) % 2, 1, -1)
    theirs[0] += 50.0
    gap = ProbeGap.of(Probe(texts=((0,) * 101,), logprobs=tuple(ours)), tuple(theirs))
    assert gap.mean == pytest.approx(0.1 + 0.498, abs=0.01)
    assert gap.high == pytest.approx(0.1)
    assert gap.tokens == 100


@pytest.mark.parametrize(("version", "old"), [("right", False), ("one before", True), ("ten before", True)])
def test_weights_that_are_old_are_told_though_an_update_moves_less_than_the_noise(version: str, old: bool) -> None:
    random = np.random.default_rng(0)
    before, update, noise = random.normal(-1, 0.5, 512), random.normal(0, 0.05, 512), random.laplace(0, 0.05, 512)
    served = {"right": before + update, "one before": before, "ten before": before - 3 * update}[version]
    texts = tuple((number,) * 17 for number in range(32))
    probe = Probe(texts=texts, logprobs=tuple(before + update), before=tuple(before))
    in_two_publishes = 2 * ProbeGap.of(probe, tuple(served + noise)).age
    assert (in_two_publishes > 14) is old


@pytest.mark.parametrize("alike", [1, 8, 32])
@pytest.mark.parametrize("shape", ["laplace", "normal", "standard_t"])
def test_right_weights_are_not_called_old_where_rounding_moves_the_learners_logprobs_as_much_as_the_update(
    shape: str, alike: int
) -> None:
    """As in bfloat16 at a small learning rate: each side, and each version of the learner's, is off by its own."""
    random = np.random.default_rng(1)

    draw: dict[str, Callable[[], NDArray[np.float64]]] = {
        "laplace": lambda: random.laplace(0, 0.04, 256),
        "normal": lambda: random.normal(0, 0.04, 256),
        "standard_t": lambda: 0.04 * random.standard_t(3, 256),
    }

    def rounding() -> NDArray[np.float64]:
        """The same for so many tokens of a text."""
        return np.repeat(draw[shape]()[: 256 // alike], alike)

    texts = tuple((number,) * 33 for number in range(8))
    evidence = 0.0
    for _ in range(2000):
        before = random.normal(-1, 0.5, 256)
        now = before + random.normal(0, 0.004, 256)
        probe = Probe(texts=texts, logprobs=tuple(now + rounding()), before=tuple(before + rounding()))
        evidence = max(0.0, evidence + ProbeGap.of(probe, tuple(now + rounding())).age)
        assert evidence < 14


def test_an_update_that_changes_nothing_is_no_evidence() -> None:
    probe = Probe(texts=((0, 1, 2),), logprobs=(-1.0, -2.0), before=(-1.0, -2.0))
    assert ProbeGap.of(probe, (-1.5, -2.5)).age == 0.0


@pytest.mark.parametrize("theirs", [(-1.0,), (-1.0, math.nan), (-1.0, -math.inf), ()])
def test_an_answer_that_does_not_fit_is_infinitely_far_away(theirs: tuple[float, ...]) -> None:
    assert not ProbeGap.of(Probe(texts=((0, 1, 2),), logprobs=(-1.0, -2.0)), theirs).finite


def test_nothing_is_compared_with_logprobs_of_the_learner_that_are_not_finite() -> None:
    probe = Probe(texts=((0, 1, 2),), logprobs=(-1.0, math.nan))
    assert not probe.usable
    assert ProbeGap.of(probe, (-3.0, -3.0)) == ProbeGap()


def test_an_update_that_moves_nothing_to_speak_of_is_no_evidence_however_the_noise_falls() -> None:
    ours = np.linspace(-3.0, -1.0, 256)
    before = ours + 1e-6
    theirs = before + 1e-7
    probe = Probe(texts=((0,) * 257,), logprobs=tuple(ours), before=tuple(before))
    assert ProbeGap.of(probe, tuple(theirs)).age == 0.0
