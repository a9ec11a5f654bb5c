"""A loss on what the environment said between the policy's turns: which tokens these are, and what their loss is."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.batch import TrainSequence, flatten, observed_in, sequences_of
from learner.training.config import TrainingConfig
from learner.training.packing import pack, shared_prefixes
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from protocol.trajectories import SUMMARY_STATE
from tests.learner.samples import group, trajectory
from tests.learner.training.plain_adamw import mean_cross_entropy, plain_training
from tests.learner.training.test_batch import in_a_tree, several_turns
from tests.learner.training.test_demonstrations import OPTIMIZER, assert_close, weights_of
from tests.learner.training.tiny_model import branched, conversing, random_sequences

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
OBSERVING = GrpoConfig(observation_weight=0.5).preset()


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    *,
    weight: float = 0.5,
    algo: str = "grpo",
    training: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Trainer]:
    torch.manual_seed(0)  # of adapters
    knobs = {} if algo == "sft" else {"observation_weight": weight}
    made = Trainer(
        path,
        algorithm=ADAPTER.validate_python({"type": algo, **knobs}),
        config=TrainingConfig.model_validate({"optimizer": OPTIMIZER, "microbatch_tokens": 64, **training}),
        ranks=Ranks(),
        commands=commands,
    )
    yield made
    made.close()


def only_observed(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """As sft trains what the environment said, and nothing else."""
    return [
        TrainSequence.supervised(token_ids=each.token_ids, loss_mask=each.observed)
        for each in sequences
        if each.observed.any()
    ]


def test_the_environments_words_are_what_was_given_behind_the_first_turn() -> None:
    """Three turns of two given tokens and a sampled one."""
    assert observed_in(several_turns()).astype(int).tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0]
    assert observed_in(trajectory(4, 4)).sum() == 0, "one turn has a prompt, and no answer to the policy"
    # A context begins with its prompt, in which all is that was said before.
    assert observed_in(several_turns(starts=(3,))).astype(int).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert observed_in(several_turns(starts=(3, 6))).sum() == 0
    given = several_turns()
    asked = given.turns[1].model_copy(update={"state": SUMMARY_STATE})
    summed = given.model_copy(update={"turns": (given.turns[0], asked, given.turns[2])})
    assert observed_in(summed).astype(int).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0], "the rules ask for a summary"


def test_a_token_that_left_the_loss_for_its_age_is_no_observation() -> None:
    given = several_turns()
    old = given.model_copy(update={"loss_mask": np.zeros_like(given.loss_mask)})
    assert observed_in(old).astype(int).tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0]


def test_they_are_told_to_an_algorithm_that_asks_and_follow_the_contexts() -> None:
    groups = [group(0, several_turns(starts=(3,)), several_turns())]
    asked = sequences_of(groups, version=4, max_lag=2, preset=OBSERVING)
    told = [each.observed.astype(int).tolist() for each in asked]
    assert told == [[0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0, 1, 1, 0]]
    batch = flatten(asked)
    assert batch.observed_lengths.tolist() == [0, 2, 4]
    silent = flatten(sequences_of(groups, version=4, max_lag=2, preset=GrpoConfig().preset()))
    assert (len(silent.observed), silent.observed_lengths.tolist()) == (0, [0, 0, 0])


def test_a_tree_predicts_what_it_shares_from_one_place_once_for_each_of_its_ways() -> None:
    tree = in_a_tree((0, 0), (0, 1), (1, 0), rewards=(1.0, 0.0, 1.0))
    batch = flatten(sequences_of([tree], version=4, max_lag=2, preset=OBSERVING))
    row = pack(batch, np.arange(3), prefixes=shared_prefixes(batch))
    # Eight input tokens each; the first two ways share five tokens, the third only the prompt of two with them.
    assert len(row.token_ids) == 8 + 3 + 6
    assert row.observed_targets.tolist() == batch.token_ids[batch.observed].tolist()
    before = [int(batch.token_ids[place - 1]) for place in np.flatnonzero(batch.observed)]
    assert row.token_ids[row.observed_rows].tolist() == before, "each is predicted from the token before it"
    first, second = row.observed_rows[:4].tolist(), row.observed_rows[4:8].tolist()
    assert (first[0], first[0] == second[0]) == (2, True), "the first two ways have one beginning"
    assert len(row.observing().targets) == len(row.targets) + 12
    assert row.observing().targets[: len(row.targets)].equal(row.targets)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_is_that_of_plain_torch_to_the_fifth_digit(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    """Half of the trajectories have no advantage, and learn what was said to them all the same."""
    rewards = (1.0, -1.0, 0.0, 0.0)
    steps = [
        [replace(each, reward=rewards[number % 4]) for number, each in enumerate(conversing(branched(drawn)))]
        for drawn in (random_sequences(12, seed=1), random_sequences(12, seed=2))
    ]
    nats: list[float] = []

    def beside(model: torch.nn.Module, step: int) -> torch.Tensor:
        mean = mean_cross_entropy(model, only_observed(steps[step]))
        nats.append(mean.item())
        return 0.5 * mean

    expected = plain_training(tied_llama, steps, optimizer=OPTIMIZER, beside=beside)
    with trainer(tied_llama, commands, training={"zero_stage": stage}) as made:
        metrics = [made.train_step(step, version=i) for i, step in enumerate(steps)]
        assert_close(weights_of(made), expected.weights)
    assert [each.means["observation_loss"] for each in metrics] == pytest.approx(nats, abs=1e-5)
    whole = [loss + 0.5 * mean for loss, mean in zip(expected.losses, nats, strict=True)]
    assert [each.loss for each in metrics] == pytest.approx(whole, abs=1e-5)
    assert [each.grad_norm for each in metrics] == pytest.approx(expected.grad_norms, rel=1e-4)


@pytest.mark.parametrize(
    "training", [{}, {"lora": {"rank": 4}}, {"microbatch_tokens": 1}, {"temperature": 1.5}],
    ids=["plain", "adapters", "a row for each", "temperature"],
)  # fmt: skip
def test_groups_of_equal_rewards_teach_what_the_environment_said_and_nothing_else(
    tied_llama: Path, commands: CommandChannel, training: dict[str, object]
) -> None:
    batch = [replace(each, reward=0.5) for each in conversing(random_sequences(8, seed=3))]
    with trainer(tied_llama, commands, algo="sft", training=training) as made:
        fine_tuned = made.train_step(only_observed(batch), version=0)
        expected = weights_of(made)
    with trainer(tied_llama, commands, weight=1.0, training=training) as made:
        step = made.train_step(batch, version=0)
        assert_close(weights_of(made), expected)
    assert step.means["observation_loss"] == pytest.approx(fine_tuned.loss, rel=1e-5)
    assert step.trained_tokens == sum(int(each.loss_mask.sum()) for each in batch), "they count apart"


def test_a_policy_that_knows_nothing_gives_each_word_a_fortieth_in_each_update(
    tied_llama: Path, tmp_path: Path, commands: CommandChannel
) -> None:
    """So the loss of each update is half of log 40, whatever share of the words it has, and no reward adds to it."""
    model = AutoModelForCausalLM.from_pretrained(tied_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.save_pretrained(tmp_path / "blank")
    batch = [replace(each, reward=0.5) for each in conversing(random_sequences(9, seed=3))]
    frozen = {"learning_rate": 1e-12, "weight_decay": 0.0}
    with trainer(tmp_path / "blank", commands, training={"updates_per_step": 3, "optimizer": frozen}) as made:
        step = made.train_step(batch, version=0)
    assert step.means["observation_loss"] == pytest.approx(math.log(40), abs=1e-6)
    assert step.loss == pytest.approx(0.5 * math.log(40), abs=1e-6)


def test_the_gradient_of_a_lag_has_its_part_of_them(tied_llama: Path, commands: CommandChannel) -> None:
    samples = [replace(each, group=i // 4) for i, each in enumerate(conversing(random_sequences(8)))]
    units = [0] * 4 + [1] * 4
    found = []
    for weight in (0.0, 0.5, 1.0):
        with trainer(tied_llama, commands, weight=weight) as made:
            found.append(made.sketches(samples, units=units, parts=[0, 0]))
    assert np.abs(found[1] - found[0]).max() > 1e-3
    assert found[2] - found[0] == pytest.approx(2 * (found[1] - found[0]), abs=1e-5)


def test_that_nothing_was_observed_is_said_once(
    tied_llama: Path, commands: CommandChannel, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(tied_llama, commands) as made:
        steps = [made.train_step(random_sequences(4), version=version) for version in range(2)]
    said = [record.message for record in caplog.records if "observation_weight" in record.message]
    assert len(said) == 1
    assert "nothing is learned from observations where conversations end with the first turn" in said[0]
    assert [each.means["observation_loss"] for each in steps] == [0.0, 0.0]


@pytest.mark.parametrize("algo", ["sft", "rm", "dpo", "distill", "online_dpo", "best_of_k"])
def test_algorithms_without_a_policy_gradient_refuse_it(algo: str) -> None:
    with pytest.raises(ValidationError, match="observation_weight"):
        ADAPTER.validate_python({"type": algo, "observation_weight": 0.1})
