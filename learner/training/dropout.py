"""Dropout turned off: in modules, in their numbers, and in the config that some of them read at each call."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig


def disable_dropout(model: nn.Module) -> None:
    """Turn dropout off: a policy is trained as it is sampled.

    Some models of transformers read their probabilities from the config in each forward pass, as Falcon does. So the
    config is changed as well, and a model that is written says 0 there.
    """
    for module in model.modules():
        _clear(module)
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for part in _parts(config):
                _clear(part)


def _clear(owner: object) -> None:
    """Set to 0 what is a probability by its name: `attn_pdrop`, `hidden_dropout`, `layerdrop`, `drop_path_rate`."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(owner, name, 0.0)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and those within it, such as `text_config`."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)
