"""Rules that make logits of the products of hidden states and output matrix: a factor, and a cap.

Granite divides, Cohere and Falcon-H1 multiply, Gemma 2, 3n and 4 cap. vLLM does the same, before the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping",)


@dataclass(frozen=True)
class LogitRules:
    """Logits are `softcap` tanh(`factor` product / `softcap`), without a `softcap` `factor` product. `unrounded`
    products of bfloat16 are kept in float32, in which they are added up; else they are rounded to bfloat16.
    """

    factor: float = 1.0
    softcap: float | None = None
    unrounded: bool = False

    def apply_(self, products: Tensor) -> Tensor:
        """The logits, in the memory of `products`."""
        if self.softcap is not None:
            return products.mul_(self.factor / self.softcap).tanh_().mul_(self.softcap)
        return products if self.factor == 1.0 else products.mul_(self.factor)

    def slope(self, logits: Tensor, *, temperature: float) -> Tensor | float | None:
        """The derivative of logits by their products, from logits that are over the temperature; None for 1."""
        if self.softcap is not None:
            return (logits * (temperature / self.softcap)).square_().neg_().add_(1.0).mul_(self.factor)
        return None if self.factor == 1.0 else self.factor


def logit_rules(config: PreTrainedConfig) -> LogitRules:
    """The rules of a model with this config."""
    text = config.get_text_config(decoder=True)

    def numbers(names: tuple[str, ...]) -> list[float]:
        # A config that merely carries such a number has no field for it, and its model does not look at it.
        return [float(getattr(text, name)) for name in names if getattr(text, name, None) and hasattr(type(text), name)]

    factor = 1.0
    for number in numbers(_FACTORS):
        factor *= number
    for number in numbers(_DIVISORS):
        factor /= number
    return LogitRules(factor=factor, softcap=next(iter(numbers(_CAPS)), None))
