"""`learner replay RUN`: trains a run again from its journal, and compares what comes out with what the run wrote.

    checkpoint, or the initial model ─▶ batches of the journal, in order ─┬▶ numbers of each step = metrics.jsonl ?
                                                                          └▶ weights = later checkpoints, model/ ?

On the run's machine, with its versions and in float32, all of it is equal bit for bit. The run's folder is only read.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from learner.algorithms.preset import Preset
from learner.config import LearnerConfig
from learner.data.demonstrations import Demonstrations
from learner.journal.checkpoints import Checkpoint, checkpoints_of
from learner.journal.journal import FOLDER
from learner.journal.segments import segments_of
from learner.leases.intake import TakenBatch
from learner.recovery import LoggedStep, logged_steps
from learner.reports.history import RunHistory
from learner.run_demonstrations import check_same_demonstrations, demonstrations_of
from learner.run_ranks import LearnerRanks
from learner.taught_batches import TaughtBatch, is_taught_by_policy, taught
from learner.training.batch import GroupsAgain, TrainSequence, sequences_of
from learner.training.policy import WeightSnapshot
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
from learner.training.trainer_thread import TrainerThread
from services.config import made_with
from services.process import Stop, WrongSettings
from services.run_lock import holder_of
from services.standard_output import show

logger = logging.getLogger(__name__)

_TIMES = ("forward_backward_s", "optimizer_s", "pass_costs")
_SAID_EVERY = 50
Weights = Mapping[str, torch.Tensor]


class Differs(RuntimeError):
    """The replay is not the run; the text names the first difference."""


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Everything that was compared, and was equal: steps by their numbers, and weights by where the run wrote them."""

    first: int
    last: int
    compared_steps: int
    compared_weights: Sequence[str]

    def __str__(self) -> str:
        weights = ", ".join(self.compared_weights) or "nothing: the run wrote none behind its first step here"
        return (
            f"replayed steps {self.first + 1} to {self.last}: the numbers of {self.compared_steps} of them are those "
            f"of metrics.jsonl, digit for digit.\nweights compared, equal bit for bit: {weights}"
        )


async def replay(config: LearnerConfig, stop: Stop, *, version: int | None) -> None:
    """Trains what the journal holds, from the checkpoint of `version` on, and prints what was compared.

    Raises Differs, and WrongSettings where there is nothing to begin with, or the run still goes on.
    """
    base, steps = beginning_of(config, version)
    check_same_demonstrations(config, config.run.folder)
    demonstrations = demonstrations_of(config)
    async with AsyncExitStack() as stack:
        ranks = stack.enter_context(LearnerRanks(config, argv=sys.argv, stop=stop))
        thread = await stack.enter_async_context(TrainerThread())

        async def all_of_it() -> ReplayResult:
            trainer = await thread.run(partial(ranks.open_trainer, should_stop=thread.stopping))
            return await thread.run(lambda: _trained_again(trainer, config, demonstrations, base=base, steps=steps))

        replayed = await ranks.watch.during(all_of_it())
    show(f"{replayed}\n")


def beginning_of(config: LearnerConfig, version: int | None) -> tuple[Checkpoint | None, Sequence[LoggedStep]]:
    """The checkpoint to begin with, None for the initial model, and the steps that the journal holds from there on.

    Raises WrongSettings where there is nothing to begin with, or the run still goes on.
    """
    folder = config.run.folder
    if (holder := holder_of(folder)) is not None:
        raise WrongSettings(f"the run in {folder} goes on: {holder} has it. Wait for its end, or replay a copy of it")
    return beginning_in(folder, config, _base(folder, version))


def beginning_in(
    folder: Path, config: LearnerConfig, base: Checkpoint | None
) -> tuple[Checkpoint | None, Sequence[LoggedStep]]:
    """As `beginning_of`, with a checkpoint that is known to be whole, of a folder in which nothing changes: the run's
    own, or one that holds its files still.
    """
    run, first = config.run.folder, 0 if base is None else base.version
    steps = logged_steps(folder, version=first)
    if not steps:
        raise WrongSettings(f"the journal of {run} holds no batch behind version {first}: nothing to replay")
    _say_what_is_other(run)
    logger.info("replaying steps %d to %d, from %s", first + 1, first + len(steps), base.path if base else config.model)
    return base, steps


def nothing_to_begin_with(run: Path, version: int | None) -> WrongSettings:
    """The complaint that a replay cannot begin with `version`, or with any: it names those that it can begin with."""
    there = ", ".join(map(str, sorted(_bases(run)))) or "none"
    return WrongSettings(
        f"{run}: {'nothing to begin with' if version is None else f'no version {version}'}: the journal follows "
        f"these: {there}. It is kept from the oldest checkpoint on; checkpoint.whole_journal = true keeps all of it"
    )


def _base(run: Path, version: int | None) -> Checkpoint | None:
    """Beginning of a replay: a whole checkpoint that the journal follows, or the initial model. Raises WrongSettings.

    Of version 0 a checkpoint, if there is one, else the initial model, which is None.
    """
    possible = _bases(run)
    if not possible or (version is not None and version not in possible):
        raise nothing_to_begin_with(run, version)
    return possible[min(possible) if version is None else version]


def _bases(folder: Path) -> dict[int, Checkpoint | None]:
    """Everything that a replay can begin with, by version."""
    begun = {segment.start for segment in segments_of(folder / FOLDER)}
    whole = {each.version: each for each in checkpoints_of(folder) if each.version in begun and each.fault() is None}
    return {**dict.fromkeys({0} & begun), **whole}


def _say_what_is_other(folder: Path) -> None:
    made, here = made_with.read(folder), made_with.here()
    for name in ("versions", "host"):
        if made.get(name) != here[name]:
            logger.warning(
                "the run's %s were %s, here they are %s: weights may differ in their last bits",
                name, json.dumps(made.get(name)), json.dumps(here[name]),
            )  # fmt: skip


def _trained_again(
    trainer: Trainer,
    config: LearnerConfig,
    demonstrations: Demonstrations | None,
    *,
    base: Checkpoint | None,
    steps: Sequence[LoggedStep],
) -> ReplayResult:
    """In the trainer's thread."""
    folder, first = config.run.folder, steps[0].version
    if base is not None:
        trainer.load(base.trainer)
    noted = RunHistory(dict).read(folder / "metrics.jsonl").steps
    written = {each.version: each for each in checkpoints_of(folder) if each.version > first and each.fault() is None}
    mine: dict[int, Weights] = {}
    compared = 0
    for done, step in enumerate(steps, 1):
        metrics = train_logged(trainer, config, step, demonstrations).metrics
        compared += _same_numbers(metrics, noted.get(step.version + 1), step=step.version + 1)
        if step.version + 1 in written or done == len(steps):
            mine[step.version + 1] = _by_name(trainer.host_copy())
        if done % _SAID_EVERY == 0:
            logger.info("replayed %d of %d steps, all equal so far", done, len(steps))
    last = first + len(steps)
    equal = [_exported(folder, mine[last], last=last)]
    for version, checkpoint in written.items():
        if version in mine:
            trainer.load(checkpoint.trainer)
            _same_weights(_by_name(trainer.host_copy()), mine[version], where=checkpoint.path.name)
            equal.append(checkpoint.path.name)
    return ReplayResult(
        first=first, last=last, compared_steps=compared, compared_weights=[each for each in equal if each]
    )


@dataclasses.dataclass(frozen=True)
class TrainedAgain:
    """A logged batch that was trained once more, as it was taught, and its sequences."""

    batch: TakenBatch
    sequences: Sequence[TrainSequence]
    metrics: StepMetrics


def train_logged(
    trainer: Trainer, config: LearnerConfig, step: LoggedStep, demonstrations: Demonstrations | None
) -> TrainedAgain:
    """Trains a logged batch as its step did, with the demonstrations of that step."""
    as_taught = taught_again(step, config, trainer)
    sequences = sequences_in(as_taught, config, trainer.preset)
    shown = () if demonstrations is None else demonstrations.of_step(step.version)
    metrics = trainer.train_step(sequences, version=step.version, demonstrations=shown)
    return TrainedAgain(as_taught.batch, sequences, as_taught.noted_in(metrics))


def taught_again(step: LoggedStep, config: LearnerConfig, trainer: Trainer) -> TaughtBatch:
    """A logged batch as it was taught. Raises WrongSettings if answers of the policy are not in the journal: the step
    was not trained.
    """
    batch, noted = step.read(), step.told()
    if not config.teachers:
        return TaughtBatch(batch)
    for group in batch.groups:
        if group.lease_id not in noted and is_taught_by_policy(config.teachers, group.environment):
            raise WrongSettings(
                f"step {step.version + 1} was not trained: the journal has its batch, and not what the policy said of "
                f"lease {group.lease_id} as its own teacher; resume the run first"
            )
    told = [noted.get(group.lease_id) for group in batch.groups]
    return taught(trainer, batch, told, teachers=config.teachers)


def sequences_in(as_taught: TaughtBatch, config: LearnerConfig, preset: Preset) -> Sequence[TrainSequence]:
    """The sequences that a preset trains of a logged batch, with the teachers of their environments."""
    batch, teaching = as_taught.batch, as_taught.teaching
    return sequences_of(
        batch.groups,
        version=batch.version,
        max_lag=batch.bound(config.max_lag),
        again=GroupsAgain(batch.reused, batch.bound_of_reused(config.reused_lag)),
        preset=preset,
        teaching=teaching,
    )


def numbers_of_step(metrics: StepMetrics) -> dict[str, Any]:
    """The numbers of a step as `metrics.jsonl` holds them, without times."""
    replayed = {name: value for name, value in dataclasses.asdict(metrics).items() if name not in _TIMES}
    found: dict[str, Any] = json.loads(json.dumps(replayed))
    return found


def _same_numbers(metrics: StepMetrics, noted: Mapping[str, Any] | None, *, step: int) -> bool:
    """True if there was something to compare with. Raises Differs."""
    if noted is None:
        return False
    if (difference := first_difference(numbers_of_step(metrics), noted)) is not None:
        raise Differs(f"step {step} is the first that differs: {difference}")
    return True


def first_difference(numbers: Mapping[str, Any], noted: Mapping[str, Any]) -> str | None:
    """The first number of a step that is not as it was noted, in words; None if all are."""
    for name, value in numbers.items():
        # As text, so that a number that is none equals itself.
        if name in noted and json.dumps(noted[name]) != json.dumps(value):
            return f"its {name} was {noted[name]}, and is {value} now"
    return None


def _by_name(snapshot: WeightSnapshot) -> Weights:
    return {each.name: each.value for each in snapshot.tensors}


def _exported(folder: Path, mine: Weights, *, last: int) -> str:
    """Compares with the exported model, if the run came to its end; returns what was compared."""
    summary, path = folder / "summary.json", folder / "model" / "model.safetensors"
    if not (summary.exists() and path.exists()) or json.loads(summary.read_text(encoding="utf-8"))["steps"] != last:
        return ""
    theirs = load_file(path)
    common = {name: mine[name].to(theirs[name].dtype) for name in mine if name in theirs}
    _same_weights({name: theirs[name] for name in common}, common, where="model/")
    return "model/" if common else ""


def _same_weights(theirs: Weights, mine: Weights, *, where: str) -> None:
    for name, weight in theirs.items():
        if not torch.equal(weight, mine[name]):
            apart = (weight.float() - mine[name].float()).abs()
            raise Differs(
                f"{name} in {where} differs in {int((apart > 0).sum())} of {apart.numel()} numbers, by at most "
                f"{float(apart.max()):.3g}; the numbers of all steps before it agree"
            )
