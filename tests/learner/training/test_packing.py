from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.training.attention import build_packed_index
from learner.training.batch import TrainSequence, flatten
from learner.training.logprobs import Chunking
from learner.training.packing import pack, plan
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from tests.learner.training.tiny_model import random_sequences

SETTINGS = LogprobSettings(temperature=0.9, chunking=Chunking(), with_entropy=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 64, 10_000])
def test_a_plan_places_every_sequence_once_within_the_budget_and_evenly(ranks: int, budget: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 40, 50)
    shares = plan(lengths, ranks=ranks, microbatch_tokens=budget)
    rows = [row for share in shares for row in share]
    assert sorted(np.concatenate(rows).tolist()) == list(range(50))
    assert all(lengths[row].sum() <= budget or len(row) == 1 for row in rows)
    assert len({len(share) for share in shares}) == 1
    loads = [sum(int(lengths[row].sum()) for row in share) for share in shares]
    assert max(loads) - min(loads) <= lengths.max()


def test_a_rank_without_sequences_still_has_a_row_that_trains_nothing() -> None:
    batch = flatten(random_sequences(1))
    shares = plan(batch.lengths, ranks=2, microbatch_tokens=100)
    empty = pack(batch, shares[1][0], weights=np.ones(1))
    assert len(empty.token_ids) == 1
    assert len(empty.targets) == 0


def test_a_row_leaves_out_last_tokens_and_points_each_target_at_the_token_before_it() -> None:
    def sequence(tokens: list[int], trained: list[int]) -> TrainSequence:
        mask = np.isin(np.arange(len(tokens)), trained)
        return TrainSequence.supervised(token_ids=np.array(tokens, dtype=np.int32), loss_mask=mask)

    batch = flatten([sequence([10, 11, 12], [2]), sequence([20], []), sequence([30, 31, 32, 33], [1, 3])])
    row = pack(batch, np.array([2, 1, 0]), weights=np.array([0.5, 9.0, 0.25]))
    assert row.token_ids.tolist() == [30, 31, 32, 10, 11]
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
    assert row.targets.tolist() == [31, 33, 12]
    assert row.token_ids[row.rows].tolist() == [30, 32, 11]
    assert row.weights.tolist() == [0.25, 0.25, 0.5]


def test_only_tokens_of_the_learners_own_version_in_unmixed_sequences_count_as_current() -> None:
    batch = flatten(random_sequences(12))
    row = pack(batch, np.arange(12), weights=np.ones(12))
    owner = np.repeat(np.arange(12), batch.lengths)
    expected = (batch.lags == 0) & ~batch.mixed_versions[owner]
    assert row.current.tolist() == expected[batch.loss_mask].tolist()
    assert 0 < sum(row.current.tolist()) < len(row.current)


def test_buckets_hold_little_padding_and_cover_the_row() -> None:
    lengths = sorted(np.random.default_rng(1).integers(1, 200, 64).tolist())
    index = build_packed_index(lengths)
    assert sum(bucket.tokens for bucket in index.buckets) == sum(lengths)
    assert all(bucket.tokens >= 0.8 * bucket.sequences * bucket.longest for bucket in index.buckets)


@pytest.mark.parametrize("longest", [12, 60])
def test_packed_logprobs_and_gradients_are_those_of_the_plain_model_on_each_sequence(
    tiny_llama: Path, longest: int
) -> None:
    sequences = random_sequences(9, longest=longest)
    batch = flatten(sequences)
    order = plan(batch.lengths, ranks=1, microbatch_tokens=10_000)[0][0]
    policy = PolicyModel(load_causal_lm(tiny_llama, dtype=torch.float32), settings=SETTINGS)
    logprobs, entropy = policy(pack(batch, order, weights=np.ones(9)))
    logprobs.sum().backward()

    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    parts = [_plain_logprobs(plain, sequences[i]) for i in order]
    expected = torch.cat([part[0] for part in parts])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.cat([part[1] for part in parts]), rtol=0, atol=1e-5)
    expected.sum().backward()  # type: ignore[no-untyped-call]
    ours = dict(policy.causal_lm.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=2e-5)


def _plain_logprobs(model: torch.nn.Module, sequence: TrainSequence) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(sequence.token_ids).long()
    whole = torch.log_softmax(model(input_ids=ids[None]).logits[0] / 0.9, dim=1)
    trained = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
    entropy = -(whole.exp() * whole).sum(1)
    return whole[trained - 1, ids[trained]], entropy[trained - 1]
