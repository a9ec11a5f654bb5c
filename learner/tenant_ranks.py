"""Ranks of a learner that serves the Tinker API: each opens the base model, and rank 0 alone has a service."""

from __future__ import annotations

import logging

import torch

from learner.config import LearnerConfig
from learner.rank_group import RankGroup, follow_group
from learner.training.adapter_ranks import RankedAdapters, follow_adapters
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.logprobs import Chunking
from learner.training.ranks import OPENING, CommandChannel, Ranks
from protocol.adapters import MAX_ADAPTER_BYTES
from services.process import WrongSettings

logger = logging.getLogger(__name__)


def open_adapters(config: LearnerConfig, *, name: str, ranks: Ranks) -> AdapterTrainer:
    """The trainer of a rank. Raises WrongSettings for a model that has no adapters here, or too many weights."""
    training = config.training
    try:
        trainer = AdapterTrainer.open(
            config.model,
            name=name,
            dtype=training.dtype,
            device=ranks.device,
            chunking=Chunking(tokens=training.logprob_chunk_tokens, vocabulary=training.logprob_chunk_vocabulary),
        )
    except (ValueError, FileNotFoundError) as error:
        raise WrongSettings(f"[learner] model: {error}") from error
    if config.tinker.all_weights and trainer.whole_bytes > MAX_ADAPTER_BYTES:
        raise WrongSettings(
            f"[learner] tinker.all_weights: all weights of {config.model} are a file of {trainer.whole_bytes:,} bytes "
            f"in float32, and generators fetch one of at most {MAX_ADAPTER_BYTES:,}; name a smaller model, or have "
            "clients train adapters (tinker.all_weights false)"
        )
    return trainer


def open_on_all(config: LearnerConfig, group: RankGroup, *, name: str) -> AdapterTrainer | RankedAdapters:
    """The trainer of adapters on all ranks, of which rank 0 is asked; blocks until all have the base model."""
    commands = group.open() if group.ranks.count > 1 else None
    own = open_adapters(config, name=name, ranks=group.ranks)
    return own if commands is None else RankedAdapters(own, commands)


def follow_tenants(config: LearnerConfig, ranks: Ranks) -> int:
    """The life of a rank other than 0; returns the exit code."""

    def work(commands: CommandChannel) -> None:
        torch.manual_seed(config.seed)
        commands.place = OPENING
        logger.info("rank %d trains its share of the rows of clients", ranks.rank)
        follow_adapters(open_adapters(config, name=str(config.model), ranks=ranks), commands)

    return follow_group(config, ranks, work)
