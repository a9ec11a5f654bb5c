from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.export import SavedModel
from learner.training.batch import Candidates, TrainSequence, flatten
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.engine import TrainingEngine
from learner.training.logprobs import Chunking
from learner.training.models import Output
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import (
    LogprobSettings,
    PolicyModel,
    TextFiles,
    host_copy,
    load_causal_lm,
    write_model_directory,
)
from learner.training.ranks import CommandChannel
from tests.learner.training.tiny_model import VOCABULARY
from tests.learner.training.tiny_models import ARCHITECTURES, write_tiny_model

TEMPERATURE = 0.8
COUNT = 5
SETTINGS = LogprobSettings(
    temperature=TEMPERATURE, chunking=Chunking(tokens=7, vocabulary=9), with_entropy=True, entropy_gradient=True
)


def sequences_with_candidates(count: int) -> list[TrainSequence]:
    draw = np.random.default_rng(5)
    sequences = []
    for _ in range(count):
        length = int(draw.integers(4, 20))
        sequences.append(
            TrainSequence.supervised(
                token_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=np.arange(length) >= 2,
                candidates=Candidates(
                    token_ids=draw.integers(0, VOCABULARY, (length, COUNT)).astype(np.int32),
                    logprobs=np.zeros((length, COUNT), dtype=np.float32),
                ),
            )
        )
    return sequences


def packed(sequences: Sequence[TrainSequence], members: Sequence[int] | None = None) -> Microbatch:
    batch = flatten(sequences)
    row = np.arange(len(sequences)) if members is None else np.array(members, dtype=np.int64)
    return pack(batch, row, prefixes=shared_prefixes(batch))


def policy_in_float64(path: Path) -> PolicyModel:
    return PolicyModel(load_causal_lm(path, dtype=torch.float64), settings=SETTINGS)


def known(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def plain_distributions(model: torch.nn.Module, sequences: Sequence[TrainSequence]) -> Tensor:
    """The logprobs of the whole vocabulary where each trained token is predicted, by the plain model."""
    parts = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids).long()
        trained = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
        parts.append(model(input_ids=ids[None]).logits[0, trained - 1])
    return torch.log_softmax(torch.cat(parts) / TEMPERATURE, dim=1)


def combined(logprobs: Tensor, entropy: Tensor, of_candidates: Tensor) -> Tensor:
    """A loss in which each of the three weighs differently at each token."""
    slopes = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
    return (slopes * logprobs).sum() + (slopes.cos() * entropy).sum() + (slopes[:, None].exp() * of_candidates).sum()


def test_logprobs_entropy_candidates_and_all_gradients_are_those_of_the_plain_model(tiny_llama: Path) -> None:
    sequences = sequences_with_candidates(6)
    microbatch = packed(sequences)
    policy = policy_in_float64(tiny_llama)
    logprobs, entropy, of_candidates, *_ = policy(microbatch)
    combined(logprobs, entropy, of_candidates).backward()  # type: ignore[no-untyped-call]

    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    whole = plain_distributions(plain, sequences)
    expected_entropy = -(whole.exp() * whole).sum(1)
    expected_candidates = whole.gather(1, known(microbatch.candidates))
    expected = whole.gather(1, microbatch.targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-6)
    torch.testing.assert_close(of_candidates, expected_candidates, rtol=0, atol=1e-6)
    combined(expected, expected_entropy, expected_candidates).backward()  # type: ignore[no-untyped-call]
    ours = dict(policy.causal_lm.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-5, atol=1e-5)


def test_the_candidates_of_a_local_teacher_are_the_top_of_the_plain_model(tiny_llama: Path) -> None:
    sequences = sequences_with_candidates(6)
    policy = policy_in_float64(tiny_llama)
    top = policy.top_candidates(packed(sequences), count=12)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    expected = plain_distributions(plain, sequences).topk(12)
    torch.testing.assert_close(top.logprobs, expected.values, rtol=0, atol=1e-6)
    assert top.token_ids.tolist() == expected.indices.tolist()
    assert not top.logprobs.requires_grad


def test_without_candidates_and_without_entropy_there_are_only_logprobs(tied_llama: Path) -> None:
    settings = LogprobSettings(temperature=1.0, chunking=Chunking(), with_entropy=False)
    policy = PolicyModel(load_causal_lm(tied_llama, dtype=torch.float32), settings=settings)
    mask = np.array([False, True, True])
    plain = TrainSequence.supervised(token_ids=np.array([3, 4, 5], dtype=np.int32), loss_mask=mask)
    logprobs, entropy, of_candidates, *_ = policy(packed([plain]))
    assert logprobs.shape == (2,)
    assert entropy is None
    assert of_candidates is None


def test_a_row_that_trains_nothing_gives_nothing_and_reaches_every_parameter(tied_llama: Path) -> None:
    policy = policy_in_float64(tied_llama)
    empty = packed(sequences_with_candidates(2), members=[])
    logprobs, entropy, of_candidates, *_ = policy(empty)
    assert logprobs.shape == entropy.shape == (0,)
    assert of_candidates.shape == (0, COUNT)
    (logprobs.sum() + entropy.sum() + of_candidates.sum()).backward()
    assert all(known(parameter.grad).abs().sum() == 0 for parameter in policy.parameters())
    top = policy.top_candidates(empty, count=3)
    assert top.token_ids.shape == top.logprobs.shape == (0, 3)


def test_sharded_parameters_move_by_the_same_gradients(commands: CommandChannel, tiny_llama: Path) -> None:
    microbatch = packed(sequences_with_candidates(6))
    moved = []
    for stage in (0, 3):
        config = TrainingConfig(zero_stage=stage, optimizer=OptimizerConfig(epsilon=1e-3))
        policy = PolicyModel(load_causal_lm(tiny_llama, dtype=torch.float32), settings=SETTINGS)
        engine: TrainingEngine[Output] = TrainingEngine(policy, config=config, device=torch.device("cpu"))
        logprobs, entropy, of_candidates, *_ = engine.forward(microbatch)
        engine.backward(combined(logprobs, known(entropy), known(of_candidates)), last=True)
        engine.update(learning_rate=1e-2)
        moved.append({tensor.name: tensor.value for tensor in host_copy(engine, dtype="float32", keep=True).tensors})
        engine.close()
    for name, value in moved[0].items():
        torch.testing.assert_close(moved[1][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "phimoe"])
def test_a_host_copy_has_each_tensor_as_the_checkpoint_format_has_it(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path / "model")
    policy = PolicyModel(load_causal_lm(folder, dtype=torch.float32), settings=SETTINGS)
    snapshot = host_copy(SavedModel(policy, policy.state_dict()), dtype="float32", keep=True, bucket_bytes=1 << 14)
    laid_out = {name: value for bucket in snapshot.buckets for name, value in bucket.named()}
    copied = {tensor.name: tensor.value for tensor in snapshot.tensors}
    stored = load_file(folder / "model.safetensors")
    assert copied.keys() == laid_out.keys() == stored.keys()
    for tensor, value in stored.items():
        assert torch.equal(copied[tensor], value), tensor
        assert torch.equal(laid_out[tensor], value), tensor
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    write_model_directory(
        snapshot, causal_lm=policy.causal_lm, source=TextFiles(folder), destination=tmp_path / "written"
    )
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[tensor], value) for tensor, value in stored.items())
