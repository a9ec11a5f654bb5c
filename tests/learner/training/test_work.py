"""Work of sequences, and how it is spread over ranks."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from learner.training.packing import plan
from learner.training.policy import load_causal_lm
from learner.training.work import even_position, work_of
from tests.learner.training.test_packing import nothing_shared
from tests.learner.training.tiny_models import write_tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_attention_costs_as_much_as_the_rest_where_its_products_have_as_many_operations() -> None:
    # Of a layer: queries and output 16 x 16 each, keys and values 16 x 8 each, and three matrices of 16 x 40.
    weights = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40)
    assert even_position(LlamaForCausalLM(LlamaConfig(**SMALL))) == 2 * weights / (4 * 3 * 16)


def test_layers_of_a_window_do_not_count_and_experts_do_by_the_share_that_a_token_is_given_to(tmp_path: Path) -> None:
    assert even_position(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))) == math.inf
    moe = load_causal_lm(write_tiny_model("qwen3 moe", tmp_path / "moe"), dtype=torch.float32)
    config: Any = moe.config
    all_of_them = sum(p.numel() for name, p in moe.named_parameters() if ".experts." in name)
    others = sum(
        p.numel()
        for name, p in moe.named_parameters()
        if ".experts." not in name and p.dim() > 1 and config.vocab_size not in p.shape
    )
    keyed = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    share = config.num_experts_per_tok / config.num_experts
    assert 0 < share < 1
    assert even_position(moe) == pytest.approx(2 * (others + share * all_of_them) / keyed)
    mixed = load_causal_lm(write_tiny_model("gemma3", tmp_path / "mixed"), dtype=torch.float32)
    shape: Any = mixed.config
    windows = [kind != "full_attention" for kind in shape.layer_types]
    assert any(windows)
    assert not all(windows)
    assert math.isfinite(even_position(mixed))


@pytest.mark.parametrize("name", ["falcon-h1", "gpt2", "lfm2", "mamba2", "llama4"])
def test_every_kind_of_model_has_a_place_or_none(name: str, tmp_path: Path) -> None:
    even = even_position(load_causal_lm(write_tiny_model(name, tmp_path / "model"), dtype=torch.float32))
    assert even > 0
    assert math.isinf(even) == (name == "mamba2")


def test_work_grows_with_the_keys_that_a_token_sees() -> None:
    assert work_of(10, 10, even=math.inf) == 10
    assert work_of(10, 10, even=5) == 20  # five keys in the mean
    assert work_of(2, 10, even=9) == 4  # nine in the mean of the last two


def test_ranks_have_equal_work_and_not_equal_tokens() -> None:
    lengths = np.array([1000, *[100] * 20])
    order = nothing_shared(len(lengths)).sharing
    for even, alone in ((math.inf, 1500), (100.0, 1000)):
        shares = plan(lengths, sharing=order, ranks=2, microbatch_tokens=1000, even=even)
        tokens = [sum(int(lengths[row].sum()) for row in share) for share in shares]
        with_long = next(n for n, share in enumerate(shares) if any(0 in row for row in share))
        assert tokens[with_long] == alone
