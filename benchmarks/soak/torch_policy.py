"""A Llama in plain torch, for the soak's generator: an implementation of its own, so that a proof by logprobs proves
something. Parameters have the names of the checkpoint format; the head is the embedding.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class PolicyShape:
    """Shape of a model, from its `config.json`."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    epsilon: float
    theta: float

    @classmethod
    def read(cls, folder: Path) -> "PolicyShape":
        """Raises ValueError for a model that `TorchPolicy` is not."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
            raise ValueError(f"{folder}: expected a llama with tied embeddings, got {config['model_type']}")
        rope = config.get("rope_parameters") or config
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            key_heads=config["num_key_value_heads"],
            epsilon=config["rms_norm_eps"],
            theta=rope["rope_theta"],
        )


class TorchPolicy(nn.Module):
    """Logits of whole sequences, without a cache of keys and values: they are a dozen tokens long."""

    def __init__(self, shape: PolicyShape, *, positions: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        self.requires_grad_(requires_grad=False)
        size = shape.hidden // shape.heads
        frequencies = shape.theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).repeat(1, 2)
        self._rotation = (angles.cos(), angles.sin())

    @classmethod
    def read(cls, folder: Path, *, positions: int) -> "TorchPolicy":
        """The model of a directory. Raises ValueError for one that is not of this kind."""
        policy = cls(PolicyShape.read(folder), positions=positions)
        policy.load_weights(load_file(folder / "model.safetensors").items())
        return policy

    def forward(self, token_ids: Tensor) -> Tensor:
        """(rows, tokens) to logits (rows, tokens, vocabulary). What stands right of a token does not change it."""
        hidden = self.model.embed_tokens(token_ids)
        cos, sin = (part[: token_ids.shape[1]] for part in self._rotation)
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin)
        return functional.linear(self.model.norm(hidden), self.model.embed_tokens.weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies tensors in by name; the names. Raises KeyError and RuntimeError for what does not fit."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, value in weights:
            if name != "lm_head.weight":
                parameters[name].copy_(value)
                loaded.add(name)
        return loaded


class _Decoder(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)


class _Layer(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.mlp = _Mlp(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class _Attention(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self._size = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self._size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * self._size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * self._size, bias=False)
        self.o_proj = nn.Linear(shape.heads * self._size, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries = _turned(self._split(self.q_proj(hidden)), cos, sin)
        keys = _turned(self._split(self.k_proj(hidden)), cos, sin)
        values = self._split(self.v_proj(hidden))
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        joined: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return joined

    def _split(self, rows: Tensor) -> Tensor:
        """(rows, tokens, heads * size) to (rows, heads, tokens, size)."""
        return rows.view(*rows.shape[:2], -1, self._size).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return found


def _turned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864), with the halves of a head as the two coordinates."""
    left, right = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat((-right, left), dim=-1) * sin
