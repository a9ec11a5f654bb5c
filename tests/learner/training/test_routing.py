"""The load of a mixture's experts, and the loss that keeps it even: as transformers has it, however a step is cut."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.sft import SftConfig
from learner.training.batch import TrainSequence
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.tiny_models import write_tiny_model
from tests.learner.training.two_ranks_of_routers import CASES, LOSS, lead, open_trainer

SCRIPT = Path(__file__).with_name("two_ranks_of_routers.py")
ROOT = Path(__file__).parents[3]
COEFFICIENT = 5.0
EXPERTS, CHOSEN = 4, 2
# Plain descent, as far as AdamW can: with this epsilon a weight moves by its gradient, times 1e-3.
OPTIMIZER = OptimizerConfig(learning_rate=1.0, epsilon=1e3, beta1=0.0, beta2=0.0, max_grad_norm=0.0)


def config_with(**changes: object) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"optimizer": OPTIMIZER.model_dump(exclude_none=True), "router": {"aux_loss_coef": COEFFICIENT}, **changes}
    )


def with_a_prompt_in_common(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The same behind a prompt that stands in a row once."""
    prompt = np.arange(5, dtype=np.int32)
    nothing = np.zeros(5)
    return [
        replace(
            each,
            token_ids=np.concatenate([prompt, each.token_ids]).astype(np.int32),
            loss_mask=np.concatenate([nothing > 0, [True], each.loss_mask[1:]]),
            behavior_logprobs=np.concatenate([nothing, each.behavior_logprobs]).astype(np.float32),
            lags=np.concatenate([nothing, each.lags]).astype(np.int32),
        )
        for each in sequences
    ]


def alike(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """With rewards that leave no advantage."""
    return [replace(each, reward=1.0) for each in sequences]


def reference(path: Path, sequences: list[TrainSequence]) -> tuple[float, dict[str, Tensor]]:
    """transformers' loss of one padded batch, in which each sequence's last token is padding as well, since nothing is
    predicted from it; and its gradient times the coefficient, by the names of a checkpoint.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest = max(len(each.token_ids) for each in sequences)
    ids, mask = torch.zeros(2, len(sequences), longest, dtype=torch.int64)
    for row, each in enumerate(sequences):
        ids[row, : len(each.token_ids)] = torch.from_numpy(each.token_ids)
        mask[row, : len(each.token_ids) - 1] = 1
    logits = model.model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    loss = load_balancing_loss_func(logits, EXPERTS, CHOSEN, mask)
    assert isinstance(loss, Tensor)
    torch.autograd.backward(COEFFICIENT * loss)
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return float(loss.detach()), revert_weight_conversion(model, gradients)


def trained(
    path: Path, sequences: list[TrainSequence], commands: CommandChannel, config: TrainingConfig
) -> tuple[StepMetrics, dict[str, Tensor]]:
    """A step, and by how much it moved each weight."""
    made = Trainer(path, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands)
    before = {each.name: each.value.clone() for each in made.host_copy().tensors}
    metrics = made.train_step(sequences, version=0)
    moved = {each.name: before[each.name] - each.value for each in made.host_copy().tensors}
    made.close()
    return metrics, moved


def assert_moved_by(moved: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        torch.testing.assert_close(moved[name] * 1e3, gradient, rtol=4e-3, atol=4e-3, msg=name)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3 moe", tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize(
    "changes",
    [
        {"microbatch_tokens": 4096},
        {"microbatch_tokens": 48},
        {"microbatch_tokens": 48, "gradient_checkpointing": True},
        {"microbatch_tokens": 48, "zero_stage": 3},
    ],
    ids=["one row", "many rows", "recomputed", "sharded"],
)
def test_the_loss_and_its_gradient_are_those_of_transformers_however_the_step_is_cut(
    mixture: Path, commands: CommandChannel, changes: dict[str, object]
) -> None:
    """Without advantages, so that nothing else has a gradient."""
    sequences = alike(with_a_prompt_in_common(random_sequences(12, seed=4)))
    loss, gradients = reference(mixture, sequences)
    metrics, moved = trained(mixture, sequences, commands, config_with(**changes))
    assert metrics.router_aux_loss == pytest.approx(loss, abs=1e-5)
    assert any("gate" in name and gradient.abs().max() > 0.01 for name, gradient in gradients.items())
    assert_moved_by(moved, gradients)
    assert (metrics.microbatches > 1) == (changes["microbatch_tokens"] == 48)


def test_two_ranks_have_the_loss_and_the_gradient_of_one(
    mixture: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    """Of all tokens of an update, on whichever rank they are."""
    (tmp_path / "two").mkdir()
    argv = [sys.executable, str(SCRIPT), str(mixture), str(tmp_path / "two")]
    subprocess.run(argv, check=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for number, (count, changes) in enumerate(CASES):
        name = f"{number}.safetensors"
        lead(open_trainer(mixture, changes, Ranks(), commands), tmp_path / name, count=count)
        expected, seen = load_file(tmp_path / name), load_file(tmp_path / "two" / name)
        assert expected[LOSS] > 0
        assert any("gate" in name and gradient.abs().max() > 0.01 for name, gradient in expected.items())
        for each, value in expected.items():
            torch.testing.assert_close(seen[each], value, rtol=1e-5, atol=1e-5, msg=f"{changes}: {each}")


def test_what_has_no_advantage_has_a_load_all_the_same(mixture: Path, commands: CommandChannel) -> None:
    """The loss adds its own gradient to that of the algorithm, of the sequences without an advantage as well."""
    sequences = [
        replace(each, group=n // 4, reward=float(n == 0)) for n, each in enumerate(random_sequences(8, seed=4))
    ]
    _, gradients = reference(mixture, sequences)
    _, without = trained(mixture, sequences, commands, config_with(router={}))
    _, moved = trained(mixture, sequences, commands, config_with(microbatch_tokens=48))
    assert_moved_by({name: moved[name] - without[name] for name in moved}, gradients)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "granite moe"])
def test_other_mixtures_have_the_loss_too(name: str, commands: CommandChannel, tmp_path: Path) -> None:
    changes = {"logits_scaling": 1.0} if name == "granite moe" else {"sliding_window": 128} if name == "gpt-oss" else {}
    path = write_tiny_model(name, tmp_path, **changes)
    sequences = alike(random_sequences(8, seed=5))
    loss, gradients = reference(path, sequences)
    metrics, moved = trained(path, sequences, commands, config_with(microbatch_tokens=48))
    assert metrics.router_aux_loss == pytest.approx(loss, abs=1e-5)
    assert_moved_by(moved, gradients)


def test_without_a_coefficient_the_load_is_measured_and_nothing_is_changed(
    mixture: Path, commands: CommandChannel
) -> None:
    sequences = alike(random_sequences(8, seed=6))
    metrics, moved = trained(mixture, sequences, commands, config_with(router={}))
    assert metrics.router_aux_loss == pytest.approx(reference(mixture, sequences)[0], abs=1e-5)
    assert all(not each.any() for each in moved.values())


def test_the_metrics_are_those_counted_by_hand(mixture: Path, commands: CommandChannel) -> None:
    sequences = random_sequences(8, seed=7)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    counts, entropies = torch.zeros(2, EXPERTS), []
    for each in sequences:
        ids = torch.from_numpy(each.token_ids[:-1].astype(np.int64))[None]
        for layer, logits in enumerate(model.model(input_ids=ids, output_router_logits=True).router_logits):
            counts[layer] += torch.bincount(logits.topk(CHOSEN).indices.flatten(), minlength=EXPERTS)
            entropies.append(-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1))
    metrics, _ = trained(mixture, sequences, commands, config_with(router={}, microbatch_tokens=48))
    assert metrics.expert_load_max == pytest.approx(float((counts / counts.mean(1, keepdim=True)).max()))
    assert metrics.dead_experts == int((counts == 0).sum())
    assert metrics.router_entropy == pytest.approx(float(torch.cat(entropies).mean().detach()), abs=1e-5)


def test_experts_that_no_token_chooses_are_dead(commands: CommandChannel, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model("gpt-oss", tmp_path, sliding_window=128))
    with torch.no_grad():
        model.model.layers[1].mlp.router.weight.zero_()
        model.model.layers[1].mlp.router.bias.copy_(torch.arange(EXPERTS))
    model.save_pretrained(tmp_path)
    metrics, _ = trained(tmp_path, random_sequences(8, seed=8), commands, config_with(router={}))
    assert metrics.dead_experts is not None
    assert metrics.dead_experts >= EXPERTS - CHOSEN
    assert metrics.expert_load_max == EXPERTS / CHOSEN


def test_routers_that_are_no_softmax_have_a_load_and_no_entropy(commands: CommandChannel, tmp_path: Path) -> None:
    path = write_tiny_model("glm4 moe", tmp_path)
    metrics, _ = trained(path, random_sequences(8, seed=9), commands, config_with(router={}))
    assert metrics.expert_load_max is not None
    assert metrics.expert_load_max >= 1
    assert metrics.router_entropy is metrics.router_aux_loss is None


def test_a_dense_model_has_no_such_metrics(tiny_llama: Path, commands: CommandChannel) -> None:
    metrics, _ = trained(tiny_llama, random_sequences(8), commands, config_with(router={}))
    assert metrics.expert_load_max is metrics.dead_experts is metrics.router_entropy is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama", "LlamaForCausalLM has no experts: expected a mixture of experts. Leave it out."),
        ("glm4 moe", "transformers defines no load-balancing loss for Glm4MoeForCausalLM"),
    ],
)
def test_a_model_without_the_loss_is_refused_by_name(
    name: str, says: str, commands: CommandChannel, tmp_path: Path
) -> None:
    path = write_tiny_model(name, tmp_path)
    with pytest.raises(ValueError, match=says):
        Trainer(path, algorithm=SftConfig(), config=config_with(), ranks=Ranks(), commands=commands)


def test_routers_without_adapters_have_no_loss() -> None:
    with pytest.raises(ValueError, match="routers have no adapters, and stay as they are"):
        config_with(lora={"rank": 2})
