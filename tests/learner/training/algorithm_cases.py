"""Each algorithm with sequences that have what it looks at, and settings of training with which it shows itself."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from learner.training.batch import Candidates, TrainSequence
from tests.learner.training.tiny_model import conversing, random_sequences
from tests.learner.training.two_ranks_of_algorithms import grouped, half_mismatched, paired, two_players

OPTIMIZER = {"learning_rate": 1e-2, "epsilon": 1e-4}


def componented(count: int) -> list[TrainSequence]:
    return [
        replace(sequence, components=(index % 3 / 2, sequence.reward)) for index, sequence in enumerate(grouped(count))
    ]


def greedily_compared(count: int) -> list[TrainSequence]:
    return [replace(sequence, greedy_reward=0.25 * (sequence.group % 3)) for sequence in grouped(count)]


def half_taught(count: int) -> list[TrainSequence]:
    """Every other sequence has a teacher's logprobs already."""
    return [
        sequence if index % 2 else replace(sequence, teacher_logprobs=np.where(sequence.loss_mask, -3.0, 0.0))
        for index, sequence in enumerate(grouped(count))
    ]


def told(sequence: TrainSequence) -> TrainSequence:
    """With a teacher's logprobs and its candidates: tokens 3 to 7, 0.5 of the mass and the next 0.25, …"""
    trained = sequence.loss_mask[:, None]
    ids = np.where(trained, np.arange(3, 8), 0).astype(np.int32)
    logprobs = np.where(trained, np.log(0.5) * np.arange(1, 6), 0).astype(np.float32)
    taught = np.where(sequence.loss_mask, -3.0, 0.0).astype(np.float32)
    return replace(sequence, teacher_logprobs=taught, candidates=Candidates(ids, logprobs))


def half_shown(count: int) -> list[TrainSequence]:
    """Every other sequence has a teacher's candidates already."""
    return [sequence if index % 2 else told(sequence) for index, sequence in enumerate(grouped(count))]


def scored(count: int) -> list[TrainSequence]:
    """Pairs of which one token, the last, is marked: the model's score is that of the token before it."""
    return [
        replace(
            sequence,
            loss_mask=np.arange(len(sequence.token_ids)) == len(sequence.token_ids) - 1,
            behavior_logprobs=np.zeros(len(sequence.token_ids), dtype=np.float32),
            lags=np.zeros(len(sequence.token_ids), dtype=np.int32),
        )
        for sequence in paired(count)
    ]


HEAD = {"kind": "head", "trunk_gradient": 0.5, "optimizer": OPTIMIZER}
ALGORITHM_CASES: list[tuple[dict[str, object], Callable[[int], list[TrainSequence]], dict[str, object]]] = [
    ({"type": "dr_grpo", "constant_length": 24}, grouped, {}),
    ({"type": "dapo"}, grouped, {"updates_per_step": 2}),
    ({"type": "max_rl"}, grouped, {}),
    ({"type": "cispo"}, grouped, {"updates_per_step": 2}),
    ({"type": "topr"}, grouped, {"updates_per_step": 2}),
    ({"type": "kimi"}, grouped, {"updates_per_step": 2}),
    ({"type": "reinforce"}, grouped, {}),
    ({"type": "best_of_k"}, grouped, {}),
    ({"type": "sft"}, random_sequences, {}),
    ({"type": "gspo"}, grouped, {}),
    ({"type": "grpo", "second_moment_limit": 2.0, "binary_kl_limit": 1.5}, grouped, {"updates_per_step": 2}),
    ({"type": "clip_cov", "covariance_share": 0.1, "covariance_low": 0.1}, grouped, {"updates_per_step": 2}),
    ({"type": "kl_cov", "covariance_share": 0.1}, grouped, {"updates_per_step": 2}),
    ({"type": "luspo"}, grouped, {"updates_per_step": 2}),
    ({"type": "vespo"}, grouped, {"updates_per_step": 2}),
    ({"type": "vcpo"}, grouped, {"updates_per_step": 2}),
    ({"type": "dppo", "divergence": "kl"}, grouped, {"updates_per_step": 2}),
    ({"type": "opo"}, grouped, {}),
    ({"type": "gvpo"}, grouped, {}),
    ({"type": "otb"}, grouped, {}),
    ({"type": "otb", "kl_coefficient": 0.1, "kl_in": "reward"}, grouped, {"updates_per_step": 2}),
    ({"type": "rae"}, two_players, {}),
    ({"type": "remax"}, greedily_compared, {}),
    ({"type": "dro"}, grouped, {"updates_per_step": 2}),
    ({"type": "pass_at_k", "right_reward": 0.0}, grouped, {}),
    ({"type": "gmpo"}, grouped, {"updates_per_step": 2}),
    ({"type": "sapo", "advantage_scale": "batch"}, grouped, {"updates_per_step": 2}),
    ({"type": "rloo", "policy_loss": "sequence_clip", "aggregation": "sequence_sum"}, grouped, {"updates_per_step": 2}),
    (
        {"type": "grpo", "correction": "geometric", "correction_floor": 0.5, "self_normalise": True, "token_veto": 0.2},
        grouped,
        {},
    ),
    ({"type": "grpo", "divergence_limit": 0.01, "kl_coefficient": 0.1, "kl_ratio": True}, grouped, {}),
    ({"type": "grpo", "token_window": [0.2, 5.0], "kl_coefficient": 0.1}, grouped, {"updates_per_step": 2}),
    ({"type": "grpo", "entropy_coefficient": 0.05}, grouped, {}),
    ({"type": "grpo", "positive_nll": 0.1, "positive_reward": 0.0}, grouped, {"updates_per_step": 2}),
    ({"type": "gdpo", "components": {"a": 1.0, "b": 0.5}}, componented, {}),
    ({"type": "rloo", "kl_coefficient": 0.1}, grouped, {}),
    ({"type": "reinforce_pp", "kl_coefficient": 0.1}, grouped, {}),
    ({"type": "gigpo"}, grouped, {}),
    ({"type": "hgpo"}, grouped, {}),
    ({"type": "treerl"}, grouped, {}),
    ({"type": "ppo", "kl_coefficient": 0.1}, grouped, {"updates_per_step": 2}),
    ({"type": "ppo"}, grouped, {"updates_per_step": 2, "critic": HEAD}),
    ({"type": "opd"}, grouped, {}),
    ({"type": "opd"}, half_taught, {}),
    ({"type": "opd", "divergence": "reverse_kl", "teacher_tokens": 5}, grouped, {}),
    ({"type": "opd", "divergence": "jsd", "teacher_tokens": 5}, half_shown, {"updates_per_step": 2}),
    ({"type": "grpo", "teacher_weight": 0.5, "teacher_tokens": 5}, half_shown, {}),
    (
        {"type": "grpo", "teacher_weight": 0.5, "teacher_tokens": 5, "observation_weight": 0.3},
        lambda count: conversing(grouped(count)),
        {"updates_per_step": 2},
    ),
    (
        {"type": "ppo", "observation_weight": 0.3},
        lambda count: conversing(grouped(count)),
        {"updates_per_step": 2, "critic": HEAD},
    ),
    ({"type": "online_dpo"}, paired, {"updates_per_step": 2}),
    ({"type": "dpo", "sft_weight": 0.1}, paired, {}),
    ({"type": "dpo", "loss": "ipo"}, paired, {}),
    ({"type": "dpo", "loss": "orpo"}, paired, {}),
    ({"type": "dpo", "loss": "simpo"}, paired, {}),
    ({"type": "dpo", "loss": "length_normalised"}, paired, {}),
    ({"type": "dpo", "loss": "bco"}, paired, {"updates_per_step": 2}),
    ({"type": "dpo", "loss": "exo", "reference_free": True}, paired, {}),
    ({"type": "dpo", "loss": "nca"}, paired, {}),
    ({"type": "dpo", "loss": "kto"}, half_mismatched, {}),
    ({"type": "distill", "teacher_tokens": 5}, random_sequences, {}),
    ({"type": "distill", "teacher_tokens": 1000}, random_sequences, {}),  # more than the vocabulary holds
    ({"type": "distill", "divergence": "skewed_reverse_kl", "teacher_tokens": 5}, random_sequences, {}),
    ({"type": "distill", "divergence": "adaptive_kl", "teacher_tokens": 5}, random_sequences, {}),
    ({"type": "rm", "center_coefficient": 0.01}, scored, {}),
]
