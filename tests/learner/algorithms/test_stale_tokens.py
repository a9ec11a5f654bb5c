"""Stale tokens: every loss that trains on streamed tokens is corrected for them, or says that it is not."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from learner.algorithms.knobs import Knobs
from learner.algorithms.old_tokens import LEFT_OUT_OF_OLD, OldTokenBound
from learner.algorithms.preset import LossTokens, Preset, ScoredBatch
from learner.algorithms.presets.gdpo import GdpoConfig
from learner.algorithms.presets.pass_at_k import PassAtKConfig
from learner.algorithms.presets.registry import STREAMED, AlgorithmConfig
from tests.learner.algorithms.differences import doubles, gradient

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])
POLICY = doubles(-1.0, -0.5, -2.0, -0.7, -1.2, -0.9, -1.5, -0.4)
REWARDS = doubles(1.0, 0.0, 0.0, 1.0)
SHIFT = 1.5 * doubles(1, 1, -1, -1, -1, 1, 1, -1)
"""Nats, up for two trajectories and down for two: a cap hides a change on one side."""


def batch_of(behavior: Tensor, proximal: Tensor, *, lag: int = 2, truncated: Tensor | None = None) -> ScoredBatch:
    """Four trajectories of two groups, of 2, 3, 2 and 1 tokens."""
    return ScoredBatch(
        rewards=REWARDS,
        groups=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool) if truncated is None else truncated,
        components=REWARDS.reshape(-1, 1),
        sequences=SEQUENCES,
        token_ids=torch.arange(8),
        turns=SEQUENCES,
        turn_states=torch.tensor([0, 0, 1, 1]),
        lags=torch.full((8,), lag),
        behavior_logprobs=behavior,
        proximal_logprobs=proximal,
        reference_logprobs=torch.full_like(POLICY, -1.0),
        teacher_logprobs=torch.linspace(-0.5, -1.5, 8, dtype=torch.float64),
        values=torch.full_like(POLICY, 0.25),
        logit_norms=torch.linspace(0.2, 1.2, 8, dtype=torch.float64),
        greedy_rewards=doubles(0.25, 0.25, 1.0, 1.0),
    )


def loss_at(preset: Preset, policy: Tensor, *, behavior: Tensor, proximal: Tensor, lag: int = 2) -> Tensor:
    """The loss of a step in one microbatch, the policy somewhere, the proximal where it is said to be."""
    scored = batch_of(behavior, proximal, lag=lag)
    made = None if preset.advantages is None else preset.advantages(scored)
    kept = torch.ones(8, dtype=torch.bool) if made is None or made.kept is None else made.kept
    weights = torch.from_numpy(preset.weights(np.bincount(SEQUENCES[kept], minlength=4)))
    return preset.loss(
        LossTokens(
            policy_logprobs=policy,
            proximal_logprobs=proximal,
            behavior_logprobs=behavior,
            advantages=torch.zeros_like(policy) if made is None else made.advantages,
            lags=scored.lags,
            weights=weights[SEQUENCES] * kept,
            sequences=SEQUENCES,
            sequence_weights=weights,
            labels=torch.ones(4, dtype=torch.bool),
            pairs=torch.tensor([[0, 1], [3, 2]]) if preset.paired else torch.zeros(0, 2, dtype=torch.int64),
            margins=torch.zeros(2, dtype=torch.float64),
            reference_logprobs=scored.reference_logprobs,
            pulled=None if made is None else made.pulled,
            correction_scale=1.0 if made is None else made.correction_scale,
        )
    ).total


def slope(preset: Preset, behavior: Tensor) -> Tensor:
    """The gradient of a step's first update, where the proximal policy is the policy itself."""
    return gradient(lambda policy: loss_at(preset, policy, behavior=behavior, proximal=POLICY), POLICY)


def notices(preset: Preset) -> bool:
    shifted, same = slope(preset, POLICY + SHIFT), slope(preset, POLICY)
    assert float(same.abs().max()) > 0
    return float((shifted - same).abs().max()) > 0.01 * float(same.abs().max())


def choices(kind: type[Knobs]) -> list[dict[str, object]]:
    """The defaults, and each other choice of a loss, of a correction and of the proximal policy."""
    found: list[dict[str, object]] = [{}]
    for name in ("policy_loss", "correction", "proximal"):
        field = kind.model_fields.get(name)
        if field is None:
            continue
        for value in get_args(field.annotation):
            found.append({name: value})
            if "policy_loss" in kind.model_fields and name != "policy_loss":
                found[-1] |= {"policy_loss": "sequence_clip"}
    return found


REQUIRED: dict[type[Knobs], dict[str, object]] = {
    GdpoConfig: {"components": {"correct": 1.0}},
    PassAtKConfig: {"k": 1},
}
"""Knobs that an algorithm needs; in groups of two, as here, sets are of one."""
CASES = [(kind, given) for kind in STREAMED for given in choices(kind)]


@pytest.mark.parametrize(
    ("kind", "given"), CASES, ids=[f"{kind.model_fields['type'].default}-{given}" for kind, given in CASES]
)
def test_every_gradient_on_streamed_tokens_notices_the_behavior_policy_or_says_that_it_does_not(
    kind: type[Knobs], given: dict[str, object]
) -> None:
    config = kind.model_validate(REQUIRED.get(kind, {}) | given)
    said = "uncorrected" in (kind.__doc__ or "") and kind.model_fields["type"].default in ("online_dpo", "best_of_k")
    chosen = given.get("correction") == "none"
    assert notices(ADAPTER.validate_python(config).preset()) is not (said or chosen)


def test_what_is_not_corrected_is_said_where_it_is_chosen() -> None:
    for field in ("correction", "kl_ratio", "positive_nll", "entropy_coefficient"):
        kinds = [kind for kind in STREAMED if field in kind.model_fields]
        assert kinds
        assert all("uncorrected" in (kind.model_fields[field].description or "") for kind in kinds)


@pytest.mark.parametrize("algo", ["rloo", "gspo", "luspo", "gmpo", "sapo", "kimi", "grpo", "kl_cov"])
def test_a_correction_multiplies_the_gradient_of_a_first_update(algo: str) -> None:
    """w = e^-1.5 = 0.223 where behavior is 1.5 nats above, and e^1.5 = 4.48, capped at 2, where it is below."""
    given = {"policy_loss": "sequence_clip"} if algo == "rloo" else {}
    preset = ADAPTER.validate_python({"type": algo, **given}).preset()
    expected = slope(preset, POLICY) * torch.exp(-SHIFT).clamp(max=2.0)
    torch.testing.assert_close(slope(preset, POLICY + SHIFT), expected)


def test_luspo_is_gspo_times_the_length_of_each_trajectory() -> None:
    """Of 2, 3, 2 and 1 tokens."""
    luspo, gspo = (ADAPTER.validate_python({"type": name}).preset() for name in ("luspo", "gspo"))
    lengths = doubles(2, 2, 3, 3, 3, 2, 2, 1)
    torch.testing.assert_close(slope(luspo, POLICY + SHIFT), slope(gspo, POLICY + SHIFT) * lengths)


def test_rloos_sequence_clip_is_of_the_product_over_the_trajectory() -> None:
    """The policy 0.1 nats above the proximal at each token: the mean ratio 1.105 is within 0.2 of 1; the products are
    e^0.2 = 1.22 and e^0.3 = 1.35 for the longer ones, e^0.1 for the last, good one. Good are 0 and 3: 0 is clipped.
    """
    preset = ADAPTER.validate_python({"type": "rloo", "policy_loss": "sequence_clip"}).preset()
    slopes = gradient(lambda policy: loss_at(preset, policy, behavior=POLICY - 0.1, proximal=POLICY - 0.1), POLICY)
    assert [value != 0 for value in slopes.tolist()] == [False, False, True, True, True, True, True, True]


@pytest.mark.parametrize(
    ("given", "moves"),
    [
        ({"type": "grpo"}, False),
        ({"type": "grpo", "proximal": "behavior"}, True),
        ({"type": "grpo", "proximal": "interpolate"}, True),
        ({"type": "gspo", "proximal": "behavior"}, True),
        ({"type": "cispo"}, True),
        ({"type": "vespo"}, True),
        ({"type": "vcpo"}, True),
        ({"type": "opo"}, True),
        ({"type": "otb"}, True),
        ({"type": "rae"}, True),
        ({"type": "remax"}, True),
        ({"type": "dro"}, True),
        ({"type": "rloo"}, True),
        ({"type": "rloo", "policy_loss": "sequence_clip"}, False),
    ],
)
def test_a_ratio_that_differs_from_1_in_the_first_update_is_known_to(given: dict[str, object], moves: bool) -> None:
    assert ADAPTER.validate_python(given).preset().moves_at_once is moves


@pytest.mark.parametrize("algo", ["ppo", "reinforce_pp"])
def test_whitening_leaves_out_trajectories_that_are_not_trained(algo: str) -> None:
    """Trajectory 1 was cut off: the others' advantages have mean 0 and deviation 1 among themselves."""
    preset = ADAPTER.validate_python({"type": algo, "truncated": "mask"}).preset()
    assert preset.advantages is not None
    truncated = torch.tensor([False, True, False, False])
    made = preset.advantages(batch_of(POLICY, POLICY, truncated=truncated))
    kept = ~truncated[SEQUENCES]
    assert made.kept is not None
    assert made.kept.tolist() == kept.tolist()
    of_kept = made.advantages[kept]
    assert float(of_kept.mean()) == pytest.approx(0, abs=1e-9)
    assert float(of_kept.std(correction=0)) == pytest.approx(1, abs=1e-4)
    assert made.advantages[~kept].tolist() == [0, 0, 0]


def test_whitening_leaves_out_tokens_that_a_filter_takes_out() -> None:
    preset = ADAPTER.validate_python({"type": "reinforce_pp", "token_veto": 0.5}).preset()
    assert preset.advantages is not None
    behavior = POLICY + doubles(0, 1.5, 0, 0, 0, 0, 0, 0)  # w = 0.22 at the second token of trajectory 0
    made = preset.advantages(batch_of(behavior, POLICY))
    assert made.kept is not None
    assert made.kept.tolist() == [False, False, *[True] * 6]
    # Left are rewards 0, 0, 0 | 0, 0 | 1: mean 1/6, variance 5/36.
    expected = [-1 / 5**0.5] * 5 + [5 / 5**0.5]
    assert made.advantages.tolist() == pytest.approx([0, 0, *expected], abs=1e-4)


def test_the_divergence_mask_of_a_preset_looks_at_its_advantages() -> None:
    """Behavior is above the policy by 1.5 in trajectories 0, good, and 2, bad: the latter leaves the loss."""
    preset = ADAPTER.validate_python({"type": "grpo", "divergence_limit": 0.5}).preset()
    assert preset.advantages is not None
    assert preset.passes.proximal
    made = preset.advantages(batch_of(POLICY + SHIFT, POLICY))
    assert made.kept is not None
    assert made.kept.tolist() == [True] * 5 + [False, False, True]


@pytest.mark.parametrize("counted", [False, True])
def test_a_second_moment_leaves_out_tokens_of_a_step_and_of_its_counts(counted: bool) -> None:
    """log w is 0.1 at all tokens, but for 1.0 at the third and 3.0 at the last, which the veto takes first: its w is
    e^-3. Squares 0.01 six times and 1: mean 0.151, above 0.1.
    """
    given: dict[str, object] = {
        "type": "grpo",
        "second_moment_limit": 0.1,
        "token_veto": 0.1,
        "count_left_out": counted,
    }
    preset = ADAPTER.validate_python(given).preset()
    assert preset.advantages is not None
    assert preset.passes.proximal
    behavior = POLICY - doubles(0.1, 0.1, 1.0, 0.1, 0.1, 0.1, 0.1, -3.0)
    made = preset.advantages(batch_of(behavior, POLICY))
    assert made.kept is not None
    assert made.kept.tolist() == [True, True, False, True, True, True, True, counted]
    slopes = slope(preset, behavior).tolist()
    assert [value != 0 for value in slopes] == [True, True, False, True, True, True, True, False]


@pytest.mark.parametrize("knobs", [{}, {"proximal": "behavior"}, {"proximal": "interpolate"}, {"token_veto": 0.1}])
def test_of_tokens_beyond_the_lag_of_others_the_second_moment_is_bounded_by_itself(knobs: dict[str, object]) -> None:
    """Lag 9 at the last four tokens, log w 0.1, 0.3, -0.2 and 3.0: squares 0.01, 0.09, 0.04 and 9. The mean of the two
    smallest is 0.025, that of three 0.047. The young ones have 1.0, and hide nothing and lose nothing.
    """
    preset = ADAPTER.validate_python({"type": "grpo", **knobs}).preset()
    assert preset.advantages is not None
    assert preset.bounds_old_tokens
    behavior = POLICY - doubles(1.0, 1.0, 1.0, 1.0, 0.1, 0.3, -0.2, 3.0)
    lags = torch.tensor([2, 2, 2, 2, 9, 9, 9, 9])
    batch = replace(batch_of(behavior, POLICY), lags=lags)
    bounded = preset.advantages(replace(batch, old_tokens=OldTokenBound(4, 0.04)))
    assert bounded.kept is not None
    assert bounded.kept.tolist() == [True, True, True, True, True, False, True, False]
    assert bounded.means[LEFT_OUT_OF_OLD] == 2
    free, young = preset.advantages(batch), preset.advantages(replace(batch, old_tokens=OldTokenBound(9, 0.04)))
    assert free.kept is not None
    assert young.kept is not None
    assert LEFT_OUT_OF_OLD not in free.means
    assert (bool(free.kept.all()), bool(young.kept.all()), young.means[LEFT_OUT_OF_OLD]) == (True, True, 0)


def test_self_normalised_weights_are_those_of_the_step_over_their_mean() -> None:
    """w = 0.223 for 4 tokens and 2 for the other 4: the mean is 1.112."""
    low = float(torch.exp(torch.tensor(-1.5, dtype=torch.float64)))
    preset = ADAPTER.validate_python({"type": "grpo", "self_normalise": True}).preset()
    plain = ADAPTER.validate_python({"type": "grpo"}).preset()
    assert preset.advantages is not None
    made = preset.advantages(batch_of(POLICY + SHIFT, POLICY))
    assert made.correction_scale == pytest.approx(8 / (4 * low + 4 * 2))
    expected = slope(plain, POLICY + SHIFT) * made.correction_scale
    torch.testing.assert_close(slope(preset, POLICY + SHIFT), expected)
