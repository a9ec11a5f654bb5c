"""Two ranks and what their disks do: `two_ranks_on_disks.py MODEL OUT`.

Rank 1 sees another folder than rank 0, then the same; then its disk is full at a checkpoint, and at one that is written
beside training; then there is room again, and a checkpoint is there of which it cannot read its part. Rank 0 writes
what it saw to OUT/seen.json. Rank 0 forks rank 1.
"""

import errno
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import torch

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.deferred import DeferredFiles, PartsOfRanks
from learner.training.ranks import CommandChannel, Ranks, share_folder
from learner.training.trainer import Trainer
from tests.learner.training.rank_processes import two_ranks
from tests.learner.training.tiny_model import random_sequences


def lead(trainer: Trainer, out: Path) -> dict[str, object]:
    trainer.train_step(random_sequences(8, seed=1), version=0)
    try:
        trainer.save(out / "full")
    except OSError as error:
        said = str(error)
    else:
        said = "nothing"
    resource_is_back()
    finish = trainer.begin_save(out / "full beside")
    trainer.train_step(random_sequences(8, seed=2), version=1)
    try:
        finish()
    except OSError as error:
        beside = str(error)
    else:
        beside = "nothing"
    trainer.begin_save(out / "checkpoint")()
    trainer.load(out / "checkpoint")
    shutil.copytree(out / "checkpoint", out / "unread")
    try:
        trainer.load(out / "unread")
    except OSError as error:
        unread = str(error)
    else:
        unread = "nothing"
    trainer.load(out / "checkpoint")
    trainer.close()
    files = sorted(path.name for path in (out / "checkpoint" / "deepspeed").iterdir())
    return {"full": said, "beside": beside, "unread": unread, "files": files}


def resource_is_back() -> None:
    """Both ranks wait here for each other, and then there is room."""
    limit(resource.RLIM_INFINITY)
    torch.distributed.barrier()


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Short(Trainer):
    """On rank 1: the disk is full until the first save is over."""

    def _begin_save(self, directory: Path) -> PartsOfRanks:
        if directory.name == "full beside":
            limit(20_000)
        begun = super()._begin_save(directory)
        begun.join()
        limit(resource.RLIM_INFINITY)
        return begun

    def _save(self, directory: Path, *, later: DeferredFiles | None = None) -> None:
        if directory.name != "full":
            super()._save(directory, later=later)
            return
        limit(20_000)
        try:
            super()._save(directory)
        finally:
            resource_is_back()

    def _load_progress(self, progress: Path, state: Path) -> None:
        if progress.parent.name == "unread":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        super()._load_progress(progress, state)


def shared(folder: Path, ranks: Ranks, commands: CommandChannel) -> bool:
    folder.mkdir(exist_ok=True)
    return share_folder(folder, commands, ranks=ranks)


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    with two_ranks() as (ranks, commands):
        seen = {"apart": shared(out / str(ranks.rank), ranks, commands), "together": shared(out, ranks, commands)}
        kind = Trainer if ranks.leads else Short
        config = TrainingConfig(zero_stage=1)
        trainer = kind(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
        if ranks.leads:
            (out / "seen.json").write_text(json.dumps({**seen, **lead(trainer, out)}), encoding="utf-8")
        else:
            trainer.follow()


if __name__ == "__main__":
    main()
