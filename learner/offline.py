"""Training on files: `sft`, `rm`, `dpo`, `distill`, by the same trainer without generators, and its held-out metrics.

A run that is taken up goes on from its newest checkpoint as if it had never ended: weights, optimizer, random states
and the place in the data are those of then, and `metrics.jsonl` is cut where its checkpoint stood.
"""

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from learner.algorithms.pairs import Sides
from learner.algorithms.presets.dpo import DpoConfig
from learner.algorithms.presets.dpo_family import preference
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.presets.rm import RmConfig
from learner.checkpoint_writer import CheckpointWriter
from learner.config import LearnerConfig
from learner.data.examples import TokenizedExample, batches, length_statistics
from learner.data.model_tokenizer import open_tokenizer
from learner.data.reference_cache import CacheKey, cached_reference_logprobs, fingerprint_model, fingerprint_sequences
from learner.journal.checkpoints import Checkpoint, Checkpoints, checkpoints_of
from learner.journal.files import LineFile, anyone, ignore, write_atomically
from learner.journal.manifest import Signer
from learner.journal.run_folder import (
    NothingToResume,
    hold_run_folder,
    keep_template,
    open_run_folder,
)
from learner.offline_examples import Examples, Unit, in_step, read_units
from learner.recovery import changes_of_this_start, expected_signer
from learner.reports.trackers import TrackedRun, Trackers, trackers_of
from learner.run_ranks import LearnerRanks
from learner.training.batch import TrainSequence
from learner.training.config import TrainingConfig
from learner.training.trainer import Trainer, stop_after_skips
from learner.training.trainer_thread import TrainerThread
from protocol.rewards import RewardFormat, RewardInput, write_reward_input
from services.config import made_with
from services.durations import clock_text
from services.process import FINISH_S, Stop

logger = logging.getLogger(__name__)

Told = Callable[[Mapping[str, object]], None]

_AT_ONCE = 256
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_PROGRESS_EVERY_S = 5.0


def measure(trainer: Trainer, algo: AlgorithmConfig, units: Sequence[Unit]) -> dict[str, float]:
    """Accuracy and distributions of scores of pairs, or the mean negative log-likelihood, in nats per token."""
    sequences = [sequence for unit in units for sequence in unit]
    outputs = _outputs(trainer, sequences)
    if isinstance(algo, RmConfig):
        return of_scores(np.array([values[0] for values in outputs]).reshape(-1, 2))
    examples = [values for values, sequence in zip(outputs, sequences, strict=True) if not sequence.mismatched]
    likelihood = {"nll": -float(np.concatenate(examples).mean())}
    if not isinstance(algo, DpoConfig):
        return likelihood
    known = _sums(_known(trainer, sequences)) if algo.uses_reference else None
    if algo.loss == "kto":
        assert known is not None, "kto has a reference"
        return likelihood | _of_labels(algo.beta * (_sums(outputs) - known), sequences)
    return likelihood | of_scores(_implicit_rewards(algo, outputs, known))


def _implicit_rewards(
    algo: DpoConfig, outputs: Sequence[NDArray[np.float32]], known: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Of chosen and rejected as the loss itself compares them, [P, 2]."""
    made = preference(
        algo,
        policy=_sides(_sums(outputs)),
        reference=None if known is None else _sides(known),
        lengths=_sides(np.array([float(len(values)) for values in outputs])),
        shift=torch.zeros((), dtype=torch.float64),
    )
    return np.stack([made.chosen_rewards.numpy(), made.rejected_rewards.numpy()], axis=1)


def _of_labels(rewards: NDArray[np.float64], sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Share of good examples with a reward above the reference point and of bad ones below (ties count half), that
    point, and the rewards of both labels, as far as there are any.
    """
    mismatched = np.array([sequence.mismatched for sequence in sequences])
    labels = np.array([sequence.label for sequence in sequences])[~mismatched]
    point = max(0.0, float(rewards[mismatched].mean()))
    above = rewards[~mismatched] - point
    right = np.where(above == 0, 0.5, (above > 0) == labels)
    found = {"accuracy": float(right.mean()), "reference_point": point}
    for name, scores in (("good", above[labels] + point), ("bad", above[~labels] + point)):
        if len(scores):
            found |= _distribution(name, scores)
    return found


def of_scores(pairs: NDArray[np.floating]) -> dict[str, float]:
    """Of the scores [P, 2] of chosen and rejected: how often the chosen one is higher (ties count half), and both
    distributions.
    """
    chosen, rejected = pairs[:, 0], pairs[:, 1]
    wins = (chosen > rejected).mean() + 0.5 * (chosen == rejected).mean()
    found = {"accuracy": float(wins), "margin_mean": float((chosen - rejected).mean())}
    return found | _distribution("chosen", chosen) | _distribution("rejected", rejected)


def _distribution(name: str, scores: NDArray[np.floating]) -> dict[str, float]:
    found = {f"{name}_mean": float(scores.mean()), f"{name}_deviation": float(scores.std())}
    return found | {f"{name}_p{100 * q:g}": float(np.quantile(scores, q)) for q in _QUANTILES}


def _sides(values: NDArray[np.float64]) -> Sides:
    """Chosen and rejected stand in turn."""
    return Sides(chosen=torch.from_numpy(values[0::2]), rejected=torch.from_numpy(values[1::2]))


def _outputs(trainer: Trainer, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    return [
        values
        for start in range(0, len(sequences), _AT_ONCE)
        for values in trainer.outputs(sequences[start : start + _AT_ONCE])
    ]


def _known(trainer: Trainer, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    if all(len(sequence.reference_logprobs) for sequence in sequences):
        return [sequence.reference_logprobs[sequence.loss_mask] for sequence in sequences]
    return trainer.reference_logprobs(sequences)


def _sums(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    return np.array([float(part.sum(dtype=np.float64)) for part in parts])


async def train_offline(config: LearnerConfig, stop: Stop) -> None:
    """Trains `steps` batches, measures what is held out before and after, and exports the model."""
    folder = config.run.folder
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(await hold_run_folder(folder, resume=config.resume is True))
        settings = config.made_with()
        changes = changes_of_this_start(config, settings)
        open_run_folder(lock, folder, resume=config.resume is True, journal=False)
        made_with.write(folder, settings, changes=changes, differs=made_with.differing(config))
        keep_template(folder, config.run.template_text)
        run = TrackedRun(config.run.name, folder, settings, repeats=True)
        trackers = stack.enter_context(Trackers(trackers_of(**dict(config.trackers)), run))
        ranks = stack.enter_context(LearnerRanks(config, argv=sys.argv, stop=stop))
        thread = await stack.enter_async_context(TrainerThread())

        async def work() -> None:
            trainer = await thread.run(partial(ranks.open_trainer, should_stop=thread.stopping))
            stop.finish_s = FINISH_S
            await thread.run(partial(_train, config, trainer, stop, trackers.take, lock.check))

        async with asyncio.TaskGroup() as group:
            watch = group.create_task(lock.watch(), name="run_lock")
            await ranks.watch.during(work())
            watch.cancel()


def _train(
    config: LearnerConfig,
    trainer: Trainer,
    stop: Stop | None = None,
    told: Told = ignore,
    may_write: Callable[[], None] = anyone,
) -> None:
    """`may_write` raises once the run's folder is another process's."""
    run = config.run
    tokenizer = open_tokenizer(config.model, template=run.template_text, told=run.chat_template_kwargs)
    examples = _with_reference(config, trainer, read_units(config, tokenizer))
    config = _with_steps(config, examples)
    may_write()
    if config.data.epochs is not None:
        made_with.note(config.run.folder, steps=config.steps)
    _say(config, examples)
    if examples.form is not None:  # an export of a checkpoint needs it, too
        write_reward_input(config.run.folder, _reward_input(examples.form))
    begun = _begun(config, trainer, examples)
    metrics = LineFile(config.run.folder / "metrics.jsonl", end=begun.metrics_bytes, told=told, may_write=may_write)
    try:
        if begun.before is None:
            begun = replace(begun, before=_measured(config, trainer, examples, metrics, step=0))
        if begun.began_unix_s is None:
            begun = replace(begun, began_unix_s=time.time())
        step = _steps(config, trainer, examples, metrics, begun, _End(stop, config.time_limit_s), may_write)
        cut = stop is not None and stop.requested  # who asked for an end waits for it
        after = {} if cut else _measured(config, trainer, examples, metrics, step=step)
    finally:
        metrics.close()
    may_write()
    trainer.export(config.exported_model)
    if examples.form is not None:
        write_reward_input(config.exported_model, _reward_input(examples.form))
    trainer.close()
    summary = {"algo": config.algo.type, "steps": step, "before": begun.before, "after": after}
    write_atomically(config.run.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    logger.info("the trained model is in %s", config.exported_model)


def _reward_input(form: RewardFormat) -> RewardInput:
    """Says how a reward model reads its input that was trained on pairs of this form."""
    return RewardInput(format=form, tokenize="apart", special_tokens=form == "plain")


@dataclass(frozen=True)
class _RunState:
    """Progress of a run. `order` names the examples and how they are drawn: batch n follows from it and n alone.

    `before`: what was measured before the first step. `metrics_bytes`: of `metrics.jsonl`; what follows them is of
    steps that will be trained again. `began_unix_s`: when the run's first step began. `good_enough_at`: the
    `stop_at_nll` at which it has ended.
    """

    order: str
    step: int = 0
    metrics_bytes: int = 0
    before: dict[str, float] | None = None
    began_unix_s: float | None = None
    good_enough_at: float | None = None

    def times(self) -> dict[str, float]:
        """Of a step that ends now: the time of day, and since the first step began, with that without a learner."""
        now = time.time()
        passed_s = 0.0 if self.began_unix_s is None else max(0.0, now - self.began_unix_s)
        return {"time_s": round(passed_s, 3), "unix_s": round(now, 3)}


def _begun(config: LearnerConfig, trainer: Trainer, examples: Examples) -> _RunState:
    """A new run, or one as its newest whole checkpoint has it. Raises NothingToResume."""
    sequences = [_tokenized(sequence) for unit in examples.training for sequence in unit]
    data = config.data
    order = f"{fingerprint_sequences(sequences)}, seed {data.seed}, batches of {data.batch_size}"
    checkpoint = _newest(config.run.folder, expected_signer(config)) if config.resume is True else None
    if checkpoint is None:
        return _RunState(order=order)
    begun = _RunState(**checkpoint.progress())
    if begun.order != order:
        raise NothingToResume(
            f"{checkpoint.path} is of a run on other examples, or in another order ({begun.order}) than that of "
            f"{data.path} now ({order}): restore file and settings, or start without --resume"
        )
    trainer.load(checkpoint.trainer)
    logger.info("resuming at step %d", begun.step)
    return begun


def _newest(folder: Path, signer: Signer | None) -> Checkpoint | None:
    found = checkpoints_of(folder)
    for checkpoint in reversed(found):
        fault = checkpoint.fault(signer=signer)
        if fault is None:
            return checkpoint
        logger.error("checkpoint %s cannot be used: %s", checkpoint.path.name, fault)
    if found:
        raise NothingToResume(f"no checkpoint in {folder} is whole: restore one, or start without --resume")
    logger.warning("there is no checkpoint in %s yet: the run begins with its first step", folder)
    return None


def _say(config: LearnerConfig, examples: Examples) -> None:
    lengths = length_statistics([_tokenized(sequence) for unit in examples.training for sequence in unit])
    logger.info(
        "%s on %d examples (%d held out), %d steps of %d; %.0f tokens each, at most %d",
        config.algo.type,
        len(examples.training),
        len(examples.held_out),
        config.steps,
        config.data.batch_size,
        lengths.mean,
        lengths.longest,
    )


def _with_steps(config: LearnerConfig, examples: Examples) -> LearnerConfig:
    """With the steps that the epochs come to, if these are set."""
    if config.data.epochs is None:
        return config
    steps = math.ceil(config.data.epochs * len(examples.training) / config.data.batch_size)
    return config.model_copy(update={"steps": steps})


class _End:
    """End of training before its last step: at a stop, and after some seconds. Asked from the thread."""

    def __init__(self, stop: Stop | None, limit_s: float | None) -> None:
        self._stop, self._limit_s, self._began = stop, limit_s, time.monotonic()

    def has_come(self, step: int) -> bool:
        late = self._limit_s is not None and time.monotonic() - self._began >= self._limit_s
        asked = self._stop is not None and self._stop.requested
        if late or asked:
            why = "stopped" if asked else f"time_limit_s is {self._limit_s:g} s"
            how = made_with.to_go_on()
            logger.info(
                "stopping early after step %d (%s); saving the model as at a normal end; to go on: %s", step, why, how
            )
        return late or asked


def _steps(
    config: LearnerConfig,
    trainer: Trainer,
    examples: Examples,
    metrics: LineFile,
    begun: _RunState,
    end: _End,
    may_write: Callable[[], None],
) -> int:
    """Trains until the last step, or the end that comes before it; returns the number of the last one."""
    data, keep = config.data, config.checkpoint.keep
    order = batches(examples.training, size=data.batch_size, seed=data.seed, first=begun.step)
    signer = Signer.read(config.leases.secret_key_file)
    checkpoints = Checkpoints(config.run.folder, keep=keep, signer=signer, may_write=may_write)
    writer = CheckpointWriter(
        checkpoints,
        trainer,
        beside_training=config.checkpoint.beside_training,
        written=_said_by_the_writer,
        failed=_no_checkpoint,
    )
    try:
        return _train_steps(config, trainer, examples, metrics, begun, end, order, writer)
    finally:
        writer.settle(wait=True)


def _train_steps(
    config: LearnerConfig,
    trainer: Trainer,
    examples: Examples,
    metrics: LineFile,
    begun: _RunState,
    end: _End,
    order: Iterator[list[Unit]],
    writer: CheckpointWriter,
) -> int:
    data, enough = config.data, config.data.stop_at_nll
    if enough is not None and begun.good_enough_at == enough:
        return begun.step
    began = said = time.monotonic()
    for step in range(begun.step + 1, config.steps + 1):
        writer.settle(wait=False)
        made = trainer.train_step(in_step(next(order)), version=step - 1)
        metrics.write({"kind": "step", "step": step, **asdict(made), **begun.times()})
        if made.skipped_updates:
            logger.error(
                "step %d: %d updates had a gradient that is not finite and were left out", step, made.skipped_updates
            )
            stop_after_skips(made, most=config.training.max_skipped_updates)
        now = time.monotonic()
        if now - said > _PROGRESS_EVERY_S or step == config.steps:
            left_s = (config.steps - step) * (now - began) / (step - begun.step)
            logger.info("step %d/%d  loss %.4f  ETA %s", step, config.steps, made.loss, clock_text(left_s))
            said = now
        state = replace(begun, step=step, good_enough_at=None)
        if data.measure_every_steps and step % data.measure_every_steps == 0 and step < config.steps:
            found = _measured(config, trainer, examples, metrics, step=step)
            if enough is not None and found["nll"] <= enough:
                logger.info("training ends after step %d: what is held out is at data.stop_at_nll, %g", step, enough)
                state = replace(state, good_enough_at=enough)
        ends = state.good_enough_at is not None or (step < config.steps and end.has_come(step))
        if ends or step % config.checkpoint.every_steps == 0:
            writer.begin(version=step, progress=asdict(replace(state, metrics_bytes=metrics.end)))
        if ends:
            return step
    return max(begun.step, config.steps)


def _said_by_the_writer(step: int, seconds: float) -> None:
    """A checkpoint is there: nothing more is to be said of it."""


def _no_checkpoint(step: int, error: OSError) -> None:
    logger.warning("no checkpoint of step %d could be written: %s. The run goes on", step, error)


def _measured(
    config: LearnerConfig, trainer: Trainer, examples: Examples, metrics: LineFile, *, step: int
) -> dict[str, float]:
    if not examples.held_out:
        return {}
    found = measure(trainer, config.algo, examples.held_out)
    metrics.write({"kind": "held_out", "step": step, **found, "unix_s": round(time.time(), 3)})
    shown = ("accuracy", "nll", "margin_mean")
    text = "  ".join(f"{name} {found[name]:.4f}" for name in shown if name in found)
    logger.info("%d held-out examples after step %d: %s", len(examples.held_out), step, text)
    return found


def _with_reference(config: LearnerConfig, trainer: Trainer, examples: Examples) -> Examples:
    """The reference's logprobs, from the cache beside the data, for an algorithm whose reference stays as it is."""
    if not trainer.preset.passes.reference or config.training.reference.mode != "initial":
        return examples
    count = len(examples.training)
    units = [*examples.training, *examples.held_out]
    sequences = [sequence for unit in units for sequence in unit]
    known = iter(_reference_logprobs(config, trainer, sequences))
    done = [tuple(replace(sequence, reference_logprobs=next(known)) for sequence in unit) for unit in units]
    return replace(examples, training=done[:count], held_out=done[count:])


def _reference_logprobs(
    config: LearnerConfig, trainer: Trainer, sequences: Sequence[TrainSequence]
) -> list[NDArray[np.float32]]:
    assert config.data.path is not None, "checked by the config"
    tokenized = [_tokenized(sequence) for sequence in sequences]
    key = CacheKey(
        model=fingerprint_model(config.model),
        data=fingerprint_sequences(tokenized),
        temperature=config.training.temperature,
        precision=_precision(config.training),
    )

    def compute(_: Sequence[TokenizedExample]) -> list[NDArray[np.float32]]:
        logger.info("computing the reference's logprobs of %d sequences", len(sequences))
        size = config.data.batch_size
        parts = (sequences[start : start + size] for start in range(0, len(sequences), size))
        trained = [values for part in parts for values in trainer.reference_logprobs(part)]
        return [_spread(values, sequence) for values, sequence in zip(trained, sequences, strict=True)]

    return cached_reference_logprobs(tokenized, folder=_folder_of(config.data.path), key=key, compute=compute)


def _precision(training: TrainingConfig) -> str:
    """Of a forward pass: float32 has the same head either way."""
    head = training.dtype == "bfloat16" and training.head_dtype == "float32"
    return f"{training.dtype}, head in float32" if head else training.dtype


def _folder_of(data: Path) -> Path:
    return Path(str(data).partition("#")[0]).parent


def _tokenized(sequence: TrainSequence) -> TokenizedExample:
    return TokenizedExample(token_ids=sequence.token_ids, loss_mask=sequence.loss_mask)


def _spread(values: NDArray[np.float32], sequence: TrainSequence) -> NDArray[np.float32]:
    spread = np.zeros(len(sequence.token_ids), dtype=np.float32)
    spread[sequence.loss_mask] = values
    return spread
