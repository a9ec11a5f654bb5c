"""Losses of clients against formulas written out in float64, over random cases."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.algorithms.client_losses import LOSS_NAMES, ClientLossError, LossInputs
from learner.algorithms.presets.client_presets import find_client_loss
from learner.algorithms.presets.registry import ALGORITHMS
from tests.learner.algorithms.preset_totals import preset_total

CASES = 200
FLOOR = -1e8
GROUPLESS = ("grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "topr", "kimi", "dppo", "vespo", "reinforce")


def case(seed: int) -> dict[str, Tensor]:
    """Three sequences' tokens in float64: some without advantage, some impossible for one side or both."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(24, generator=generator, dtype=torch.float64)

    policy, behavior, advantages = -drawn().exp(), -drawn().exp(), drawn()
    advantages[torch.rand(24, generator=generator) < 0.3] = 0.0
    if seed % 3 == 0:
        policy[torch.rand(24, generator=generator) < 0.1] = -torch.inf
    if seed % 4 == 0:
        behavior[torch.rand(24, generator=generator) < 0.1] = -torch.inf
    low = 0.5 + 0.4 * torch.rand(24, generator=generator, dtype=torch.float64)
    return {
        "policy": policy,
        "logprobs": behavior,
        "advantages": advantages,
        "weights": drawn(),
        "clip_low_threshold": low,
        "clip_high_threshold": low + 0.6,
        "sequence_ratio_mask": (torch.rand(24, generator=generator) < 0.7).double(),
        "sequences": torch.arange(24) // 8,
    }


def floored(values: Tensor) -> Tensor:
    return torch.where(values > FLOOR, values, torch.full_like(values, FLOOR))


def plain_ratio(policy: Tensor, behavior: Tensor) -> Tensor:
    gap = floored(policy) - floored(behavior)
    return torch.where(gap.abs() > 20, math.exp(20.0) ** torch.sign(gap.detach()), torch.exp(gap.clamp(-20, 20)))


def plain_gspo(of: Mapping[str, Tensor], policy: Tensor, low: float, high: float) -> Tensor:
    total = policy.new_zeros(())
    for number in range(3):
        here = of["sequences"] == number
        inside = here & (of["sequence_ratio_mask"] > 0)
        gaps = (floored(policy.detach()) - floored(of["logprobs"]))[inside]
        shared = gaps.mean().clamp(-20, 20) if inside.any() else policy.new_zeros(())
        for p, gain in zip(policy[here], of["advantages"][here], strict=True):
            moved = torch.exp(shared) * torch.exp(floored(p) - floored(p.detach()))
            total = total - torch.minimum(moved * gain, moved.clamp(low, high) * gain)
    return total


def plain_stable(of: Mapping[str, Tensor], policy: Tensor, coefficient: float) -> Tensor:
    trained = of["advantages"] != 0
    p, q, gain = floored(policy)[trained], floored(of["logprobs"])[trained], of["advantages"][trained]
    weight = plain_ratio(p, q).detach().clamp(max=1.0)
    return -(weight * p * gain).sum() + coefficient * ((p - q).clamp(-20, 20) ** 2 / 2).clamp(max=10).sum()


def plain(name: str, of: Mapping[str, Tensor], policy: Tensor) -> Tensor:
    """The loss as it is written in the documents, with the defaults as numbers."""
    p, q, gain = floored(policy), floored(of["logprobs"]), of["advantages"]
    r = plain_ratio(policy, of["logprobs"])
    formulas: dict[str, Callable[[], Tensor]] = {
        "cross_entropy": lambda: -(of["weights"] * p).sum(),
        "importance_sampling": lambda: -(r * gain).sum(),
        "ppo": lambda: -torch.minimum(r * gain, r.clamp(0.8, 1.2) * gain).sum(),
        "cispo": lambda: -(r.detach().clamp(0.0, 4.0) * p * gain).sum(),
        "dro": lambda: -(p * gain - 0.05 / 2 * (p - q) ** 2).sum(),
        "gspo": lambda: plain_gspo(of, policy, 0.8, 1.2),
        "stable_reinforce": lambda: plain_stable(of, policy, 0.1),
    }
    return formulas[name]()


def ours(name: str, of: Mapping[str, Tensor], policy: Tensor, **config: float | str) -> Tensor:
    loss = find_client_loss(name, config)
    inputs = {key: of[key] for key in loss.required}
    for key, value in loss.optional.items():
        inputs[key] = (
            of[key] if key in ("weights", "mask", "proximal_logprobs") and key in of else torch.full_like(policy, value)
        )
    return loss.total(LossInputs(policy_logprobs=policy, sequences=of["sequences"], count=3, of=inputs))


def with_gradient(compute: Callable[[Tensor], Tensor], policy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = policy.clone().requires_grad_()
    value = compute(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    for seed in range(CASES):
        of = case(seed)
        value, gradient = with_gradient(partial(ours, name, of), of["policy"])
        expected, slope = with_gradient(partial(plain, name, of), of["policy"])
        assert bool(value.isfinite()), f"case {seed}"
        torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-9, msg=f"value of case {seed}")
        torch.testing.assert_close(gradient, slope, rtol=1e-7, atol=1e-9, msg=f"gradient of case {seed}")


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_float32_is_as_good_to_five_digits(name: str) -> None:
    for seed in range(1, CASES, 12):
        of = {key: value.float() if value.is_floating_point() else value for key, value in case(seed).items()}
        value, gradient = with_gradient(partial(ours, name, of), of["policy"])
        expected, slope = with_gradient(partial(plain, name, of), of["policy"].double())
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-5)


def test_several_targets_of_a_position_are_weighed_one_by_one() -> None:
    of = case(1)
    wide = of["policy"].reshape(8, 3).requires_grad_()
    loss = find_client_loss("cross_entropy", {})
    total = loss.total(LossInputs(wide.flatten(), of["sequences"], 3, {"weights": of["weights"]}))
    assert loss.wide
    torch.testing.assert_close(total, -(wide * of["weights"].reshape(8, 3)).sum())
    (gradient,) = torch.autograd.grad(total, wide)
    torch.testing.assert_close(gradient, -of["weights"].reshape(8, 3))


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_bounds_may_be_each_tokens_own(name: str) -> None:
    of = case(2)
    loss = find_client_loss(name, {})
    inputs = {key: of[key] for key in (*loss.required, *loss.optional)}
    together = loss.total(LossInputs(of["policy"], of["sequences"], 3, inputs))
    one_by_one = torch.zeros((), dtype=torch.float64)
    for place in range(24):
        only = torch.arange(24) == place
        advantages = torch.where(only, of["advantages"], 0)
        config = {key: float(of[key][place]) for key in loss.optional}
        one_by_one += ours(name, {**of, "advantages": advantages}, of["policy"], **config)
    torch.testing.assert_close(together, one_by_one)
    assert not torch.equal(together, ours(name, of, of["policy"]))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", {"clip_high_threshold": 1.0}),
        ("dro", {"beta": 0.5}),
        ("gspo", {"clip_low_threshold": 0.99}),
        ("stable_reinforce", {"kl_coeff": "0.7"}),
    ],
)
def test_settings_change_a_loss(name: str, config: dict[str, float | str]) -> None:
    of = case(5)
    assert ours(name, of, of["policy"], **config) != ours(name, of, of["policy"])


def test_what_is_not_known_is_refused_with_what_is() -> None:
    with pytest.raises(ClientLossError, match="no loss is named 'sac': expected one of cross_entropy, importance"):
        find_client_loss("sac", {})
    with pytest.raises(ClientLossError, match="ppo has no setting 'clip_low': expected clip_low_threshold, clip_high"):
        find_client_loss("ppo", {"clip_low": 0.2})
    with pytest.raises(ClientLossError, match="the setting beta of dro is 'much': expected a number"):
        find_client_loss("dro", {"beta": "much"})
    for wrong in (math.nan, math.inf, "nan"):
        with pytest.raises(ClientLossError, match="expected a finite number"):
            find_client_loss("dro", {"beta": wrong})


@pytest.mark.parametrize("preset", GROUPLESS)
def test_a_preset_computes_its_own_loss_on_the_tokens_that_are_trained(preset: str) -> None:
    of = case(7)
    policy = of["policy"]
    whole, gradient = with_gradient(lambda p: ours("ppo", of, p, headway=preset), policy)
    trained = of["advantages"] != 0
    part = {key: value[trained] for key, value in of.items()}
    alone, slope = with_gradient(lambda p: ours("ppo", part, p, headway=preset), policy[trained])
    torch.testing.assert_close(whole, alone)
    torch.testing.assert_close(gradient[trained], slope)
    assert bool((gradient[~trained] == 0).all())
    assert bool(gradient[trained].any())


def as_our_runs_have_it(name: str, of: Mapping[str, Tensor], policy: Tensor, *, stale: bool, **knobs: object) -> Tensor:
    return preset_total(
        name,
        policy=policy,
        behavior=of["logprobs"],
        advantages=of["advantages"],
        sequences=of["sequences"],
        anchor=of["proximal_logprobs"] if stale else None,
        lags=of["lags"],
        **knobs,
    )


PRESETS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in GROUPLESS] + [
    (name, {"proximal": "interpolate"}) for name in GROUPLESS if "proximal" in ALGORITHMS[name].model_fields
]


@pytest.mark.parametrize("stale", [False, True], ids=["policy", "proximal"])
@pytest.mark.parametrize(("preset", "knobs"), PRESETS, ids=str)
def test_a_presets_value_and_gradient_are_those_of_the_preset_itself(
    preset: str, stale: bool, knobs: dict[str, Any]
) -> None:
    for seed in range(0, CASES, 4):
        of = {**case(seed), "lags": torch.arange(24) % 5}
        if stale:
            of["proximal_logprobs"] = of["policy"] - 0.1
        policy = of["policy"]
        value, gradient = with_gradient(partial(ours, "ppo", of, headway=preset, **knobs), policy)
        expected, slope = with_gradient(partial(as_our_runs_have_it, preset, of, stale=stale, **knobs), policy)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=f"value of case {seed}")
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5, msg=f"gradient of case {seed}")


def test_an_interpolated_proximal_rests_on_lags() -> None:
    with_lags = find_client_loss("ppo", {"headway": "grpo", "proximal": "interpolate"})
    assert with_lags.required == ("logprobs", "advantages", "lags")
    assert "lags" not in find_client_loss("ppo", {"headway": "grpo"}).required
    of = case(17)
    fresh, old = (
        ours("ppo", {**of, "lags": torch.full((24,), lag)}, of["policy"], headway="grpo", proximal="interpolate")
        for lag in (0, 3)
    )
    assert fresh != old


def test_grpos_loss_is_corrected_for_lag_and_summed() -> None:
    of = case(10)
    policy = of["policy"]
    weight = plain_ratio(policy, of["logprobs"]).clamp(max=2.0)
    value, gradient = with_gradient(lambda p: ours("importance_sampling", of, p, headway="grpo"), policy)
    torch.testing.assert_close(value, -(weight * of["advantages"]).sum())
    torch.testing.assert_close(gradient, -weight * of["advantages"])
    capped = ours("importance_sampling", of, policy, headway="grpo", correction_cap=1.0)
    torch.testing.assert_close(capped, -(weight.clamp(max=1.0) * of["advantages"]).sum())


def test_a_window_leaves_tokens_out_of_the_sum() -> None:
    of = case(11)
    weight = plain_ratio(of["policy"], of["logprobs"])
    inside = (weight >= 0.5) & (weight <= 1.5)
    kept = -(weight * of["advantages"])[inside].sum()
    torch.testing.assert_close(ours("ppo", of, of["policy"], headway="grpo", token_window="0.5,1.5"), kept)


def test_a_mask_says_which_tokens_a_sequences_mean_is_over() -> None:
    of = {**case(13), "mask": torch.ones(24, dtype=torch.float64)}
    own = {key: value for key, value in of.items() if key != "mask"}
    masked, unmasked = (ours("gspo", each, of["policy"], headway="gspo", proximal="behavior") for each in (of, own))
    assert masked != unmasked


@pytest.mark.parametrize("preset", sorted(set(ALGORITHMS) - set(GROUPLESS)))
def test_presets_that_need_more_than_tokens_are_refused_by_name(preset: str) -> None:
    with pytest.raises(ClientLossError, match=f"^{preset} .*takes one of grpo, dapo"):
        find_client_loss("ppo", {"headway": preset})


def test_wrong_settings_of_a_preset_are_refused() -> None:
    with pytest.raises(ClientLossError, match="no algorithm is named 'grpo_9'"):
        find_client_loss("ppo", {"headway": "grpo_9"})
    with pytest.raises(ClientLossError, match="aggregation is no setting of headway: grpo here: advantages and sums"):
        find_client_loss("ppo", {"headway": "grpo", "aggregation": "token"})
    with pytest.raises(ClientLossError, match="kl_coefficient is no setting"):
        find_client_loss("ppo", {"headway": "grpo", "kl_coefficient": 0.1})
    with pytest.raises(ClientLossError, match="clip_low: Input should be less than or equal to 1"):
        find_client_loss("ppo", {"headway": "grpo", "clip_low": 3.0})
    with pytest.raises(ClientLossError, match="self_normalise needs a pass over the whole step"):
        find_client_loss("ppo", {"headway": "grpo", "self_normalise": 1.0})
    with pytest.raises(ClientLossError, match="cross_entropy, which has no advantages"):
        find_client_loss("cross_entropy", {"headway": "grpo"})
