"""Opening the trainer: its ranks, their process group, the model."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from learner.config import LearnerConfig
from learner.teachers.folders import check_tokenizers
from learner.training.ranks import (
    Followers,
    Ranks,
    die_with_parent,
    open_process_group,
    ranks_from_environment,
    start_followers,
)
from learner.training.trainer import Trainer

_PROBE_TEXT = "12+30=42. The capital of France is Paris, and two and two make four. One, two, three, four, five."


@dataclass(frozen=True)
class OpenTrainer:
    """Rank 0's trainer, and the other ranks if it started them."""

    trainer: Trainer
    followers: Followers

    def close(self) -> None:
        """Ends the other ranks."""
        self.followers.close(timeout_s=2.0)


def open_trainer(config: LearnerConfig, *, argv: Sequence[str], should_stop: Callable[[], bool]) -> OpenTrainer:
    """Rank 0's trainer; starts the other ranks on this host unless something like torchrun did.

    Raises TeacherFailed, before anything is loaded, for a teacher that cannot teach this model.
    """
    check_tokenizers(config.teachers, model=config.model)
    given = ranks_from_environment(os.environ)
    command = [sys.executable, "-m", "learner.command", *argv[1:]]
    followers = start_followers(command, count=config.ranks) if given is None else Followers(ranks=given)
    trainer = _trainer(config, followers.ranks, listener_of=followers, should_stop=should_stop)
    return OpenTrainer(trainer=trainer, followers=followers)


def follow(config: LearnerConfig, ranks: Ranks) -> None:
    """The life of a rank other than 0."""
    die_with_parent()
    _trainer(config, ranks, listener_of=None, should_stop=lambda: False).follow()


def first_probe(model: Path, *, count: int) -> tuple[int, ...]:
    """The beginning of a fixed text in the model's tokens: 2 to `count` of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tuple(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)[:count])


def vocabulary_size(model: Path) -> int:
    """The number of token ids that the model knows, from its config.json."""
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _trainer(
    config: LearnerConfig, ranks: Ranks, *, listener_of: Followers | None, should_stop: Callable[[], bool]
) -> Trainer:
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    commands = open_process_group(
        ranks,
        timeout_s=config.training.collective_timeout_s,
        listener=None if listener_of is None else listener_of.listener,
    )
    return Trainer(
        config.model,
        algorithm=config.algo,
        config=config.training,
        ranks=ranks,
        commands=commands,
        teachers=[teacher.path for teacher in config.teachers if teacher.path is not None],
        should_stop=should_stop,
    )
