"""A critic on the policy's own layers: what it learns, what reaches the policy, and what leaves the learner."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.ppo import PpoConfig
from learner.training.config import CriticConfig, TrainingConfig
from learner.training.packing import Microbatch
from learner.training.ranks import CommandChannel, Ranks
from learner.training.score_model import CriticHead, CriticTargets
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import CPU, microbatch
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.two_ranks_of_a_head import lead

OPTIMIZER = {"learning_rate": 1e-2, "epsilon": 1e-4}
SCRIPT = Path(__file__).parent / "two_ranks_of_a_head.py"
ROOT = Path(__file__).parents[3]


def config_of(critic: Mapping[str, object], **training: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"optimizer": OPTIMIZER, "critic": critic, **training})


def trainer(path: Path, commands: CommandChannel, config: TrainingConfig) -> Trainer:
    return Trainer(path, algorithm=PpoConfig(), config=config, ranks=Ranks(), commands=commands)


def weights_after_a_step(path: Path, commands: CommandChannel, config: TrainingConfig) -> dict[str, torch.Tensor]:
    made = trainer(path, commands, config)
    made.train_step(random_sequences(16), version=0)
    weights = {tensor.name: tensor.value for tensor in made.host_copy().tensors}
    made.close()
    return weights


def head_on(states: torch.Tensor, *, trunk_gradient: float) -> tuple[CriticHead, Microbatch, CriticTargets]:
    """A head that has learnt something, and targets of 1 for all tokens, of weight 0.25 each."""
    row = microbatch(random_sequences(3))
    count = len(row.targets)
    config = config_of({"kind": "head", "trunk_gradient": trunk_gradient, "optimizer": OPTIMIZER})
    given = states[:count]
    head = CriticHead(width=states.shape[1], states=lambda _: given, config=config, device=CPU, value_clip=None)
    size = int(row.places.max()) + 1
    targets = CriticTargets(old_values=torch.zeros(size), returns=torch.ones(size), weights=torch.full((size,), 0.25))
    head.learn(given.detach(), row, targets, last=True)
    head.update(number=0)
    return head, row, targets


def test_a_head_starts_at_0_and_learns_alone_by_default(commands: CommandChannel) -> None:
    torch.manual_seed(0)
    states = torch.randn(100, 4, requires_grad=True)
    head, row, targets = head_on(states, trunk_gradient=0.0)
    with torch.no_grad():
        values = head.values(row)
    assert float((1 - values).square().mean()) < 1  # it began at 0 everywhere
    below = head.learn(states[: len(row.targets)], row, targets, last=True)
    assert not below.requires_grad
    # Half of the squared error of each, times 0.25.
    assert head.update(number=1) == pytest.approx(float(0.125 * (1 - values).square().sum()), rel=1e-5)


def test_what_reaches_the_policys_layers_is_the_value_losss_own_gradient(commands: CommandChannel) -> None:
    torch.manual_seed(0)
    states = torch.randn(100, 4, requires_grad=True)
    head, row, targets = head_on(states, trunk_gradient=0.5)
    used = states[: len(row.targets)]
    with torch.no_grad():
        weight = torch.linalg.lstsq(used, head.values(row)).solution  # the head is linear
    assert float(weight.abs().max()) > 0
    loss = 0.125 * (used @ weight - 1).square().sum()
    (expected,) = torch.autograd.grad(0.5 * loss, states, retain_graph=True)
    (found,) = torch.autograd.grad(head.learn(used, row, targets, last=True), states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_detached_head_leaves_the_policy_as_a_critic_of_its_own_does(
    tied_llama: Path, commands: CommandChannel
) -> None:
    """Both give values of 0 in the first step, and so the same advantages."""
    plain = weights_after_a_step(tied_llama, commands, config_of({}))
    detached = weights_after_a_step(tied_llama, commands, config_of({"kind": "head"}))
    assert all(torch.equal(value, plain[name]) for name, value in detached.items())


def test_an_attached_head_moves_the_policy_once_it_has_learnt(tied_llama: Path, commands: CommandChannel) -> None:
    def after(trunk_gradient: float) -> dict[str, torch.Tensor]:
        critic = {"kind": "head", "trunk_gradient": trunk_gradient, "optimizer": OPTIMIZER}
        return weights_after_a_step(tied_llama, commands, config_of(critic, updates_per_step=2))

    detached, attached = after(0.0), after(1.0)
    assert any(not torch.equal(value, detached[name]) for name, value in attached.items())


@pytest.mark.parametrize("trunk_gradient", [0.0, 0.5])
def test_the_head_warms_up_comes_back_from_a_checkpoint_and_stays_out_of_the_model(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, trunk_gradient: float
) -> None:
    critic = {"kind": "head", "trunk_gradient": trunk_gradient, "warmup_steps": 3, "optimizer": OPTIMIZER}
    config, batch = config_of(critic), random_sequences(16)
    made = trainer(tied_llama, commands, config)
    before = made.host_copy()
    losses = [made.train_step(batch, version=version).means["value_loss"] for version in range(3)]
    assert losses[2] < losses[1] < losses[0]
    after = {tensor.name: tensor.value for tensor in made.host_copy().tensors}
    assert all(torch.equal(tensor.value, after[tensor.name]) for tensor in before.tensors)
    made.save(tmp_path / "checkpoint")
    fourth = made.train_step(batch, version=3)
    made.export(tmp_path / "model")
    made.close()
    again = trainer(tied_llama, commands, config)
    again.load(tmp_path / "checkpoint")
    repeated = again.train_step(batch, version=3)
    again.close()
    assert repeated.means == pytest.approx(fourth.means, abs=1e-6)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    names = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["architectures"]
    assert names == ["LlamaForCausalLM"]


@pytest.mark.timeout(400)
def test_two_ranks_train_a_head_and_the_layers_below_it_like_one(
    commands: CommandChannel, tied_llama: Path, tmp_path: Path
) -> None:
    critic = {"kind": "head", "trunk_gradient": 0.5, "optimizer": OPTIMIZER}
    configs = [config_of(critic, microbatch_tokens=64, zero_stage=stage) for stage in (0, 2, 3)]
    argv = [sys.executable, str(SCRIPT), str(tied_llama), str(tmp_path)]
    argv += [config.model_dump_json(exclude_none=True) for config in configs]
    subprocess.run(argv, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    lead(trainer(tied_llama, commands, configs[0]), tmp_path / "one.safetensors")
    expected = load_file(tmp_path / "one.safetensors")
    for number in range(len(configs)):
        seen = load_file(tmp_path / f"{number}.safetensors")
        for name, value in expected.items():
            torch.testing.assert_close(seen[name], value, rtol=0, atol=2e-5)


def test_a_setting_of_another_kind_of_critic_is_refused() -> None:
    with pytest.raises(ValidationError, match="model is set but kind is head"):
        CriticConfig(kind="head", model=Path("somewhere"))
    with pytest.raises(ValidationError, match="trunk_gradient is set but kind is model"):
        CriticConfig(trunk_gradient=0.5)
    assert CriticConfig(kind="head", trunk_gradient=0.5).trunk_gradient == 0.5
