"""`learner replay RUN --set KEY=VALUE`: trains a run's batches again by other settings, and shows what would differ.

    checkpoint, or the initial model ─┬▶ its batches, by its own settings ─▶ pulls of groups ─┬▶ groups that changed
                                      └▶ its batches, by the other ones ───▶ pulls of groups ─┘
                                               └▶ numbers of each step, beside those of metrics.jsonl

The samples stay those of the run. From the first step that differs on they are not what the policy would have sampled,
so a what-if says what the settings do to the learning from given data, and not what a run by them would be. The run's
folder is only read. A run that goes on is trained as far as its journal reaches, where no GPU is in use.
"""

import heapq
import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from learner.changed_settings import WhatIf
from learner.config import LearnerConfig
from learner.data.demonstrations import Demonstrations
from learner.journal.checkpoints import Checkpoint, checkpoints_of
from learner.journal.held import NothingHeld, held_still
from learner.leases.intake import TakenBatch
from learner.recovery import LoggedStep
from learner.replay import (
    beginning_in,
    beginning_of,
    first_difference,
    nothing_to_begin_with,
    numbers_of_step,
    train_logged,
)  # fmt: skip
from learner.reports.history import RunHistory
from learner.reports.what_if_folder import GROUPS_FILE, NOTE_FILE, PULLS_PREFIX, ProgressNotes
from learner.reports.what_if_numbers import size_of_change
from learner.run_demonstrations import check_same_demonstrations, demonstrations_of
from learner.run_ranks import LearnerRanks
from learner.run_settings import refuse_beside
from learner.training.engine import OtherOptimizer
from learner.training.group_pulls import GroupChange, StepPulls, changes_of_groups
from learner.training.trainer import Trainer
from learner.training.trainer_thread import TrainerThread
from learner.what_if_text import ShownWhatIf
from services.config import made_with
from services.process import Stop, WrongSettings
from services.run_lock import life_in
from services.standard_output import show

logger = logging.getLogger(__name__)

OFF_POLICY = (
    "off-policy: the samples are those of the run. From the first step that differs on, the policy would have sampled "
    "others, so these curves do not say what a run by these settings would be. The further it goes, the less they say."
)
_NOT_OF_WHAT_IF = ("mismatch_kl",)  # the weights are other ones than sampled: it is not numerics that make the gap
_SAID_EVERY = 50
_Numbers = dict[str, Any]
_Ordered = tuple[float, int, int, GroupChange]


async def show_what_if(what_if: WhatIf, stop: Stop, *, version: int | None) -> None:
    """Trains the journal from the checkpoint of `version` on by the changed settings; prints both curves.

    Raises WrongSettings where there is nothing to begin with, the run still goes on and a GPU would be needed twice,
    the checkpoint lacks what the settings need, or the folder to write exists.
    """
    config = what_if.config
    if what_if.to is not None and what_if.to.exists():
        raise WrongSettings(f"{what_if.to} exists: name a new folder by --to")
    async with AsyncExitStack() as stack:
        base, steps = _beginning(what_if, version, stack)
        ranks = stack.enter_context(LearnerRanks(config, argv=sys.argv, stop=stop))
        thread = await stack.enter_async_context(TrainerThread())
        opened = partial(ranks.open_next_trainer, should_stop=thread.stopping)
        shown = await ranks.watch.during(
            thread.run(lambda: compared(what_if, base=base, steps=steps, open_trainer=opened))
        )
    show(f"{shown}\n")


def _beginning(
    what_if: WhatIf, version: int | None, stack: AsyncExitStack
) -> tuple[Checkpoint | None, Sequence[LoggedStep]]:
    """As `beginning_of`, also of a run that goes on: `stack` holds its files as they are now. Raises WrongSettings."""
    folder, to = what_if.config.run.folder, what_if.to
    if life_in(folder) != "goes on":
        return beginning_of(what_if.config, version)
    refuse_beside(folder)
    if to is not None:
        to.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = stack.enter_context(held_still(folder, version=version, beside=None if to is None else to.parent))
    except NothingHeld as error:
        raise nothing_to_begin_with(folder, version) from error
    return beginning_in(held, what_if.config, next(iter(checkpoints_of(held)), None))


def compared(
    what_if: WhatIf,
    *,
    base: Checkpoint | None,
    steps: Sequence[LoggedStep],
    open_trainer: Callable[[LearnerConfig], Trainer],
) -> ShownWhatIf:
    """Trains the steps by the run's settings, if groups are asked for, and by the changed ones. Raises WrongSettings.

    In the trainer's thread. `open_trainer` makes a trainer that keeps pulls; the one before it is closed by then.
    """
    noted = RunHistory(dict).read(what_if.config.run.folder / "metrics.jsonl").steps
    with ExitStack() as stack:
        files = stack.enter_context(WhatIfFiles(what_if, first=steps[0].version))
        # In the what-if's own folder, so that whoever removes what a killed one has left finds it.
        notes = Path(stack.enter_context(TemporaryDirectory(prefix=PULLS_PREFIX, dir=what_if.to)))
        progress = ProgressNotes(what_if.to, steps=len(steps))
        unlike = ""
        if what_if.groups:
            logger.info("training %d steps by the run's own settings, for its groups", len(steps))
            unlike = _trained_by_run(
                what_if.config, base, steps, notes=notes, noted=noted, progress=progress, open_trainer=open_trainer
            )
        logger.info("training %d steps by %s", len(steps), ", ".join(map(str, what_if.differences)))
        shown = demonstrations_of(what_if.changed)
        trainer = _opened(what_if.changed, base, open_trainer)
        numbers: dict[int, _Numbers] = {}
        most: list[_Ordered] = []
        for done, step in enumerate(steps, 1):
            found, pulls, batch = _taken(trainer, what_if.changed, step, shown)
            numbers[step.version + 1] = {name: value for name, value in found.items() if name not in _NOT_OF_WHAT_IF}
            changes = []
            if what_if.groups:
                of_run = StepPulls.load(notes / f"{step.version}.npz")
                changes = changes_of_groups(batch.groups, step=step.version + 1, run=of_run, now=pulls)
            files.write(step.version + 1, numbers[step.version + 1], changes)
            most = heapq.nlargest(what_if.groups, [*most, *_ordered(changes)])
            progress.note("what-if", done, unlike=unlike)
            if done % _SAID_EVERY == 0:
                logger.info("trained %d of %d steps by the other settings", done, len(steps))
        trainer.close()
        progress.note("done", len(steps), unlike=unlike)
    return ShownWhatIf(
        differences=tuple(map(str, what_if.differences)),
        run={step: noted[step] for step in numbers if step in noted},
        now=numbers,
        groups=tuple(each for *_, each in most),
        compared_groups=what_if.groups > 0,
        unlike=unlike,
        caveat=OFF_POLICY,
    )


def _trained_by_run(
    config: LearnerConfig,
    base: Checkpoint | None,
    steps: Sequence[LoggedStep],
    *,
    notes: Path,
    noted: Mapping[int, _Numbers],
    progress: ProgressNotes,
    open_trainer: Callable[[LearnerConfig], Trainer],
) -> str:
    """Keeps the pulls of each step in `notes`; returns the first number that is not that of the run, if one is."""
    check_same_demonstrations(config, config.run.folder)
    shown = demonstrations_of(config)
    trainer = _opened(config, base, open_trainer)
    unlike = ""
    for done, step in enumerate(steps, 1):
        found, pulls, _ = _taken(trainer, config, step, shown)
        pulls.save(notes / f"{step.version}.npz")
        difference = first_difference(found, noted.get(step.version + 1, {}))
        unlike = unlike or (f"step {step.version + 1} is the first that differs: {difference}" if difference else "")
        progress.note("run", done, unlike=unlike)
        if done % _SAID_EVERY == 0:
            logger.info("trained %d of %d steps by the run's own settings", done, len(steps))
    trainer.close()
    return unlike


def _ordered(changes: Sequence[GroupChange]) -> list[_Ordered]:
    """The groups whose pull changed, as they compare: the greatest changed most, or as much in an earlier step."""
    return [
        (size_of_change(each.pull_change), -each.step, -each.lease_id, each) for each in changes if each.pull_change
    ]


def _opened(
    config: LearnerConfig, base: Checkpoint | None, open_trainer: Callable[[LearnerConfig], Trainer]
) -> Trainer:
    """A trainer at the beginning. Raises WrongSettings for a checkpoint without what the settings need."""
    trainer = open_trainer(config)
    if base is not None:
        try:
            trainer.load(base.trainer)
        except (FileNotFoundError, OtherOptimizer) as error:
            raise WrongSettings(
                f"{base.path.name} does not hold what these settings need: {error}. Begin with the initial model by "
                "--from 0, if the journal reaches back to it (checkpoint.whole_journal), or change something else"
            ) from error
    return trainer


def _taken(
    trainer: Trainer, config: LearnerConfig, step: LoggedStep, demonstrations: Demonstrations | None
) -> tuple[_Numbers, StepPulls, TakenBatch]:
    """The step's numbers, its pulls, and the batch that was trained."""
    again = train_logged(trainer, config, step, demonstrations)
    assert trainer.pulls is not None, "the trainer was opened to keep them"
    clips = again.metrics.clip_fraction is not None
    pulls = StepPulls.made(again.sequences, trainer.pulls, epochs=config.training.epochs_per_step, clips=clips)
    return numbers_of_step(again.metrics), pulls, again.batch


class WhatIfFiles:
    """Writes a what-if as the folder of a run, step by step, where one is asked for; a context manager.

    `metrics.jsonl` holds what training gives of each step, `groups.jsonl` the changes of its groups, `made_with.json`
    the settings, `what_if.json` what it is and `progress.json` how far it has come. A folder without a step goes again.
    """

    def __init__(self, what_if: WhatIf, *, first: int) -> None:
        """`first` is the version that it begins with."""
        self._what_if = what_if
        self._first = first
        self._metrics: IO[str] | None = None
        self._groups: IO[str] | None = None
        self._stack = ExitStack()
        self._is_empty = True

    def __enter__(self) -> "WhatIfFiles":
        folder, what_if = self._what_if.to, self._what_if
        if folder is not None:
            folder.mkdir(parents=True)
            made_with.write(folder, what_if.changed.made_with())
            note = {
                "run": str(what_if.config.run.folder),
                "from_version": self._first,
                "changes": [str(each) for each in what_if.differences],
                "caveat": OFF_POLICY,
            }
            (folder / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
            self._metrics = self._stack.enter_context((folder / "metrics.jsonl").open("w", encoding="utf-8"))
            if what_if.groups:
                self._groups = self._stack.enter_context((folder / GROUPS_FILE).open("w", encoding="utf-8"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._is_empty and self._what_if.to is not None:
            shutil.rmtree(self._what_if.to)

    def write(self, step: int, numbers: _Numbers, changes: Sequence[GroupChange]) -> None:
        """Adds a step."""
        self._is_empty = False
        if self._metrics is not None:
            self._metrics.write(json.dumps({"kind": "step", "step": step, **numbers}) + "\n")
            self._metrics.flush()
        if self._groups is not None:
            self._groups.writelines(json.dumps(each.line()) + "\n" for each in changes)
            self._groups.flush()
