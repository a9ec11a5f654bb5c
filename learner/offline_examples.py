"""What algorithms that learn from files are given: units of one sequence, or of the two of a pair."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from learner.algorithms.config import DistillConfig, DpoConfig, RmConfig, SftConfig
from learner.config import LearnerConfig
from learner.data.distillation import DistillationExample, read_distillation
from learner.data.examples import read_examples
from learner.data.preferences import LabelledCompletion, PreferencePair, are_conversations, read_labelled, read_pairs
from learner.data.splitting import split
from learner.data.tokenizing import Tokenized, Tokenizer
from learner.training.batch import Candidates, TrainSequence
from protocol.reward_models import RewardInput

Unit = tuple[TrainSequence, ...]
"""Sequences that are always trained together: one, or the chosen and the rejected of a pair."""


@dataclass(frozen=True)
class Examples:
    """What is trained on, and what is only measured."""

    training: Sequence[Unit]
    held_out: Sequence[Unit]


def read_units(config: LearnerConfig, tokenizer: Tokenizer) -> Examples:
    """Reads `data.path` as the algorithm wants it. Raises DataError, FileNotFoundError."""
    assert config.data.path is not None, "checked by the config"
    units = _units(config, config.data.path, tokenizer)
    parts = split(units, prompt=_prompt, share=config.data.held_out_share, seed=config.data.seed)
    return Examples(training=parts.training, held_out=parts.held_out)


def reward_input(config: LearnerConfig) -> RewardInput | None:
    """How a reward model reads its input once it is served: as it is trained. None for other algorithms.

    Raises DataError.
    """
    if not isinstance(config.algo, RmConfig):
        return None
    assert config.data.path is not None, "checked by the config"
    return RewardInput(format="chat" if are_conversations(config.data.path) else "plain", tokenize="apart")


def in_step(units: Sequence[Unit]) -> list[TrainSequence]:
    """The sequences of a step's units, its pairs numbered."""
    return [
        replace(sequence, pair=number if len(unit) == 2 else -1)
        for number, unit in enumerate(units)
        for sequence in unit
    ]


def _units(config: LearnerConfig, path: Path, tokenizer: Tokenizer) -> list[Unit]:
    match config.algo:
        case RmConfig():
            end = tokenizer.eos_token_id or 0
            return [_scored_pair(pair, end) for pair in read_pairs(path, tokenizer)]
        case DpoConfig(loss="kto"):
            return [_labelled(example) for example in read_labelled(path, tokenizer)]
        case DpoConfig():
            return [_pair(pair) for pair in read_pairs(path, tokenizer)]
        case DistillConfig():
            return [_distilled(example) for example in read_distillation(path, tokenizer)]
        case _:
            assert isinstance(config.algo, SftConfig) or config.algo.type == "custom", config.algo.type
            return [(example,) for example in read_examples(path, tokenizer)]


def _prompt(unit: Unit) -> bytes:
    first = unit[0]
    return first.token_ids[: int(first.loss_mask.argmax())].tobytes()


def _pair(pair: PreferencePair) -> Unit:
    return (_sequence(pair.chosen, margin=pair.margin), _sequence(pair.rejected, margin=pair.margin))


def _sequence(tokenized: Tokenized, *, margin: float = 0.0, label: bool = True) -> TrainSequence:
    return TrainSequence.supervised(
        token_ids=tokenized.token_ids, loss_mask=tokenized.loss_mask, margin=margin, label=label
    )


def _scored_pair(pair: PreferencePair, end: int) -> Unit:
    """The score of a sequence is that of its last token: one more is appended, which that one would predict."""
    return tuple(
        TrainSequence.supervised(
            token_ids=np.append(side.without_tail().token_ids, np.int32(end)).astype(np.int32),
            loss_mask=np.append(np.zeros(len(side.without_tail().token_ids), dtype=np.bool_), True),
            margin=pair.margin,
        )
        for side in (pair.chosen, pair.rejected)
    )


def _labelled(example: LabelledCompletion) -> Unit:
    return (_sequence(example.completion, label=example.label),)


def _distilled(example: DistillationExample) -> Unit:
    sequence = _sequence(example.completion)
    if example.top is None:
        return (sequence,)
    top = example.top.over(example.completion.loss_mask)
    return (replace(sequence, candidates=Candidates(token_ids=top.token_ids, logprobs=top.logprobs)),)
