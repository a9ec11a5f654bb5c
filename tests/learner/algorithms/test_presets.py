"""Presets as the trainer sees them: on a policy that is one row of logits, every one of them learns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from learner.algorithms.preset import Advantages, CarriedState, LossTokens, Preset, ScoredBatch
from learner.algorithms.presets.custom import AlgorithmNotFound
from learner.algorithms.presets.registry import AlgorithmConfig

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
ACTIONS, GROUPS, SIZE = 6, 8, 8
GOOD = 2


def preset_of(algo: str, **knobs: object) -> Preset:
    return ADAPTER.validate_python({"type": algo, **knobs}).preset()


@dataclass(frozen=True)
class Draw:
    """A step of one-token trajectories: `actions` and `rewards` [S], all of `GROUPS` groups."""

    actions: Tensor
    rewards: Tensor
    behavior: Tensor

    @property
    def groups(self) -> Tensor:
        return torch.arange(GROUPS).repeat_interleave(SIZE)


def drawn(logits: Tensor, generator: torch.Generator) -> Draw:
    logprobs = torch.log_softmax(logits.detach(), dim=0)
    actions = torch.multinomial(logprobs.exp(), GROUPS * SIZE, replacement=True, generator=generator)
    return Draw(actions=actions, rewards=(actions == GOOD).double(), behavior=logprobs[actions])


def selected(preset: Preset, draw: Draw) -> Tensor:
    """The trajectories that the preset trains, in order."""
    if preset.select is None:
        return torch.arange(len(draw.actions))
    of_groups = draw.rewards.reshape(GROUPS, SIZE).tolist()
    return torch.tensor(
        [group * SIZE + index for group, rewards in enumerate(of_groups) for index in preset.select(rewards)],
        dtype=torch.int64,
    )


def good_weights(preset: Preset, rewards: Tensor, kept: Tensor) -> Tensor:
    """Weights of trajectories of one token each, among the good ones."""
    assert preset.good_reward is not None
    good = kept & (rewards >= preset.good_reward)
    return torch.from_numpy(preset.weights(good.numpy().astype(np.int64)))


def loss_of(
    preset: Preset, draw: Draw, logits: Tensor, *, reference: Tensor, teacher: Tensor, start: Tensor | None = None
) -> Tensor:
    """The trainer's loss for an update in one microbatch: a step's only one, or one after its `start`."""
    chosen = selected(preset, draw)
    actions, count = draw.actions[chosen], len(chosen)
    policy = torch.log_softmax(logits, dim=0)[actions]
    proximal = policy.detach() if start is None else torch.log_softmax(start, dim=0)[actions]
    scored = ScoredBatch(
        rewards=draw.rewards[chosen],
        groups=draw.groups[chosen],
        truncated=torch.zeros(count, dtype=torch.bool),
        components=draw.rewards[chosen].reshape(-1, 1),
        sequences=torch.arange(count),
        token_ids=actions,
        turns=torch.arange(count),
        turn_states=draw.groups[chosen],
        lags=torch.zeros(count, dtype=torch.int64),
        behavior_logprobs=draw.behavior[chosen],
        proximal_logprobs=proximal,
        reference_logprobs=torch.log_softmax(reference, dim=0)[actions],
        teacher_logprobs=torch.log_softmax(teacher, dim=0)[actions],
        values=torch.zeros(count, dtype=torch.float64),
        greedy_rewards=torch.zeros(count, dtype=torch.float64),
        logit_norms=1
        - 2 * proximal.exp()
        + torch.softmax(logits.detach() if start is None else start, 0).square().sum(),
    )
    made = None if preset.advantages is None else preset.advantages(scored)
    kept = torch.ones(count, dtype=torch.bool) if made is None or made.kept is None else made.kept
    weights = torch.from_numpy(preset.weights(kept.numpy().astype(np.int64)))
    return preset.loss(
        LossTokens(
            policy_logprobs=policy,
            proximal_logprobs=proximal,
            behavior_logprobs=draw.behavior[chosen],
            advantages=torch.zeros(count, dtype=torch.float64) if made is None else made.advantages,
            lags=torch.zeros(count, dtype=torch.int64),
            weights=weights * kept,
            good_weights=None if preset.good_reward is None else good_weights(preset, draw.rewards[chosen], kept),
            sequences=torch.arange(count),
            sequence_weights=weights,
            labels=torch.ones(count, dtype=torch.bool),
            pairs=torch.arange(count).reshape(-1, 2) if preset.paired else torch.zeros(0, 2, dtype=torch.int64),
            margins=torch.zeros(count // 2, dtype=torch.float64),
            reference_logprobs=scored.reference_logprobs,
            entropy=-(torch.log_softmax(logits, 0) * torch.softmax(logits, 0)).sum().expand(count),
            pulled=None if made is None else made.pulled,
            entropy_coefficient=None if made is None else made.entropy_coefficient,
            correction_scale=1.0 if made is None else made.correction_scale,
        )
    ).total


STREAMED = [
    ("grpo", {}),
    ("grpo", {"dual_clip": 3.0, "kl_coefficient": 0.01, "kl_form": "k2", "entropy_coefficient": 1e-3}),
    ("grpo", {"token_window": (0.5, 5.0), "correction": "none"}),
    ("grpo", {"sequence_window": (0.5, 5.0), "proximal": "interpolate"}),
    ("grpo", {"correction": "sequence", "truncated": "mask", "reward_scale": 2.0, "reward_clip": 1.0}),
    ("grpo", {"proximal": "behavior"}),
    ("grpo", {"correction": "geometric", "correction_floor": 0.5, "self_normalise": True, "token_veto": 1e-4}),
    ("grpo", {"correction_cap": 1.0, "correction_cap_bad": 5.0}),
    ("rloo", {"ratio_cap_bad": 5.0}),
    ("grpo", {"divergence_limit": 0.5, "advantage_scale": "batch", "kl_coefficient": 0.01, "kl_ratio": True}),
    ("grpo", {"second_moment_limit": 0.04, "clip_low": 1.0, "clip_high": 4.0}),
    ("grpo", {"binary_kl_limit": 2.0, "second_moment_limit": 0.04, "token_veto": 1e-4, "count_left_out": True}),
    ("grpo", {"entropy_target": 3.0, "entropy_coefficient": 1e-3}),
    ("clip_cov", {"covariance_share": 0.05, "covariance_low": 0.1}),
    ("kl_cov", {"covariance_share": 0.05}),
    ("gmpo", {}),
    ("sapo", {}),
    ("grpo", {"reward_normalisation": "standardise", "length_penalty": 0.1, "positive_nll": 0.1}),
    ("gdpo", {"components": {"good": 1.0}}),
    ("dr_grpo", {"constant_length": 1}),
    ("dapo", {"overlong_length": 64, "overlong_buffer": 32}),
    ("max_rl", {}),
    ("pass_at_k", {}),
    ("gspo", {}),
    ("luspo", {}),
    ("cispo", {}),
    ("topr", {}),
    ("kimi", {}),
    ("dro", {}),
    ("dppo", {}),
    ("dppo", {"divergence": "kl"}),
    ("vespo", {}),
    ("vcpo", {}),
    ("opo", {}),
    ("otb", {}),
    ("rae", {}),
    ("remax", {}),
    ("gvpo", {}),
    ("reinforce", {}),
    ("reinforce", {"ratio_cap": None, "kl_coefficient": 0.01, "kl_in": "reward"}),
    ("rloo", {}),
    ("rloo", {"policy_loss": "sequence_clip", "kl_coefficient": 0.01}),
    ("reinforce_pp", {"kl_coefficient": 0.01}),
    ("reinforce_pp", {"group_baseline": True}),
    ("ppo", {"kl_coefficient": 0.01, "kl_control": "adaptive", "length_adaptive_alpha": 0.05}),
    ("gigpo", {}),
    ("hgpo", {}),
    ("treerl", {}),
    ("online_dpo", {}),
    ("best_of_k", {}),
    ("opd", {}),
]


@pytest.mark.parametrize(("algo", "knobs"), STREAMED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_preset_knows_whether_its_loss_has_a_gradient_without_advantages(algo: str, knobs: dict[str, object]) -> None:
    preset = preset_of(algo, **knobs)
    without = preset if preset.advantages is None else replace(preset, advantages=lambda step: _none_of(preset, step))
    logits = torch.linspace(-1.0, 1.0, ACTIONS, dtype=torch.float64).requires_grad_()
    start = torch.flip(logits.detach(), (0,))
    draw = drawn(start, torch.Generator().manual_seed(3))
    loss = loss_of(without, draw, logits, reference=start, teacher=start, start=start)
    (found,) = torch.autograd.grad(loss, logits)
    assert bool((found == 0).all()) == preset.rests_on_advantages


def _none_of(preset: Preset, batch: ScoredBatch) -> Advantages:
    assert preset.advantages is not None
    made = preset.advantages(batch)
    return replace(made, advantages=torch.zeros_like(made.advantages))


@pytest.mark.parametrize(("algo", "knobs"), STREAMED, ids=lambda value: value if isinstance(value, str) else "")
def test_every_streamed_preset_makes_the_rewarded_action_likely(algo: str, knobs: dict[str, object]) -> None:
    preset = preset_of(algo, **knobs)
    logits = torch.zeros(ACTIONS, dtype=torch.float64, requires_grad=True)
    reference = torch.zeros(ACTIONS, dtype=torch.float64)
    teacher = torch.zeros(ACTIONS, dtype=torch.float64).index_fill(0, torch.tensor([GOOD]), 6.0)
    generator = torch.Generator().manual_seed(3)
    adam = torch.optim.Adam([logits], lr=0.05)
    for _ in range(120):
        draw = drawn(logits, generator)
        if len(selected(preset, draw)) == 0:
            continue
        adam.zero_grad()
        loss_of(preset, draw, logits, reference=reference, teacher=teacher).backward()  # type: ignore[no-untyped-call]
        adam.step()
    assert preset.samples_policy
    assert float(torch.softmax(logits.detach(), dim=0)[GOOD]) > 0.8


def gradient(preset: Preset, draw: Draw, at: Tensor) -> Tensor:
    logits = at.clone().requires_grad_()
    zeros = torch.zeros_like(at)
    (found,) = torch.autograd.grad(loss_of(preset, draw, logits, reference=zeros, teacher=zeros), logits)
    return found


@pytest.mark.parametrize(("algo", "knobs"), [("grpo", {}), ("dppo", {"kappa": 0.0}), ("cispo", {}), ("kimi", {})])
def test_on_policy_with_one_update_the_gradient_is_that_of_reinforce(algo: str, knobs: dict[str, object]) -> None:
    at = torch.linspace(-1.0, 1.0, ACTIONS, dtype=torch.float64)
    draw = drawn(at, torch.Generator().manual_seed(5))
    expected = gradient(preset_of("reinforce"), draw, at)
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(gradient(preset_of(algo, **knobs), draw, at), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algo", ["sft", "rm", "dpo", "distill"])
def test_presets_that_learn_from_files_sample_nothing(algo: str) -> None:
    assert not preset_of(algo).samples_policy


def test_a_group_that_failed_as_a_whole_has_no_best_to_train() -> None:
    select = preset_of("best_of_k").select
    assert select is not None
    assert [tuple(select(rewards)) for rewards in ([0.0, 0.0], [1.0, 1.0], [0.0, 1.0, 1.0], [0.5])] == [
        (),
        (),
        (1,),
        (),
    ]


def test_a_weight_of_the_entropy_that_adapts_takes_part_where_there_is_too_little_of_it() -> None:
    """Six actions, none likelier: ln 6 = 1.79 nats at each token."""
    at = torch.zeros(ACTIONS, dtype=torch.float64)
    draw = drawn(at, torch.Generator().manual_seed(1))
    skewed = torch.linspace(-1.0, 1.0, ACTIONS, dtype=torch.float64)
    plain, bonus = preset_of("grpo"), preset_of("grpo", entropy_coefficient=2e-3)
    for target, like in ((1.8, bonus), (1.7, plain)):
        preset = preset_of("grpo", entropy_target=target, entropy_coefficient=2e-3)
        assert preset.entropy_gradient
        torch.testing.assert_close(gradient(preset, draw, skewed), gradient(like, draw, skewed))
    assert float((gradient(bonus, draw, skewed) - gradient(plain, draw, skewed)).abs().max()) > 1e-5


@pytest.mark.parametrize(("target", "now", "following"), [(1.2, 2e-3, 2.1e-3), (0.9, 0.0, 1.9e-3)])
def test_the_weight_of_the_entropy_is_carried_from_step_to_step(target: float, now: float, following: float) -> None:
    """Tokens at -0.5 and -1.5: an entropy of 1 nat."""
    preset = preset_of("grpo", entropy_target=target, entropy_coefficient=1e-3)
    sequences = torch.tensor([0, 1])
    scored = ScoredBatch(
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        groups=torch.tensor([0, 0]),
        truncated=torch.tensor([False, False]),
        components=torch.zeros(2, 0, dtype=torch.float64),
        sequences=sequences,
        token_ids=sequences,
        turns=sequences,
        turn_states=sequences,
        lags=torch.zeros_like(sequences),
        behavior_logprobs=torch.tensor([-0.5, -1.5], dtype=torch.float64),
        carried=CarriedState(entropy_coefficient=2e-3),
    )
    assert preset.advantages is not None
    made = preset.advantages(scored)
    assert made.entropy_coefficient == now
    assert made.carried is not None
    assert made.carried.entropy_coefficient == pytest.approx(following)
    assert made.means == pytest.approx({"entropy_coefficient": now, "sampled_entropy": 1.0})
    begun = preset.advantages(replace(scored, carried=CarriedState())).carried
    assert begun is not None
    assert begun.entropy_coefficient == pytest.approx(1.1e-3 if target > 1 else 9e-4)


def test_a_window_takes_tokens_out_of_numerator_and_denominator() -> None:
    at = torch.zeros(ACTIONS, dtype=torch.float64)
    draw = drawn(at, torch.Generator().manual_seed(1))
    far = torch.arange(len(draw.actions)) % 2 == 0
    stale = Draw(
        actions=draw.actions, rewards=draw.rewards, behavior=torch.where(far, draw.behavior - 3, draw.behavior)
    )
    preset = preset_of("grpo", token_window=(0.5, 5.0), correction="none")
    counted = preset_of("grpo", token_window=(0.5, 5.0), correction="none", count_left_out=True)
    # Every other token has w = e^3 > 5: left out of a mean over half as many tokens, or over all of them.
    torch.testing.assert_close(gradient(preset, stale, at), 2 * gradient(counted, stale, at))


def test_gdpo_normalises_each_component_in_its_group_before_it_weighs_them() -> None:
    """Two groups of two. `fast`: 1, 3 and 0, 0: in its group (R - mean) / d = -+1/sqrt(2), 0, 0. `right`: 0, 0 and 1,
    0: 0, 0, +-1/sqrt(2). Weighted by 1 and 2: (-1, 1, 2, -2) / sqrt(2); mean 0, deviation sqrt((1 + 1 + 4 + 4) / 8).
    """
    preset = preset_of("gdpo", components={"fast": 1.0, "right": 2.0}, truncated="mask")
    assert preset.components == ("fast", "right")
    assert preset.advantages is not None
    sequences = torch.tensor([0, 1, 1, 2, 3])
    scored = ScoredBatch(
        rewards=torch.tensor([9.0, 8.0, 7.0, 6.0], dtype=torch.float64),
        groups=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([False, False, False, False]),
        components=torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
        sequences=sequences,
        token_ids=sequences,
        turns=sequences,
        turn_states=torch.zeros(4, dtype=torch.int64),
        lags=torch.zeros_like(sequences),
        behavior_logprobs=torch.zeros(5, dtype=torch.float64),
    )
    root = (10 / 8) ** 0.5
    expected = [value / 2**0.5 / root for value in (-1.0, 1.0, 1.0, 2.0, -2.0)]
    assert preset.advantages(scored).advantages.tolist() == pytest.approx(expected, abs=1e-5)
    # Without the last, cut off: -1, 1, 2 over sqrt(2). Of -1, 1, 2 the mean is 2/3, the variance (25 + 1 + 16) / 27.
    cut = preset.advantages(replace(scored, truncated=torch.tensor([False, False, False, True])))
    spread = (14 / 9) ** 0.5
    left = [(value - 2 / 3) / spread for value in (-1.0, 1.0, 1.0, 2.0)]
    assert cut.advantages.tolist() == pytest.approx([*left, 0.0], abs=1e-5)


def test_the_likelihood_of_good_trajectories_is_a_mean_over_their_tokens_alone() -> None:
    """With k of n good, the gradient differs from grpo's by that of 0.5 x -(1/k) sum over them of log p."""
    at = torch.linspace(-1.0, 1.0, ACTIONS, dtype=torch.float64)
    draw = drawn(at, torch.Generator().manual_seed(5))
    good = draw.rewards == 1
    logits = at.clone().requires_grad_()
    likelihood = torch.log_softmax(logits, dim=0)[draw.actions[good]].mean()
    (expected,) = torch.autograd.grad(-0.5 * likelihood, logits)
    assert 0 < int(good.sum()) < len(good)
    added = gradient(preset_of("grpo", positive_nll=0.5), draw, at) - gradient(preset_of("grpo"), draw, at)
    torch.testing.assert_close(added, expected)
    none_good = gradient(preset_of("grpo", positive_nll=0.5, positive_reward=2.0), draw, at)
    torch.testing.assert_close(none_good, gradient(preset_of("grpo"), draw, at))


@pytest.mark.parametrize(("alpha", "expected"), [(None, [0.95**2, 0.95, 1.0]), (0.5, [1 / 9, 1 / 3, 1.0])])
def test_ppos_lambda_can_grow_with_the_trajectory(alpha: float | None, expected: list[float]) -> None:
    """Three tokens, a reward of 1 at the end, values of 0: A_t = lambda^(2 - t). lambda = 1 - 1 / (0.5 x 3) = 1/3."""
    preset = preset_of("ppo", whiten=False, **({} if alpha is None else {"length_adaptive_alpha": alpha}))
    sequences = torch.zeros(3, dtype=torch.int64)
    scored = ScoredBatch(
        rewards=torch.ones(1, dtype=torch.float64),
        groups=torch.zeros(1, dtype=torch.int64),
        truncated=torch.zeros(1, dtype=torch.bool),
        components=torch.zeros(1, 0),
        sequences=sequences,
        token_ids=sequences,
        turns=sequences,
        turn_states=torch.zeros(1, dtype=torch.int64),
        lags=sequences,
        behavior_logprobs=torch.zeros(3, dtype=torch.float64),
        values=torch.zeros(3, dtype=torch.float64),
    )
    assert preset.advantages is not None
    made = preset.advantages(scored)
    assert made.advantages.tolist() == pytest.approx(expected)
    assert made.returns is not None
    assert made.returns.tolist() == pytest.approx([1.0, 1.0, 1.0])


def own_algorithm(*, scale: float) -> Preset:
    """A user's own: grpo times a number."""
    inner = preset_of("grpo")

    def loss(tokens: LossTokens) -> "object":
        made = inner.loss(tokens)
        return type(made)(total=scale * made.total)

    return Preset(
        name="own",
        loss=loss,  # type: ignore[arg-type]
        weights=inner.weights,
        advantages=inner.advantages,
        samples_policy=True,
    )


def own_greedy_algorithm() -> Preset:
    return replace(own_algorithm(scale=1.0), greedy_baseline=True)


def test_an_algorithm_of_ones_own_is_named_by_import_path() -> None:
    at = torch.linspace(-1.0, 1.0, ACTIONS, dtype=torch.float64)
    draw = drawn(at, torch.Generator().manual_seed(5))
    own = preset_of("custom", path=f"{__name__}:own_algorithm", options={"scale": 3.0})
    torch.testing.assert_close(gradient(own, draw, at), 3 * gradient(preset_of("grpo"), draw, at))


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("no.such:thing", {}, "ModuleNotFoundError"),
        (f"{__name__}:no_such", {}, "AttributeError"),
        (f"{__name__}:own_algorithm", {"size": 1}, "unexpected keyword argument 'size'"),
        ("builtins:dict", {}, "returned dict; expected a Preset"),
        (f"{__name__}:own_greedy_algorithm", {}, "greedy answers are sampled for remax alone"),
    ],
)
def test_an_algorithm_that_cannot_be_had_is_named(path: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(AlgorithmNotFound, match=said):
        preset_of("custom", path=path, options=options)


def test_an_algorithm_whose_module_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaving_algorithm.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(AlgorithmNotFound, match="SystemExit: 3"):
        preset_of("custom", path="leaving_algorithm:build")


Check = Callable[[Preset], bool]


@pytest.mark.parametrize(
    ("algo", "knobs", "check"),
    [
        ("grpo", {}, lambda preset: not preset.passes.reference and not preset.passes.proximal),
        ("grpo", {"kl_coefficient": 0.1}, lambda preset: preset.passes.reference and not preset.passes.proximal),
        ("rloo", {"kl_coefficient": 0.1}, lambda preset: preset.passes.reference and preset.passes.proximal),
        ("grpo", {"token_window": (0.5, 2.0)}, lambda preset: preset.passes.proximal),
        ("ppo", {}, lambda preset: preset.passes.values),
        ("opd", {}, lambda preset: preset.passes.teacher),
        ("dpo", {"loss": "simpo"}, lambda preset: not preset.passes.reference),
    ],
)
def test_only_the_passes_that_are_needed_are_run(algo: str, knobs: dict[str, object], check: Check) -> None:
    assert check(preset_of(algo, **knobs))
