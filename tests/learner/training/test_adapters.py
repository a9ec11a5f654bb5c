from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from learner.training.adapters import Adapter, adapters_off, add_adapters, merged_weights
from learner.training.config import LoraConfig
from learner.training.engine import TrainingEngine
from learner.training.peft_names import peft_names
from learner.training.policy import (
    TextFiles,
    host_copy,
    load_causal_lm,
    write_model_directory,
)
from learner.training.ranks import CommandChannel
from tests.learner.training.engine_parts import (
    CPU,
    LORA,
    Parts,
    assert_close,
    config_with,
    load_policy,
    logprobs,
    microbatch,
    open_parts,
    update,
    weights_of,
)
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.tiny_models import tiny_causal_lm

TRAINED = [random_sequences(6, seed=1), random_sequences(5, seed=2), random_sequences(4, seed=3)]
STAGES = (0, 1, 2, 3)


def initial_weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in AutoModelForCausalLM.from_pretrained(path).named_parameters()}


def values_of(parts: Parts, *, trained: bool) -> dict[str, torch.Tensor]:
    """Copies of the model's own parameters."""
    parameters = dict(parts.policy.named_parameters())
    with parts.engine.gathered(list(parameters.values())):
        return {name: value.detach().clone() for name, value in parameters.items() if ("lora_" in name) == trained}


def test_merging_is_the_weight_and_the_scaled_product() -> None:
    # 0.5 * [1, 2]^T [10, 20] = [[5, 10], [10, 20]]
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    adapter = Adapter(up=torch.tensor([[1.0], [2.0]]), down=torch.tensor([[10.0, 20.0]]), scale=0.5)
    merged = adapter.merged(base)
    assert merged.tolist() == [[6.0, 12.0], [13.0, 24.0]]
    assert base.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_decoder_without_linear_layers_is_refused_by_name() -> None:
    """GPT-2 has convolutions of one token each in their place."""
    with pytest.raises(ValueError, match=r"rank is above 0, and the decoder of GPT2LMHeadModel has no linear layers"):
        add_adapters(tiny_causal_lm("gpt2"), LoraConfig(rank=2))


def test_all_linear_layers_of_the_decoder_are_adapted_and_nothing_else(tiny_llama: Path) -> None:
    model = load_causal_lm(tiny_llama, dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=2))
    adapted = [weight.name for weight in merged_weights(model) if weight.adapter is not None]
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    assert adapted == [
        f"model.layers.{number}.{block}.{name}.weight"
        for number in range(2)
        for block, names in zip(("self_attn", "mlp"), layers, strict=True)
        for name in names
    ]
    assert all(("lora_" in name) == value.requires_grad for name, value in model.named_parameters())
    assert [weight.name for weight in merged_weights(model)] == list(initial_weights(tiny_llama))


def test_targets_choose_layers_and_the_scale_is_alpha_over_rank(tied_llama: Path) -> None:
    model = load_causal_lm(tied_llama, dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=4, alpha=6.0, targets=("v_proj", "layers.1.mlp.up_proj")))
    adapted = {weight.name: weight.adapter for weight in merged_weights(model) if weight.adapter is not None}
    assert set(adapted) == {
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    }
    adapter = adapted["model.layers.1.mlp.up_proj.weight"]
    assert (adapter.scale, tuple(adapter.up.shape), tuple(adapter.down.shape)) == (1.5, (96, 4), (4, 64))


def test_the_score_of_a_reward_model_is_not_adapted() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    model = LlamaForSequenceClassification(config)
    add_adapters(model, LoraConfig(rank=2))
    assert sum(weight.adapter is not None for weight in merged_weights(model)) == 7
    assert "score.weight" in {weight.name for weight in merged_weights(model) if weight.adapter is None}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj", "proj"])
def test_a_target_that_is_no_linear_layer_of_the_decoder_is_refused(tied_llama: Path, target: str) -> None:
    model = load_causal_lm(tied_llama, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"'{target}'.*LlamaForCausalLM.*all-linear.*q_proj"):
        add_adapters(model, LoraConfig(rank=4, targets=("q_proj", target)))


@pytest.mark.parametrize("stage", STAGES)
def test_training_moves_the_adapters_alone_and_publishes_the_adapted_model(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int
) -> None:
    parts = open_parts(tiny_llama, config_with(lora=LORA, zero_stage=stage))
    frozen, adapters = values_of(parts, trained=False), values_of(parts, trained=True)
    for sequences in TRAINED:
        assert update(parts, sequences) > 0
    assert_close(values_of(parts, trained=False), frozen, atol=0)
    assert all(not torch.equal(value, adapters[name]) for name, value in values_of(parts, trained=True).items())

    row = microbatch(TRAINED[0])
    with torch.no_grad():
        adapted = logprobs(parts, row)
    snapshot = host_copy(parts.engine, dtype="float32", keep=True)
    initial = initial_weights(tiny_llama)
    assert [tensor.name for tensor in snapshot.tensors] == list(initial)
    changed = {tensor.name for tensor in snapshot.tensors if not torch.equal(tensor.value, initial[tensor.name])}
    assert changed == {name for name in initial if "_proj" in name}
    base, factors = (
        {tensor.name: tensor.value for tensor in host_copy(parts.engine, dtype="float32", keep=True, part=part).tensors}
        for part in ("base", "adapter")
    )
    for tensor in snapshot.tensors:
        down, up = (factors.pop(name, None) for name in peft_names(tensor.name.removesuffix(".weight")))
        expected = base.pop(tensor.name)
        if down is not None and up is not None:
            expected = Adapter(down=down, up=up, scale=LORA["alpha"] / LORA["rank"]).merged(expected)
        assert torch.equal(tensor.value, expected), "base and adapter are what is merged"
    assert not base
    assert not factors
    write_model_directory(
        snapshot, causal_lm=parts.policy.causal_lm, source=TextFiles(tiny_llama), destination=tmp_path / "model"
    )
    merged = load_policy(tmp_path / "model", config_with())
    with torch.no_grad():
        torch.testing.assert_close(merged(row)[0], adapted, rtol=0, atol=1e-5)
    assert_close(values_of(parts, trained=False), frozen, atol=0)  # publishing merged a copy
    parts.engine.close()


def test_only_the_adapters_have_a_place_in_the_optimizer_and_in_the_checkpoint(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    parts = open_parts(tied_llama, config_with(lora=LORA, zero_stage=1))
    update(parts, TRAINED[0])
    parts.engine.save(tmp_path)
    # Rank 4 on (in, out) 64x64 and 64x32 twice each, 64x96 twice and 96x64: 4 * (in + out) per layer, two layers.
    adapters = 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160)
    # A weight in the model's file, and master, mean and squared mean in the optimizer's, 4 bytes each.
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.pt"))
    assert 16 * adapters < written < 16 * adapters + 60_000
    assert sum(value.numel() for value in initial_weights(tied_llama).values()) * 4 > 120_000
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_adapters_continues_as_if_nothing_had_happened(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int
) -> None:
    config = config_with(lora=LORA, zero_stage=stage)
    parts = open_parts(tied_llama, config)
    for sequences in TRAINED[:2]:
        update(parts, sequences)
    parts.engine.save(tmp_path)
    saved = weights_of(parts)
    update(parts, TRAINED[2])
    expected = weights_of(parts)
    parts.engine.close()
    parts = open_parts(tied_llama, config)
    parts.engine.load(tmp_path)
    assert_close(weights_of(parts), saved, atol=0)
    update(parts, TRAINED[2])
    assert_close(weights_of(parts), expected, atol=1e-7)
    parts.engine.close()


def test_adapters_train_in_bfloat16_with_float32_masters(tied_llama: Path, commands: CommandChannel) -> None:
    parts = open_parts(tied_llama, config_with(lora=LORA, dtype="bfloat16"))
    for sequences in TRAINED:
        update(parts, sequences)
    row = microbatch(TRAINED[0])
    with torch.no_grad():
        adapted = logprobs(parts, row)
    merged = load_policy(tied_llama, config_with())
    weights = {f"causal_lm.{name}": value for name, value in weights_of(parts).items()}
    merged.load_state_dict(weights, strict=False)
    with torch.no_grad():
        # The forward pass rounds each layer's output to 8 bits; the logprobs lie around -4.
        torch.testing.assert_close(merged(row)[0], adapted.float(), rtol=0, atol=0.15)
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_its_owner_unfreezes_is_trained_published_and_saved_beside_the_adapters(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, dtype: str
) -> None:
    config = config_with(lora=LORA, zero_stage=stage, dtype=dtype)

    def opened() -> Parts:
        policy = load_policy(tied_llama, config)
        policy.get_parameter("causal_lm.model.norm.weight").requires_grad_(True)
        return Parts(policy=policy, engine=TrainingEngine(policy, config=config, device=CPU))

    parts = opened()
    update(parts, TRAINED[0])
    parts.engine.save(tmp_path)
    saved = weights_of(parts)
    assert not torch.equal(saved["model.norm.weight"], torch.ones(64))
    update(parts, TRAINED[1])
    expected = weights_of(parts)
    parts.engine.close()
    parts = opened()
    parts.engine.load(tmp_path)
    assert_close(weights_of(parts), saved, atol=0)
    update(parts, TRAINED[1])
    assert_close(weights_of(parts), expected, atol=1e-7)
    parts.engine.close()


def test_with_its_adapters_off_a_trained_model_is_the_initial_one(tied_llama: Path, commands: CommandChannel) -> None:
    row = microbatch(TRAINED[0])
    initial = load_policy(tied_llama, config_with())
    parts = open_parts(tied_llama, config_with(lora=LORA))
    update(parts, TRAINED[0])
    with torch.no_grad():
        expected, trained = initial(row)[0], logprobs(parts, row)
        with adapters_off(parts.policy):
            off = logprobs(parts, row)
        again = logprobs(parts, row)
    torch.testing.assert_close(off, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(off, trained, atol=1e-2)
    assert torch.equal(again, trained)
    parts.engine.close()


def test_a_tied_embedding_is_published_once(tied_llama: Path, commands: CommandChannel, tmp_path: Path) -> None:
    parts = open_parts(tied_llama, config_with(lora=LORA))
    update(parts, TRAINED[0])
    snapshot = host_copy(parts.engine, dtype="bfloat16", keep=True)
    assert "lm_head.weight" not in {tensor.name for tensor in snapshot.tensors}
    assert {tensor.value.dtype for tensor in snapshot.tensors} == {torch.bfloat16}
    write_model_directory(
        snapshot, causal_lm=parts.policy.causal_lm, source=TextFiles(tied_llama), destination=tmp_path
    )
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == {tensor.name for tensor in snapshot.tensors}
    parts.engine.close()
