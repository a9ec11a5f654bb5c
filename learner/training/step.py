"""One step: the batch is cut into updates, each update into microbatches; what it measured comes back.

With one update per step the learner's policy at the step's start is the policy being differentiated, so its logprobs
are those of the same forward pass. With several, a pass without gradient records them before the first update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.preset import LossTokens, Preset
from learner.training.batch import FlatBatch
from learner.training.config import TrainingConfig
from learner.training.distribution import any_rank
from learner.training.engine import Engine
from learner.training.metrics import MicrobatchRecord, StepMetrics, token_means
from learner.training.packing import Microbatch, pack, plan
from learner.training.prefixes import shared_prefixes
from learner.training.ranks import Ranks
from learner.training.reference import Reference
from learner.training.schedule import learning_rate


class TrainingStopped(Exception):
    """`should_stop` said so in the middle of a step. Updates already made stay; the gradient underway is discarded."""


@dataclass(frozen=True)
class _Update:
    """What an update did on this rank."""

    records: tuple[MicrobatchRecord, ...]
    grad_norm: float
    forward_backward_s: float
    optimizer_s: float


class Step:
    """Runs steps on this rank; every rank runs the same ones at the same time."""

    def __init__(
        self,
        engine: Engine[tuple[Tensor, Tensor | None]],
        *,
        preset: Preset,
        config: TrainingConfig,
        ranks: Ranks,
        reference: Reference | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._preset = preset
        self._config = config
        self._ranks = ranks
        self._reference = reference
        self._should_stop = should_stop

    def run(self, batch: FlatBatch, *, first_update: int) -> StepMetrics:
        """Trains on `batch`; its first update is number `first_update` of the schedule. Raises TrainingStopped."""
        slices = [
            part for part in np.array_split(np.arange(len(batch.lengths)), self._config.updates_per_step) if len(part)
        ]
        rows = [self._microbatches(batch, part) for part in slices]
        proximal: list[list[Tensor | None]] = [[None] * len(microbatches) for microbatches in rows]
        started = time.perf_counter()
        if len(slices) > 1 and self._preset.samples_policy:
            proximal = [[self._logprobs_now(microbatch) for microbatch in microbatches] for microbatches in rows]
        proximal_s = time.perf_counter() - started
        rates = [learning_rate(self._config.optimizer, update=first_update + i) for i in range(len(slices))]
        updates = [self._update(*each) for each in zip(rows, proximal, rates, strict=True)]
        means = token_means(
            [record for update in updates for record in update.records],
            updates=len(updates),
            samples_policy=self._preset.samples_policy,
            ratio_moves=len(updates) > 1,
        )
        return StepMetrics(
            **vars(means),
            grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            learning_rate=rates[-1],
            tokens=int(batch.lengths.sum()),
            trained_tokens=int(batch.loss_mask.sum()),
            sequences=len(batch.lengths),
            microbatches=sum(map(len, rows)) * self._ranks.count,
            updates=len(updates),
            forward_backward_s=proximal_s + sum(update.forward_backward_s for update in updates),
            optimizer_s=sum(update.optimizer_s for update in updates),
        )

    def _microbatches(self, batch: FlatBatch, sequences: NDArray[np.int64]) -> list[Microbatch]:
        """This rank's share of an update. The weights count the update's sequences on all ranks."""
        weights = np.zeros(len(batch.lengths))
        weights[sequences] = self._preset.token_weights(batch.trained_lengths[sequences])
        prefixes = shared_prefixes(batch)
        shares = plan(
            batch.lengths[sequences],
            prefixes=prefixes.of(sequences),
            ranks=self._ranks.count,
            microbatch_tokens=self._config.microbatch_tokens,
        )
        rows = (sequences[row] for row in shares[self._ranks.rank])
        return [pack(batch, row, prefixes=prefixes, weights=weights).to(self._ranks.device) for row in rows]

    def _update(self, microbatches: Sequence[Microbatch], proximal: Sequence[Tensor | None], rate: float) -> _Update:
        started = time.perf_counter()
        records = []
        for number, (microbatch, anchor) in enumerate(zip(microbatches, proximal, strict=True), start=1):
            if any_rank(self._should_stop()):
                self._engine.discard_gradients()
                raise TrainingStopped
            records.append(self._accumulate(microbatch, proximal=anchor, last=number == len(microbatches)))
        middle = time.perf_counter()
        norm = self._engine.update(learning_rate=rate)
        return _Update(
            records=tuple(records),
            grad_norm=norm,
            forward_backward_s=middle - started,
            optimizer_s=time.perf_counter() - middle,
        )

    def _accumulate(self, microbatch: Microbatch, *, proximal: Tensor | None, last: bool) -> MicrobatchRecord:
        reference_logprobs = None if self._reference is None else self._reference.logprobs(microbatch)
        policy_logprobs, entropy = self._engine.forward(microbatch)
        anchor = policy_logprobs.detach() if proximal is None else proximal
        losses = self._preset.token_losses(
            LossTokens(
                policy_logprobs=policy_logprobs,
                proximal_logprobs=anchor,
                behavior_logprobs=microbatch.behavior_logprobs,
                advantages=microbatch.advantages,
                lags=microbatch.lags,
                reference_logprobs=reference_logprobs,
            )
        )
        loss = (microbatch.weights * losses.losses).sum()
        self._engine.backward(loss, last=last)
        return MicrobatchRecord(
            loss=loss.detach(),
            proximal_logprobs=anchor,
            entropy=entropy,
            clipped=losses.clipped,
            corrected=losses.corrected,
            microbatch=microbatch,
        )

    def _logprobs_now(self, microbatch: Microbatch) -> Tensor:
        with torch.no_grad():
            logprobs, _ = self._engine.forward(microbatch)
        return logprobs
