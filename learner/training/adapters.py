"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers and on the experts of a mixture.

They are peft's: weights [out, in] stay frozen, and scale * up @ down is added; of experts [experts, ...] each has an
adapter of its own. What leaves the learner is always the merged model under its Hugging Face names: `merged_weights`
says which parameters make up each published weight. The reference policy needs no second model: `adapters_off` is the
frozen one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from learner.training.config import ALL_LINEAR, LoraConfig
from learner.training.shards import whole_shape, whole_size
from learner.training.unfit_model import UnfitModel

if TYPE_CHECKING:  # a second of each start that runs without adapters would do without
    import peft
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

logger = logging.getLogger(__name__)

ADAPTER = "default"
BASE_LAYER = "base_layer"
MOST_RANK = 512
_HELD = "held"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# They choose experts, and say how much of the one that all tokens share is taken.
_ROUTERS = frozenset({"gate", "router", "router_gate", "shared_expert_gate"})
# Where a kernel on a GPU takes a layer's weight without calling the layer, so that an adapter on it would add nothing.
_TAKEN_BY_KERNELS = "out_proj"
_WITH_KERNELS = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})


@dataclass(frozen=True)
class Adapter:
    """A low-rank change of a weight [out, in]: `scale` * `up` [out, rank] @ `down` [rank, in].

    To experts' weights [experts, out, in] it is `up` [out, rank * experts] and `down` [experts * rank, in], as peft
    keeps them; `turned` where they are [experts, in, out].
    """

    down: Tensor
    up: Tensor
    scale: float
    turned: bool = False

    def merged(self, base: Tensor) -> Tensor:
        """`base` and what is added to it, a new tensor in float32."""
        up, down = self.up.float(), self.down.float()
        if base.dim() == 2:
            return torch.addmm(base.float(), up, down, alpha=self.scale)
        experts = base.shape[0]
        down = down.view(experts, -1, down.shape[-1])
        up = up.view(up.shape[0], -1, experts).permute(2, 0, 1)
        left, right = (down.mT, up.mT) if self.turned else (up, down)
        return torch.baddbmm(base.float(), left, right, alpha=self.scale)


@dataclass(frozen=True)
class MergedWeight:
    """A weight of the model without adapters, under its name there, and what is added to it."""

    name: str
    parameter: nn.Parameter
    adapter: Adapter | None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All that its value is made of."""
        if self.adapter is None:
            return (self.parameter,)
        down, up = self.adapter.down, self.adapter.up
        assert isinstance(down, nn.Parameter), "peft's down projection is linear"
        assert isinstance(up, nn.Parameter), "peft's up projection is linear"
        return (self.parameter, down, up)


@dataclass(frozen=True)
class Targets:
    """Names, whole or from a dot on, of linear layers, and of parameters by themselves such as experts, which are
    adapted.
    """

    layers: Sequence[str]
    parameters: Sequence[str] = ()


def add_adapters(causal_lm: nn.Module, config: LoraConfig, *, sharded: bool = False) -> None:
    """Freezes a model of transformers, and puts an adapter onto each linear layer and expert of its decoder that is a
    target.

    The adapted model computes what the model did: `up` starts at 0, `down` is drawn from torch's global generator. What
    is not in the decoder is frozen, too; a value head that is trained is unfrozen by its owner. Experts can have no
    adapters if the parameters will be `sharded` (ZeRO-3), or with dropout: with all-linear they go without, and a
    warning says so. Raises UnfitModel for targets that the decoder lacks, or that can have no adapters.
    """
    import peft

    assert config.enabled, "called for a rank above 0"
    causal_lm.requires_grad_(False)
    obstacle = _obstacle(config, sharded=sharded)
    targets = _targets(causal_lm, config.targets, obstacle=obstacle)
    _check_kernels(causal_lm, targets.layers)
    held = Targets(*([f"{_HELD}.{name}" for name in names] for names in (targets.layers, targets.parameters)))
    peft.inject_adapter_in_model(peft_config(config, targets=held), _WithoutConfig(causal_lm), adapter_name=ADAPTER)


def peft_config(config: LoraConfig, *, targets: Targets) -> peft.LoraConfig:
    """The adapters as peft describes them."""
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets.layers),
        target_parameters=list(targets.parameters) or None,
        bias="none",
    )


def is_renamed_by_peft(causal_lm: nn.Module, layer: str) -> bool:
    """True if peft, where it sees the model's config, takes a linear layer of this name for one of the experts.

    Of many mixtures it takes gate_proj, up_proj and down_proj (w1, w2, w3), as a list of target_modules has them, for
    experts as transformers 4 kept them, and adapts the tensors of transformers 5 that hold these instead; dense layers
    and shared experts of the name then have no adapter.
    """
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    alone = peft.LoraConfig(target_modules=[layer])
    try:
        convert_peft_config_for_transformers(alone, causal_lm, None)
    except ValueError:  # experts' gate_proj and up_proj are one tensor: peft takes neither without the other
        return True
    return layer not in alone.target_modules


def adapters_off(model: nn.Module) -> AbstractContextManager[None]:
    """Within it the adapters of `model` add 0, so that it is the model that it was before they were trained.

    Their layers still run: under ZeRO-3 a pass that left some out would undo the order of prefetching. Use it around a
    whole forward pass without gradient, not between a forward pass and its backward pass.
    """
    from peft.helpers import rescale_adapter_scale

    off: AbstractContextManager[None] = rescale_adapter_scale(model, 0.0)
    return off


def merged_weights(model: nn.Module) -> Iterator[MergedWeight]:
    """The weights of `model` as they are without adapters, in the model's order; tied ones appear once."""
    adapters = {id(_base_weight(layer)): _adapter_of(layer) for layer in _adapted_layers(model)}
    factors = {id(factor) for adapter in adapters.values() for factor in (adapter.down, adapter.up)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in factors:
            yield MergedWeight(name=_plain(name), parameter=parameter, adapter=adapters.get(id(parameter)))


def why_merged(causal_lm: nn.Module, config: LoraConfig) -> str:
    """Reason why generators can only be sent the model with these adapters merged; empty if vLLM may take them alone.

    What an engine of a given model has no place for, it says itself.
    """
    if config.rank > MOST_RANK:
        return f"training.lora.rank is {config.rank}, and vLLM takes ranks up to {MOST_RANK}"
    if adaptable(causal_lm)[1]:
        return "the model is a mixture of experts, whose adapters vLLM keeps otherwise"
    return ""


class _WithoutConfig(nn.Module):
    """A model of which peft sees no config, so that it adapts what is named and nothing else: `is_renamed_by_peft`."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.add_module(_HELD, causal_lm)


def _check_kernels(causal_lm: nn.Module, layers: Sequence[str]) -> None:
    kind = getattr(getattr(causal_lm, "config", None), "model_type", None)
    taken = [name for name in layers if name.rpartition(".")[2] == _TAKEN_BY_KERNELS]
    if kind in _WITH_KERNELS and taken:
        others = ", ".join(sorted({name.rpartition(".")[2] for name in layers} - {_TAKEN_BY_KERNELS}))
        raise UnfitModel(
            f"training.lora.targets has {taken[0]}, whose weight the kernels of {kind} take without calling the layer, "
            f"so that an adapter would add nothing: expected other layers. Set training.lora.targets to some of "
            f"{others or 'the linear layers of the decoder'}"
        )


def _plain(name: str) -> str:
    """Without the layers that adapters are wrapped around, of which experts have one in another."""
    return ".".join(part for part in name.split(".") if part != BASE_LAYER)


def _obstacle(config: LoraConfig, *, sharded: bool) -> str:
    """Reason why experts can have no adapters; empty if they can. A forward pass changes their weights meanwhile."""
    if sharded:
        return "training.zero_stage is 3, which leaves no expert whole: set it to 2 at most"
    return f"training.lora.dropout is {config.dropout:g}, which experts cannot have: set it to 0" * bool(config.dropout)


def adaptable(causal_lm: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, nn.Parameter]]:
    """The linear layers of a model's decoder, and the parameters that hold its experts, by their names in the model."""
    decoder = causal_lm.base_model
    assert isinstance(decoder, nn.Module), "a model of transformers"
    prefix = next(f"{name}." if name else "" for name, module in causal_lm.named_modules() if module is decoder)
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]  # Llama 4 calls the whole model its decoder
    linear = {
        prefix + name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return linear, {prefix + name: each for name, each in expert_parameters(decoder)}


def is_router(name: str) -> bool:
    """True for a layer of a decoder that is a router, or is in one: those stay as they are."""
    return not _ROUTERS.isdisjoint(name.lower().split("."))


def _targets(causal_lm: nn.Module, wanted: Sequence[str], *, obstacle: str) -> Targets:
    linear, experts = adaptable(causal_lm)
    linear = {name: layer for name, layer in linear.items() if not is_router(name)}
    if not linear and not experts:
        raise UnfitModel(
            f"training.lora.rank is above 0, and the decoder of {type(causal_lm).__name__} has no linear layers, onto "
            "which adapters are put: expected a decoder such as Llama's or Qwen's. Set training.lora.rank to 0, or "
            "name another model."
        )
    if tuple(wanted) == (ALL_LINEAR,):
        if experts and obstacle:
            share = sum(map(whole_size, experts.values())) / sum(map(whole_size, causal_lm.parameters()))
            logger.warning("the experts, %.0f %% of the weights, get no adapters: %s", 100 * share, obstacle)
        return Targets(list(linear), () if obstacle else list(experts))
    for target in wanted:
        if not any(_is_named(name, target) for name in (*linear, *experts)):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in (*linear, *experts)}))
            raise UnfitModel(
                f"training.lora.targets has {target!r}, which is no linear layer of the decoder of "
                f"{type(causal_lm).__name__}: expected {ALL_LINEAR} or some of {known}"
            )
    chosen = Targets(
        *([name for name in names if any(_is_named(name, one) for one in wanted)] for names in (linear, experts))
    )
    if chosen.parameters and obstacle:
        raise UnfitModel(f"training.lora.targets has {chosen.parameters[0]}, which is of experts, and {obstacle}")
    return chosen


def expert_parameters(decoder: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters [experts, ...] of a mixture of experts that are matrices for each, by name."""
    for name, module in decoder.named_modules():
        if not isinstance(module, _CONVOLUTIONS):
            for own, parameter in module.named_parameters(recurse=False):
                if len(whole_shape(parameter)) == 3:
                    yield f"{name}.{own}" if name else own, parameter


def _is_named(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _adapted_layers(model: nn.Module) -> Iterator[LoraLayer]:
    if "peft" not in sys.modules:
        return  # then nobody has put an adapter onto anything
    from peft.tuners.lora import LoraLayer

    yield from (layer for layer in model.modules() if isinstance(layer, LoraLayer))


def _is_wrapper(layer: LoraLayer) -> TypeGuard[ParamWrapper]:
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(layer, ParamWrapper)


def _base_weight(layer: LoraLayer) -> nn.Parameter:
    weight = layer.get_param() if _is_wrapper(layer) else layer.get_base_layer().weight
    assert isinstance(weight, nn.Parameter), "an adapted layer is linear, or holds experts"
    return weight


def _adapter_of(layer: LoraLayer) -> Adapter:
    return Adapter(
        down=layer.lora_A[ADAPTER].weight,
        up=layer.lora_B[ADAPTER].weight,
        scale=float(layer.scaling[ADAPTER]),
        turned=_is_wrapper(layer) and not layer._did_swap_in_out_features,
    )
