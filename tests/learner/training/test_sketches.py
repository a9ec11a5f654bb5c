"""The sketch of a gradient, by hand and by chance; and gradients that are computed beside those of training."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training import step as step_module
from learner.training.batch import TrainSequence, sequences_of
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.engine import TrainingEngine
from learner.training.ranks import CommandChannel, Ranks
from learner.training.sketches import GradientSketch
from learner.training.trainer import Trainer
from tests.learner.training.tiny_model import random_group, random_sequences

CPU = torch.device("cpu")
TWO_RANKS = Path(__file__).with_name("two_ranks_of_sketches.py")
ROOT = Path(__file__).parents[3]


def whole(sketch: GradientSketch, *parts: list[float]) -> torch.Tensor:
    return sketch.of([torch.tensor(part) for part in parts], sizes=[len(part) for part in parts])


def test_by_hand_each_weight_is_added_to_its_sum_by_its_sign_and_a_window_is_turned_as_a_whole() -> None:
    sketch = GradientSketch(device=CPU, size=4, window=3)
    sketch._sums, sketch._signs = torch.tensor([2, 0, 2]), torch.tensor([1.0, -1.0, -1.0])
    sketch._turns = [(0, 1), (1, -1)]

    assert whole(sketch, [1.0, 10.0, 100.0]).tolist() == [-10.0, 0.0, -99.0, 0.0]
    assert whole(sketch, [1.0], [10.0, 100.0]).tolist() == [-10.0, 0.0, -99.0, 0.0], "parameters are counted through"
    # Two more weights are places 0 and 1 of the second window: 7 at sum 2 and -8 at sum 0, turned by 1, sign -1.
    assert whole(sketch, [1.0, 10.0], [100.0, 7.0, 8.0]).tolist() == [-10.0, 8.0, -99.0, -7.0]
    assert sketch.of([None, torch.tensor([7.0])], sizes=[3, 1]).tolist() == [0.0, 0.0, 0.0, -7.0]


def test_dot_products_of_sketches_are_right_on_average_and_as_close_as_the_number_of_sums_makes_them() -> None:
    """Several windows; the cosine is 0.6. The variance of <Sx, Sy> is (<x, y>^2 + 1) / D for unit vectors."""
    draws = torch.Generator().manual_seed(1)
    x, other = torch.randn(2, 500, generator=draws)
    x /= x.norm()
    other -= (other @ x) * x
    y = 0.6 * x + 0.8 * other / other.norm()
    found = [
        float(one.of([x], sizes=[500]) @ one.of([y], sizes=[500]))
        for one in (GradientSketch(device=CPU, size=64, window=128, seed=seed) for seed in range(600))
    ]
    expected = ((0.36 + 1) / 64) ** 0.5
    assert np.mean(found) == pytest.approx(0.6, abs=4 * expected / 600**0.5)
    assert np.std(found) == pytest.approx(expected, rel=0.12)


def test_a_sketch_is_linear_and_the_same_whenever_it_is_made() -> None:
    gradients = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    one, other = (GradientSketch(device=CPU, size=32, window=100) for _ in range(2))
    parts = [one.of([gradient], sizes=[300]) for gradient in gradients]
    torch.testing.assert_close(other.of([gradients.sum(0)], sizes=[300]), parts[0] + parts[1], atol=1e-5, rtol=0)


@contextmanager
def trainer(path: Path, commands: CommandChannel, algorithm: GrpoConfig, **training: Any) -> Iterator[Trainer]:
    config = TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), microbatch_tokens=16, **training)
    made = Trainer(path, algorithm=algorithm, config=config, ranks=Ranks(), commands=commands)
    yield made
    made.close()


GROUPS = [random_group(number, version=4 - number % 3) for number in range(6)]
PARTS = [number % 3 for number in range(6)]


def compared(made: Trainer) -> tuple[list[TrainSequence], list[int]]:
    sequences = sequences_of(GROUPS, version=4, max_lag=2, preset=made.preset)
    return sequences, [one.origin.group for one in sequences if one.origin is not None]


class ExactSketch:
    """Keeps the gradient as it is."""

    def of(self, gradients: Any, *, sizes: Any) -> torch.Tensor:
        parts = [
            torch.zeros(size) if gradient is None else gradient.reshape(-1)
            for gradient, size in zip(gradients, sizes, strict=True)
        ]
        return torch.cat(parts).double()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("correction", ["truncate", "none"])
def test_the_shares_of_a_part_add_up_to_the_gradient_of_a_step_of_it_alone(
    tied_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch, stage: int, correction: str
) -> None:
    """Without sketch. The step is that of the real trainer, of the groups of lag 1, by the same loss."""
    seen: list[torch.Tensor] = []
    update = TrainingEngine.update

    def noting(self: TrainingEngine[Any], *, learning_rate: float) -> float:
        if self.zero_stage == 0:
            seen.append(torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]).double())
        return update(self, learning_rate=learning_rate)

    monkeypatch.setattr(TrainingEngine, "update", noting)
    algorithm = GrpoConfig.model_validate({"type": "grpo", "correction": correction})
    with trainer(tied_llama, commands, algorithm, zero_stage=stage) as made:
        monkeypatch.setattr(step_module, "SKETCH_SIZE", sum(p.numel() for p in made._models.trained.parameters()))
        made._step._sketcher = ExactSketch()  # type: ignore[assignment]
        sequences, units = compared(made)
        found = torch.from_numpy(made.sketches(sequences, units=units, parts=PARTS))
        alone = sequences_of([GROUPS[1], GROUPS[4]], version=4, max_lag=2, preset=made.preset)
        metrics = made.train_step(alone, version=4)
    gradient = found[[1, 4]].sum(0)
    assert float(gradient.norm()) == pytest.approx(metrics.grad_norm, rel=1e-4)
    for expected in seen:
        torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    "training",
    [{"zero_stage": stage} for stage in (0, 1, 2)]
    + [{"updates_per_step": 2}, {"lora": {"rank": 4, "dropout": 0.5}}, {"dtype": "bfloat16"}],
    ids=["stage 0", "stage 1", "stage 2", "two updates", "adapters that drop", "bfloat16"],
)
def test_training_goes_on_to_the_last_digit_as_without_a_comparison(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, training: dict[str, Any]
) -> None:
    """Weights, the optimizer's state and random numbers are in what the second step makes, and in the checkpoint."""
    ends = []
    for compares in (False, True):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        with trainer(tied_llama, commands, GrpoConfig(), **training) as made:
            numbers = []
            for number in range(2):
                if compares:
                    sequences, units = compared(made)
                    assert np.abs(made.sketches(sequences, units=units, parts=PARTS)).sum() > 0
                metrics = made.train_step(random_sequences(12, seed=number), version=4 + number)
                numbers.append((metrics.loss, metrics.grad_norm, metrics.means))
            weights = [(one.name, one.value) for one in made.host_copy().tensors]
        ends.append((numbers, torch.rand(3), np.random.random(3), random.random(), weights))
    plain, beside = ends
    assert beside[0] == plain[0]
    assert torch.equal(beside[1], plain[1])
    assert beside[2].tolist() == plain[2].tolist()
    assert beside[3] == plain[3]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(beside[4], plain[4], strict=True))


def test_what_the_algorithm_carries_on_is_not_moved_by_a_comparison(tied_llama: Path, commands: CommandChannel) -> None:
    algorithm = GrpoConfig.model_validate({"type": "grpo", "reward_normalisation": "standardise"})
    with trainer(tied_llama, commands, algorithm) as made:
        before = made._step.carried
        sequences, units = compared(made)
        made.sketches(sequences, units=units, parts=PARTS)
        assert made._step.carried == before


def test_a_group_without_an_advantage_has_no_gradient(tied_llama: Path, commands: CommandChannel) -> None:
    groups = [GROUPS[0], random_group(7, version=4, rewards=(1.0, 1.0))]
    with trainer(tied_llama, commands, GrpoConfig()) as made:
        sequences = sequences_of(groups, version=4, max_lag=2, preset=made.preset)
        units = [one.origin.group for one in sequences if one.origin is not None]
        found = made.sketches(sequences, units=units, parts=[0, 0])
    assert found[0].any()
    assert not found[1].any()


def test_one_and_two_ranks_find_the_same_sketches(tied_llama: Path, commands: CommandChannel, tmp_path: Path) -> None:
    """Each group is computed by one rank as a whole, so that no sum is taken in another order."""
    argv = [sys.executable, str(TWO_RANKS), str(tied_llama), str(tmp_path)]
    subprocess.run(argv, check=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)})
    two = np.load(tmp_path / "sketches.npy")
    with trainer(tied_llama, commands, GrpoConfig()) as made:
        sequences, units = compared(made)
        one = made.sketches(sequences, units=units, parts=PARTS)
    assert np.abs(one).sum() > 0
    assert (two == one).all()
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert seen["own"] == [3, 3], "both ranks took part"
