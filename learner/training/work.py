"""Arithmetic of a sequence's tokens, by which ranks are given equal work: late tokens see more keys than early ones.

A token's forward pass takes 2 floating point operations for each weight of the layers that it goes through, and in
attention 4 for each key that it sees, head and width of a head: two products, of queries with keys and of
probabilities with values (arXiv 2001.08361, section 2.1, and the same for the backward pass, twice).
"""

import math

from torch import nn

from learner.training.shards import whole_shape, whole_size
from services.model_folder import experts_of

_FULL = ("full_attention", "attention", "hybrid")
"""Kinds of layers that see all keys, some beside a recurrent state."""


def even_position(model: nn.Module) -> float:
    """Place in a sequence of the token whose attention costs as much as all the rest of it does, for a model of
    transformers; infinite for one without layers of full attention. Windows are too short to count.
    """
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    layers, heads = (
        int(getattr(config, "num_hidden_layers", 0) or 0),
        int(getattr(config, "num_attention_heads", 0) or 0),
    )
    kinds = getattr(config, "layer_types", None)
    if kinds:
        full = sum(kind in _FULL for kind in kinds)
    else:
        full = 0 if getattr(config, "sliding_window", None) and hasattr(type(config), "sliding_window") else layers
    width = getattr(config, "head_dim", None) or (int(config.hidden_size) // heads if heads else 0)
    keyed = 4 * full * heads * int(width)
    return 2 * _active_weights(model, config) / keyed if keyed else math.inf


def _active_weights(model: nn.Module, config: object) -> float:
    """Weights of the matrices that a token goes through: of experts as many as it is given to, and no embeddings."""
    experts, chosen = experts_of(lambda key: getattr(config, key, None))
    share = (chosen or 1) / experts if experts else 1.0
    vocabulary = int(config.vocab_size)  # type: ignore[attr-defined]
    return sum(
        whole_size(parameter) * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if len(whole_shape(parameter)) > 1 and vocabulary not in whole_shape(parameter)
    )


def work_of(own: int, length: int, *, even: float) -> float:
    """Work of the last `own` tokens of a sequence of `length`, in tokens that see nothing; `even` is the model's even
    position.
    """
    return own * (1.0 + (length - own / 2) / even)
