"""Names of an adapter's tensors: peft's, in its files, and those of a training model's state. Loads no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

_PREFIX = "base_model.model."
_SIDES = {"down": "lora_A.weight", "up": "lora_B.weight"}


def peft_names(layer: str) -> tuple[str, str]:
    """The names of a layer's down and up factor."""
    return f"{_PREFIX}{layer}.{_SIDES['down']}", f"{_PREFIX}{layer}.{_SIDES['up']}"


def factors_of_peft(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The factors of an `adapter_model.safetensors`, by the names that they have in a state. Raises ValueError."""
    return dict(_renamed(tensors))


def _renamed(tensors: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, tensor in tensors.items():
        side = next((side for side, ending in _SIDES.items() if name.endswith(f".{ending}")), None)
        if side is None or not name.startswith(_PREFIX):
            raise ValueError(f"{name} is no factor of an adapter: expected {_PREFIX}LAYER.{_SIDES['down']}")
        yield f"{name.removeprefix(_PREFIX).removesuffix(f'.{_SIDES[side]}')}.{side}", tensor
