"""Training on files: `sft`, `rm`, `dpo`, `distill`. The same trainer, without generators."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import transformers
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.data.examples import batches
from learner.data.reference_cache import CacheKey, cached_reference_logprobs, fingerprint_model, fingerprint_sequences
from learner.data.splitting import length_statistics
from learner.data.tokenizing import Tokenized
from learner.history.durable_files import write_atomically
from learner.history.line_file import LineFile
from learner.offline_examples import Examples, Unit, in_step, read_units, reward_input
from learner.offline_measures import measure
from learner.trainer_thread import TrainerThread
from learner.training.batch import TrainSequence
from learner.training.trainer import Trainer
from learner.training_setup import open_trainer
from protocol.reward_models import write_reward_input
from services.process import Stop

log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0


async def train_offline(config: LearnerConfig, stop: Stop) -> None:
    """Trains `steps` batches, measures what is held out before and after, and exports the model."""
    async with TrainerThread() as thread:
        opened = await thread.run(partial(open_trainer, config, argv=sys.argv, should_stop=thread.stopping))
        try:
            await thread.run(partial(_train, config, opened.trainer))
        finally:
            opened.close()


def _train(config: LearnerConfig, trainer: Trainer) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    examples = _with_reference(config, trainer, read_units(config, tokenizer))
    served_as = reward_input(config)
    _say(config, examples)
    config.run.folder.mkdir(parents=True, exist_ok=True)
    metrics = LineFile(config.run.folder / "metrics.jsonl")
    try:
        before = _measured(config, trainer, examples, metrics, step=0)
        _steps(config, trainer, examples.training, metrics)
        after = _measured(config, trainer, examples, metrics, step=config.steps)
    finally:
        metrics.close()
    trainer.export(config.exported_model)
    if served_as is not None:
        write_reward_input(config.exported_model, served_as)
    trainer.close()
    summary = {"algo": config.algo.type, "steps": config.steps, "before": before, "after": after}
    write_atomically(config.run.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    log.info("the trained model is in %s", config.exported_model)


def _say(config: LearnerConfig, examples: Examples) -> None:
    lengths = length_statistics([_tokenized(sequence) for unit in examples.training for sequence in unit])
    log.info(
        "%s on %d examples (%d held out), %d steps of %d; %.0f tokens each, at most %d",
        config.algo.type,
        len(examples.training),
        len(examples.held_out),
        config.steps,
        config.data.batch_size,
        lengths.mean,
        lengths.longest,
    )


def _steps(config: LearnerConfig, trainer: Trainer, units: Sequence[Unit], metrics: LineFile) -> None:
    order = batches(units, size=config.data.batch_size, seed=config.data.seed)
    began = said = time.monotonic()
    for step in range(1, config.steps + 1):
        made = trainer.train_step(in_step(next(order)), version=step - 1)
        metrics.write({"kind": "step", "step": step, **asdict(made)})
        now = time.monotonic()
        if now - said > _PROGRESS_EVERY_S or step == config.steps:
            left_s = (config.steps - step) * (now - began) / step
            log.info("step %d/%d  loss %.4f  ETA %.0f s", step, config.steps, made.loss, left_s)
            said = now


def _measured(
    config: LearnerConfig, trainer: Trainer, examples: Examples, metrics: LineFile, *, step: int
) -> dict[str, float]:
    if not examples.held_out:
        return {}
    found = measure(trainer, config.algo, examples.held_out)
    metrics.write({"kind": "held_out", "step": step, **found})
    shown = ("accuracy", "nll", "margin_mean")
    text = "  ".join(f"{name} {found[name]:.4f}" for name in shown if name in found)
    log.info("%d held-out examples after step %d: %s", len(examples.held_out), step, text)
    return found


def _with_reference(config: LearnerConfig, trainer: Trainer, examples: Examples) -> Examples:
    """The reference's logprobs, from the cache beside the data, for an algorithm whose reference stays as it is."""
    if not trainer.preset.passes.reference or config.training.reference.mode != "initial":
        return examples
    if not config.data.cache_reference:
        return examples
    count = len(examples.training)
    units = [*examples.training, *examples.held_out]
    sequences = [sequence for unit in units for sequence in unit]
    known = iter(_reference_logprobs(config, trainer, sequences))
    done = [tuple(replace(sequence, reference_logprobs=next(known)) for sequence in unit) for unit in units]
    return Examples(training=done[:count], held_out=done[count:])


def _reference_logprobs(
    config: LearnerConfig, trainer: Trainer, sequences: Sequence[TrainSequence]
) -> list[NDArray[np.float32]]:
    assert config.data.path is not None, "checked by the config"
    tokenized = [_tokenized(sequence) for sequence in sequences]
    key = CacheKey(
        model=fingerprint_model(config.model),
        data=fingerprint_sequences(tokenized),
        temperature=config.training.temperature,
        precision=config.training.dtype,
    )

    def compute(_: Sequence[Tokenized]) -> list[NDArray[np.float32]]:
        log.info("computing the reference's logprobs of %d sequences", len(sequences))
        size = config.data.batch_size
        parts = (sequences[start : start + size] for start in range(0, len(sequences), size))
        trained = [values for part in parts for values in trainer.reference_logprobs(part)]
        return [_spread(values, sequence) for values, sequence in zip(trained, sequences, strict=True)]

    return cached_reference_logprobs(tokenized, folder=_folder_of(config.data.path), key=key, compute=compute)


def _folder_of(data: Path) -> Path:
    return Path(str(data).partition("#")[0]).parent


def _tokenized(sequence: TrainSequence) -> Tokenized:
    return Tokenized(token_ids=sequence.token_ids, loss_mask=sequence.loss_mask)


def _spread(values: NDArray[np.float32], sequence: TrainSequence) -> NDArray[np.float32]:
    spread = np.zeros(len(sequence.token_ids), dtype=np.float32)
    spread[sequence.loss_mask] = values
    return spread
