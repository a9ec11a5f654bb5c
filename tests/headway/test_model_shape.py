"""The numbers of a model that a plan rests on: of dense models and of mixtures of experts, as they are published."""

import json
from pathlib import Path

import pytest

from headway.model_shape import Shape, shape_of
from services.config.sources import ConfigError

DENSE: dict[str, object] = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 10, "tie_word_embeddings": True,
}  # fmt: skip
# As their config.json say it; billions of parameters, and of those that a token meets, as their makers say.
QWEN3_30B_A3B: dict[str, object] = {
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, object] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
GLM_45_AIR: dict[str, object] = {
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "tie_word_embeddings": False,
    "vocab_size": 151552,
}  # fmt: skip


def written(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_shape_of_a_dense_model(tmp_path: Path) -> None:
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16 + 2 * 8
    shape = shape_of(written(tmp_path, DENSE))
    assert shape == Shape(2 * layer + 10 * 8 + 8, layers=2, hidden=8, kv_width=4, vocabulary=10, tied=True)
    assert shape.matrices == 2 * (layer - 2 * 8), "neither norms nor embeddings"
    assert shape.computed == shape.read(1) == shape.read(256) == shape.parameters


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [(QWEN3_30B_A3B, 30.5, 3.3), (MIXTRAL_8X7B, 46.7, 12.9), (GLM_45_AIR, 106, 12)],
    ids=["Qwen3-30B-A3B", "Mixtral-8x7B", "GLM-4.5-Air"],
)
def test_a_mixture_has_the_parameters_that_its_makers_say(
    config: dict[str, object], parameters: float, active: float, tmp_path: Path
) -> None:
    shape = shape_of(written(tmp_path, config))
    assert shape.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    # Makers round, and some leave out the embeddings or the output matrix.
    assert shape.computed / 1e9 == pytest.approx(active, rel=0.12)


def test_the_numbers_of_qwen3_30b_a3b(tmp_path: Path) -> None:
    shape = shape_of(written(tmp_path, QWEN3_30B_A3B))
    expert = 3 * 2048 * 768
    assert shape.parameters - shape.computed == 48 * (128 - 8) * expert
    assert shape.met == 8 / 128
    assert shape.kv_width == 4 * 128
    assert shape.read(1) == shape.computed
    # The second token meets an eighth of a half of what the first one did not.
    assert shape.read(2) == pytest.approx(shape.computed + 48 * (128 - 8) * expert / 16)
    assert shape.read(256) == pytest.approx(shape.parameters, rel=1e-6)


def test_layers_without_experts_are_dense(tmp_path: Path) -> None:
    config = {**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [47]}
    every = shape_of(written(tmp_path, QWEN3_30B_A3B))
    some = shape_of(written(tmp_path, config))
    assert some.parameters - some.computed == (every.parameters - every.computed) * 23 / 48


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank, whose sizes are not known here: give --parameters"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention, whose sizes are not known"),
        ({"num_experts": 4}, "4 experts and no num_experts_per_tok: give --parameters"),
    ],
)
def test_what_is_not_known_is_named(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        shape_of(written(tmp_path, {**DENSE, **changes}))
    assert says in error.value.problems[0]
