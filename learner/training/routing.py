"""Routing of tokens in a mixture of experts: the load of its experts, and the loss that keeps the load even.

router ─ logits ─▶ softmax ─▶ probabilities ─┐
   └─ chosen experts ─▶ counts ──────────────┴─▶ RoutingSums of a row ─▶ of an update, over ranks ─▶ loss and metrics

The loss is transformers' `load_balancing_loss_func` (arXiv 2101.03961, equations 4 to 6) over the tokens of all
sequences of an update, each as if it stood alone: a prompt that sequences share counts for each of them. It is a
product of two means, and so no sum over microbatches; but the shares of the choices that experts get have no gradient.
Once they are known of the whole update, each microbatch adds its part, and how it is cut changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from learner.training.adapters import expert_parameters
from learner.training.ranks import summed_over_ranks
from learner.training.router_replay import ReplayTally
from learner.training.shards import whole_shape
from learner.training.unfit_model import UnfitModel

_REFERENCE = "load_balancing_loss_func"


class RoutingSums(NamedTuple):
    """Sums over tokens, each as often as sequences have it, of L layers with E experts.

    `chosen` [L, E]: choices of each expert. `probabilities` [E]: of being chosen, over all layers, with a gradient if
    the pass has one; `entropy`: of these, in nats, over all layers; both NaN where the router is no softmax. `tokens`:
    how many were summed, once for each layer. `given` and `changed`: see `ReplayTally`. A tuple, since DeepSpeed's
    hooks look into those.
    """

    chosen: Tensor
    probabilities: Tensor
    entropy: Tensor
    tokens: Tensor
    given: Tensor
    changed: Tensor

    def loss_of(self, part: RoutingSums) -> Tensor:
        """The addition of `part` to the load-balancing loss of these sums, which it is in; only it has a gradient."""
        shares = (self.chosen.sum(0) / self.tokens).to(part.probabilities)
        return len(shares) * (shares * part.probabilities).sum() / self.tokens.to(part.probabilities)


def total(parts: Sequence[RoutingSums]) -> RoutingSums:
    """Of all parts of all ranks, float64, without gradient. Every rank must call it with at least one part."""
    rows = [torch.cat([each.detach().double().flatten() for each in part]) for part in parts]
    sums = summed_over_ranks(torch.stack(rows).sum(0))
    layers, experts = parts[0].chosen.shape
    chosen, probabilities = sums[:-4].view(layers + 1, experts).tensor_split([layers])
    entropy, tokens, given, changed = sums[-4:]
    return RoutingSums(chosen, probabilities[0], entropy, tokens.clamp(min=1), given, changed)


@dataclass(frozen=True, kw_only=True)
class RoutingMetrics:
    """Of a mixture of experts, over the tokens of a step; None for other models, or where routers are no softmax.

    `expert_load_max`: the largest share of a layer's choices that an expert got, over an even one. `dead_experts`:
    those that no token chose, of all layers. `router_entropy`: in nats, the mean over tokens and layers.
    `router_aux_loss`: the load-balancing loss before its coefficient; evenly chosen, as many as a token has experts.
    `router_replayed_share`: choices, of all tokens and layers, that were the engine's (`router_replay`), and
    `router_changed_share`: those of them that would have been others; None if none was the engine's.
    """

    expert_load_max: float | None = None
    dead_experts: int | None = None
    router_entropy: float | None = None
    router_aux_loss: float | None = None
    router_replayed_share: float | None = None
    router_changed_share: float | None = None


def routing_metrics(parts: Sequence[RoutingSums]) -> RoutingMetrics:
    """Of this rank's parts; none for a model without experts. Every rank must call it."""
    if not parts:
        return RoutingMetrics()
    found = total(parts)
    shares = found.chosen / found.chosen.sum(1, keepdim=True).clamp(min=1)
    softmax = not bool(found.entropy.isnan())
    return RoutingMetrics(
        expert_load_max=float(shares.max() * shares.shape[1]),
        dead_experts=int((found.chosen == 0).sum()),
        router_entropy=float(found.entropy / found.tokens) if softmax else None,
        router_aux_loss=float(found.loss_of(found)) if softmax else None,
        router_replayed_share=float(found.given / found.tokens) if found.given > 0 else None,
        router_changed_share=float(found.changed / found.given) if found.given > 0 else None,
    )


class ExpertWatch:
    """Notes which experts the routers of a model of transformers choose, while it is asked to."""

    def __init__(self, model: nn.Module) -> None:
        """Puts hooks onto the layers' experts, if it has any."""
        self.has_softmax = hasattr(sys.modules[type(model).__module__], _REFERENCE)
        """True if transformers has the loss for this model, whose routers then choose the largest of a softmax."""
        self._name = type(model).__name__
        self._chosen: list[Tensor] = []
        self._watching = False
        found = {name.rpartition(".")[0]: whole_shape(weight)[0] for name, weight in expert_parameters(model)}
        self._layers, self._experts = len(found), max(found.values(), default=0)
        for name in found:
            model.get_submodule(name).register_forward_pre_hook(self._note, with_kwargs=True)

    def __bool__(self) -> bool:
        return self._layers > 0

    def check_loss(self, path: Path) -> None:
        """Raises UnfitModel for a model in `path` that has no load-balancing loss."""
        if not self:
            raise UnfitModel(
                f"{path}: training.router.aux_loss_coef is set, and {self._name} has no experts: expected a mixture of "
                "experts. Leave it out."
            )
        if not self.has_softmax:
            raise UnfitModel(
                f"{path}: training.router.aux_loss_coef is set, and transformers defines no load-balancing loss for "
                f"{self._name}, whose routers are no softmax, or are kept even otherwise: expected a model with one, "
                "such as Qwen3-MoE, Mixtral or gpt-oss. Leave it out."
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a forward pass is noted; layers that a backward pass computes once more are not within it."""
        self._chosen = []
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def sums(
        self, router_logits: Sequence[Tensor], counts: Tensor, *, replayed: ReplayTally | None = None
    ) -> RoutingSums | None:
        """Of the pass that was noted: `router_logits` [T, E] of each layer, if it has a softmax; `counts` [T], in how
        many sequences a token is; `replayed`, choices that were the engine's. None if a layer's experts were given no
        choice.
        """
        if len(self._chosen) != self._layers:
            return None
        weights = counts.float()
        chosen = weights.new_zeros(self._layers, self._experts)
        for layer, index in enumerate(self._chosen):
            chosen[layer].scatter_add_(0, index.flatten(), weights.repeat_interleave(index.shape[1]))
        probabilities, entropy = weights.new_zeros(self._experts), weights.new_zeros(())
        for logits in router_logits:
            logprobs = logits.float().log_softmax(-1)
            likely = logprobs.exp()
            probabilities = probabilities + weights @ likely
            entropy = entropy - (weights @ (likely * logprobs).detach()).sum()
        if not self.has_softmax:
            probabilities, entropy = probabilities + torch.nan, entropy + torch.nan
        none = weights.new_zeros(())
        return RoutingSums(
            chosen,
            probabilities,
            entropy,
            weights.sum() * self._layers,
            none if replayed is None else replayed.given,
            none if replayed is None else replayed.changed,
        )

    def _note(self, _: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        if self._watching:
            given = (each for each in (*arguments, *named.values()) if isinstance(each, Tensor))
            self._chosen += [each.detach() for each in given if not each.is_floating_point() and each.dim() == 2][:1]
