"""A trajectory of several contexts is several sequences, and a correction looks at the same ones in the whole step as
in the loss.

w is exp(proximal - behavior) of a token. Trajectory 0 consists of two contexts, trajectory 1 of one; the group's
rewards are centred, so that their advantages are +1/2 and -1/2. At a step's start the ratio r is 1, so the slope of a
token is -advantage / tokens x its weight.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from learner.algorithms.policy_loss import once_for_each
from learner.algorithms.preset import Advantages, CarriedState, Preset, ScoredBatch
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.models import StepData, TokenScores, credit, loss_tokens
from learner.training.packing import pack, shared_prefixes

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
BEHAVIOR = -1.0
COUNTED: dict[str, object] = {"count_left_out": True, "self_normalise": True}


@dataclass(frozen=True)
class SplitStep:
    """Result of a step at its trained tokens, in order: `kept`, of which there are `counted`, and in `weights` the
    slope of the loss times -`counted` / advantage, which is `scale` times the weight of the correction.
    """

    kept: list[bool]
    weights: list[float]
    scale: float
    counted: int


def batch_of(*contexts: tuple[float, ...], last: tuple[float, ...], rewards: tuple[float, float]) -> FlatBatch:
    """Trajectory 0 of `contexts`, trajectory 1 of `last`: a number for each trained token, behind a prompt of one."""
    parts = [
        TrainSequence(
            token_ids=np.arange(1 + len(ratios), dtype=np.int32),
            loss_mask=np.arange(1 + len(ratios)) > 0,
            behavior_logprobs=np.array([0.0, *[BEHAVIOR] * len(ratios)], dtype=np.float32),
            lags=np.zeros(1 + len(ratios), dtype=np.int32),
            reward=rewards[0],
            continues=number > 0,
        )
        for number, ratios in enumerate((*contexts, last))
    ]
    parts[-1] = replace(parts[-1], continues=False, reward=rewards[1])
    return flatten(parts)


def preset_of(**knobs: object) -> Preset:
    return ADAPTER.validate_python({"type": "grpo", "advantage_scale": "none", **knobs}).preset()


def trained(
    *contexts: tuple[float, ...],
    last: tuple[float, ...],
    rewards: tuple[float, float] = (1.0, 0.0),
    knobs: dict[str, object],
) -> SplitStep:
    """The step whose correction weights are those numbers, each sequence in a microbatch of its own."""
    batch, preset = batch_of(*contexts, last=last, rewards=rewards), preset_of(**knobs)
    logs = [value for ratios in (*contexts, last) for value in (0.0, *(BEHAVIOR + math.log(w) for w in ratios))]
    scores = TokenScores(proximal_logprobs=torch.tensor(logs))
    made = credit(batch, scores, preset=preset, carried=CarriedState())
    weights = once_for_each(preset.weights, trained_lengths=made.kept_lengths(batch), trajectories=batch.trajectories)
    data = StepData(batch, scores, made, weights, critic_targets=None, good_weights=None)
    slopes = _slopes(data, preset)
    mask = torch.from_numpy(batch.loss_mask)
    counted = int(made.kept.sum())
    return SplitStep(
        kept=made.kept[mask].tolist(),
        weights=(-counted * slopes / made.advantages)[mask].tolist(),
        scale=made.correction_scale,
        counted=counted,
    )


def _slopes(data: StepData, preset: Preset) -> torch.Tensor:
    """The gradient of the step's loss with respect to each token's logprob, [N]."""
    proximal = data.scores.proximal_logprobs
    assert proximal is not None
    policy = proximal.clone().requires_grad_()
    for number in range(len(data.batch.lengths)):
        microbatch = pack(data.batch, np.array([number]), prefixes=shared_prefixes(data.batch))
        tokens = loss_tokens(data, microbatch, logprobs=policy[microbatch.places], entropy=None)
        preset.loss(tokens).total.backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    return policy.grad


def seen(batch: FlatBatch) -> ScoredBatch:
    """The batch as an advantage sees it."""
    found: list[ScoredBatch] = []

    def estimate(scored: ScoredBatch) -> Advantages:
        found.append(scored)
        return Advantages(advantages=torch.zeros(len(scored.sequences)))

    credit(batch, TokenScores(), preset=replace(preset_of(), advantages=estimate), carried=CarriedState())
    return found[0]


def test_rewards_are_of_trajectories_and_contexts_are_told_apart() -> None:
    split = seen(batch_of((1.0, 1.0), (1.0,), last=(1.0,), rewards=(1.0, 0.0)))
    assert split.contexts is not None
    assert (split.sequences.tolist(), split.contexts.tolist()) == ([0, 0, 0, 1], [0, 0, 1, 2])
    whole = seen(batch_of((1.0, 1.0, 1.0), last=(1.0,), rewards=(1.0, 0.0)))
    assert whole.contexts is not None
    assert whole.contexts.tolist() == whole.sequences.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("correction", "weights"),
    [("sequence", [3.0, 3.0, 0.4, 1.0]), ("geometric", [3**0.5, 3**0.5, 0.4, 1.0])],
)
def test_a_product_or_mean_over_a_context_is_normalised_by_the_weights_of_contexts(
    correction: str, weights: list[float]
) -> None:
    """Over the trajectory the product would be 1.2."""
    knobs: dict[str, object] = {"correction": correction, "correction_cap": 10.0}
    plain = trained((1.5, 2.0), (0.4,), last=(1.0,), knobs=knobs)
    assert plain.weights == pytest.approx(weights, rel=1e-5)
    normal = trained((1.5, 2.0), (0.4,), last=(1.0,), knobs={**knobs, "self_normalise": True})
    assert normal.scale == pytest.approx(4 / sum(weights), rel=1e-5)
    assert normal.weights == pytest.approx([4 / sum(weights) * weight for weight in weights], rel=1e-5)
    assert sum(normal.weights) == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize(
    ("contexts", "kept"),
    [((3.0, 0.4), [False, False, True]), ((0.8, 6.0), [True, False, True])],
    ids=["both out, their mean 1.1", "one out, their mean 2.2"],
)
def test_a_window_leaves_out_of_the_counts_the_contexts_that_it_leaves_out_of_the_loss(
    contexts: tuple[float, float], kept: list[bool]
) -> None:
    """The weight of each token is w, which is within the cap, and the mean is over those that are kept."""
    first, second = contexts
    step = trained((first,), (second,), last=(0.8,), knobs={"sequence_window": (0.5, 2.0)})
    assert (step.kept, step.counted) == (kept, sum(kept))
    ratios = (first, second, 0.8)
    assert step.weights == pytest.approx([w if k else 0.0 for w, k in zip(ratios, kept, strict=True)], rel=1e-5)


def test_a_veto_leaves_out_the_context_of_the_token_and_no_other() -> None:
    contexts = ((1.2, 0.05), (0.8,))
    step = trained(*contexts, last=(1.6,), knobs={"token_veto": 0.1})
    assert (step.kept, step.counted) == ([False, False, True, True], 2)
    assert step.weights == pytest.approx([0.0, 0.0, 0.8, 1.6], rel=1e-5)


def test_divergence_leaves_out_the_bad_tokens_of_the_context_that_diverged() -> None:
    """Behavior is a nat above proximal in the first context; over the trajectory it would be 0.59 nats a token."""
    far = math.exp(-1)
    step = trained((far, far), (1.25,), last=(0.9,), rewards=(0.0, 1.0), knobs={"divergence_limit": 0.5})
    assert (step.kept, step.counted) == ([False, False, True, True], 2)
    assert step.weights == pytest.approx([0.0, 0.0, 1.25, 0.9], rel=1e-5)


def test_a_window_whose_tokens_count_normalises_by_the_contexts_of_the_loss() -> None:
    """The first two are left out of the loss, so the only weight left is 0.8."""
    step = trained((3.0,), (0.4,), last=(0.8,), knobs={"sequence_window": (0.5, 2.0), **COUNTED})
    assert (step.kept, step.counted) == ([True] * 3, 3)
    assert step.scale == pytest.approx(1 / 0.8, rel=1e-5)
    assert step.weights == pytest.approx([0.0, 0.0, 1.0], rel=1e-5)


def test_a_veto_whose_tokens_count_normalises_by_the_contexts_of_the_loss() -> None:
    step = trained((1.2, 0.05), (0.8,), last=(1.6,), knobs={"token_veto": 0.1, **COUNTED})
    assert (step.kept, step.counted) == ([True] * 4, 4)
    assert step.scale == pytest.approx(2 / 2.4, rel=1e-5)
    assert step.weights == pytest.approx([0.0, 0.0, 2 / 3, 4 / 3], rel=1e-5)


def test_divergence_whose_tokens_count_normalises_by_the_contexts_of_the_loss() -> None:
    far = math.exp(-1)
    step = trained((far, far), (1.25,), last=(0.9,), rewards=(0.0, 1.0), knobs={"divergence_limit": 0.5, **COUNTED})
    assert (step.kept, step.counted) == ([True] * 4, 4)
    assert step.scale == pytest.approx(2 / 2.15, rel=1e-5)
    assert step.weights == pytest.approx([0.0, 0.0, 2.5 / 2.15, 1.8 / 2.15], rel=1e-5)


def test_a_second_moment_is_of_the_tokens_that_a_filter_leaves_in_the_loss() -> None:
    """log w is 0.1 and -3, of which the veto takes both; 1.0 in the other context; 0.1 twice in trajectory 1. Squares
    of the three that are left: 1, 0.01, 0.01, of mean 0.34. So the largest goes, out of the counts as well.
    """
    near, far = math.exp(0.1), math.exp(1.0)
    knobs: dict[str, object] = {"token_veto": 0.1, "second_moment_limit": 0.1, "count_left_out": True}
    step = trained((near, math.exp(-3.0)), (far,), last=(near, near), knobs=knobs)
    assert (step.kept, step.counted) == ([True, True, False, True, True], 4)
    assert step.weights == pytest.approx([0.0, 0.0, 0.0, near, near], rel=1e-5)
