"""The part of a microbatch that a rank computes: all of it, or, of ranks that share a row, its own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from learner.training.layouts import takes_packed_rows
from learner.training.packing import Microbatch, PackedRow
from learner.training.sequence_groups import GatheredTargets, HeadExchange, SequenceGroup
from learner.training.unfit_model import UnfitModel


@dataclass(frozen=True)
class RowPart:
    """Of a microbatch the tokens of a rank, `row`, whose index is that of the whole; and n of its N predictions, as of
    `Microbatch`: `rows` are places among the tokens. `exchange` has the others' tokens; absent of a whole row.
    """

    row: PackedRow
    rows: Tensor
    targets: Tensor
    candidates: Tensor | None
    exchange: HeadExchange | None = None
    gathered: GatheredTargets | None = None

    def whole(self, values: Tensor) -> Tensor:
        """Numbers [n, ...] of this part's predictions to those of the microbatch [N, ...]. All ranks of its group must
        call it, in one order.
        """
        own = values[: len(self.targets)]
        return own if self.gathered is None else self.gathered.whole(own)


def check_shareable(model: nn.Module, path: Path, group: SequenceGroup) -> None:
    """Raises UnfitModel for a model, of transformers, whose rows the ranks of `group` cannot share."""
    if group.size == 1:
        return
    what = None
    config = model.config
    assert isinstance(config, PreTrainedConfig), "a model of transformers has a config"
    heads = getattr(config.get_text_config(decoder=True), "num_attention_heads", None) or group.size
    if not takes_packed_rows(model):
        what = f"{type(model).__name__} takes no packed rows: expected a model whose layers are all of attention"
    elif heads % group.size:
        what = f"{type(model).__name__} has {heads} attention heads, which so many ranks cannot share evenly: expected "
        what += f"a divisor of {heads}"
    if what is not None:
        raise UnfitModel(f"{path}: learner.training.sequence_parallel is {group.size}, and {what}. Or leave it out.")


def part_of(model: nn.Module, microbatch: Microbatch, group: SequenceGroup) -> RowPart:
    """The part of this rank in `group`; all of the microbatch, while the model does not take packed rows."""
    if group.size == 1 or not takes_packed_rows(model):
        return RowPart(microbatch, microbatch.rows, microbatch.targets, microbatch.candidates)
    tokens = len(microbatch.token_ids)
    places = group.own_tokens(tokens, device=microbatch.token_ids.device)
    dealt = torch.arange(len(places), device=places.device) * group.size + group.place
    row = PackedRow(
        token_ids=microbatch.token_ids[places],
        positions=microbatch.positions[places],
        index=microbatch.index,
        # The last token counts where it is, and not where it fills a row up.
        counts=microbatch.counts[places] * (dealt < tokens),
        routing=None if microbatch.routing is None else microbatch.routing.at(places),
    )
    gathered = GatheredTargets(microbatch.rows, group)
    own, candidates = gathered.own, microbatch.candidates
    return RowPart(
        row,
        rows=microbatch.rows[own] // group.size,
        targets=microbatch.targets[own],
        candidates=None if candidates is None else candidates[own],
        exchange=HeadExchange(group, tokens=tokens),
        gathered=gathered,
    )
