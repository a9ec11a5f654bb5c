"""A check of a model, as it is loaded, that it computes sequences together as transformers computes each by itself.

A row of several random sequences, one of them longer than the model's window if that is affordable, goes through the
model as training has it, and each sequence alone through the code of transformers with its plain attention. All ranks
take part alike, and nothing is left behind: no gradient, no mode, no drawn number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.layouts import plain_attention
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import PolicyModel
from learner.training.ranks import rank_count, summed_over_ranks
from learner.training.score_model import ScoreModel
from learner.training.shards import whole_size
from learner.training.unfit_model import UnfitModel

# In nats, or in a score's unit: the mean over the tokens of a piece. Random models that are computed wrongly are off by
# 0.1 to 4.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05}
# Of gradients, as a share of their length: a wrong one is off by all of it.
SLOPE_TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.3}
# Rounding of bfloat16 grows with a model's depth; it is told from a mistake by how far two right ways are apart.
_TIMES_ROUNDING = 3.0
_MAX_ROUNDING = 0.25
_PIECE = 16
# Tokens times parameters: about two seconds.
_WORK = {"cpu": 2e10, "cuda": 1e13}
_SHORTEST, _LONGEST = 24, 2048
_OTHERS = (9, 17, 5)
_BEYOND_WINDOW = 16
_SEED = 20

Compute = Callable[[Microbatch], Tensor]
"""Numbers [N] of a microbatch's targets."""
Otherwise = Callable[[], AbstractContextManager[object]]
"""A context within which a model computes in another way."""


@dataclass(frozen=True)
class PackingGap:
    """Mean gap of logprobs in the worst piece of a sequence, and its limit."""

    found: float
    allowed: float

    @property
    def passes(self) -> bool:
        """False for one that is not a number, too."""
        return self.found <= self.allowed


def check_policy(policy: PolicyModel, path: Path, *, compute: Compute) -> PackingGap:
    """Raises UnfitModel, with the name `path`, for a policy whose logprobs come out wrong. `compute` runs it: itself,
    or the engine that it is under. All ranks must call it.
    """
    settings = policy.settings

    def together(microbatch: Microbatch) -> Tensor:
        policy.settings = replace(settings, with_entropy=False, entropy_gradient=False, with_states=False)
        return compute(microbatch)

    def alone(microbatch: Microbatch) -> Tensor:
        policy.settings = replace(settings, own_logits=True)
        return compute(microbatch)

    try:
        return _check(policy, policy.causal_lm, path, together=together, alone=alone)
    finally:
        policy.settings = settings


def check_scores(scores: ScoreModel, path: Path, *, compute: Compute) -> PackingGap:
    """Raises UnfitModel for a reward model or critic whose states come out wrong. All ranks must call it."""
    scores.probed = True
    try:
        return _check(scores, scores.classifier, path, together=compute, alone=compute)
    finally:
        scores.probed = False


def gap_between(model: nn.Module, compute: Compute, otherwise: Otherwise, *, allowed: float) -> PackingGap:
    """The gap, bounded by `allowed`, of two ways in which `compute` runs the same row of random sequences through
    `model`, of transformers, as it stands. All ranks must call it.
    """
    row = _ProbeRow(model)
    with _undisturbed(model):
        found = row.together(compute)
        with otherwise():
            return replace(row.gap(found, row.together(compute)), allowed=allowed)


def slope_gap_between(
    model: nn.Module, compute: Compute, otherwise: Otherwise, *, parameters: Sequence[nn.Parameter]
) -> PackingGap:
    """The same in training, of the gradients that the sum of the row's numbers has at `parameters`: how far they are
    apart, as a share of the other way's length. All ranks must call it.
    """
    row = _ProbeRow(model)
    with _undisturbed(model, trains=True):
        found = row.slopes(compute, parameters)
        with otherwise():
            expected = row.slopes(compute, parameters)
    share = (found - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny)
    allowed = SLOPE_TOLERANCES.get(row.dtype, SLOPE_TOLERANCES[torch.float32])
    return PackingGap(found=float(summed_over_ranks(share.reshape(1))) / rank_count(), allowed=allowed)


class _ProbeRow:
    """The sequences of `probe`, together in a row and each alone, on the device and in the type of a model."""

    def __init__(self, inner: nn.Module) -> None:
        parameter = next(inner.parameters())
        self._device, self.dtype = parameter.device, parameter.dtype
        self._batch = probe(inner, device=parameter.device)

    def together(self, compute: Compute) -> list[Tensor]:
        """The numbers of each sequence, computed in one row."""
        return self._of(range(len(self._batch.lengths)), compute)

    def singly(self, compute: Compute) -> list[Tensor]:
        """The numbers of each sequence, computed by itself."""
        return [self._of([sequence], compute)[0] for sequence in range(len(self._batch.lengths))]

    def gap(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> PackingGap:
        """With the limit of the model's type."""
        return PackingGap(found=_gap(found, expected), allowed=TOLERANCES.get(self.dtype, TOLERANCES[torch.float32]))

    def slopes(self, compute: Compute, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The gradients at `parameters` of the sum of all numbers, computed in one row: end to end, in float32."""
        row = self._row(range(len(self._batch.lengths)))
        slopes = torch.autograd.grad(compute(row).float().sum(), parameters, allow_unused=True)
        return torch.cat([slope.detach().flatten().float().cpu() for slope in slopes if slope is not None])

    def _row(self, sequences: Sequence[int]) -> Microbatch:
        batch = self._batch
        return pack(batch, np.array(sequences, dtype=np.int64), prefixes=shared_prefixes(batch)).to(self._device)

    def _of(self, sequences: Sequence[int], compute: Compute) -> list[Tensor]:
        row = self._row(sequences)
        values = compute(row).float().cpu()
        owners = row.sequences.cpu()
        return [values[owners == sequence] for sequence in range(len(sequences))]


def _check(model: nn.Module, inner: nn.Module, path: Path, *, together: Compute, alone: Compute) -> PackingGap:
    parameter, row = next(model.parameters()), _ProbeRow(inner)
    with _undisturbed(model):
        found = row.together(together)
        with plain_attention(inner):
            expected = row.singly(alone)
        gap = row.gap(found, expected)
        if not gap.passes and parameter.dtype == torch.bfloat16:
            gap = replace(gap, allowed=max(gap.allowed, _rounding(inner, lambda: row.singly(alone), expected)))
    if not gap.passes:
        raise UnfitModel(
            f"{path}: {type(inner).__name__} computes several sequences together otherwise than transformers computes "
            f"each alone: a self-check found {gap.found:.2g} between them, expected at most {gap.allowed:.2g}. It "
            "would be trained otherwise than it is sampled. Name another model."
        )
    return gap


def _rounding(inner: nn.Module, by: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> float:
    """A gap that rounding alone explains: some times that between two of transformers' own kernels."""
    if not getattr(inner, "_supports_sdpa", False):
        return 0.0
    with plain_attention(inner, "sdpa"):
        return min(_TIMES_ROUNDING * _gap(by(), expected), _MAX_ROUNDING)


def _gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The mean over the worst piece of all sequences, the worst of all ranks' alike."""
    pieces = [
        piece.mean()
        for one, other in zip(found, expected, strict=True)
        for piece in torch.split((one - other).abs(), _PIECE)
        if len(piece)
    ]
    worst = torch.stack(pieces).max()
    # Each rank sees the same sequences; the mean of what they found is the same number on every one of them.
    return float(summed_over_ranks(worst.reshape(1))) / rank_count()


def probe(model: nn.Module, *, device: torch.device) -> FlatBatch:
    """Random sequences for a model of transformers: short ones, two of them with the same beginning, a long one, and
    another that leaves it at its last quarter.
    """
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    drawn = np.random.default_rng(_SEED)
    parameters = sum(map(whole_size, model.parameters()))
    vocabulary = int(config.vocab_size)
    long = _long(config, parameters=parameters, device=device)
    prompt = drawn.integers(0, vocabulary, 4)
    sequences = []
    stem = drawn.integers(0, vocabulary, long)
    for length, begun in ((_OTHERS[0], prompt), (_OTHERS[1], prompt), (long, stem), (_OTHERS[2], prompt[:0]),
                          (long, stem[: 3 * long // 4])):  # fmt: skip
        ids = np.concatenate([begun, drawn.integers(0, vocabulary, length - len(begun))])
        mask = np.arange(length) >= len(prompt)
        sequences.append(
            TrainSequence(
                token_ids=ids.astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.zeros(length, dtype=np.float32),
                reward=0.0,
                lags=np.zeros(length, dtype=np.int32),
                mixed_versions=False,
            )
        )
    return flatten(sequences)


def _long(config: object, *, parameters: int, device: torch.device) -> int:
    work = _WORK.get(device.type, _WORK["cpu"])
    # Each token goes through the model twice.
    affordable = int(work / max(parameters, 1) / 2) - sum(_OTHERS)
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    wanted = max((window + _BEYOND_WINDOW for window in windows if window), default=4 * _SHORTEST)
    most = getattr(config, "max_position_embeddings", None) or _LONGEST
    return max(min(wanted, affordable, _LONGEST, most), min(_SHORTEST, most))


@contextmanager
def _undisturbed(model: nn.Module, *, trains: bool = False) -> Iterator[None]:
    """Without gradient and dropout, or as in training, in a copy of the random state; modules' modes are put back one
    by one.
    """
    modes = {module: module.training for module in model.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.set_grad_enabled(trains), torch.random.fork_rng(devices=devices):
            model.train(trains)
            yield
    finally:
        for module, training in modes.items():
            module.training = training
