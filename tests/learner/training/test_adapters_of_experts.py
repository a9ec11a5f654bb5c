"""Low-rank adapters of a mixture of experts: each expert has one, and what is published has them merged."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.sft import SftConfig
from learner.training.adapters import add_adapters, merged_weights
from learner.training.config import LoraConfig
from learner.training.policy import load_causal_lm
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import LORA, config_with
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.tiny_models import write_tiny_model

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


def test_experts_are_targets_by_name(tmp_path: Path) -> None:
    model = load_causal_lm(write_tiny_model("qwen3 moe", tmp_path), dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=2, targets=("v_proj", "experts.down_proj")))
    assert adapted(model) == {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("self_attn.v_proj.weight", "mlp.experts.down_proj")
    }
