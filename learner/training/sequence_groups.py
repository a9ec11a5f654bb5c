"""Sequence parallelism after DeepSpeed-Ulysses (arXiv 2309.14509): the ranks of a group share each packed row.

Between attentions a rank has some of the row's tokens, and all of their heads; within them all tokens, and some of the
heads. One exchange, each rank with each, leads from either to the other, and its gradient is the same exchange:

    [T/S, H, D] ─▶ exchange ─▶ [T, H/S, D] ─▶ attention of the whole row ─▶ [T, H/S, D] ─▶ exchange ─▶ [T/S, H, D]

Tokens are dealt out like cards, rank r of S has r, r + S, r + 2 S, ...: what is predicted lies behind the prompts, and
so each rank has as much of it. Numbers of the tokens are gathered for the loss, which every rank computes whole: each
takes the gradient of its own tokens, and so has a part of the gradient of the weights, which the sum over ranks makes
whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from learner.training.ranks import rank, rank_count


@dataclass(frozen=True)
class SequenceGroup:
    """The `size` ranks that share rows, and this rank's `place` among them. Of one rank it is nothing but that."""

    size: int = 1
    place: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def opened(cls, size: int, *, timeout_s: float) -> SequenceGroup:
        """This rank's group, of neighbours. All ranks must call it. Raises ValueError if ranks would be left over."""
        if size == 1:
            return ALONE
        count, own = rank_count(), rank()
        if count % size:
            raise ValueError(
                f"learner.training.sequence_parallel is {size}, and the learner has {count} ranks, which share rows in "
                f"groups of {size}: expected a multiple of {size}. Set learner.ranks, or leave sequence_parallel out."
            )
        groups = [
            dist.new_group(list(range(first, first + size)), timeout=timedelta(seconds=timeout_s))
            for first in range(0, count, size)
        ]
        return cls(size=size, place=own % size, group=groups[own // size])

    @property
    def leads(self) -> bool:
        """True of one rank of each group, whose numbers count where all ranks of it have the same."""
        return self.place == 0

    def once(self, values: Tensor) -> Tensor:
        """Numbers that all ranks of a group have alike, to be summed over all ranks: zeros, on all but one of them."""
        return values if self.leads else torch.zeros_like(values)

    def own_tokens(self, tokens: int, *, device: torch.device) -> Tensor:
        """Places int64 [ceil(T / S)] of this rank's tokens in a row of `tokens`; beyond its end, that of the last."""
        dealt = torch.arange(self.place, self.place + _upwards(tokens, self.size), self.size, device=device)
        return dealt.clamp(max=tokens - 1)

    def exchange(self, parts: Tensor) -> Tensor:
        """[c, S, ...] to the same shape: part s of this rank goes to rank s, and comes to lie at [:, r] there, of rank
        r. The exchange of its result is `parts` again.
        """
        exchanged: Tensor = _Exchange.apply(parts, self)  # type: ignore[no-untyped-call]
        return exchanged

    def exchanged(self, parts: Tensor) -> Tensor:
        """As `exchange`, without gradient."""
        sent = parts.transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.transpose(0, 1).contiguous()

    def gathered(self, own: Tensor, *, most: int) -> Tensor:
        """[n, ...] of each rank, n at most `most`, to [S * most, ...], in the order of ranks; without gradient."""
        if most == 0:
            return own
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts)

    def close(self) -> None:
        """Releases it. All ranks must call it."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)


ALONE = SequenceGroup()
"""A rank that shares its rows with nobody."""


def _upwards(number: int, step: int) -> int:
    return -(-number // step) * step


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return group.exchanged(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        group: SequenceGroup = ctx.group  # type: ignore[attr-defined]
        return group.exchanged(grads[0]), None


@dataclass(frozen=True)
class HeadExchange:
    """Leads from this rank's tokens of a row of `tokens` to its heads of all tokens, and back."""

    group: SequenceGroup
    tokens: int

    def check(self, heads: int, *, layer: str) -> None:
        """Raises ValueError if so many heads of queries cannot be shared out."""
        if heads % self.group.size:
            raise ValueError(
                f"learner.training.sequence_parallel is {self.group.size}, and {layer} has {heads} attention heads, "
                f"which so many ranks cannot share evenly: expected a divisor of {heads}. Lower it, or leave it out."
            )

    def to_heads(self, flat: Tensor) -> Tensor:
        """[T/S, K, D] to [T, K', D]. Heads of keys that do not go into S parts are there several times, so many that
        each query finds its own: K' is lcm(K, S) / S.
        """
        size = self.group.size
        copies = size // math.gcd(flat.shape[1], size)
        parts = flat if copies == 1 else flat.repeat_interleave(copies, dim=1)
        heads = parts.shape[1] // size
        exchanged = self.group.exchange(parts.view(len(parts), size, heads, parts.shape[2]))
        return exchanged.flatten(0, 1)[: self.tokens]

    def to_tokens(self, flat: Tensor) -> Tensor:
        """[T, H/S, D] to [T/S, H, D]; zeros at what is beyond the row's end."""
        size = self.group.size
        padded = torch.nn.functional.pad(flat, (0, 0, 0, 0, 0, _upwards(self.tokens, size) - self.tokens))
        return self.group.exchange(padded.view(-1, size, *flat.shape[1:])).flatten(1, 2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """[H] to [H/S]: this rank's."""
        return of_heads.chunk(self.group.size)[self.group.place]


class GatheredTargets:
    """The N numbers of a row's targets, of which each rank of a group makes those of its own tokens."""

    def __init__(self, rows: Tensor, group: SequenceGroup) -> None:
        """`rows` int64 [N]: the row's token that predicts each."""
        owners = rows % group.size
        counts = torch.bincount(owners, minlength=group.size)
        by_owner = owners.argsort(stable=True)
        within = torch.empty_like(rows)
        within[by_owner] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owners[by_owner]]
        self.group = group
        self.own = (owners == group.place).nonzero()[:, 0]
        """int64 [n]: numbers of this rank's among them."""
        self.most = int(counts.max())
        self.order = owners * self.most + within
        """int64 [N]: where each is, among what `SequenceGroup.gathered` gives of `most`."""

    def whole(self, own: Tensor) -> Tensor:
        """[n, ...] of each rank to [N, ...]; the gradient is that of this rank's, of a loss that all compute alike."""
        gathered: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]
        return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, own: Tensor, targets: GatheredTargets) -> Tensor:
        ctx.save_for_backward(targets.own)
        return targets.group.gathered(own, most=targets.most).index_select(0, targets.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (own,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, own), None
