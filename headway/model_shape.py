"""The numbers of a model that a plan rests on, read from its config.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.config.sources import ConfigError
from services.model_folder import experts_of

_OF_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_INSTEAD = "give --parameters, --layers, --hidden, --kv-width and --vocabulary (and --active) instead of --model"


@dataclass(frozen=True)
class Shape:
    """Of a decoder: `kv_width` is key/value heads times their size.

    Of a mixture of experts a token meets `active` of the `parameters`, and `met` of a layer's experts; None and 1 for
    all of them.
    """

    parameters: float
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int
    active: float | None = None
    met: float = 1.0
    tied: bool = field(default=False, kw_only=True)
    """The embeddings are the output's matrix, too."""

    @property
    def matrices(self) -> float:
        """Parameters of the linear layers' matrices within the decoder's layers."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return max(0.0, self.parameters - embeddings - self.hidden * (2 * self.layers + 1))

    @property
    def computed(self) -> float:
        """Parameters that are multiplied with each token."""
        return self.parameters if self.active is None else self.active

    def read(self, at_once: int) -> float:
        """Parameters that some of so many tokens meet, if each expert is as likely as another."""
        return self.parameters - (self.parameters - self.computed) * (1 - self.met) ** (at_once - 1)


def shape_of(folder: Path) -> Shape:
    """Of a model's config.json, as Llama's and Qwen's families and mixtures of experts write it. Raises ConfigError."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hidden, layers, heads = found["hidden_size"], found["num_hidden_layers"], found["num_attention_heads"]
        inner, vocabulary = found["intermediate_size"], found["vocab_size"]
    except OSError as error:
        raise ConfigError([f"cannot read {path}: {error.strerror}; expected the folder of a model"]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{path} does not say {error}: {_INSTEAD}"]) from error
    strange = sorted({"kv_lora_rank"} & found.keys() | set(found.get("layer_types") or ()) - _OF_ATTENTION)
    if strange:
        raise ConfigError([f"{path} has {strange[0]}, whose sizes are not known here: {_INSTEAD}"])
    size = found.get("head_dim") or hidden // heads
    kv_width = size * (found.get("num_key_value_heads") or heads)
    mixture = _mixture_of(found, path)
    sparse = len(mixture.layers)
    dense = layers * (2 * hidden * heads * size + 2 * hidden * kv_width + 2 * hidden)
    dense += (layers - sparse) * 3 * hidden * inner + sparse * mixture.always
    dense += vocabulary * hidden * (1 if found.get("tie_word_embeddings") else 2) + hidden
    routed = sparse * mixture.experts * mixture.each
    shape = Shape(dense + routed, layers, hidden, kv_width, vocabulary, tied=bool(found.get("tie_word_embeddings")))
    return replace(shape, active=dense + routed * mixture.met, met=mixture.met) if sparse else shape


@dataclass(frozen=True)
class _Mixture:
    """Experts, in `layers`: `each` of so many parameters, beside router and shared experts, which are met `always`."""

    layers: Sequence[int] = ()
    experts: int = 1
    each: int = 0
    always: int = 0
    met: float = 1.0


def _mixture_of(found: Mapping[str, Any], path: Path) -> _Mixture:
    experts, chosen = experts_of(found.get)
    if experts < 2:
        return _Mixture()
    if not chosen:
        raise ConfigError([f"{path} has {experts} experts and no num_experts_per_tok: {_INSTEAD}"])
    hidden, width = found["hidden_size"], found.get("moe_intermediate_size") or found["intermediate_size"]
    shared = (found.get("n_shared_experts") or 0) * width
    shared += found.get("shared_expert_intermediate_size") or found.get("shared_intermediate_size") or 0
    every, alone = found.get("decoder_sparse_step") or 1, found.get("mlp_only_layers") or ()
    first = found.get("first_k_dense_replace") or 0
    return _Mixture(
        layers=[
            layer for layer in range(first, found["num_hidden_layers"])
            if (layer + 1) % every == 0 and layer not in alone
        ],
        experts=experts, each=3 * hidden * width, always=hidden * experts + 3 * hidden * shared, met=chosen / experts,
    )  # fmt: skip
