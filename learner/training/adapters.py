"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft: weights [out, in] stay frozen, and scale * up @ down is added.

What leaves the learner is always the merged model under its Hugging Face names: `merged_weights` says which parameters
make up each published weight. The reference policy needs no second model: `adapters_off` is the frozen one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import peft
import torch
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from learner.training.config import ALL_LINEAR, LoraConfig

ADAPTER = "default"
BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Adapter:
    """What is added to a weight [out, in]: `scale` * `up` [out, rank] @ `down` [rank, in]."""

    down: nn.Parameter
    up: nn.Parameter
    scale: float


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
        return (self.parameter, self.adapter.down, self.adapter.up)


def add_adapters(causal_lm: nn.Module, config: LoraConfig) -> None:
    """Freezes a model of transformers, and puts an adapter onto each linear layer of its decoder that is a target.

    The adapted model computes what the model did: `up` starts at 0, `down` is drawn from torch's global generator. What
    is not in the decoder is frozen, too; a value head that is trained is unfrozen by its owner. Raises ValueError for
    targets that the decoder lacks.
    """
    assert config.enabled, "called for a rank above 0"
    causal_lm.requires_grad_(False)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_layers_to_adapt(causal_lm, config.targets),
        bias="none",
    )
    peft.inject_adapter_in_model(lora, causal_lm, adapter_name=ADAPTER)


def adapters_off(model: nn.Module) -> AbstractContextManager[None]:
    """Within it the adapters of `model` add 0, so that it is the model that it was before they were trained.

    Their layers still run: under ZeRO-3 a pass that left some out would undo the order of prefetching. Use it around a
    whole forward pass without gradient, not between a forward pass and its backward pass.
    """
    off: AbstractContextManager[None] = rescale_adapter_scale(model, 0.0)
    return off


def merged_weights(model: nn.Module) -> Iterator[MergedWeight]:
    """The weights of `model` as they are without adapters, in the model's order; tied ones appear once."""
    adapters = {
        id(_base_weight(layer)): _adapter_of(layer) for layer in model.modules() if isinstance(layer, LoraLayer)
    }
    factors = {id(factor) for adapter in adapters.values() for factor in (adapter.down, adapter.up)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in factors:
            yield MergedWeight(
                name=name.replace(BASE_LAYER, "."), parameter=parameter, adapter=adapters.get(id(parameter))
            )


def merge(base: Tensor, *, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """base [out, in] + scale * up [out, rank] @ down [rank, in], a new tensor in float32."""
    return torch.addmm(base.float(), up.float(), down.float(), alpha=scale)


def _layers_to_adapt(causal_lm: nn.Module, targets: Sequence[str]) -> list[str]:
    decoder = causal_lm.base_model
    assert isinstance(decoder, nn.Module), "a model of transformers"
    prefix = next(f"{name}." if name else "" for name, module in causal_lm.named_modules() if module is decoder)
    linear = [prefix + name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    if tuple(targets) == (ALL_LINEAR,):
        return linear
    for target in targets:
        if not any(_is_named(name, target) for name in linear):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise ValueError(
                f"training.lora.targets has {target!r}, which is no linear layer of the decoder of "
                f"{type(causal_lm).__name__}: expected {ALL_LINEAR} or some of {known}"
            )
    return [name for name in linear if any(_is_named(name, target) for target in targets)]


def _is_named(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _base_weight(layer: LoraLayer) -> nn.Parameter:
    weight = layer.get_base_layer().weight
    assert isinstance(weight, nn.Parameter), "an adapted layer is linear"
    return weight


def _adapter_of(layer: LoraLayer) -> Adapter:
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    assert isinstance(down, nn.Parameter), "peft's down projection is linear"
    assert isinstance(up, nn.Parameter), "peft's up projection is linear"
    return Adapter(down=down, up=up, scale=float(layer.scaling[ADAPTER]))
