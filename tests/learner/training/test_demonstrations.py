"""Demonstrations beside what was sampled: their mean cross-entropy, times a weight, in each update's loss."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.batch import TrainSequence
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.plain_adamw import mean_cross_entropy, plain_training
from tests.learner.training.tiny_model import VOCABULARY, branched, random_sequences

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5)


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    *,
    algo: str = "grpo",
    weight: float = 0.5,
    training: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Trainer]:
    torch.manual_seed(0)  # of adapters
    made = Trainer(
        path,
        algorithm=ADAPTER.validate_python({"type": algo}),
        config=TrainingConfig.model_validate({"optimizer": OPTIMIZER, "microbatch_tokens": 64, **training}),
        ranks=Ranks(),
        commands=commands,
        demonstration_weight=weight,
    )
    yield made
    made.close()


def shown(count: int, *, seed: int) -> list[TrainSequence]:
    """Demonstrations, some of which begin alike."""
    return [
        TrainSequence.supervised(token_ids=each.token_ids, loss_mask=each.loss_mask)
        for each in branched(random_sequences(count, seed=seed))
    ]


def equally_good(count: int) -> list[TrainSequence]:
    """Samples that teach nothing: of one group, with equal rewards."""
    return [replace(each, reward=0.5) for each in random_sequences(count, seed=9)]


def weights_of(made: Trainer) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.value for tensor in made.host_copy().tensors}


def assert_close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, atol: float = 1e-5
) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_steps_are_those_of_plain_torch_to_the_fifth_digit(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    steps = [random_sequences(12, seed=1), random_sequences(7, seed=2)]
    given = [shown(6, seed=3), shown(3, seed=4)]
    nats: list[float] = []

    def beside(model: torch.nn.Module, step: int) -> torch.Tensor:
        mean = mean_cross_entropy(model, given[step])
        nats.append(mean.item())
        return 0.5 * mean

    expected = plain_training(tied_llama, steps, optimizer=OPTIMIZER, beside=beside)
    with trainer(tied_llama, commands, training={"zero_stage": stage}) as made:
        metrics = [made.train_step(step, version=i, demonstrations=given[i]) for i, step in enumerate(steps)]
        assert_close(weights_of(made), expected.weights)
    assert [each.loss for each in metrics] == pytest.approx(expected.losses, abs=1e-5)
    assert [each.grad_norm for each in metrics] == pytest.approx(expected.grad_norms, rel=1e-4)
    assert [each.demonstration_loss for each in metrics] == pytest.approx(nats, abs=1e-5)
    tokens = [sum(int(one.loss_mask.sum()) for one in each) for each in given]
    assert [each.demonstration_tokens for each in metrics] == tokens
    sampled = [sum(int(one.loss_mask.sum()) for one in step) for step in steps]
    assert [each.trained_tokens for each in metrics] == sampled, "demonstrations count apart"


def test_a_policy_that_knows_nothing_gives_each_token_a_fortieth(
    tied_llama: Path, tmp_path: Path, commands: CommandChannel
) -> None:
    """log 40 nats a token; and at a temperature of 2 still, as all logits are 0."""
    model = AutoModelForCausalLM.from_pretrained(tied_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.save_pretrained(tmp_path / "blank")
    with trainer(tmp_path / "blank", commands, training={"temperature": 2.0}) as made:
        step = made.train_step(random_sequences(4), version=0, demonstrations=shown(4, seed=3))
        alone = made.train_step(random_sequences(4), version=1)
    assert VOCABULARY == 40
    assert step.demonstration_loss == pytest.approx(math.log(40), abs=1e-6)
    assert (alone.demonstration_loss, alone.demonstration_tokens) == (None, None)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"lora": {"rank": 4}},
        {"updates_per_step": 2, "epochs_per_step": 2},
        {"microbatch_tokens": 10_000, "gradient_checkpointing": True},
        {"temperature": 1.5},
    ],
    ids=["plain", "adapters", "two updates twice", "one row", "temperature"],
)
def test_beside_samples_that_teach_nothing_a_step_is_one_of_sft(
    tied_llama: Path, commands: CommandChannel, training: dict[str, object]
) -> None:
    given = [shown(6, seed=3), shown(6, seed=4)]
    with trainer(tied_llama, commands, algo="sft", training=training) as made:
        fine_tuned = [made.train_step(each, version=i) for i, each in enumerate(given)]
        expected = weights_of(made)
    with trainer(tied_llama, commands, weight=1.0, training=training) as made:
        steps = [made.train_step(equally_good(8), version=i, demonstrations=each) for i, each in enumerate(given)]
        assert_close(weights_of(made), expected)
    assert [each.grad_norm for each in steps] == pytest.approx([each.grad_norm for each in fine_tuned], rel=1e-5)
    assert [each.loss for each in steps] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert [each.demonstration_tokens for each in steps] == [each.trained_tokens for each in fine_tuned]
    assert [each.demonstration_loss for each in steps] == pytest.approx([each.loss for each in fine_tuned], rel=0.1)


@pytest.mark.parametrize("critic", [{}, {"kind": "head", "trunk_gradient": 0.5}], ids=["model", "head"])
def test_a_critic_learns_from_the_samples_alone(
    tied_llama: Path, commands: CommandChannel, critic: dict[str, object]
) -> None:
    """A step of its optimizer follows the last row of samples, though demonstrations follow in the policy's."""
    training = {"critic": {"optimizer": OPTIMIZER, **critic}}
    losses = []
    for given in ((), shown(6, seed=3)):
        with trainer(tied_llama, commands, algo="ppo", weight=1e-9, training=training) as made:
            losses.append([_value_loss(made, version, given) for version in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def _value_loss(made: Trainer, version: int, given: Sequence[TrainSequence]) -> float:
    return made.train_step(random_sequences(8), version=version, demonstrations=given).means["value_loss"]


def test_the_split_into_rows_changes_nothing(tied_llama: Path, commands: CommandChannel) -> None:
    found = []
    for budget in (1, 60, 10_000):
        with trainer(tied_llama, commands, training={"microbatch_tokens": budget}) as made:
            step = made.train_step(random_sequences(8), version=0, demonstrations=shown(8, seed=5))
            found.append((step, weights_of(made)))
    for step, weights in found[1:]:
        assert step.demonstration_loss == pytest.approx(found[0][0].demonstration_loss, rel=1e-5)
        assert_close(weights, found[0][1], atol=2e-5)


def test_the_gradient_of_a_lag_is_that_of_the_samples(tied_llama: Path, commands: CommandChannel) -> None:
    samples = [replace(each, group=i // 4) for i, each in enumerate(random_sequences(8))]
    with trainer(tied_llama, commands) as made:
        sketch = made.sketches(samples, units=[0] * 4 + [1] * 4, parts=[0, 0])
    with trainer(tied_llama, commands, weight=0.0) as made:
        assert np.array_equal(made.sketches(samples, units=[0] * 4 + [1] * 4, parts=[0, 0]), sketch)
