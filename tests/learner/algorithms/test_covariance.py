"""Tokens that lower the entropy: covariances by hand, and what the two presets do with the tokens picked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from learner.algorithms import covariance, policy_loss
from learner.algorithms.preset import Advantages, Preset
from learner.algorithms.presets.registry import ALGORITHMS
from tests.learner.algorithms.differences import doubles, gradient
from tests.learner.algorithms.test_stale_tokens import POLICY, batch_of, loss_at

COUNTED = torch.tensor([True, True, True, False, True])


def found() -> Tensor:
    """Of the counted: A 1, 1, -1, -1, mean 0; log p -1, -2, -3, -6, mean -3: 2, 1, 0 and 3."""
    return covariance.covariances(
        advantages=doubles(1, 1, -1, 9, -1), logprobs=doubles(-1, -2, -3, -50, -6), counted=COUNTED
    )


def test_a_covariance_is_of_advantage_and_logprob_about_the_means_of_what_is_trained() -> None:
    assert found().tolist() == [2, 1, 0, 0, 3]
    assert float(found().sum() / 4) == pytest.approx(np.cov([1, 1, -1, -1], [-1, -2, -3, -6], bias=True)[0, 1])
    nothing = torch.zeros(2, dtype=torch.bool)
    none = covariance.covariances(advantages=doubles(1, 2), logprobs=doubles(-1, -2), counted=nothing)
    assert none.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("share", "picked"), [(0.01, {4}), (0.25, {4}), (0.5, {0, 4}), (0.8, {0, 1, 4}), (1.0, {0, 1, 2, 4})]
)
def test_the_largest_are_a_share_of_what_is_trained_and_at_least_one(share: float, picked: set[int]) -> None:
    made = covariance.largest(found(), share=share, counted=COUNTED)
    assert set(torch.nonzero(made)[:, 0].tolist()) == picked


def test_tokens_are_drawn_between_two_bounds_each_as_often_and_alike_by_the_seed() -> None:
    """Between 0.5 and 2.5 are the first two; a quarter of four is one."""

    def one(seed: int, share: float = 0.25) -> Tensor:
        return covariance.drawn(found(), low=0.5, high=2.5, share=share, counted=COUNTED, seed=seed)

    assert all(torch.equal(one(seed), one(seed)) for seed in range(5))
    counts = torch.stack([one(seed) for seed in range(400)]).sum(dim=0).tolist()
    assert counts[2:] == [0, 0, 0]
    assert sum(counts) == 400
    assert min(counts[:2]) > 150
    assert one(3, share=1.0).tolist() == [True, True, False, False, False]
    assert not covariance.drawn(found(), low=7.0, high=9.0, share=1.0, counted=COUNTED, seed=1).any()


def test_nothing_is_picked_where_nothing_is_trained() -> None:
    nothing = torch.zeros(5, dtype=torch.bool)
    assert not covariance.largest(found(), share=1.0, counted=nothing).any()
    assert not covariance.drawn(found(), low=-9.0, high=9.0, share=1.0, counted=nothing, seed=1).any()
    empty = torch.zeros(0, dtype=torch.bool)
    assert covariance.largest(doubles(), share=1.0, counted=empty).tolist() == []


def test_a_pulled_token_has_the_slope_of_its_distance_to_the_proximal_policy() -> None:
    """Ratios e^0.5, e^0.5 and e^-0.5; A 2, 2 and -1; the last two are pulled by 0.3."""
    gaps = doubles(0.5, 0.5, -0.5)
    proximal, advantages = doubles(-2, -2, -2), doubles(2, 2, -1)
    pulled = torch.tensor([False, True, True])

    def losses(policy: Tensor) -> Tensor:
        return policy_loss.kl_cov(
            policy_logprobs=policy, proximal_logprobs=proximal, advantages=advantages, pulled=pulled, pull=0.3
        ).losses

    up, down = float(torch.exp(gaps[0])), float(torch.exp(gaps[2]))
    assert losses(proximal + gaps).tolist() == pytest.approx([-2 * up, 0.15 - 2 * up, 0.15 + down])
    slopes = gradient(lambda policy: losses(policy).sum(), proximal + gaps)
    assert slopes.tolist() == pytest.approx([-2 * up, 0.3 - 2 * up, down - 0.3])


def made_by(name: str, **knobs: object) -> tuple[Preset, Advantages]:
    """Of four trajectories in groups of two, good and bad: A is 1/sqrt(2) at the tokens 0, 1 and 7, its negative at the
    others, -1/(4 sqrt(2)) on average. log p is -1.025 on average, so that 1 and 7 have the largest covariances of those
    that are good, and 2 the largest of the bad: 0.464, 0.552 and 0.517.
    """
    preset = ALGORITHMS[name].model_validate({"type": name, **knobs}).preset()
    assert preset.advantages is not None
    assert preset.passes.proximal
    return preset, preset.advantages(batch_of(POLICY, POLICY))


def test_clip_cov_takes_the_advantage_of_the_tokens_that_it_draws() -> None:
    _, made = made_by("clip_cov", covariance_share=1.0, covariance_low=0.4, covariance_high=0.6)
    assert [value == 0 for value in made.advantages.tolist()] == [False, True, True, False, False, False, False, True]
    assert made.means["covariance_share"] == 3 / 8
    _, plain = made_by("clip_cov")
    assert not (plain.advantages == 0).any()


def test_the_measured_share_is_of_the_tokens_that_count() -> None:
    """The last trajectory, two tokens, was cut off and is masked: of the other six one is drawn, whatever lies between
    the bounds.
    """
    knobs = {"covariance_share": 0.01, "covariance_low": -9.0, "covariance_high": 9.0, "truncated": "mask"}
    preset = ALGORITHMS["clip_cov"].model_validate({"type": "clip_cov", **knobs}).preset()
    assert preset.advantages is not None
    batch = batch_of(POLICY, POLICY)
    last = torch.arange(len(batch.rewards)) == len(batch.rewards) - 1
    left = int((batch.sequences != len(batch.rewards) - 1).sum())
    assert left < len(batch.sequences)
    made = preset.advantages(replace(batch, truncated=last))
    assert made.kept is not None
    assert int(made.kept.sum()) == left
    assert made.means["covariance_share"] == 1 / left


@pytest.mark.parametrize(("low", "high"), [(5.0, 1.0), (2.0, 2.0)])
def test_bounds_between_which_no_token_lies_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValidationError, match=r"covariance_low is .* no token lies between"):
        ALGORITHMS["clip_cov"].model_validate({"type": "clip_cov", "covariance_low": low, "covariance_high": high})


def test_kl_cov_pulls_the_tokens_with_the_largest_covariances() -> None:
    preset, made = made_by("kl_cov", covariance_share=0.25)
    assert made.pulled is not None
    assert torch.nonzero(made.pulled)[:, 0].tolist() == [2, 7]
    still = gradient(lambda policy: loss_at(preset, policy, behavior=POLICY, proximal=POLICY), POLICY)
    moved = gradient(lambda policy: loss_at(preset, policy, behavior=POLICY - 0.1, proximal=POLICY - 0.1), POLICY)
    # The ratio is e^0.1 and the pull 1, each of the eight tokens weighs an eighth.
    expected = still * torch.exp(doubles(0.1)) + made.pulled.double() / 8
    torch.testing.assert_close(moved, expected)
