"""Examples for algorithms that learn from files: units of one sequence, or of the two of a pair."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from learner.algorithms.presets.distill import DistillConfig
from learner.algorithms.presets.dpo import DpoConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.presets.rm import RmConfig
from learner.algorithms.presets.sft import SftConfig
from learner.config import LearnerConfig
from learner.data.distillation import DistillationExample, read_distillation
from learner.data.examples import DataTokenizer, TokenizedExample, check_lengths, read_examples, split
from learner.data.preferences import LabelledCompletion, PreferencePair, read_labelled, read_pairs
from learner.data.sources import RecordError
from learner.training.batch import Candidates, TrainSequence
from protocol.rewards import RewardFormat
from services.model_folder import positions

Unit = tuple[TrainSequence, ...]
"""Sequences that go together: one; the chosen and the rejected of a pair; or one and a mismatched one of its prompt."""


@dataclass(frozen=True)
class Examples:
    """Examples for training, and those that are only measured. `form`: of pairs, whether they are texts or
    conversations.
    """

    training: Sequence[Unit]
    held_out: Sequence[Unit]
    form: RewardFormat | None = None


@dataclass(frozen=True)
class _PromptedUnit:
    """A unit, and the tokens of its prompt."""

    prompt: bytes
    unit: Unit


def read_units(config: LearnerConfig, tokenizer: DataTokenizer) -> Examples:
    """Reads `data.path` as the algorithm wants it. Raises RecordError, FileNotFoundError."""
    assert config.data.path is not None, "checked by the config"
    path, algo = config.data.path, config.algo
    form: RewardFormat | None = None
    if isinstance(algo, RmConfig):
        pairs = read_pairs(path, tokenizer)
        form = _form_of(pairs, path)
        units = [_scored_pair(pair, tokenizer.eos_token_id or 0) for pair in pairs]
    else:
        units = [_PromptedUnit(_prompt(unit[0]), unit) for unit in _units(algo, path, tokenizer)]
    if isinstance(algo, DistillConfig):
        _check_taught(units[0].unit, config)
    check_lengths([sequence for one in units for sequence in one.unit], path=path, model=config.model)
    if isinstance(algo, DpoConfig) and algo.loss == "kto":
        units = _with_mismatched(units, path, seed=config.data.seed, most=positions(config.model))
    parts = split(units, prompt=lambda one: one.prompt, share=config.data.held_out_share, seed=config.data.seed)
    training, held_out = ([one.unit for one in part] for part in (parts.training, parts.held_out))
    return Examples(training=training, held_out=held_out, form=form)


def in_step(units: Sequence[Unit]) -> list[TrainSequence]:
    """The sequences of a step's units, its pairs numbered."""
    return [
        replace(sequence, pair=number if len(unit) == 2 and not unit[1].mismatched else -1)
        for number, unit in enumerate(units)
        for sequence in unit
    ]


def _units(algo: AlgorithmConfig, path: Path, tokenizer: DataTokenizer) -> list[Unit]:
    match algo:
        case DpoConfig(loss="kto"):
            return [_labelled(example) for example in read_labelled(path, tokenizer)]
        case DpoConfig():
            return [_pair(pair) for pair in read_pairs(path, tokenizer)]
        case DistillConfig():
            return [_distilled(example) for example in read_distillation(path, tokenizer)]
        case _:
            assert isinstance(algo, SftConfig) or algo.type == "custom", algo.type
            return [(example,) for example in read_examples(path, tokenizer)]


def _prompt(first: TrainSequence | TokenizedExample) -> bytes:
    return first.token_ids[: int(first.loss_mask.argmax())].tobytes()


def _form_of(pairs: Sequence[PreferencePair], path: Path) -> RewardFormat:
    """A reward model is served with inputs of one form: the one that it was trained on."""
    forms = sorted({pair.form for pair in pairs})
    if len(forms) > 1:
        raise RecordError(f"{path} has pairs of texts and of messages: a reward model takes one form; split the file")
    return forms[0]


def _check_taught(unit: Unit, config: LearnerConfig) -> None:
    """All records are alike in this."""
    cached = unit[0].candidates is not None
    if cached and config.training.temperature != 1:
        raise RecordError(
            f"{config.data.path} holds a teacher's logprobs, which are at temperature 1, and training.temperature is "
            f"{config.training.temperature:g}: set it to 1, or let a teacher in learner.teachers answer at yours"
        )
    if not cached and not config.teachers:
        raise RecordError(
            f"{config.data.path} holds no logprobs of a teacher and no teacher is set: give the data `top_ids` and "
            "`top_logprobs`, or set a teacher with a path in learner.teachers"
        )
    if cached and config.teachers:
        raise RecordError(
            f"{config.data.path} holds a teacher's logprobs and learner.teachers sets one, too: remove one of them"
        )


def _pair(pair: PreferencePair) -> Unit:
    return (_sequence(pair.chosen, margin=pair.margin), _sequence(pair.rejected, margin=pair.margin))


def _sequence(tokenized: TokenizedExample, *, margin: float = 0.0, label: bool = True) -> TrainSequence:
    return TrainSequence.supervised(
        token_ids=tokenized.token_ids, loss_mask=tokenized.loss_mask, margin=margin, label=label
    )


def _scored_pair(pair: PreferencePair, end: int) -> _PromptedUnit:
    """The score of a sequence is that of its last token: one more is appended, which that one would predict."""
    unit = tuple(
        TrainSequence.supervised(
            token_ids=np.append(side.without_tail().token_ids, np.int32(end)).astype(np.int32),
            loss_mask=np.append(np.zeros(len(side.without_tail().token_ids), dtype=np.bool_), True),
            margin=pair.margin,
        )
        for side in (pair.chosen, pair.rejected)
    )
    return _PromptedUnit(_prompt(pair.chosen), unit)


def _labelled(example: LabelledCompletion) -> Unit:
    return (_sequence(example.completion, label=example.label),)


def _with_mismatched(units: Sequence[_PromptedUnit], path: Path, *, seed: int, most: int | None) -> list[_PromptedUnit]:
    """Each unit with its prompt and the completion of a unit of another prompt, drawn at random, for kto's reference
    point. `most`: tokens that the model takes, None if that is not known. Raises RecordError if all prompts are alike.
    """
    order = sorted(range(len(units)), key=lambda index: units[index].prompt)
    prompts = [units[index].prompt for index in order]
    draw = np.random.default_rng(seed)
    partners: dict[int, int] = {}
    for index in range(len(units)):
        first, end = bisect_left(prompts, units[index].prompt), bisect_right(prompts, units[index].prompt)
        others = len(units) - (end - first)
        if not others:
            raise RecordError(
                f"{path} has one prompt only: kto compares with what the policy makes of completions of other prompts; "
                "give it examples of two prompts or more, or take another loss"
            )
        place = int(draw.integers(others))
        partners[index] = order[place if place < first else place + end - first]
    return [
        replace(unit, unit=(*unit.unit, _mismatched(unit.unit[0], units[partners[index]].unit[0], most=most)))
        for index, unit in enumerate(units)
    ]


def _mismatched(prompted: TrainSequence, completed: TrainSequence, *, most: int | None) -> TrainSequence:
    """The prompt of one with all that follows the prompt of the other, as far as the model takes it: each of the two
    may be short enough, and what is made of them too long.
    """
    prompt, begin = int(prompted.loss_mask.argmax()), int(completed.loss_mask.argmax())
    kept = slice(None if most is None else most + 1)  # the last token is only predicted
    made = TrainSequence.supervised(
        token_ids=np.concatenate([prompted.token_ids[:prompt], completed.token_ids[begin:]])[kept],
        loss_mask=np.concatenate([prompted.loss_mask[:prompt], completed.loss_mask[begin:]])[kept],
    )
    return replace(made, mismatched=True)


def _distilled(example: DistillationExample) -> Unit:
    sequence = _sequence(example.completion)
    if example.top is None:
        return (sequence,)
    top = example.top.over(example.completion.loss_mask)
    return (replace(sequence, candidates=Candidates(token_ids=top.token_ids, logprobs=top.logprobs)),)
