import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS
from transformers import MixtralConfig, MixtralForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.ppo import PpoConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.presets.sft import SftConfig
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.engine import OtherOptimizer, TrainingEngine
from learner.training.muon import MuonWithAdamW, hidden_matrices, muon_of
from learner.training.ranks import CommandChannel, Ranks
from learner.training.score_model import load_score_model
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import CPU
from tests.learner.training.plain_adamw import plain_adamw, plain_training
from tests.learner.training.tiny_model import random_sequences, with_a_bad_reward

OPTIMIZER = OptimizerConfig(type="muon", learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5)
CONFIG = TrainingConfig(optimizer=OPTIMIZER, microbatch_tokens=64)
ADAMW = CONFIG.model_copy(update={"optimizer": OPTIMIZER.model_copy(update={"type": "adamw"})})
STEPS = [random_sequences(20, seed=1), random_sequences(1, seed=2)]
# torch's Newton-Schulz works in bfloat16, whose numbers are 2^-8 apart, relatively, and whose roundings add up.
ROUNDED = 0.08
TWO_RANKS = Path(__file__).parent / "two_ranks.py"
ROOT = Path(__file__).parents[3]


@contextmanager
def trainer(
    path: Path, commands: CommandChannel, *, config: TrainingConfig = CONFIG, algorithm: AlgorithmConfig | None = None
) -> Iterator[Trainer]:
    made = Trainer(path, algorithm=algorithm or GrpoConfig(), config=config, ranks=Ranks(), commands=commands)
    yield made
    made.close()


def weights_of(made: Trainer) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.value.clone() for tensor in made.host_copy().tensors}


def of_type(type_: str, **changes: object) -> dict[str, object]:
    return {"optimizer": {"type": type_}, **changes}


def optimizer_of(matrix: nn.Parameter, **changes: object) -> MuonWithAdamW:
    config = OptimizerConfig.model_validate({"type": "muon", "learning_rate": 0.1, **changes})
    return MuonWithAdamW([matrix], [nn.Parameter(torch.zeros(1))], config, fused=False)


def stretched(value: float) -> float:
    """A singular value after Newton-Schulz, in float64."""
    for _ in range(DEFAULT_NS_STEPS):
        value = DEFAULT_A * value + DEFAULT_B * value**3 + DEFAULT_C * value**5
    return value


def muon_and_adamw(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """torch's own, as its documentation has them, over the weights that the names tell."""
    named = dict(model.named_parameters())
    hidden = {name: each for name, each in named.items() if name.endswith("_proj.weight")}
    muon = torch.optim.Muon(
        list(hidden.values()),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, plain_adamw([each for name, each in named.items() if name not in hidden], config)]


def test_two_updates_of_a_diagonal_matrix_are_those_worked_out_by_hand() -> None:
    matrix = nn.Parameter(torch.eye(2, dtype=torch.float64))
    optimizer = optimizer_of(matrix, weight_decay=0.5)
    # Each number of the diagonal is a singular value. Of the gradient (3, 4), whose length is 5, those are 0.6 and 0.8,
    # which five steps of 3.4445 s - 4.775 s^3 + 2.0315 s^5 take to 0.7229 and 1.1192. The factor of a 2 x 2 matrix is
    # 0.2 sqrt(2) = 0.2828, and the decay takes 0.1 * 0.5 of 1: 1 - 0.05 - 0.1 * 0.2828 * 0.7229 = 0.9296, and 0.9183.
    matrix.grad = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer.step()
    first = matrix.detach().clone()
    expected = 0.95 - 0.1 * 0.2 * math.sqrt(2) * torch.tensor([stretched(0.6), stretched(0.8)], dtype=torch.float64)
    torch.testing.assert_close(expected, torch.tensor([0.9296, 0.9183], dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(first.diagonal(), expected, rtol=0, atol=ROUNDED * 0.02)
    assert first[0, 1] == first[1, 0] == 0
    # The mean of gradients (momentum 0.95) is 0.95 (0.15, 0.2) + 0.05 (4, -3) = (0.3425, 0.04), and Nesterov's look
    # ahead 0.05 (4, -3) + 0.95 (0.3425, 0.04) = (0.5254, -0.112), which divided by its length is (0.978, -0.2085).
    matrix.grad = torch.diag(torch.tensor([4.0, -3.0], dtype=torch.float64))
    optimizer.step()
    ahead = torch.tensor([0.525375, -0.112], dtype=torch.float64)
    directions = [stretched(value) for value in (ahead / ahead.norm()).tolist()]
    moved = 0.95 * first.diagonal() - 0.1 * 0.2 * math.sqrt(2) * torch.tensor(directions, dtype=torch.float64)
    torch.testing.assert_close(matrix.detach().diagonal(), moved, rtol=0, atol=ROUNDED * 0.02)


def test_two_updates_are_those_of_the_code_that_brought_the_factor_of_the_longer_side() -> None:
    """Numbers of MoonshotAI/Moonlight at c2ad5b20, examples/toy_train.py: Muon, with a rate of 0.01 and a decay of 0.1.

    It sums gradients up where torch's averages them, which the orthogonalisation does not see.
    """
    matrix = nn.Parameter(torch.tensor([[0.5, -1.0, 0.25], [1.5, 0.75, -0.5]]))
    optimizer = optimizer_of(matrix, learning_rate=0.01, weight_decay=0.1)
    for gradient in ([[1.0, 2.0, -1.0], [0.5, -1.5, 2.0]], [[-0.5, 1.0, 0.25], [2.0, 1.0, -1.0]]):
        matrix.grad = torch.tensor(gradient)
        optimizer.step()
    theirs = torch.tensor([[0.49683094, -1.00360084, 0.24975069], [1.49149597, 0.74858814, -0.50142014]])
    torch.testing.assert_close(matrix.detach(), theirs, rtol=0, atol=ROUNDED * 0.01 * 0.2 * math.sqrt(3))


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2, 7)])
def test_an_update_keeps_the_singular_vectors_of_the_gradient_and_has_the_factor_of_the_longer_side(
    shape: tuple[int, int],
) -> None:
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(*shape, generator=generator, dtype=torch.float64)
    matrix = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    matrix.grad = gradient.clone()
    optimizer_of(matrix).step()
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    made = torch.tensor([stretched(each) for each in (values / values.norm()).tolist()], dtype=torch.float64)
    orthogonal = left @ torch.diag(made) @ right
    expected = -0.1 * 0.2 * math.sqrt(max(shape)) * orthogonal
    torch.testing.assert_close(matrix.detach(), expected, rtol=0, atol=ROUNDED * float(expected.abs().max()))


def test_layers_matrices_are_muons_and_all_else_is_adamws(tied_llama: Path, tiny_llama: Path) -> None:
    for path in (tied_llama, tiny_llama):
        model = load_score_model(path, dtype=torch.float32, head_seed=0)
        names = set(hidden_matrices(model))
        assert len(names) == 2 * 7
        assert all(name.startswith("classifier.model.layers.") and name.endswith("_proj.weight") for name in names)
        made = muon_of(model, OPTIMIZER, fused=True)
        muon, adamw = made.param_groups
        assert len(muon["params"]) == 14
        assert len(muon["params"]) + len(adamw["params"]) == len(list(model.parameters()))
        assert {muon["lr"], adamw["lr"]} == {1e-2}
        assert {muon["weight_decay"], adamw["weight_decay"]} == {0.1}


def test_two_steps_move_the_weights_like_torchs_own_optimizers(tiny_llama: Path, commands: CommandChannel) -> None:
    expected = plain_training(tiny_llama, STEPS, optimizer=OPTIMIZER, made=muon_and_adamw)
    start = load_file(tiny_llama / "model.safetensors")
    with trainer(tiny_llama, commands) as made:
        metrics = [made.train_step(step, version=index) for index, step in enumerate(STEPS)]
        seen = weights_of(made)
    assert [each.loss for each in metrics] == pytest.approx(expected.losses, abs=1e-4)
    assert [each.grad_norm for each in metrics] == pytest.approx(expected.grad_norms, rel=1e-3)
    assert metrics[0].grad_norm > OPTIMIZER.max_grad_norm, "gradients are clipped"
    assert_moved_alike(seen, expected.weights, start=start)


def assert_moved_alike(
    seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, start: dict[str, torch.Tensor]
) -> None:
    """Within 1 % of how far each weight went: gradients differ in their last digits, and bfloat16 rounds them."""
    assert list(seen) == list(expected)
    for name, value in seen.items():
        moved = float((expected[name] - start[name]).norm())
        assert moved > 0.01, name
        assert float((value - expected[name]).norm()) < 0.01 * moved, name


def test_an_update_that_is_not_finite_is_left_out_and_a_resumed_run_goes_on_bit_by_bit(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    warm = OPTIMIZER.model_copy(update={"warmup_updates": 4})
    config = CONFIG.model_copy(update={"optimizer": warm})
    bad = with_a_bad_reward(STEPS[0])
    with trainer(tied_llama, commands, config=config) as made:
        made.train_step(STEPS[0], version=0)
        before = weights_of(made)
        made.save(tmp_path)
        assert made.train_step(bad, version=1).skipped_updates == 1
        assert_equal(weights_of(made), before)
        made.load(tmp_path)
        steps = [made.train_step(step, version=1) for step in (STEPS[1], STEPS[0])]
        expected = weights_of(made)
    with trainer(tied_llama, commands, config=config) as made:
        made.load(tmp_path)
        assert_equal(weights_of(made), before)
        again = [made.train_step(step, version=1) for step in (STEPS[1], STEPS[0])]
        assert_equal(weights_of(made), expected)
    assert [(each.loss, each.grad_norm, each.learning_rate) for each in again] == (
        [(each.loss, each.grad_norm, each.learning_rate) for each in steps]
    )
    assert [each.learning_rate for each in again] == pytest.approx([0.004, 0.006])


def assert_equal(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(seen) == list(expected)
    assert [name for name, value in seen.items() if not torch.equal(value, expected[name])] == []


def test_a_resumed_run_takes_its_own_settings_of_both_optimizers(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    other = OPTIMIZER.model_copy(update={"momentum": 0.5, "weight_decay": 0.0, "beta1": 0.5})
    with trainer(tied_llama, commands) as made:
        made.train_step(STEPS[0], version=0)
        made.save(tmp_path)
    with trainer(tied_llama, commands, config=CONFIG.model_copy(update={"optimizer": other})) as made:
        made.load(tmp_path)
        muon, adamw = made._models.engine._engine.basic_optimizer.param_groups
    assert (muon["momentum"], muon["weight_decay"], muon["eps"], "betas" in muon) == (0.5, 0.0, 1e-7, False)
    assert (adamw["betas"], adamw["weight_decay"], adamw["eps"]) == ((0.5, 0.95), 0.0, 1e-4)


@pytest.mark.parametrize(("one", "other"), [(CONFIG, ADAMW), (ADAMW, CONFIG)], ids=["from muon", "from adamw"])
def test_a_checkpoint_of_the_other_optimizer_is_refused_by_name(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, one: TrainingConfig, other: TrainingConfig
) -> None:
    with trainer(tied_llama, commands, config=one) as made:
        made.save(tmp_path)
    said = f"optimizer is {one.optimizer.type}, and optimizer.type is {other.optimizer.type} now"
    with trainer(tied_llama, commands, config=other) as made, pytest.raises(OtherOptimizer, match=said):
        made.load(tmp_path)


def test_a_policy_learns_a_text_by_heart(tied_llama: Path, commands: CommandChannel) -> None:
    with trainer(tied_llama, commands, algorithm=SftConfig()) as made:
        losses = [made.train_step(STEPS[0], version=index).loss for index in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_critic_of_its_own_is_trained_by_muon_beside_a_policy_by_adamw(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    critic = {"optimizer": {"type": "muon", "learning_rate": 1e-3}}
    config = TrainingConfig.model_validate({**ADAMW.model_dump(exclude_none=True), "critic": critic})
    with trainer(tied_llama, commands, config=config, algorithm=PpoConfig()) as made:
        made.train_step(STEPS[0], version=0)
        made.save(tmp_path)
        expected = made.train_step(STEPS[0], version=1)
        made.load(tmp_path)
        again = made.train_step(STEPS[0], version=1)
    assert expected.means["value_loss"] == again.means["value_loss"]
    assert expected.loss == again.loss


def test_two_ranks_train_save_and_load_like_one(tied_llama: Path, tmp_path: Path) -> None:
    expected = plain_training(tied_llama, STEPS, optimizer=OPTIMIZER, made=muon_and_adamw)
    start = load_file(tied_llama / "model.safetensors")
    text = CONFIG.model_dump_json(exclude_none=True)
    argv = [sys.executable, str(TWO_RANKS), str(tied_llama), str(tmp_path), text]
    subprocess.run(argv, check=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)})
    seen = json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))
    assert seen["losses"] == pytest.approx(expected.losses, abs=1e-4)
    assert seen["skipped"] == [1, 0, 0]
    trained, resumed = (load_file(tmp_path / f"{name}_0" / "model.safetensors") for name in ("trained", "resumed"))
    assert_equal(resumed, trained)
    assert_moved_alike({name: trained[name] for name in expected.weights}, expected.weights, start=start)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_stage": 1}, "zero_stage is 1.*expected zero_stage 0"),
        ({"zero_stage": 3}, "zero_stage is 3.*expected zero_stage 0"),
        ({"zero_stage": 1, "offload": "optimizer"}, "zero_stage is 1"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16.*expected dtype float32"),
        ({"dtype": "bfloat16", "offload": "optimizer"}, "dtype is bfloat16"),
        ({"lora": {"rank": 4}}, "lora.rank is above 0"),
    ],
)
def test_a_run_that_leaves_no_matrix_whole_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=f"optimizer.type is muon and {said}"):
        TrainingConfig.model_validate(of_type("muon", **changes))
    TrainingConfig.model_validate(of_type("adamw", **changes))


def test_a_critic_is_refused_where_a_policy_would_be_and_where_it_is_a_head() -> None:
    muon = of_type("muon")
    with pytest.raises(ValidationError, match=r"critic\.optimizer\.type is muon and zero_stage is 2"):
        TrainingConfig.model_validate({"critic": muon, "zero_stage": 2})
    with pytest.raises(ValidationError, match=r"optimizer\.type is muon but kind is head"):
        TrainingConfig.model_validate({"critic": {**muon, "kind": "head"}})
    # Adapters are the policy's alone.
    assert TrainingConfig.model_validate({"critic": muon, "lora": {"rank": 4}}).critic.optimizer.type == "muon"


def test_a_momentum_is_for_muon_alone() -> None:
    with pytest.raises(ValidationError, match="momentum is set but type is adamw"):
        OptimizerConfig(momentum=0.9)
    assert OptimizerConfig(type="muon", momentum=0.9).momentum == 0.9


def test_stacked_experts_and_a_model_without_layers_are_refused_by_name(commands: CommandChannel) -> None:
    shape = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, vocab_size=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"muon, and model\.layers\.0\.\S*experts\S* of Mixtral\w+ has 3 dimensions"):
        muon_of(MixtralForCausalLM(shape), OPTIMIZER, fused=True)
    with pytest.raises(ValueError, match="Linear has no linear layers within layers"):
        TrainingEngine(nn.Linear(2, 1), config=CONFIG, device=CPU)
