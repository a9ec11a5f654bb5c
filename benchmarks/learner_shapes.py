"""Shapes of models that a benchmark trains with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config


@dataclass(frozen=True)
class QwenShape:
    """A Qwen2 with tied embeddings; a Qwen3, if its heads have a size of their own."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    head: int | None = None

    @property
    def head_size(self) -> int:
        """Of a head of queries, keys or values."""
        return self.head or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """All heads together."""
        return self.heads * self.head_size

    @property
    def matrix_weights(self) -> int:
        """Weights that are multiplied with each token: of the layers, and of the output projection."""
        attention = 2 * self.hidden * (self.attention_width + self.key_value_heads * self.head_size)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


SHAPES: Mapping[str, QwenShape] = {
    shape.name: shape
    for shape in (
        QwenShape("tiny", hidden=32, layers=2, heads=4, key_value_heads=2, intermediate=64, vocabulary=128),
        QwenShape("0.5b", hidden=896, layers=24, heads=14, key_value_heads=2, intermediate=4864, vocabulary=151_936),
        QwenShape("1.5b", hidden=1536, layers=28, heads=12, key_value_heads=2, intermediate=8960, vocabulary=151_936),
        QwenShape("tiny-qwen3", 32, layers=2, heads=4, key_value_heads=2, intermediate=64, vocabulary=128, head=16),
        QwenShape(
            "0.6b", 1024, layers=28, heads=16, key_value_heads=8, intermediate=3072, vocabulary=151_936, head=128
        ),
        QwenShape(
            "1.7b", 2048, layers=28, heads=16, key_value_heads=8, intermediate=6144, vocabulary=151_936, head=128
        ),
    )
}
"""Shapes by name. Those of billions are Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen3-0.6B and Qwen3-1.7B."""


def write_random_model(shape: QwenShape, folder: Path) -> Path:
    """A Hugging Face directory in bfloat16, without a tokenizer, the same at every call. Returns `folder`."""
    # Billions of random numbers take a CPU minutes.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(_config_of(shape), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def _config_of(shape: QwenShape) -> PreTrainedConfig:
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    made: PreTrainedConfig = Qwen2Config(**sizes) if shape.head is None else Qwen3Config(head_dim=shape.head, **sizes)
    return made
