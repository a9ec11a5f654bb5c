"""Routers take the experts that they are given: with the same ones nothing changes, with others the logprobs do."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.config import LearnerConfig
from learner.training.adapters import expert_parameters
from learner.training.batch import SequenceRouting, TrainSequence, flatten
from learner.training.config import TrainingConfig
from learner.training.logprobs import Chunking
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from learner.training.ranks import CommandChannel, Ranks
from learner.training.recomputing import recompute_layers
from learner.training.router_replay import GivenExperts, RouterReplay
from learner.training.routing import ExpertWatch
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import LORA, config_with
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.tiny_models import write_tiny_model

MIXTURES = ["qwen3 moe", "mixtral", "gpt-oss", "granite moe", "glm4 moe", "deepseek v3", "qwen3.5 moe", "qwen3-next"]
LAYERS, EXPERTS, CHOSEN = 2, 4, 2
SETTINGS = LogprobSettings(temperature=1.0, chunking=Chunking(tokens=64, vocabulary=64), with_entropy=False)


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3 moe", tmp_path_factory.mktemp("mixture"))


def policy_of(path: Path) -> PolicyModel:
    policy = PolicyModel(load_causal_lm(path, dtype=torch.float32), settings=SETTINGS)
    policy.replay = RouterReplay(policy.causal_lm)
    policy.watch = ExpertWatch(policy.causal_lm)
    return policy


def routed_by_transformers(path: Path, sequences: list[TrainSequence]) -> list[TrainSequence]:
    """With the experts that transformers' own model sends each sequence's tokens to, but the last one's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    found: dict[int, NDArray[np.uint8]] = {}

    def note(number: int, given: tuple[object, ...]) -> None:
        (index,) = [each for each in given if isinstance(each, Tensor) and not each.is_floating_point()]
        found[number] = index.numpy().astype(np.uint8)

    for name in {name.rpartition(".")[0] for name, _ in expert_parameters(model)}:
        number = int(name.split(".")[2])
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, at=number: note(at, given))
    routed = []
    for each in sequences:
        with torch.no_grad():
            model(input_ids=torch.from_numpy(each.token_ids).long()[None])
        experts = np.zeros((len(each.token_ids), LAYERS, CHOSEN), dtype=np.uint8)
        for number, index in found.items():
            experts[:, number] = np.sort(index, axis=1)
        known = np.arange(len(experts)) < len(experts) - 1
        routed.append(replace(each, routing=SequenceRouting(experts, known)))
    return routed


def with_others(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The two of the four experts that a token was not sent to."""
    changed = []
    for each in sequences:
        assert each.routing is not None
        chosen = np.zeros((*each.routing.experts.shape[:2], EXPERTS), dtype=np.bool_)
        np.put_along_axis(chosen, each.routing.experts.astype(np.int64), True, axis=2)
        others = np.argsort(chosen, axis=2, kind="stable")[:, :, :CHOSEN].astype(np.uint8)
        changed.append(replace(each, routing=SequenceRouting(others, each.routing.known)))
    return changed


def row_of(sequences: list[TrainSequence]) -> Microbatch:
    batch = flatten(sequences)
    return pack(batch, np.arange(len(sequences)), prefixes=shared_prefixes(batch))


def logprobs_of(policy: PolicyModel, sequences: list[TrainSequence]) -> Tensor:
    with torch.no_grad():
        return policy(row_of(sequences))[0]  # type: ignore[no-any-return]


def test_the_same_experts_change_nothing_and_others_do_packed_as_alone(mixture: Path) -> None:
    policy = policy_of(mixture)
    sequences = routed_by_transformers(mixture, random_sequences(5, seed=3))
    with policy.own_routing():
        own = logprobs_of(policy, sequences)
    torch.testing.assert_close(logprobs_of(policy, sequences), own, rtol=0, atol=1e-6)
    others = with_others(sequences)
    found = logprobs_of(policy, others)
    assert float((found - own).abs().mean()) > 1e-3
    alone = [logprobs_of(policy, [each]) for each in others]
    order = row_of(others).sequences
    for number, expected in enumerate(alone):
        torch.testing.assert_close(found[order == number], expected, rtol=0, atol=1e-5)


def test_routers_learn_from_the_experts_that_they_are_given(mixture: Path) -> None:
    policy = policy_of(mixture)
    sequences = with_others(routed_by_transformers(mixture, random_sequences(5, seed=3)))
    policy(row_of(sequences))[0].sum().backward()
    gates = [
        (name, each.grad)
        for name, each in policy.named_parameters()
        if name.endswith(("gate.weight", "router.weight", "router.layer.weight"))
    ]
    assert gates
    for name, gradient in gates:
        assert gradient is not None, name
        assert float(gradient.abs().max()) > 1e-6, name


def test_given_experts_with_weights_by_hand(qwen: Path) -> None:
    """A layer's block: the sum over the given experts, weighted by the softmax of all, normalised over these two."""
    policy = policy_of(qwen)
    assert policy.replay is not None
    layer = policy.causal_lm.model.layers[0]  # type: ignore[union-attr,index]
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    given = [[0, 1], [1, 3], [0, 2]]
    block = layer.mlp  # type: ignore[union-attr]
    scores = (states @ block.gate.weight.T).softmax(-1)
    expected = torch.zeros(3, 32)
    for token, experts in enumerate(given):
        total = scores[token, experts].sum() if block.gate.norm_topk_prob else 1.0
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert] @ states[token]).chunk(2)
            expected[token] += (
                scores[token, expert] / total * (block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
            )
    wrapped = next(each for each in policy.replay._blocks if each.layer is layer)
    routing = SequenceRouting(np.array([[row, row] for row in given], dtype=np.uint8), np.ones(3, dtype=np.bool_))
    wrapped.given = GivenExperts.of(routing)
    torch.testing.assert_close(block(states[None])[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3 moe", "qwen3-next"])
def test_layers_that_are_computed_once_more_take_the_same_experts(name: str, tmp_path: Path) -> None:
    """After another forward pass, too, which had other ones."""
    path = write_tiny_model(name, tmp_path)
    sequences = with_others(routed_by_transformers(path, random_sequences(4, seed=5)))
    gradients = []
    for recomputed in (False, True):
        policy = policy_of(path)
        if recomputed:
            recompute_layers(policy.causal_lm, TrainingConfig(gradient_checkpointing=True))
        loss = policy(row_of(sequences))[0].sum()
        logprobs_of(policy, [replace(each, routing=None) for each in sequences])
        loss.backward()
        gradients.append({name: each.grad for name, each in policy.named_parameters() if each.grad is not None})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=1e-6, msg=name)


def sequence(ids: list[int], trained: int, routing: list[int] | None) -> TrainSequence:
    """Its last `trained` tokens are trained; token i went to experts 10 r and 10 r + 1, with r of `routing`, -1 for
    tokens that nothing is known of.
    """
    mask = np.arange(len(ids)) >= len(ids) - trained
    told = None
    if routing is not None:
        first = np.maximum(10 * np.array(routing), 0)
        told = SequenceRouting(np.stack([first, first + 1], 1)[:, None].astype(np.uint8), np.array(routing) >= 0)
    return replace(TrainSequence.supervised(token_ids=np.array(ids, dtype=np.int32), loss_mask=mask), routing=told)


def test_places_of_a_row_by_hand() -> None:
    """A prompt 7 8 9 that three sequences share stands in the row once, and their last tokens not at all."""
    sequences = [
        sequence([7, 8, 9, 1, 2], 2, None),
        sequence([7, 8, 9, 3, 4, 5], 3, [-1, 11, 12, 13, 14, -1]),
        sequence([7, 8, 9, 6], 1, [20, 21, 22, -1]),
    ]
    row = row_of(sequences)
    assert row.token_ids.tolist() == [7, 8, 9, 1, 3, 4]
    assert row.routing is not None
    # 7 is known of the third alone; 8 and 9 are taken from the second, which comes first.
    assert row.routing.known.tolist() == [True, True, True, False, True, True]
    assert row.routing.experts[:, 0].tolist() == [[200, 201], [110, 111], [120, 121], [0, 0], [130, 131], [140, 141]]
    assert row_of(sequences[:1]).routing is None


def test_what_was_sampled_alike_stands_once_only_as_far_as_it_went_to_the_same_experts() -> None:
    """Behind the prompt 7 8, which was sent elsewhere for each, both sampled 3 4; 4 went to other experts."""
    row = row_of([sequence([7, 8, 3, 4, 5], 3, [1, 2, 3, 4, -1]), sequence([7, 8, 3, 4, 6], 3, [9, 2, 3, 5, -1])])
    assert row.token_ids.tolist() == [7, 8, 3, 4, 4]
    assert row.routing is not None
    assert row.routing.experts[:, 0, 0].tolist() == [10, 20, 30, 40, 50]
    same = row_of([sequence([7, 8, 3, 4, 5], 3, [1, 2, 3, 4, -1]), sequence([7, 8, 3, 4, 6], 3, [1, 2, 3, 4, -1])])
    assert same.token_ids.tolist() == [7, 8, 3, 4]


def test_what_is_known_of_one_sequence_alone_does_not_join_two_that_went_to_different_experts() -> None:
    """Of the second nothing is known behind the prompt: it is like neither."""
    row = row_of(
        [
            sequence([7, 8, 3, 4, 5], 3, [1, 2, 3, 4, -1]),
            sequence([7, 8, 3, 4, 6], 3, [1, 2, 3, -1, -1]),
            sequence([7, 8, 3, 4, 9], 3, [1, 2, 3, 5, -1]),
        ]
    )
    assert row.token_ids.tolist() == [7, 8, 3, 4, 4, 4]
    assert row.routing is not None
    assert row.routing.known.tolist() == [True, True, True, True, False, True]
    assert row.routing.experts[[3, 5], 0, 0].tolist() == [40, 50]


def test_a_prompt_goes_to_the_same_experts_in_whichever_rows_its_sequences_are() -> None:
    batch = flatten([sequence([7, 8, 3, 5], 2, [1, 2, 3, -1]), sequence([7, 8, 4, 6], 2, [9, 9, 4, -1])])
    prefixes = shared_prefixes(batch)
    rows = [pack(batch, np.array(chosen), prefixes=prefixes) for chosen in ([0], [1], [1, 0])]
    for row in rows:
        assert row.routing is not None
        assert row.routing.experts[:2, 0, 0].tolist() == [10, 20]


def test_more_than_256_experts_are_numbered_by_two_bytes() -> None:
    told = SequenceRouting(
        np.array([[[3, 300]], [[0, 65535]], [[0, 0]]], dtype=np.uint16), np.array([True, True, False])
    )
    row = row_of([replace(sequence([7, 8, 9], 1, None), routing=told)])
    assert row.routing is not None
    assert row.routing.experts[:, 0].tolist() == [[3, 300], [0, 65535]]


def test_experts_of_another_model_are_refused(qwen: Path) -> None:
    replay = RouterReplay(load_causal_lm(qwen, dtype=torch.float32))
    replay.check(flatten(routed_by_transformers(qwen, random_sequences(2))))
    replay.check(flatten(random_sequences(2)))
    with pytest.raises(
        ValueError, match="experts of 1 layers, 2 in each, numbered up to 31; expected 2 layers, 2 in each"
    ):
        replay.check(flatten([sequence([7, 8], 1, [3, -1])]))
    told = SequenceRouting(np.full((2, 2, 2), 4, dtype=np.uint8), np.array([True, False]))
    with pytest.raises(ValueError, match="numbered up to 4; expected 2 layers, 2 in each, numbered below 4"):
        replay.check(flatten([replace(sequence([7, 8], 1, None), routing=told)]))


def test_sequences_of_several_models_are_refused() -> None:
    told = SequenceRouting(np.zeros((2, 2, 2), dtype=np.uint8), np.array([True, False]))
    with pytest.raises(ValueError, match="the generators serve different models"):
        flatten([sequence([7, 8], 1, [3, -1]), replace(sequence([7, 8], 1, None), routing=told)])


@pytest.fixture
def opened(commands: CommandChannel) -> Iterator[list[Trainer]]:
    made: list[Trainer] = []
    yield made
    for each in made:
        each.close()


def trainer(path: Path, commands: CommandChannel, opened: list[Trainer], **changes: object) -> Trainer:
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    made = Trainer(path, algorithm=GrpoConfig(), config=config_with(**changes), ranks=Ranks(), commands=commands)
    opened.append(made)
    return made


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"zero_stage": 3, "microbatch_tokens": 24}])
def test_a_step_says_how_many_choices_were_the_engines_and_how_many_would_have_been_others(
    qwen: Path, commands: CommandChannel, opened: list[Trainer], changes: dict[str, object]
) -> None:
    made = trainer(qwen, commands, opened, **changes)
    assert made.replays_routers
    own = routed_by_transformers(qwen, random_sequences(6, seed=3))
    metrics = made.train_step([*own[:3], *(replace(each, routing=None) for each in own[3:])], version=0)
    inputs = [len(each.token_ids) - 1 for each in own]
    assert metrics.router_replayed_share == pytest.approx(sum(inputs[:3]) / sum(inputs))
    assert metrics.router_changed_share == 0.0
    metrics = made.train_step(with_others(own), version=1)
    assert metrics.router_replayed_share == 1.0
    assert metrics.router_changed_share == pytest.approx(1.0, abs=0.1)  # one step has moved the routers
    assert made.train_step(random_sequences(3), version=2).router_replayed_share is None


def test_without_told_experts_it_is_said_once(
    qwen: Path, commands: CommandChannel, opened: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(qwen, commands, opened)
    with caplog.at_level(logging.WARNING):
        for version in range(2):
            made.train_step(random_sequences(3), version=version)
    assert sum("do not tell the experts" in each.message for each in caplog.records) == 1


def test_a_router_that_is_not_known_is_left_alone_with_a_word_or_refused(
    tmp_path: Path, commands: CommandChannel, opened: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_model("llama4", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not trainer(path, commands, opened).replays_routers
    assert "router replay is off" in caplog.text
    with pytest.raises(ValueError, match="replay is on, and the routers of Llama4ForCausalLM cannot take the experts"):
        trainer(path, commands, opened, router={"replay": "on"})


def test_off_is_off_and_a_dense_model_has_nothing_to_replay(
    qwen: Path, tied_llama: Path, commands: CommandChannel, opened: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    assert not trainer(qwen, commands, opened, router={"replay": "off"}).replays_routers
    with caplog.at_level(logging.WARNING):
        assert not trainer(tied_llama, commands, opened).replays_routers
    assert "replay" not in caplog.text
    with pytest.raises(ValueError, match="cannot take the experts that generators chose: it has no experts"):
        trainer(tied_llama, commands, opened, router={"replay": "on"})


def test_an_algorithm_that_samples_nothing_has_no_use_for_it() -> None:
    found = LearnerConfig.without_effect({"algo.type": "sft", "training.router.replay": "on"})
    assert "samples nothing" in found["training.router.replay"]
    assert "training.router.replay" not in LearnerConfig.without_effect({"algo.type": "grpo"})
