"""Models other than Llama: a microbatch gives what each sequence gives in transformers, or they are refused by name."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from learner.training.attention import build_packed_index, packed_attention
from learner.training.batch import TrainSequence, flatten
from learner.training.layouts import last_states, one_rectangle, takes_packed_rows
from learner.training.logprobs import Chunking
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from learner.training.routing import ExpertWatch
from learner.training.score_model import load_score_model
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.tiny_models import ARCHITECTURES, WINDOW, tiny_config, write_tiny_model

REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "Phi-3.5-MoE": ("phimoe", {}, "model_type phimoe"),
    "Mixtral with noise": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "both directions": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
        "rope_type longrope",
    ),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "rope_type dynamic",
    ),
}
RIGHT = [name for name in ARCHITECTURES if name != "phimoe"]
PADDED = {
    "llama4",
    "qwen3.5",
    "qwen3.5 moe",
    "qwen3-next",
    "lfm2",
    "granite hybrid",
    "falcon-h1",
    "bamba",
    "mamba2",
    "bloom",
    "nemotron",
}
WITHOUT_CLASSIFIER = {
    "gemma4",
    "granite",
    "cohere",
    "cohere2",
    "glm4 moe",
    "granite moe",
    "llama4",
    "qwen3.5 moe",
    "lfm2",
    "granite hybrid",
    "falcon-h1",
    "bamba",
    "mamba2",
}
SETTINGS = LogprobSettings(temperature=0.7, chunking=Chunking(tokens=16, vocabulary=13), with_entropy=True)
TOLERANCE = 1e-4  # in float32


@pytest.fixture(scope="module", params=RIGHT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An architecture's name, and the folder of a tiny random model of it."""
    name: str = request.param
    return name, write_tiny_model(name, tmp_path_factory.mktemp("model"))


def sequences_with_a_shared_prompt() -> list[TrainSequence]:
    sequences = random_sequences(6, seed=3)
    assert max(len(sequence.token_ids) for sequence in sequences) > 2 * WINDOW
    prompt = sequences[0].token_ids[:1].repeat(WINDOW + 2)
    shared = []
    for sequence in sequences[-3:]:
        own = sequence.token_ids[sequence.loss_mask]
        mask = np.arange(len(prompt) + len(own)) >= len(prompt)
        shared.append(
            replace(
                sequence,
                token_ids=np.concatenate([prompt, own]),
                loss_mask=mask,
                behavior_logprobs=np.zeros(len(mask), np.float32),
                lags=np.zeros(len(mask), np.int32),
            )
        )
    return [*sequences[:3], *shared]


def row_of(sequences: list[TrainSequence], *, shares: bool = True) -> Microbatch:
    batch = flatten(sequences)
    row = pack(batch, torch.arange(len(sequences)).numpy(), prefixes=shared_prefixes(batch))
    assert (len(row.token_ids) < sum(len(sequence.token_ids) - 1 for sequence in sequences)) == shares
    return row


def of_plain(plain: nn.Module, sequences: list[TrainSequence]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sequence alone the outputs of the model from which trained tokens are predicted, and these tokens."""
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids).long()
        places = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0]
        yield plain(ids[None])[0][places - 1], ids[places]


def gradients(model: nn.Module, values: Tensor) -> dict[str, Tensor]:
    slopes = torch.linspace(-1, 1, values.numel(), dtype=values.dtype, device=values.device).view(values.shape)
    (slopes.sin() * values).sum().backward()  # type: ignore[no-untyped-call]
    return {name: known.grad for name, known in model.named_parameters() if known.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max().clamp(min=1.0))
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=TOLERANCE * scale, msg=name)


def test_logprobs_and_gradients_are_those_of_each_sequence_in_plain_transformers(model: tuple[str, Path]) -> None:
    name, folder = model
    policy = PolicyModel(load_causal_lm(folder, dtype=torch.float32), settings=SETTINGS)
    assert takes_packed_rows(policy.causal_lm) == (name not in PADDED)
    sequences = sequences_with_a_shared_prompt()
    row = row_of(sequences)
    found, entropy, *_ = policy(row)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected, entropies, best = [], [], []
    for logits, targets in of_plain(lambda ids: plain(input_ids=ids, use_cache=False).logits, sequences):  # type: ignore[arg-type]
        logprobs = (logits / SETTINGS.temperature).log_softmax(dim=-1)
        expected.append(logprobs.gather(1, targets[:, None])[:, 0])
        entropies.append(-(logprobs.exp() * logprobs).sum(dim=-1))
        best.append(logprobs.max(dim=-1).values)
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(entropy, torch.cat(entropies), rtol=0, atol=TOLERANCE)
    top = policy.top_candidates(row, count=2).logprobs[:, 0]
    torch.testing.assert_close(top, torch.cat(best), rtol=0, atol=TOLERANCE)
    assert_same_gradients(gradients(policy.causal_lm, found), gradients(plain, torch.cat(expected)))


def test_a_reward_model_and_a_critic_have_the_states_of_plain_transformers_or_are_refused(
    model: tuple[str, Path],
) -> None:
    name, folder = model
    if name in WITHOUT_CLASSIFIER:
        with pytest.raises(ValueError, match=r"has no sequence classifier of model_type .*Name another model"):
            load_score_model(folder, dtype=torch.float32)
        return
    scores = load_score_model(folder, dtype=torch.float32, head_seed=3)
    sequences = sequences_with_a_shared_prompt()
    found = scores(row_of(sequences))[0]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    states = of_plain(lambda ids: plain.base_model(input_ids=ids, use_cache=False).last_hidden_state, sequences)  # type: ignore[arg-type]
    expected = torch.cat([state for state, _ in states]) @ scores.head.weight.detach()[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    ours = gradients(scores.classifier.base_model, found)  # type: ignore[arg-type]
    assert_same_gradients(ours, gradients(plain.base_model, expected))


@pytest.mark.parametrize("name", ["qwen3.5", "mamba2", "llama4"])
def test_one_rectangle_has_the_states_of_several(name: str, tmp_path: Path) -> None:
    model = load_causal_lm(write_tiny_model(name, tmp_path), dtype=torch.float32)
    row = row_of(sequences_with_a_shared_prompt())
    assert len(row.index.buckets) > 1
    one = replace(row, index=replace(row.index, buckets=(one_rectangle(row.index),)))
    torch.testing.assert_close(last_states(model, one)[0], last_states(model, row)[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3 moe", "qwen3.5 moe"])
def test_routers_are_watched_as_over_each_sequence_alone(name: str, tmp_path: Path) -> None:
    model = load_causal_lm(write_tiny_model(name, tmp_path), dtype=torch.float32)
    watch = ExpertWatch(model)
    assert watch
    sequences = sequences_with_a_shared_prompt()
    _, found = last_states(model, row_of(sequences), watch=watch)
    assert found is not None
    alone = [last_states(model, row_of([each], shares=False), watch=watch)[1] for each in sequences]
    for ours, *parts in zip(found, *(each for each in alone if each is not None), strict=True):
        torch.testing.assert_close(ours, torch.stack(parts).sum(0), rtol=1e-4, atol=1e-4)


def test_what_takes_no_packed_rows_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_causal_lm(write_tiny_model("lfm2", tmp_path), dtype=torch.float32)
    said = [record.getMessage() for record in caplog.records if "takes no packed rows" in record.getMessage()]
    assert len(said) == 1
    assert "layers of the kind conv" in said[0]


def test_nothing_is_dropped_while_a_model_is_trained(tmp_path: Path) -> None:
    dropping = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    model = load_causal_lm(write_tiny_model("gpt2", tmp_path, **dropping), dtype=torch.float32)
    assert model.training
    row = row_of(sequences_with_a_shared_prompt())
    torch.testing.assert_close(last_states(model, row)[0], last_states(model, row)[0])


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_would_be_wrong_is_refused_by_what_its_config_says(
    name: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    tiny_config(name, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"its config has .*{said}.*ame another model"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_rope_that_no_sequence_is_long_enough_to_change_is_taken(tmp_path: Path) -> None:
    _, changes, _ = REFUSED["longrope"]
    load_causal_lm(write_tiny_model("phi3", tmp_path, **changes, max_position_embeddings=16), dtype=torch.float32)


@pytest.mark.parametrize("argument", [{"position_bias": torch.zeros(1)}, {"is_causal": False}])
def test_attention_refuses_arguments_that_it_does_not_know(argument: dict[str, object]) -> None:
    index = build_packed_index([torch.arange(3).numpy()], tokens=3)
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=next(iter(argument))):
        packed_attention(nn.Module(), states, states, states, None, packed_index=index, **argument)  # type: ignore[arg-type]
