"""A tiny Llama and batches for it, shared by the tests of training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.training.batch import TrainSequence
from protocol.trajectories import Trajectory, TrajectoryGroup
from tests.learner.samples import group, trajectory

VOCABULARY = 40


def write_tiny_llama(path: Path, *, tied: bool, intermediate: int = 96) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=intermediate,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return path


def random_sequences(count: int, *, seed: int = 0, longest: int = 24) -> list[TrainSequence]:
    """Sequences of 2 to `longest` tokens; about half of the tokens are trained."""
    generator = np.random.default_rng(seed)
    sequences = []
    for number in range(count):
        length = int(generator.integers(2, longest + 1))
        mask = np.arange(length) >= generator.integers(1, length)
        sequences.append(
            TrainSequence(
                token_ids=generator.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, generator.normal(-4.0, 1.0, length), 0).astype(np.float32),
                reward=float(generator.normal()),
                lags=np.where(mask, number % 3, 0).astype(np.int32),
                mixed_versions=number % 4 == 0,
            )
        )
    return sequences


def branched(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The same, but that each of four begins with three quarters of what the one before it is, trained tokens too."""
    made: list[TrainSequence] = []
    for number, sequence in enumerate(sequences):
        tokens = sequence.token_ids.copy()
        if number % 4:
            shared = min(len(tokens), len(made[-1].token_ids)) * 3 // 4
            tokens[:shared] = made[-1].token_ids[:shared]
        made.append(replace(sequence, token_ids=tokens))
    return made


def conversing(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The same, but that the environment said every third token behind the first that was trained."""
    made = []
    for sequence in sequences:
        places = np.arange(len(sequence.token_ids))
        said = sequence.loss_mask & ((places - int(sequence.loss_mask.argmax())) % 3 == 1)
        mask = sequence.loss_mask & ~said
        logprobs = np.where(mask, sequence.behavior_logprobs, 0).astype(np.float32)
        lags = np.where(mask, sequence.lags, 0).astype(np.int32)
        made.append(replace(sequence, loss_mask=mask, observed=said, behavior_logprobs=logprobs, lags=lags))
    return made


def random_group(lease_id: int, *, version: int, rewards: Sequence[float] = (1.0, 0.0, 0.5)) -> TrajectoryGroup:
    """A trajectory of random tokens for each reward, all sampled by one version; the same for the same lease."""
    draws = np.random.default_rng(lease_id)

    def one(reward: float) -> Trajectory:
        length = int(draws.integers(3, 9))
        made = trajectory(*[version] * length, reward=reward)
        tokens = draws.integers(0, VOCABULARY, length + 2).astype(np.int32)
        logprobs = np.where(made.loss_mask, draws.normal(-3.7, 0.1, length + 2), 0).astype(np.float32)
        return made.model_copy(update={"token_ids": tokens, "behavior_logprobs": logprobs})

    return group(lease_id, *map(one, rewards))


def with_a_bad_reward(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The same, but that the last one's reward makes every gradient something other than a number."""
    return [*sequences[:-1], replace(sequences[-1], reward=float("nan"))]
