"""A training step: the batch is cut into updates, each update into microbatches; what it measured comes back.

    batch ─▶ updates ─▶ microbatches ─▶ passes without gradient ─▶ advantages ─▶ update after update ─▶ StepMetrics
                                                                     epochs_per_step times

With one update per step the learner's policy at the step's start is the policy being differentiated, so its logprobs
are those of the same forward pass, and the anchor of later epochs. When an epoch makes several, a pass without gradient
records them before the first one.

With `partial_batches` a step is computed in parts (`step_parts`), the first of them, by `add`, before it is complete.

Where the loss has no gradient without an advantage, sequences that have none, such as a group's whose rewards are all
equal, are measured once and left out of the updates: that changes no gradient, and most of what good policies sample is
like that. Demonstrations are packed in rows of their own, which follow those of their update. Metrics are sums over the
trained tokens of this rank, then means over those of all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.policy_loss import negative_log_likelihood, once_for_each
from learner.algorithms.preset import CarriedState, Loss, LossTokens, Mean, Passes, Preset
from learner.training.alignment import AlignmentReading
from learner.training.batch import FlatBatch
from learner.training.config import TrainingConfig
from learner.training.engine import learning_rate
from learner.training.models import (
    Models,
    Output,
    StepData,
    TokenValues,
    credit,
    critic_metrics,
    critic_targets,
    loss_tokens,
    score,
    token_values,
)
from learner.training.packing import Microbatch, Prefixes, pack, plan, shared_out, shared_prefixes, slices_of
from learner.training.policy import PolicyModel
from learner.training.pulls import PullSums, TokenPulls
from learner.training.ranks import Ranks, any_rank, summed_over_ranks
from learner.training.routing import RoutingMetrics, RoutingSums, routing_metrics, total
from learner.training.score_model import Critic, CriticHead, freezes_policy
from learner.training.sequence_groups import ALONE, SequenceGroup
from learner.training.sketches import SKETCH_SIZE, GradientSketch
from learner.training.step_parts import RandomState, divided_pulls, end_to_end, mean_over_trajectories, undivided
from learner.training.work import even_position

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenMeans:
    """Means over the trained tokens of all ranks. Logprobs and entropies are in nats; what does not apply is None.

    `loss`: the mean over the step's updates. `mismatch_kl`: KL(behavior || learner) where both hold the same weights,
    so that engine numerics alone make it (tokens of lag 0 in sequences of a single version; None if there were none).
    `behavior_kl`: the same over all trained tokens, lag included. `importance_ratio_mean` and `_max`: exp(learner -
    behavior). `effective_sample_share`: (sum w)^2 / (n sum w^2) of those ratios, in (0, 1]. `clip_fraction`: share of
    tokens whose policy loss was clipped; None with one update per step, where the ratio to the proximal policy is
    always 1. `correction_fraction`: share of tokens whose correction weight was capped. `means`: metrics that the
    algorithm names itself.
    """

    loss: float
    entropy: float | None
    mismatch_kl: float | None
    behavior_kl: float | None
    importance_ratio_mean: float | None
    importance_ratio_max: float | None
    effective_sample_share: float | None
    clip_fraction: float | None
    correction_fraction: float | None
    means: Mapping[str, float]


@dataclass(frozen=True)
class StepMetrics(TokenMeans, RoutingMetrics):
    """Metrics of one step, over all ranks.

    `grad_norm`: before clipping, the mean over the updates. `learning_rate`: of the last update. `microbatches`: those
    learned from, of all ranks. `skipped_updates`: of policy and critic, left out since their gradient was not finite;
    `skipped_in_row`: how many of the newest ones, over steps. The times are this rank's, in seconds. `pass_costs`: CPU
    seconds of the passes through what is trained (CostSums), by forward passes and their tokens; backward counts twice.
    `alignment_cosine`: of the gradients of consecutive updates, the mean over those that have one; the shares are of
    updates whose gradient was projected, or that were left out, for it; None where it is not looked at.
    `demonstration_loss`: the mean cross-entropy of the step's demonstrations, in nats per token, over its updates, and
    `demonstration_tokens` their trained tokens, which count nowhere else; None of a step without any.
    """

    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    sequences: int
    microbatches: int
    updates: int
    forward_backward_s: float
    optimizer_s: float
    skipped_updates: int = 0
    skipped_in_row: int = 0
    pass_costs: Mapping[str, object] | None = None
    demonstration_loss: float | None = None
    demonstration_tokens: int | None = None
    alignment_cosine: float | None = None
    alignment_projected_share: float | None = None
    alignment_skipped_share: float | None = None


@dataclass(frozen=True)
class MicrobatchRecord:
    """Record of a microbatch for the metrics, without gradient; each tensor [N] but the scalar `loss`."""

    loss: Tensor
    proximal_logprobs: Tensor
    entropy: Tensor | None
    clipped: Tensor | None
    corrected: Tensor | None
    means: Mapping[str, Mean]
    microbatch: Microbatch
    routing: RoutingSums | None = None


def token_means(
    records: Sequence[MicrobatchRecord],
    *,
    updates: int,
    samples_policy: bool,
    ratio_moves: bool,
    group: SequenceGroup = ALONE,
) -> TokenMeans:
    """Means over the trained tokens of all ranks, of which those of `group` have the same. Every rank must call it."""
    sums, largest = _rank_sums(records)
    sums = group.once(sums)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    loss, count, entropy, clipped, corrected, ratio, squared, behavior_kl, fresh, fresh_kl = sums.tolist()
    first = records[0]
    tokens = max(count, 1.0)
    return TokenMeans(
        loss=loss / updates,
        entropy=None if first.entropy is None else entropy / tokens,
        mismatch_kl=fresh_kl / fresh if samples_policy and fresh else None,
        behavior_kl=behavior_kl / tokens if samples_policy else None,
        importance_ratio_mean=ratio / tokens if samples_policy else None,
        importance_ratio_max=float(largest) if samples_policy else None,
        effective_sample_share=ratio * ratio / (tokens * squared) if samples_policy and squared else None,
        clip_fraction=clipped / tokens if ratio_moves and first.clipped is not None else None,
        correction_fraction=None if first.corrected is None else corrected / tokens,
        means=_named_means(records, group),
    )


def _named_means(records: Sequence[MicrobatchRecord], group: SequenceGroup) -> dict[str, float]:
    names = sorted(records[0].means)
    if not names:
        return {}
    rows = [[total for name in names for total in (r.means[name].total, r.means[name].count)] for r in records]
    sums = torch.stack([torch.stack([value.detach().double() for value in row]) for row in rows]).sum(dim=0)
    totals = summed_over_ranks(group.once(sums)).reshape(-1, 2).tolist()
    return {name: total / count if count else 0.0 for name, (total, count) in zip(names, totals, strict=True)}


def _rank_sums(records: Sequence[MicrobatchRecord]) -> tuple[Tensor, Tensor]:
    """Ten sums, float64 [10], in the order that `token_means` unpacks, and the largest importance ratio."""
    proximal = torch.cat([record.proximal_logprobs for record in records]).double()
    behavior = torch.cat([record.microbatch.behavior_logprobs for record in records]).double()
    current = torch.cat([record.microbatch.current for record in records])
    ratio = ratios.importance_ratio(proximal_logprobs=proximal, behavior_logprobs=behavior)
    gaps = ratios.mismatch(proximal_logprobs=proximal, behavior_logprobs=behavior)
    zero = proximal.new_zeros(())
    sums = [
        torch.stack([record.loss for record in records]).sum(dtype=torch.float64),
        zero + len(proximal),
        _total([record.entropy for record in records], zero),
        _total([record.clipped for record in records], zero),
        _total([record.corrected for record in records], zero),
        ratio.sum(),
        ratio.square().sum(),
        gaps.sum(),
        current.sum(dtype=torch.float64),
        (gaps * current).sum(),
    ]
    return torch.stack(sums), ratio.max() if len(ratio) else zero


def _total(parts: Sequence[Tensor | None], zero: Tensor) -> Tensor:
    present = [part for part in parts if part is not None]
    return torch.cat(present).sum(dtype=torch.float64) if present else zero


@dataclass(frozen=True)
class AverageOutputs:
    """Logprobs float32 [N] at the trained tokens of a batch, 0 elsewhere, and the C likeliest tokens in the place of
    each: int64 and float32 [N, C].
    """

    logprobs: NDArray[np.float32]
    top_token_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


class TrainingStopped(Exception):
    """`should_stop` said so in the middle of a step. Updates already made stay; the gradient underway is discarded."""


@dataclass(frozen=True)
class _Row:
    """This rank's microbatches of an update: what is `learned` from, what has no gradient and is `idle`, and what is
    `shown`, of which all ranks have `shown_tokens` trained tokens.
    """

    learned: Sequence[Microbatch]
    idle: Sequence[Microbatch] = ()
    shown: Sequence[Microbatch] = ()
    shown_tokens: int = 0


@dataclass(frozen=True)
class _RowShare:
    """Share `number` of an update's rows, cut into `of` shares: one for each rank, or each group that shares rows."""

    number: int
    of: int


@dataclass(frozen=True)
class _Update:
    """An update's work on this rank. `records` are of all its microbatches, those of the `idle` ones included;
    `shown_nats` the cross-entropy of what was shown, its tokens' sum.
    """

    records: tuple[MicrobatchRecord, ...]
    idle: tuple[MicrobatchRecord, ...]
    grad_norm: float
    value_loss: float | None
    forward_backward_s: float
    optimizer_s: float
    shown_nats: Tensor | None = None


@dataclass(frozen=True)
class _Part:
    """Work of a part of a step on this rank, whose gradient is there, undivided. `counted` is its share of the divisor.
    `learned` of its `records` are those of microbatches with a gradient.
    """

    data: StepData
    counted: float
    records: tuple[MicrobatchRecord, ...]
    learned: int
    pull_sums: PullSums | None
    seconds: float


class TrainingStep:
    """Runs steps on this rank; every rank runs the same ones at the same time."""

    def __init__(
        self,
        models: Models,
        *,
        preset: Preset,
        config: TrainingConfig,
        ranks: Ranks,
        should_stop: Callable[[], bool],
        reached: Callable[[str], None],
    ) -> None:
        """`reached` is told where in a step this rank is, for whoever asks why it is late."""
        self._models = models
        self._engine = models.engine
        self._preset = preset
        self._config = config
        self._ranks = ranks
        self._group = models.group
        self._rows = _RowShare(ranks.rank // models.group.size, of=ranks.count // models.group.size)
        trained = models.trained
        self._even = even_position(trained.causal_lm if isinstance(trained, PolicyModel) else trained.classifier)
        self._should_stop = should_stop
        self._reached = reached
        self.old_tokens: OldTokenBound | None = None
        """Of tokens that are older than others may be; the same on every rank."""
        self.demonstration_weight = 0.0
        """Of the mean cross-entropy of demonstrations in a step's loss; the same on every rank."""
        self.keeps_tokens = False
        """If true, `tokens` is filled; the same on every rank."""
        self.tokens: TokenValues | None = None
        """Of the newest step."""
        self.tokens_s = 0.0
        """CPU seconds that filling `tokens` took in the newest step."""
        self.keeps_pulls = False
        """If true, `pulls` is filled; the same on every rank."""
        self.pulls: TokenPulls | None = None
        """Of the newest step."""
        self._pull_sums: PullSums | None = None
        self._parts: list[_Part] = []
        self._before_parts: RandomState | None = None
        self._sketcher: GradientSketch | None = None
        self._said_unrouted = False
        self._said_unobserved = False
        self.carried = CarriedState()
        """State of the algorithm for the next step; the same on every rank."""

    def run(self, batch: FlatBatch, *, first_update: int, demonstrations: FlatBatch | None = None) -> StepMetrics:
        """Trains on `batch`, and on `demonstrations` beside it; its first update is number `first_update` of the
        schedule. Raises TrainingStopped.

        Where parts of the step were added, `batch` is its last part, and there are no demonstrations.
        """
        if self._parts:
            return self._finish(batch, number=first_update)
        started, skipped_before = time.perf_counter(), self._models.skipped
        self._pull_sums = self._new_pull_sums(batch)
        slices = slices_of(batch, updates=self._config.updates_per_step)
        cut = partial(self._microbatches, batch, shared_prefixes(batch))
        whole, measured = [cut(part) for part in slices], cut(np.flatnonzero(batch.mismatched))
        data = self._data(batch, slices, [*chain.from_iterable(whole), *measured], passes=self._passes(batch, slices))
        moves = self._moves(data)
        rows = [_row(cut, part, packed, moves=moves) for part, packed in zip(slices, whole, strict=True)]
        rows = rows if demonstrations is None else self._showing(rows, demonstrations)
        scoring_s = time.perf_counter() - started
        rows *= self._config.epochs_per_step
        numbers = range(first_update, first_update + len(rows))
        rates = self._rates(numbers, scale=data.credit.step_scale)
        updates: list[_Update] = []
        for row, rate, number in zip(rows, rates, numbers, strict=True):
            known = updates[(number - first_update) % len(slices)].idle if len(updates) >= len(slices) else None
            updates.append(self._update(data, row, rate, number=number, idle=known))
            if number == first_update and len(slices) == 1 < len(rows) and self._preset.samples_policy:
                found = [(record.microbatch.places, record.proximal_logprobs) for record in updates[0].records]
                data = replace(data, scores=data.scores.anchored(found, tokens=len(batch.token_ids)))
        critic_losses = self._train_critic(data, [row.learned for row in rows], first_update=first_update)
        critic_losses += [update.value_loss for update in updates if update.value_loss is not None]
        if self.keeps_tokens:
            # Of the first epoch, in which most is still as the step found it.
            first = [record for update in updates[: len(slices)] for record in update.records]
            self._keep_tokens([(data, first)])
        if self._pull_sums is not None:
            records = [record for update in updates for record in update.records]
            self.pulls = _pulls(self._pull_sums, data, records)
        if data.credit.carried.is_finite:
            self.carried = data.credit.carried
        metrics = self._metrics(
            updates,
            means={**data.credit.means, **critic_metrics(data, critic_losses)},
            learning_rate=rates[-1],
            parts=[data],
            microbatches=sum(len(row.learned) for row in rows),
            scoring_s=scoring_s,
            skipped_before=skipped_before,
        )
        return replace(metrics, **self._of_demonstrations(rows, updates))

    def add(self, batch: FlatBatch) -> None:
        """Computes the gradient of a part of the next step, by the weights as they are. Raises TrainingStopped."""
        if not self._parts:
            self._before_parts = RandomState.now(self._ranks.device)
        self._parts.append(self._part(batch, last=False))

    def discard(self) -> None:
        """Forgets the parts of the next step, as if they had not been computed."""
        self._discard_gradients()
        if self._before_parts is not None:
            self._before_parts.restore(self._ranks.device)
        self._before_parts = None

    def _part(self, batch: FlatBatch, *, last: bool) -> _Part:
        """Adds the gradient of a part. `last`: the step's last one, after which its update is made."""
        started, name = time.perf_counter(), f"part {len(self._parts) + 1}"
        self._pull_sums = self._new_pull_sums(batch)
        cut, everything = partial(self._microbatches, batch, shared_prefixes(batch)), np.arange(len(batch.lengths))
        packed = cut(everything)
        data, counted = undivided(
            self._data(batch, [everything], packed, passes=self._preset.passes), preset=self._preset
        )
        assert data.credit.carried == self.carried, "an algorithm that carries something on sees whole steps"
        moves = self._moves(data)
        row = _row(cut, everything, packed, moves=moves)
        if not last and not moves.any():
            row = _Row(learned=(), idle=packed)
        records = [self._measure(data, microbatch) for microbatch in row.idle]
        for index, microbatch in enumerate(row.learned, start=1):
            self._reached(f"{name}, microbatch {index} of {len(row.learned)}")
            self._stop_if_asked()
            records.append(self._accumulate(data, microbatch, None, last=last and index == len(row.learned)))
        seconds = time.perf_counter() - started
        return _Part(data, counted, tuple(records), len(row.learned), self._pull_sums, seconds)

    def _finish(self, batch: FlatBatch, *, number: int) -> StepMetrics:
        """Takes the optimizer's step on the parts that were added and the last one; it is update `number`."""
        skipped_before = self._models.skipped
        parts = [*self._parts, self._part(batch, last=True)]
        self._parts, self._before_parts = [], None
        middle, divisor = time.perf_counter(), max(sum(part.counted for part in parts), 1.0)
        rates = self._rates(range(number, number + 1), scale=1.0)
        norm = self._engine.update(learning_rate=rates[0], divisor=divisor)
        records = [record for part in parts for record in part.records]
        update = _Update(
            records=tuple(replace(record, loss=record.loss / divisor) for record in records),
            idle=(),
            grad_norm=norm,
            value_loss=None,
            forward_backward_s=sum(part.seconds for part in parts),
            optimizer_s=time.perf_counter() - middle,
        )
        if self.keeps_tokens:
            self._keep_tokens([(part.data, part.records) for part in parts])
        if self.keeps_pulls:
            pulls = [_pulls(part.pull_sums, part.data, part.records) for part in parts if part.pull_sums is not None]
            self.pulls = divided_pulls(pulls, divisor=divisor)
        return self._metrics(
            [update],
            means=mean_over_trajectories([(part.data.credit.means, len(part.data.batch.firsts)) for part in parts]),
            learning_rate=rates[0],
            parts=[part.data for part in parts],
            microbatches=sum(part.learned for part in parts),
            scoring_s=0.0,
            skipped_before=skipped_before,
        )

    def _metrics(
        self,
        updates: Sequence[_Update],
        *,
        means: Mapping[str, float],
        learning_rate: float,
        parts: Sequence[StepData],
        microbatches: int,
        scoring_s: float,
        skipped_before: int,
    ) -> StepMetrics:
        """Of a step whose `parts` are all of its data. `microbatches` are those that this rank has learned from."""
        records = [record for update in updates for record in update.records]
        of_tokens = token_means(
            records,
            updates=len(updates),
            samples_policy=self._preset.samples_policy,
            ratio_moves=len(updates) > 1 or self._preset.moves_at_once,
            group=self._group,
        )
        seen = [record.routing for record in records if record.routing is not None]
        alignment = AlignmentReading() if self._engine.alignment is None else self._engine.alignment.taken()
        return StepMetrics(
            **vars(replace(of_tokens, means={**means, **of_tokens.means})),
            **vars(routing_metrics(seen)),
            grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            learning_rate=learning_rate,
            tokens=sum(int(data.batch.lengths.sum()) for data in parts),
            trained_tokens=sum(int(data.credit.kept.sum()) for data in parts),
            sequences=sum(int((~data.batch.mismatched).sum()) for data in parts),
            microbatches=microbatches * self._rows.of,
            updates=len(updates),
            forward_backward_s=scoring_s + sum(update.forward_backward_s for update in updates),
            optimizer_s=sum(update.optimizer_s for update in updates),
            skipped_updates=self._models.skipped - skipped_before,
            skipped_in_row=self._models.skipped_in_row,
            pass_costs=self._engine.costs.taken().model_dump(),
            alignment_cosine=alignment.cosine,
            alignment_projected_share=alignment.projected_share,
            alignment_skipped_share=alignment.skipped_share,
        )

    def _new_pull_sums(self, batch: FlatBatch) -> PullSums | None:
        if not self.keeps_pulls:
            return None
        return PullSums(len(batch.token_ids), ranks=self._ranks.count, group=self._group)

    def _showing(self, rows: Sequence[_Row], demonstrations: FlatBatch) -> list[_Row]:
        """The rows of a step's updates, each with its part of the demonstrations, packed by themselves."""
        parts = slices_of(demonstrations, updates=len(rows))
        assert len(parts) == len(rows), "each update has a demonstration: checked by LearnerConfig"
        cut = partial(self._microbatches, demonstrations, shared_prefixes(demonstrations))
        lengths = demonstrations.trained_lengths
        return [
            replace(row, shown=cut(part), shown_tokens=int(lengths[part].sum()))
            for row, part in zip(rows, parts, strict=True)
        ]

    def _of_demonstrations(self, rows: Sequence[_Row], updates: Sequence[_Update]) -> dict[str, Any]:
        """The fields of StepMetrics that are theirs. All ranks must call it."""
        tokens = sum(row.shown_tokens for row in rows)
        if not tokens:
            return {}
        shown = [update.shown_nats for update in updates if update.shown_nats is not None]
        nats = summed_over_ranks(self._group.once(torch.stack(shown).sum()))
        drawn = tokens // self._config.epochs_per_step
        return {"demonstration_loss": float(nats) / tokens, "demonstration_tokens": drawn}

    def _keep_tokens(self, parts: Sequence[tuple[StepData, Sequence[MicrobatchRecord]]]) -> None:
        began = time.thread_time()
        self.tokens = end_to_end([self._values(data, records) for data, records in parts])
        self.tokens_s = time.thread_time() - began

    def _values(self, data: StepData, records: Sequence[MicrobatchRecord]) -> TokenValues:
        found = [(record.microbatch.places, record.proximal_logprobs, record.entropy) for record in records]
        return token_values(data.batch, data.credit, found, group=self._group)

    def sketches(self, batch: FlatBatch, *, units: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sketch of each unit's share in the gradient of its part, [U, D]; the same on every rank, which all must call.

        `units` [S] is the unit of each sequence, 0 to U - 1, and `parts` [U] the part of each unit. The loss of a part
        is that of an update of its units alone, by the weights as they are. No weight, no state of the optimizer or of
        the algorithm, no gradient and no random number is touched. Raises TrainingStopped.
        """
        sequences_of_unit = [np.flatnonzero(units == unit) for unit in range(len(parts))]
        shares = shared_out([int(batch.lengths[each].sum()) for each in sequences_of_unit], ranks=self._rows.of)
        own, prefixes, all_of_it = shares[self._rows.number], shared_prefixes(batch), _RowShare(0, of=1)
        work = {unit: self._microbatches(batch, prefixes, sequences_of_unit[unit], share=all_of_it) for unit in own}
        slices = [np.flatnonzero(parts[units] == part) for part in np.unique(parts)]
        with torch.random.fork_rng(devices=[self._ranks.device] if self._ranks.device.type == "cuda" else []):
            whole = [*chain.from_iterable(work.values())]
            data = self._data(batch, slices, whole, passes=self._preset.passes)
            moves = self._moves(data)
            found = torch.zeros(len(parts), SKETCH_SIZE, dtype=torch.float64)
            rounds = max(map(len, shares))
            for number in range(rounds):
                self._reached(f"gradients by lag, {number + 1} of {rounds}")
                self._stop_if_asked()
                unit = own[number] if number < len(own) else None
                if unit is not None and moves[sequences_of_unit[unit]].any():
                    found[unit] = sum((self._sketch(data, one) for one in work[unit]), start=found[unit])
        # Of ranks that share a row each has a part of its gradient, and a sketch of a sum is the sum of the sketches.
        return summed_over_ranks(found).numpy()

    def _sketch(self, data: StepData, microbatch: Microbatch) -> Tensor:
        """The sketch of a microbatch's gradient, which is added to nothing."""
        microbatch, of_teacher = self._with_candidates(data, microbatch)

        def loss_of(output: Output) -> Tensor:
            (logprobs, entropy, candidates, *_), observed = data.told(microbatch, output)
            tokens = loss_tokens(data, microbatch, logprobs=logprobs, entropy=entropy)
            tokens = replace(tokens, candidate_logprobs=candidates, teacher_logprobs=of_teacher, **observed)
            return self._preset.loss(tokens).total

        if self._sketcher is None:
            self._sketcher = GradientSketch(device=self._ranks.device)
        gradients = self._engine.gradients_beside(loss_of, data.asked(microbatch))
        return self._sketcher.of(gradients, sizes=self._engine.trained_sizes)

    def outputs(self, batch: FlatBatch, *, reference: bool) -> NDArray[np.float32]:
        """The output of the trained model, or of the reference, at each trained token [N], 0 elsewhere. No gradient."""
        microbatches = self._microbatches(batch, shared_prefixes(batch), np.arange(len(batch.lengths)))
        passes = Passes(reference=True) if reference else Passes(proximal=True)
        scores = score(batch, microbatches, scorers=self._models.scorers, passes=passes, group=self._group)
        found = scores.reference_logprobs if reference else scores.proximal_logprobs
        assert found is not None, "the pass was asked for"
        return found.numpy()

    def average_outputs(self, batch: FlatBatch, *, top: int) -> AverageOutputs:
        """By the average of the policy, for each trained token: its logprob, and the `top` likeliest tokens there."""
        average, policy = self._models.average, self._models.trained
        assert average is not None, "the trainer was opened with an average"
        assert isinstance(policy, PolicyModel), "what a teacher teaches"
        microbatches = self._microbatches(batch, shared_prefixes(batch), np.arange(len(batch.lengths)))
        tokens = len(batch.token_ids)
        logprobs = torch.zeros(tokens)
        width = min(top, policy.vocabulary)
        ids, likeliest = torch.zeros(tokens, width, dtype=torch.int64), torch.zeros(tokens, width)
        with average.in_place():
            for microbatch in microbatches:
                logprobs[microbatch.places] = self._engine.forward(microbatch)[0].float().cpu()
                if top:
                    found = policy.top_candidates(microbatch, count=top)
                    ids[microbatch.places] = found.token_ids.cpu()
                    likeliest[microbatch.places] = found.logprobs.float().cpu()
        summed = [summed_over_ranks(self._group.once(each)).numpy() for each in (logprobs, ids, likeliest)]
        return AverageOutputs(*summed)

    def check_routing(self, batch: FlatBatch) -> None:
        """Raises ValueError for experts that the policy does not have. Says once that none are told."""
        policy = self._models.trained
        if not isinstance(policy, PolicyModel) or policy.replay is None:
            return
        policy.replay.check(batch)
        if batch.routing is None and self._ranks.leads and not self._said_unrouted:
            self._said_unrouted = True
            logger.warning(
                "generators do not tell the experts that tokens were sent to, so the learner's routers choose: see "
                "generator.engine.routed_experts, and the generators' logs"
            )

    def _train_critic(self, data: StepData, rows: Sequence[Sequence[Microbatch]], *, first_update: int) -> list[float]:
        """Of a critic with a model of its own: the loss of each of its updates."""
        critic, targets = self._models.critic, data.critic_targets
        if not isinstance(critic, Critic) or targets is None:
            return []
        return [critic.update(row, targets, number=first_update + index) for index, row in enumerate(rows)]

    def _moves(self, data: StepData) -> NDArray[np.bool_]:
        """True where a sequence has a gradient, [S]: all may, where the loss does not rest on advantages alone."""
        others = self._models.critic is not None or self._config.router.aux_loss_coef > 0
        if not self._preset.rests_on_advantages or others:
            return np.ones(len(data.batch.lengths), dtype=np.bool_)
        return data.credit.moves(data.batch)

    def _microbatches(
        self, batch: FlatBatch, prefixes: Prefixes, sequences: NDArray[np.int64], *, share: _RowShare | None = None
    ) -> list[Microbatch]:
        """This rank's share of an update, or another `share`; none of no sequences."""
        share = share or self._rows
        if not len(sequences):
            return []
        shares = plan(
            batch.lengths[sequences],
            sharing=prefixes.sharing.of(sequences),
            pairs=batch.pairs[sequences],
            ranks=share.of,
            microbatch_tokens=self._config.microbatch_tokens * self._group.size,
            even=self._even,
        )
        rows = (sequences[row] for row in shares[share.number])
        return [pack(batch, row, prefixes=prefixes).to(self._ranks.device) for row in rows]

    def _data(
        self,
        batch: FlatBatch,
        slices: Sequence[NDArray[np.int64]],
        microbatches: Sequence[Microbatch],
        *,
        passes: Passes,
    ) -> StepData:
        """The passes, the advantages, and the weights, which count an update's kept tokens on all ranks."""
        scores = score(batch, microbatches, scorers=self._models.scorers, passes=passes, group=self._group)
        made = credit(batch, scores, preset=self._preset, carried=self.carried, old_tokens=self.old_tokens)
        lengths = made.kept_lengths(batch)
        good = None
        if self._preset.good_reward is not None:
            good = self._weights(lengths * (batch.rewards >= self._preset.good_reward), batch.trajectories, slices)
        weights = self._weights(lengths, batch.trajectories, slices)
        return StepData(
            batch=batch,
            scores=scores,
            credit=made,
            sequence_weights=weights,
            critic_targets=critic_targets(batch, scores, made, weights),
            good_weights=good,
            taught=None if batch.taught is None else torch.from_numpy(batch.taught),
            observed_weights=self._observed_weights(batch, slices),
        )

    def _observed_weights(self, batch: FlatBatch, slices: Sequence[NDArray[np.int64]]) -> NDArray[np.float64] | None:
        if not self._preset.observes:
            return None
        lengths, weights = batch.observed_lengths, np.zeros(len(batch.lengths))
        if not lengths.any() and self._ranks.leads and not self._said_unobserved:
            self._said_unobserved = True
            logger.warning(
                "algo.observation_weight is set, and a step has no tokens that an environment said between two turns "
                "of the policy: nothing is learned from observations where conversations end with the first turn"
            )
        for part in slices:
            weights[part] = 1 / max(int(lengths[part].sum()), 1)
        return weights

    def _weights(
        self, lengths: NDArray[np.int64], trajectories: NDArray[np.int64], slices: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        weights = np.zeros(len(lengths))
        for part in slices:
            weights[part] = once_for_each(
                self._preset.weights, trained_lengths=lengths[part], trajectories=trajectories[part]
            )
        return weights

    def _rates(self, numbers: range, *, scale: float) -> list[float]:
        """The learning rates of a step's updates, times the algorithm's scale; 0 where the critic alone learns."""
        frozen = self._models.critic is not None and freezes_policy(self._config, first_update=numbers[0])
        rates = (learning_rate(self._config.optimizer, update=number) for number in numbers)
        return [0.0 if frozen else scale * rate for rate in rates]

    def _passes(self, batch: FlatBatch, slices: Sequence[NDArray[np.int64]]) -> Passes:
        """With several updates in an epoch the first one moves the policy away from where the step began. How far it is
        from old tokens has to be known before the first one.
        """
        passes, bound = self._preset.passes, self.old_tokens
        has_old = bound is not None and bool((batch.lags[batch.loss_mask] > bound.max_lag).any())
        needed = has_old or (len(slices) > 1 and self._preset.samples_policy)
        return replace(passes, proximal=True) if needed else passes

    def _update(
        self, data: StepData, row: _Row, rate: float, *, number: int, idle: tuple[MicrobatchRecord, ...] | None
    ) -> _Update:
        """`idle` are the records of what is idle, if an epoch before has made them."""
        started = time.perf_counter()
        if idle is None:
            idle = tuple(self._measure(data, microbatch) for microbatch in row.idle)
        routed = self._routed(row.learned)
        records = []
        for index, microbatch in enumerate(row.learned, start=1):
            self._reached(f"update {number}, microbatch {index} of {len(row.learned)}")
            self._stop_if_asked()
            last = index == len(row.learned)
            records.append(self._accumulate(data, microbatch, routed, last=last, shown=bool(row.shown)))
        shown_nats = self._imitate(row, number=number)
        middle = time.perf_counter()
        norm = self._engine.update(learning_rate=rate)
        critic = self._models.critic
        return _Update(
            records=(*records, *idle),
            idle=idle,
            shown_nats=shown_nats,
            grad_norm=norm,
            value_loss=critic.update(number=number) if isinstance(critic, CriticHead) else None,
            forward_backward_s=middle - started,
            optimizer_s=time.perf_counter() - middle,
        )

    def _imitate(self, row: _Row, *, number: int) -> Tensor:
        """Adds the gradient of the update's demonstrations; returns the sum of their tokens' cross-entropy, in nats."""
        nats = torch.zeros((), dtype=torch.float64)
        for index, microbatch in enumerate(row.shown, start=1):
            self._reached(f"update {number}, demonstrations {index} of {len(row.shown)}")
            self._stop_if_asked()
            losses = negative_log_likelihood(policy_logprobs=self._engine.forward(microbatch)[0])
            loss = self.demonstration_weight / row.shown_tokens * losses.sum()
            self._engine.backward(loss, last=index == len(row.shown))
            nats += losses.detach().sum(dtype=torch.float64).cpu()
        return nats

    def _stop_if_asked(self) -> None:
        if any_rank(self._should_stop()):
            self._discard_gradients()
            raise TrainingStopped

    def _measure(self, data: StepData, microbatch: Microbatch) -> MicrobatchRecord:
        """Metrics of `_accumulate`, without a gradient."""
        self._reached("what has no gradient")
        self._stop_if_asked()
        with torch.no_grad():
            logprobs, entropy, *_, routing = self._engine.forward(microbatch)
            tokens = loss_tokens(data, microbatch, logprobs=logprobs, entropy=entropy)
            return _record(self._preset.loss(tokens), tokens, microbatch, routing)

    def _discard_gradients(self) -> None:
        self._parts = []
        self._engine.discard_gradients()
        if isinstance(self._models.critic, CriticHead):
            self._models.critic.discard_gradients()

    def _routed(self, microbatches: Sequence[Microbatch]) -> RoutingSums | None:
        """Routing of an update's tokens on all ranks, as the load-balancing loss has to know beforehand; None
        without that loss, and of a single microbatch, whose own pass says it.
        """
        if not self._config.router.aux_loss_coef or len(microbatches) == 1:
            return None
        parts = []
        for microbatch in microbatches:
            self._reached("how tokens are routed")
            self._stop_if_asked()
            with torch.no_grad():
                parts.append(_sums(self._engine.forward(microbatch)[-1]))
        return total(parts)

    def _even_load(self, routing: RoutingSums | None, routed: RoutingSums | None) -> Tensor | float:
        """The addition of a microbatch to the load-balancing loss of its update, times the coefficient."""
        if not self._config.router.aux_loss_coef:
            return 0.0
        part = _sums(routing)
        return self._config.router.aux_loss_coef * (routed or total([part])).loss_of(part)

    def _accumulate(
        self, data: StepData, microbatch: Microbatch, routed: RoutingSums | None, *, last: bool, shown: bool = False
    ) -> MicrobatchRecord:
        """`last`: of those that are learned from; `shown`: demonstrations follow them in the update."""
        microbatch, of_teacher = self._with_candidates(data, microbatch)
        output, observed = data.told(microbatch, self._engine.forward(data.asked(microbatch)))
        logprobs, entropy, candidates, states, routing = output
        if self._pull_sums is not None:
            self._pull_sums.watch(logprobs, microbatch.places)
        tokens = loss_tokens(data, microbatch, logprobs=logprobs, entropy=entropy)
        tokens = replace(tokens, candidate_logprobs=candidates, teacher_logprobs=of_teacher, **observed)
        loss = self._preset.loss(tokens)
        below_head = self._learn_values(data, microbatch, states, last=last)
        whole = loss.total + self._even_load(routing, routed)
        self._engine.backward(whole if below_head is None else whole + below_head, last=last and not shown)
        return _record(loss, tokens, microbatch, routing)

    def _learn_values(
        self, data: StepData, microbatch: Microbatch, states: Tensor | None, *, last: bool
    ) -> Tensor | None:
        """Of a critic on the policy's own layers: what goes into the policy's loss."""
        critic, targets = self._models.critic, data.critic_targets
        if not isinstance(critic, CriticHead) or targets is None:
            return None
        assert states is not None, "the policy was told to give its states"
        return critic.learn(states, microbatch, targets, last=last)

    def _with_candidates(self, data: StepData, microbatch: Microbatch) -> tuple[Microbatch, Tensor | None]:
        """The microbatch with a teacher's candidates, and their logprobs [N, C]: from the data, from a teacher of the
        ranks, or of some sequences from either. Those beyond the policy's vocabulary are impossible to both, so that
        their mass is the tail's: a teacher's output matrix may have more rows, for the same tokenizer.
        """
        microbatch, found = self._all_candidates(data, microbatch)
        policy = self._models.trained
        if found is None or microbatch.candidates is None or not isinstance(policy, PolicyModel):
            return microbatch, found
        return microbatch, found.masked_fill(microbatch.candidates >= policy.vocabulary, -torch.inf)

    def _all_candidates(self, data: StepData, microbatch: Microbatch) -> tuple[Microbatch, Tensor | None]:
        teachers, told = self._models.teachers, microbatch.candidates
        if told is None and not self._preset.candidates:
            return microbatch, None
        known = self._told_candidates(data, microbatch)
        # All ranks ask or none: it takes part in their collectives.
        if told is not None and not (teachers and (data.batch.teachers >= 0).any()):
            return microbatch, known
        token_ids, found = teachers.candidates(microbatch, count=self._preset.candidates)
        if told is None or known is None:
            return replace(microbatch, candidates=token_ids), found
        asked = (microbatch.teachers[microbatch.sequences.cpu()] >= 0).to(told.device)[:, None]
        candidates = torch.where(asked, token_ids, told)
        return replace(microbatch, candidates=candidates), torch.where(asked, found.to(known.dtype), known)

    def _told_candidates(self, data: StepData, microbatch: Microbatch) -> Tensor | None:
        if microbatch.candidates is None:
            return None
        logprobs = data.batch.candidate_logprobs.reshape(len(data.batch.token_ids), -1)
        return torch.from_numpy(logprobs)[microbatch.places].to(microbatch.targets.device)


def _row(
    cut: Callable[[NDArray[np.int64]], list[Microbatch]],
    sequences: NDArray[np.int64],
    packed: list[Microbatch],
    *,
    moves: NDArray[np.bool_],
) -> _Row:
    """An update of these sequences, `packed` whole. It is never left without anything to learn from."""
    moving = moves[sequences]
    if moving.all() or not moving.any():
        return _Row(learned=packed)
    return _Row(learned=cut(sequences[moving]), idle=cut(sequences[~moving]))


def _pulls(sums: PullSums, data: StepData, records: Sequence[MicrobatchRecord]) -> TokenPulls:
    """The pulls of the tokens of `data`. Every rank must call it."""
    clipped = [(record.microbatch.places, record.clipped) for record in records]
    return sums.over_ranks(advantages=data.credit.advantages, clipped=clipped)


def _sums(routing: RoutingSums | None) -> RoutingSums:
    assert routing is not None, "a model with the loss has experts that are chosen: checked when it was loaded"
    return routing


def _record(loss: Loss, tokens: LossTokens, microbatch: Microbatch, routing: RoutingSums | None) -> MicrobatchRecord:
    return MicrobatchRecord(
        loss=loss.total.detach(),
        proximal_logprobs=tokens.proximal_logprobs,
        entropy=None if tokens.entropy is None else tokens.entropy.detach(),
        clipped=loss.clipped,
        corrected=loss.corrected,
        means=loss.means,
        microbatch=microbatch,
        routing=None if routing is None else RoutingSums(*(each.detach() for each in routing)),
    )
