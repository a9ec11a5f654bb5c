"""Muon for the matrices of a decoder's layers, and AdamW for everything else, as one optimizer.

a matrix's gradient ─▶ momentum ─▶ Newton-Schulz: nearly orthogonal ─▶ times 0.2 sqrt(max(rows, columns)) and the rate

Muon is Keller Jordan's (https://kellerjordan.github.io/posts/muon/), in torch's implementation: for hidden layers, with
AdamW for embeddings, output head, norms and biases. The factor is of arXiv 2502.16982: entries of an orthogonal matrix
have a root mean square of 1 / sqrt(max(rows, columns)), and AdamW's updates one of 0.2 to 0.4 of the rate, so that both
take the same learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.training.config import OptimizerConfig
from learner.training.unfit_model import UnfitModel


def muon_of(model: nn.Module, config: OptimizerConfig, *, fused: bool) -> MuonWithAdamW:
    """The optimizer of what is trained of a model of transformers, or of one around it; `fused` is of AdamW.

    Raises UnfitModel for a model whose layers have no linear layers, or that holds several matrices in one parameter.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    matrices = hidden_matrices(model)
    kind = type(model).__name__
    stacked = next((name for name, each in trained.items() if each.ndim > 2), None)
    if stacked is not None:
        raise UnfitModel(
            f"optimizer.type is muon, and {stacked} of {kind} has {trained[stacked].ndim} dimensions, as the stacked "
            "experts of a mixture: expected a model whose parameters have two at most. Set optimizer.type to adamw, or "
            "train another model."
        )
    if not matrices:
        raise UnfitModel(
            f"optimizer.type is muon, and {kind} has no linear layers within layers of a decoder: expected a decoder "
            "such as Llama's or Qwen's. Set optimizer.type to adamw."
        )
    others = [each for name, each in trained.items() if name not in matrices]
    return MuonWithAdamW(list(matrices.values()), others, config, fused=fused)


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained weights, by name, of the linear layers within a decoder's layers, each [rows, columns].

    Neither embeddings nor an output head are within one, whatever a model calls them.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    linear = [part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)]
    hidden = {id(part.weight) for part in linear}
    return {name: each for name, each in model.named_parameters() if each.requires_grad and id(each) in hidden}


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and torch's AdamW with one state: two groups of parameters, Muon's first.

    Both take the rate and the decay of the same config; momentum is Muon's, betas and epsilon are AdamW's.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        config: OptimizerConfig,
        *,
        fused: bool,
    ) -> None:
        rate, decay = config.learning_rate, config.weight_decay
        self._muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
        )
        betas = (config.beta1, config.beta2)
        self._adamw = torch.optim.AdamW(
            others, lr=rate, betas=betas, eps=config.epsilon, weight_decay=decay, fused=fused
        )
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Moves all parameters by their gradients."""
        assert closure is None, "gradients are there before a step"
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, settings included."""
        super().load_state_dict(dict(state_dict))
        self._share()

    def _share(self) -> None:
        """Has the two work on the groups and the state that are read and written here."""
        muon, adamw = self.param_groups
        self._muon.param_groups, self._adamw.param_groups = [muon], [adamw]
        self._muon.state = self._adamw.state = self.state


def is_of_muon(group: Mapping[str, Any]) -> bool:
    """True of a group of parameters, also in a checkpoint, that Muon moves; False of AdamW's."""
    return "momentum" in group
