"""Ranks and model of a learner that trains a run, as the trainer's thread opens them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from learner.config import LearnerConfig
from learner.rank_group import RankGroup, follow_group
from learner.teachers.teachers import check_tokenizers
from learner.training.ranks import OPENING, CommandChannel, Ranks
from learner.training.trainer import Trainer
from services.process import Stop

_PROBE_TEXT = "12+30=42. The capital of France is Paris, and two and two make four. One, two, three, four, five."


class LearnerRanks(RankGroup):
    """The ranks of a learner that trains a run, with rank 0's trainer. Its trainer's thread is to end before it."""

    def __init__(self, config: LearnerConfig, *, argv: Sequence[str], stop: Stop | None = None) -> None:
        """Raises TeacherFailed, before anything is started, for a teacher that cannot teach this model."""
        check_tokenizers(config.teachers, model=config.model)
        super().__init__(config, argv=argv, stop=stop)

    def open_next_trainer(self, config: LearnerConfig, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer by the next settings that all ranks follow; the one before it has been closed.

        Its `pulls` are kept. Raises as `open_trainer` does.
        """
        commands = self.commands or self.open()
        torch.manual_seed(config.seed)
        return _trainer(config, self.ranks, commands, should_stop=should_stop, keeps_pulls=True)

    def open_trainer(self, *, should_stop: Callable[[], bool]) -> Trainer:
        """Rank 0's trainer; blocks until all ranks are there. Raises WrongSettings if they share no folder."""
        commands = self.open()
        return _trainer(self._config, self.ranks, commands, should_stop=should_stop)


def follow(config: LearnerConfig, ranks: Ranks, *, in_turn: Sequence[LearnerConfig] = ()) -> int:
    """The life of a rank other than 0; returns the exit code. `in_turn` are the settings of the trainers that rank 0
    opens with `open_next_trainer`; without any it has the one of `config`.
    """

    def work(commands: CommandChannel) -> None:
        for each in in_turn or (config,):
            torch.manual_seed(each.seed)
            commands.place = OPENING
            _trainer(each, ranks, commands, should_stop=lambda: False, keeps_pulls=bool(in_turn)).follow()

    return follow_group(config, ranks, work)


def first_probe(model: Path, *, count: int) -> tuple[int, ...]:
    """The beginning of a fixed text in the model's tokens: 2 to `count` of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    # All of the text may be longer than the model takes, of which no more is used than it does.
    return tuple(tokenizer.encode(_PROBE_TEXT, add_special_tokens=False, verbose=False)[:count])


def _trainer(
    config: LearnerConfig,
    ranks: Ranks,
    commands: CommandChannel,
    *,
    should_stop: Callable[[], bool],
    keeps_pulls: bool = False,
) -> Trainer:
    return Trainer(
        config.model,
        algorithm=config.algo,
        config=config.training,
        ranks=ranks,
        commands=commands,
        chat_template=config.run.template_text,
        teachers=[teacher.path for teacher in config.teachers if teacher.path is not None],
        should_stop=should_stop,
        keeps_tokens=(config.samples.enabled or config.trust.enabled)
        and not config.learns_from_files
        and not config.evaluation.only,
        keeps_pulls=keeps_pulls,
        demonstration_weight=config.demonstrations.weight,
        old_tokens=config.old_tokens,
        average=next((each.average for each in config.teachers if each.average is not None), None),
    )
