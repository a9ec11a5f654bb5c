from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.training.attention import build_packed_index
from learner.training.batch import TrainSequence, flatten
from learner.training.logprobs import Chunking
from learner.training.packing import Prefixes, SharingOrder, pack, plan, shared_prefixes
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from tests.learner.training.tiny_model import branched, random_sequences

SETTINGS = LogprobSettings(temperature=0.9, chunking=Chunking(), with_entropy=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 64, 10_000])
def test_a_plan_places_every_sequence_once_within_the_budget_and_evenly(ranks: int, budget: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 40, 50)
    shares = plan(lengths, sharing=nothing_shared(len(lengths)).sharing, ranks=ranks, microbatch_tokens=budget)
    rows = [row for share in shares for row in share]
    assert sorted(np.concatenate(rows).tolist()) == list(range(50))
    assert all(lengths[row].sum() <= budget or len(row) == 1 for row in rows)
    assert len({len(share) for share in shares}) == 1
    loads = [sum(int(lengths[row].sum()) for row in share) for share in shares]
    assert max(loads) - min(loads) <= lengths.max()


def test_a_rank_without_sequences_still_has_a_row_that_trains_nothing() -> None:
    batch = flatten(random_sequences(1))
    shares = plan(batch.lengths, sharing=shared_prefixes(batch).sharing, ranks=2, microbatch_tokens=100)
    empty = pack(batch, shares[1][0], prefixes=shared_prefixes(batch))
    assert len(empty.token_ids) == 1
    assert len(empty.targets) == 0


def test_a_row_leaves_out_last_tokens_and_points_each_target_at_the_token_before_it() -> None:
    sequences = [
        told([10, 11, 12], trained=[2]),
        told([20], trained=[]),
        told([30, 31, 32, 33], trained=[1, 3]),
    ]
    batch = flatten(sequences)
    row = pack(batch, np.array([2, 1, 0]), prefixes=shared_prefixes(batch))
    assert row.token_ids.tolist() == [30, 31, 32, 10, 11]
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
    assert row.targets.tolist() == [31, 33, 12]
    assert row.token_ids[row.rows].tolist() == [30, 32, 11]
    assert row.sequences.tolist() == [0, 0, 2]
    assert row.members.tolist() == [2, 1, 0]
    assert batch.token_ids[row.places].tolist() == [31, 33, 12]


def test_only_tokens_of_the_learners_own_version_in_unmixed_sequences_count_as_current() -> None:
    batch = flatten(random_sequences(12))
    row = pack(batch, np.arange(12), prefixes=shared_prefixes(batch))
    owner = np.repeat(np.arange(12), batch.lengths)
    expected = (batch.lags == 0) & ~batch.mixed_versions[owner]
    assert row.current.tolist() == expected[batch.loss_mask].tolist()
    assert 0 < sum(row.current.tolist()) < len(row.current)


def test_buckets_hold_little_padding_and_cover_the_row() -> None:
    lengths = np.sort(np.random.default_rng(1).integers(1, 200, 64))
    rows = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
    index = build_packed_index(rows, tokens=int(lengths.sum()))
    assert sum(len(bucket.places) for bucket in index.buckets) == lengths.sum()
    assert all(len(bucket.places) >= 0.8 * bucket.sequences * bucket.longest for bucket in index.buckets)


def test_a_prompt_stands_in_a_row_once_for_all_completions_of_its_group() -> None:
    batch = flatten([completion([7, 8, 9], [1, 2]), completion([7, 8], [3, 4]), completion([7, 8, 9], [4, 5, 6])])
    row = pack(batch, np.array([0, 1, 2]), prefixes=shared_prefixes(batch))
    assert row.token_ids.tolist() == [7, 8, 9, 1, 3, 4, 5]
    assert row.positions.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert row.targets.tolist() == [1, 2, 3, 4, 4, 5, 6]
    assert row.token_ids[row.rows].tolist() == [9, 1, 8, 3, 9, 4, 5]
    assert row.counts.tolist() == [3, 3, 2, 1, 1, 1, 1]


def test_what_sequences_begin_with_alike_stands_in_a_row_once_trained_or_not() -> None:
    """An agent that has its history cut, two branches of one of its turns, the same once more, and a stranger."""
    sequences = [
        told([1, 2, 3, 4, 5, 6, 7, 8], trained=[2, 3, 6, 7]),
        told([1, 2, 3, 4, 9, 10], trained=[4, 5]),
        told([1, 2, 3, 4, 5, 6, 11], trained=[2, 3, 6]),
        told([1, 2, 3, 4, 9, 10], trained=[5]),
        told([2, 2, 3, 4], trained=[1, 2, 3]),
    ]
    row = pack(flatten(sequences), np.arange(5), prefixes=shared_prefixes(flatten(sequences)))
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 2, 2, 3]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 0, 1, 2]
    assert row.rows.tolist() == [1, 2, 5, 6, 3, 7, 1, 2, 5, 7, 8, 9, 10]
    assert row.targets.tolist() == [3, 4, 7, 8, 9, 10, 3, 4, 11, 10, 2, 3, 4]
    assert row.counts.tolist() == [4, 4, 4, 4, 2, 2, 1, 2, 1, 1, 1]
    assert row.index.spans is not None


def test_sequences_that_begin_with_little_alike_are_no_family() -> None:
    batch = flatten([told([1, 2, 3, 4, 5], trained=[3]), told([1, 6, 7, 8, 9], trained=[3])])
    assert shared_prefixes(batch).sharing.shared.tolist() == [0, 0]
    assert pack(batch, np.arange(2), prefixes=shared_prefixes(batch)).positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_some_of_the_sequences_share_what_those_between_them_shared() -> None:
    texts = ([1, 2, 3, 4, 5, 6], [9, 9], [1, 2, 3, 8], [1, 2, 3, 4, 7])
    sharing = shared_prefixes(flatten([told(text, trained=[len(text) - 1]) for text in texts])).sharing
    assert (sharing.order.tolist(), sharing.shared.tolist()) == ([0, 3, 2, 1], [0, 4, 3, 0])
    for chosen, order, shared in (
        ([0, 2], [0, 1], [0, 3]),
        ([2, 0], [1, 0], [0, 3]),
        ([1, 2, 3], [2, 1, 0], [0, 3, 0]),
        ([1], [0], [0]),
        ([], [], []),
        ([0, 3], [0, 1], [0, 4]),
    ):
        part = sharing.of(np.array(chosen, dtype=np.int64))
        assert (part.order.tolist(), part.shared.tolist()) == (order, shared)
    others = ([1, 2, 3, 4], [1, 2, 5, 6, 7, 8], [1, 2, 5, 6, 7, 9])
    sharing = shared_prefixes(flatten([told(text, trained=[3]) for text in others])).sharing
    assert (sharing.order.tolist(), sharing.shared.tolist()) == ([0, 1, 2], [0, 2, 5])
    assert sharing.of(np.array([0, 2])).shared.tolist() == [0, 2]


def test_a_plan_counts_each_branch_once_and_cuts_a_family_where_branches_part() -> None:
    stem = list(range(3, 23))
    branches = [told([*stem, *left, number], trained=[20, 21]) for left in ([50], [51]) for number in (60, 61, 62)]
    batch = flatten([branches[number] for number in (0, 3, 1, 4, 2, 5)])
    sharing = shared_prefixes(batch).sharing
    (whole,) = plan(batch.lengths, sharing=sharing, ranks=1, microbatch_tokens=28)  # 20 + 2 x (1 + 3)
    assert [sorted(row.tolist()) for row in whole] == [[0, 1, 2, 3, 4, 5]]
    (parts,) = plan(batch.lengths, sharing=sharing, ranks=1, microbatch_tokens=25)
    assert sorted(sorted(row.tolist()) for row in parts) == [[0, 2, 4], [1, 3, 5]]


def told(tokens: list[int], *, trained: list[int]) -> TrainSequence:
    mask = np.isin(np.arange(len(tokens)), trained)
    return TrainSequence.supervised(token_ids=np.array(tokens, dtype=np.int32), loss_mask=mask)


def test_a_plan_keeps_a_group_together_and_counts_its_prompt_once() -> None:
    batch = flatten([completion(list(range(20)), [1, 2]) for _ in range(4)] + [completion([50] * 20, [3])])
    shares = plan(batch.lengths, sharing=shared_prefixes(batch).sharing, ranks=1, microbatch_tokens=30)
    assert [sorted(row.tolist()) for row in shares[0]] == [[4], [0, 1, 2, 3]]


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_the_two_of_a_pair_share_a_row_with_the_chosen_one_first(budget: int) -> None:
    draw = np.random.default_rng(5)
    sequences = [
        replace(completion([7, number], draw.integers(3, 30, draw.integers(1, 9)).tolist()), pair=number // 2)
        for number in range(20)
    ]
    batch = flatten(sequences)
    shares = plan(
        batch.lengths, sharing=shared_prefixes(batch).sharing, pairs=batch.pairs, ranks=2, microbatch_tokens=budget
    )
    rows = [pack(batch, row, prefixes=shared_prefixes(batch)) for share in shares for row in share]
    pairs = [tuple(row.members[pair].tolist()) for row in rows for pair in row.pairs]
    assert sorted(pairs) == [(number, number + 1) for number in range(0, 20, 2)]


def completion(prompt: list[int], tokens: list[int]) -> TrainSequence:
    mask = np.arange(len(prompt) + len(tokens)) >= len(prompt)
    return TrainSequence.supervised(token_ids=np.array(prompt + tokens, dtype=np.int32), loss_mask=mask)


def nothing_shared(count: int, *, tokens: int = 0) -> Prefixes:
    return Prefixes(
        nodes=np.arange(tokens), sharing=SharingOrder(order=np.arange(count), shared=np.zeros(count, dtype=np.int64))
    )


def test_shared_branches_change_neither_logprobs_nor_gradients(tiny_llama: Path) -> None:
    batch = flatten(branched(random_sequences(16)))
    policy = PolicyModel(load_causal_lm(tiny_llama, dtype=torch.float32), settings=SETTINGS)
    found = {}
    for name, prefixes in {
        "alone": nothing_shared(16, tokens=len(batch.token_ids)),
        "shared": shared_prefixes(batch),
    }.items():
        row = pack(batch, np.arange(16), prefixes=prefixes)
        policy.zero_grad()
        logprobs, entropy, *_ = policy(row)
        (logprobs * torch.linspace(0.5, 2.0, len(logprobs)) + 0.1 * entropy).sum().backward()
        gradients = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
        found[name] = (len(row.token_ids), logprobs.detach(), gradients)
    assert found["shared"][0] < 0.7 * found["alone"][0]
    torch.testing.assert_close(found["shared"][1], found["alone"][1], rtol=0, atol=1e-5)
    for shared, alone in zip(found["shared"][2], found["alone"][2], strict=True):
        torch.testing.assert_close(shared, alone, rtol=1e-4, atol=2e-5)


def test_shared_prompts_change_neither_logprobs_nor_gradients(tiny_llama: Path) -> None:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 30, size).tolist() for size in (5, 9, 2)]
    sequences = [completion(prompts[i % 3], draw.integers(3, 30, draw.integers(1, 14)).tolist()) for i in range(12)]
    batch = flatten(sequences)
    policy = PolicyModel(load_causal_lm(tiny_llama, dtype=torch.float32), settings=SETTINGS)
    gradients, logprobs = [], []
    for prefixes in (nothing_shared(12, tokens=len(batch.token_ids)), shared_prefixes(batch)):
        order = plan(batch.lengths, sharing=nothing_shared(12).sharing, ranks=1, microbatch_tokens=10_000)[0][0]
        row = pack(batch, order, prefixes=prefixes)
        policy.zero_grad()
        found = policy(row)[0]
        (found * torch.linspace(0.5, 2.0, len(found))).sum().backward()
        logprobs.append(found.detach())
        gradients.append([parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None])
    assert len(row.token_ids) < batch.lengths.sum() - 12
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=1e-5)
    for plain, shared in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, shared, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("longest", [12, 60])
def test_packed_logprobs_and_gradients_are_those_of_the_plain_model_on_each_sequence(
    tiny_llama: Path, longest: int
) -> None:
    sequences = random_sequences(9, longest=longest)
    batch = flatten(sequences)
    order = plan(batch.lengths, sharing=shared_prefixes(batch).sharing, ranks=1, microbatch_tokens=10_000)[0][0]
    policy = PolicyModel(load_causal_lm(tiny_llama, dtype=torch.float32), settings=SETTINGS)
    logprobs, entropy, *_ = policy(pack(batch, order, prefixes=shared_prefixes(batch)))
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
