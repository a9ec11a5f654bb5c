"""Shapes of models that a benchmark trains with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Shape:
    """A Qwen2 with tied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int

    @property
    def attention_width(self) -> int:
        """All heads together."""
        return self.hidden

    @property
    def matrix_weights(self) -> int:
        """Weights that are multiplied with each token: of the layers, and of the output projection."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_value_heads * head
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("tiny", hidden=32, layers=2, heads=4, key_value_heads=2, intermediate=64, vocabulary=128),
        Shape("0.5b", hidden=896, layers=24, heads=14, key_value_heads=2, intermediate=4864, vocabulary=151_936),
        Shape("1.5b", hidden=1536, layers=28, heads=12, key_value_heads=2, intermediate=8960, vocabulary=151_936),
    )
}
"""The two larger ones are those of Qwen2.5-0.5B and Qwen2.5-1.5B."""


def write_random_model(shape: Shape, folder: Path) -> Path:
    """A Hugging Face directory in bfloat16, without a tokenizer, the same at every call. Returns `folder`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            intermediate_size=shape.intermediate,
            vocab_size=shape.vocabulary,
            tie_word_embeddings=True,
            max_position_embeddings=32_768,
            bos_token_id=0,
            eos_token_id=1,
        )
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
