"""Low-rank adapters of a mixture of experts: each expert has one, and what is published has them merged."""

import logging
from pathlib import Path

import peft
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
from tests.learner.training.engine_parts import LORA, config_with, open_parts, update, weights_of
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


_LATENT = {f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b", "o")} | {"self_attn.kv_a_proj_with_mqa"}
_ATTENTION = {f"self_attn.{letter}_proj" for letter in "qkvo"}
_DELTA = {f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")}
_EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def _mlp(place: str) -> set[str]:
    return {f"{place}.{name}_proj" for name in ("gate", "up", "down")}


# By layer: of DeepSeek-V3 and GLM-4.5 the first has a dense MLP, and the second shared experts.
_EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "deepseek v3": (_LATENT | _mlp("mlp"), _LATENT | _EXPERTS | _mlp("mlp.shared_experts")),
    "glm4 moe": (_ATTENTION | _mlp("mlp"), _ATTENTION | _EXPERTS | _mlp("mlp.shared_experts")),
    "qwen3-next": (
        _DELTA | _EXPERTS | _mlp("mlp.shared_expert"),
        _ATTENTION | _EXPERTS | _mlp("mlp.shared_expert"),
    ),
    "qwen3 moe": (_ATTENTION | _EXPERTS, _ATTENTION | _EXPERTS),
}


def expected_of(name: str, *, experts: bool) -> set[str]:
    """The weights of one of `_EXPECTED` that all-linear adapts."""
    layers = enumerate(_EXPECTED[name])
    return {
        f"model.layers.{number}.{each}" if each in _EXPERTS else f"model.layers.{number}.{each}.weight"
        for number, names in layers
        for each in names
        if experts or each not in _EXPERTS
    }


@pytest.mark.parametrize(
    ("lora", "sharded", "experts"),
    [
        (LoraConfig(rank=2), False, True),
        (LoraConfig(rank=2), True, False),
        (LoraConfig(rank=2, dropout=0.1), False, False),
    ],
    ids=["plain", "sharded", "dropout"],
)
@pytest.mark.parametrize("name", _EXPECTED)
def test_all_linear_is_dense_and_shared_layers_and_experts_where_they_can(
    name: str, lora: LoraConfig, sharded: bool, experts: bool
) -> None:
    model = tiny_causal_lm(name)
    add_adapters(model, lora, sharded=sharded)
    assert adapted(model) == expected_of(name, experts=experts)
    ranks = {
        (weight.parameter.dim(), weight.adapter.down.shape[0]) for weight in merged_weights(model) if weight.adapter
    }
    assert ranks == ({(2, 2), (3, 4 * 2)} if experts else {(2, 2)}), "of each of four experts the rank that is set"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", _MIXTURES)
def test_of_each_mixture_all_linear_layers_but_routers_and_head_are_adapted(name: str, sharded: bool) -> None:
    model = tiny_causal_lm(name)
    routers = {"gate", "router", "shared_expert_gate"}
    linear = {
        f"{layer}.weight"
        for layer, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and layer != "lm_head" and not routers & set(layer.split("."))
    }
    three = {each for each, value in model.named_parameters() if value.dim() == 3 and "conv1d" not in each}
    add_adapters(model, LoraConfig(rank=2), sharded=sharded)
    assert adapted(model) == linear | (set() if sharded else three)


@pytest.mark.parametrize("name", ["llama", "qwen3 moe", "gpt-oss"])
def test_names_order_and_first_values_are_those_that_peft_by_itself_gives(name: str) -> None:
    """A checkpoint of before has them."""
    ours, theirs = tiny_causal_lm(name), tiny_causal_lm(name)
    torch.manual_seed(3)
    add_adapters(ours, LoraConfig(rank=2))
    found = [(weight.name, weight.parameter.dim()) for weight in merged_weights(ours) if weight.adapter is not None]
    config = peft.LoraConfig(
        r=2,
        lora_alpha=32.0,
        target_modules=[each.removesuffix(".weight") for each, dimensions in found if dimensions == 2],
        target_parameters=[each for each, dimensions in found if dimensions == 3] or None,
    )
    torch.manual_seed(3)
    peft.inject_adapter_in_model(config, theirs)
    assert [each for each, _ in ours.named_parameters()] == [each for each, _ in theirs.named_parameters()]
    values = dict(theirs.named_parameters())
    assert all(torch.equal(value, values[each]) for each, value in ours.named_parameters())
    assert all(value.requires_grad == values[each].requires_grad for each, value in ours.named_parameters())


def test_a_name_of_dense_layers_and_of_shared_experts_is_a_target() -> None:
    model = tiny_causal_lm("deepseek v3")
    add_adapters(model, LoraConfig(rank=2, dropout=0.1, targets=("gate_proj",)))
    assert adapted(model) == {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
    }


@pytest.mark.parametrize("name", ["deepseek v3", "qwen3-next"])
def test_under_zero_3_what_is_adapted_is_trained_and_published_and_nothing_else(
    name: str, commands: CommandChannel, tmp_path: Path
) -> None:
    config = config_with(lora=LORA, zero_stage=3)
    parts = open_parts(write_tiny_model(name, tmp_path), config)
    assert adapted(parts.policy.causal_lm) == expected_of(name, experts=False)
    before = weights_of(parts)
    assert update(parts, random_sequences(6, seed=1)) > 0
    after = weights_of(parts)
    parts.engine.close()
    assert {each for each in after if after[each].ne(before[each]).any()} == expected_of(name, experts=False)


@pytest.mark.parametrize("name", ["falcon-h1", "mamba2"])
def test_a_layer_whose_weight_kernels_take_by_themselves_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"out_proj, whose weight the kernels of .* Set training.lora.targets to .*in_"
    ):
        add_adapters(tiny_causal_lm(name), LoraConfig(rank=2))
    model = tiny_causal_lm(name)
    add_adapters(model, LoraConfig(rank=2, targets=("in_proj",)))
    assert {each.rpartition("layers.")[2].partition(".")[2] for each in adapted(model)} <= {
        "mamba.in_proj.weight",
        "mixer.in_proj.weight",
    }


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
