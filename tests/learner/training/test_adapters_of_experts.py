"""Low-rank adapters of a mixture of experts: each expert has one, and what is published has them merged."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.sft import SftConfig
from learner.training.adapters import add_adapters, merged_weights
from learner.training.config import LoraConfig
from learner.training.policy import load_causal_lm
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import LORA, config_with
from tests.learner.training.tiny_model import VOCABULARY, random_sequences
from tests.learner.training.tiny_models import ARCHITECTURES, SIZES, tiny_causal_lm, write_tiny_model

TEXT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def adapted(model: torch.nn.Module) -> set[str]:
    return {weight.name for weight in merged_weights(model) if weight.adapter is not None}


def written(name: str, folder: Path) -> Path:
    write_tiny_model(name, folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral", "gpt-oss"])
def test_all_linear_adapts_each_expert(name: str, tmp_path: Path) -> None:
    model = load_causal_lm(write_tiny_model(name, tmp_path), dtype=torch.float32)
    names = [weight for weight, _ in model.named_parameters()]
    add_adapters(model, LoraConfig(rank=2))
    experts = {
        f"model.layers.{layer}.mlp.experts.{weight}_proj" for layer in range(2) for weight in ("gate_up", "down")
    }
    assert experts < adapted(model)
    assert [weight.name for weight in merged_weights(model)] == names
    assert all(("lora_" in name) == value.requires_grad for name, value in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3 moe", {"zero_stage": 0}),
        ("qwen3 moe", {"zero_stage": 1}),
        ("qwen3 moe", {"zero_stage": 2, "gradient_checkpointing": True}),
        ("gpt-oss", {}),
    ],
)
def test_what_is_published_is_what_the_adapted_experts_compute(
    name: str, changes: dict[str, object], commands: CommandChannel, tmp_path: Path
) -> None:
    folder = written(name, tmp_path / "model")
    config = config_with(lora=LORA, temperature=1.0, **changes)
    made = Trainer(folder, algorithm=SftConfig(), config=config, ranks=Ranks(), commands=commands)
    for number in range(3):
        made.train_step(random_sequences(16), version=number)
    made.export(tmp_path / "export")
    ours = torch.tensor(made.probe_logprobs([TEXT, TEXT[3:]]))
    made.close()
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "export"))
    assert before.keys() == after.keys()
    moved = {each for each in after if "experts" in each and "bias" not in each and after[each].ne(before[each]).any()}
    assert moved == {each for each in after if "experts" in each and "bias" not in each}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        expected = [
            torch.log_softmax(plain(input_ids=torch.tensor([text])).logits[0], dim=1)[
                torch.arange(len(text) - 1), text[1:]
            ]
            for text in (TEXT, TEXT[3:])
        ]
    torch.testing.assert_close(ours, torch.cat(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("lora", "sharded", "said"),
    [
        (LoraConfig(rank=2), True, "training.zero_stage is 3"),
        (LoraConfig(rank=2, dropout=0.1), False, "dropout is 0.1"),
    ],
)
def test_experts_that_can_have_no_adapters_are_named_at_the_load(
    lora: LoraConfig, sharded: bool, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_causal_lm(write_tiny_model("qwen3 moe", tmp_path), dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger="learner.training.adapters"):
        add_adapters(model, lora, sharded=sharded)
    assert adapted(model) == {
        f"model.layers.{layer}.self_attn.{letter}_proj.weight" for layer in range(2) for letter in "qkvo"
    }
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the experts, " in message
    assert said in message
    wanted = lora.model_copy(update={"targets": ("experts.down_proj",)})
    again = load_causal_lm(tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"down_proj, which is of experts, and .*{said}"):
        add_adapters(again, wanted, sharded=sharded)


_MIXTURES = sorted(name for name, (_, traits) in ARCHITECTURES.items() if any("expert" in trait for trait in traits))
_LINEAR_ROUTERS: dict[str, tuple[str, dict[str, object]]] = {
    "layers.0.mlp.shared_expert_gate": (
        "Qwen2Moe",
        {"num_experts": 5, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "layers.0.router.proj": (
        "Gemma4Text",
        {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "layers.1.feed_forward.router": ("Jamba", {"num_experts": 5, "attn_layer_period": 2, "attn_layer_offset": 0}),
    "layers.1.mlp.router.gate": (
        "Afmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1},
    ),
    "blocks.0.ffn.router.layer": (
        "Dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"moe_num_experts": 5, "moe_top_k": 2, "ffn_hidden_size": 16},
        },
    ),
    "layers.0.mlp.router.layer": ("JetMoe", {"kv_channels": 8, "num_local_experts": 5, "num_experts_per_tok": 2}),
}


def adapted_layers(model: torch.nn.Module) -> set[str]:
    add_adapters(model, LoraConfig(rank=2))
    assert isinstance(model.base_model, torch.nn.Module)
    return {name for name, layer in model.base_model.named_modules() if isinstance(layer, LoraLayer)}


# Of experts whose two projections lie in one tensor peft looks for linear layers of that name, too.
_FUSED = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")


@_FUSED
@pytest.mark.parametrize("name", _MIXTURES)
def test_no_router_of_a_mixture_is_adapted(name: str) -> None:
    found = adapted_layers(tiny_causal_lm(name))
    assert any("_proj" in layer for layer in found)
    routers = {"gate", "router", "shared_expert_gate"}
    assert not [layer for layer in found if routers & set(layer.split("."))]


@_FUSED
@pytest.mark.parametrize("router", _LINEAR_ROUTERS)
def test_a_router_that_is_a_linear_layer_is_not_adapted(router: str) -> None:
    """It is one by its size: as many outputs as experts, or one for the expert that all tokens share."""
    kind, traits = _LINEAR_ROUTERS[router]
    sizes = {name: size for name, size in SIZES.items() if kind != "Dbrx" or name in ("vocab_size", "pad_token_id")}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **traits})
    model = AutoModelForCausalLM.from_config(config)
    layer = model.base_model.get_submodule(router)
    assert isinstance(layer, torch.nn.Linear)
    assert layer.out_features in (1, 5)
    linear = {name for name, each in model.base_model.named_modules() if isinstance(each, torch.nn.Linear)}
    small = {name for name in linear if model.base_model.get_submodule(name).out_features in (1, 5)}
    found = adapted_layers(model)
    assert found & linear
    assert not small & found
    with pytest.raises(ValueError, match="is no linear layer of the decoder"):
        add_adapters(AutoModelForCausalLM.from_config(config), LoraConfig(rank=2, targets=(router,)))


def test_experts_are_targets_by_name(tmp_path: Path) -> None:
    model = load_causal_lm(write_tiny_model("qwen3 moe", tmp_path), dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=2, targets=("v_proj", "experts.down_proj")))
    assert adapted(model) == {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("self_attn.v_proj.weight", "mlp.experts.down_proj")
    }
