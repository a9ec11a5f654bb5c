"""Passes over a step and what the preset makes of them: which models are asked, and where the numbers stand."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.algorithms.preset import Advantages, CarriedState, Loss, LossTokens, Passes, Preset, ScoredBatch
from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.logprobs import TopTokens
from learner.training.models import LocalTeachers, Scorers, TokenScores, credit, score
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.ranks import CommandChannel

PASSES = Passes(proximal=True, reference=True, teacher=True, values=True)


@dataclass
class IdScorer:
    """Gives each target its token id times `factor`, with a gradient that must not be kept."""

    factor: float
    asked: list[int] = field(default_factory=list)
    weight: Tensor = field(default_factory=lambda: torch.ones((), requires_grad=True))

    def __call__(self, microbatch: Microbatch) -> Tensor:
        self.asked.append(len(microbatch.targets))
        return self.factor * microbatch.targets * self.weight


def sequence(*token_ids: int, trained: int, **fields: object) -> TrainSequence:
    """The last `trained` tokens are trained."""
    tokens = np.array(token_ids, dtype=np.int32)
    made = TrainSequence.supervised(token_ids=tokens, loss_mask=np.arange(len(tokens)) >= len(tokens) - trained)
    return replace(made, **fields)  # type: ignore[arg-type]


def step() -> FlatBatch:
    return flatten([sequence(1, 2, 3, trained=2, reward=1.0), sequence(4, 5, trained=1, reward=-1.0, group=1)])


def rows(batch: FlatBatch) -> list[Microbatch]:
    """A microbatch for each sequence, the last one first."""
    prefixes = shared_prefixes(batch)
    return [pack(batch, np.array([number]), prefixes=prefixes) for number in reversed(range(len(batch.lengths)))]


def test_each_number_stands_at_its_token_whatever_the_microbatches(commands: CommandChannel) -> None:
    batch = step()
    scorers = Scorers(proximal=IdScorer(1), reference=IdScorer(10), teacher=IdScorer(100), values=IdScorer(1000))
    found = score(batch, rows(batch), scorers=scorers, passes=PASSES)
    for values, factor in (
        (found.proximal_logprobs, 1),
        (found.reference_logprobs, 10),
        (found.teacher_logprobs, 100),
        (found.values, 1000),
    ):
        assert values is not None
        assert values.tolist() == [0, 2 * factor, 3 * factor, 0, 5 * factor]
        assert not values.requires_grad


def test_nobody_is_asked_for_what_the_algorithm_does_not_need(commands: CommandChannel) -> None:
    batch = step()
    proximal, reference = IdScorer(1), IdScorer(10)
    scorers = Scorers(proximal=proximal, reference=reference)
    found = score(batch, rows(batch), scorers=scorers, passes=Passes(reference=True))
    assert (proximal.asked, reference.asked) == ([], [1, 2])
    assert (found.proximal_logprobs, found.teacher_logprobs, found.values) == (None, None, None)


def test_norms_come_with_the_proximal_logprobs_in_one_pass(commands: CommandChannel) -> None:
    batch = step()
    proximal = IdScorer(1)

    def with_norms(microbatch: Microbatch) -> Tensor:
        return torch.stack([10.0 * microbatch.targets, 100.0 * microbatch.targets])

    scorers = Scorers(proximal=proximal, proximal_with_norms=with_norms)
    found = score(batch, rows(batch), scorers=scorers, passes=Passes(proximal=True, logit_norms=True))
    assert found.proximal_logprobs is not None
    assert found.logit_norms is not None
    assert found.proximal_logprobs.tolist() == [0, 20, 30, 0, 50]
    assert found.logit_norms.tolist() == [0, 200, 300, 0, 500]
    assert proximal.asked == []


@pytest.mark.parametrize("wanted", [True, False])
def test_logprobs_that_came_with_the_batch_are_taken_as_they_are(commands: CommandChannel, wanted: bool) -> None:
    """0.1 is no power of two: a detour over float64 or a model would show."""
    known = [np.array([0, -0.1, -0.2], dtype=np.float32), np.array([0, -0.3], dtype=np.float32)]
    given = [
        sequence(1, 2, 3, trained=2, reference_logprobs=known[0], teacher_logprobs=2 * known[0]),
        sequence(4, 5, trained=1, reference_logprobs=known[1], teacher_logprobs=2 * known[1]),
    ]
    batch = flatten(given)
    reference, teacher = IdScorer(10), IdScorer(100)
    scorers = Scorers(proximal=IdScorer(1), reference=reference, teacher=teacher)
    found = score(batch, rows(batch), scorers=scorers, passes=Passes(reference=wanted, teacher=wanted))
    assert found.reference_logprobs is not None
    assert found.teacher_logprobs is not None
    assert found.reference_logprobs.numpy().tolist() == np.concatenate(known).tolist()
    assert found.teacher_logprobs.numpy().tolist() == (2 * np.concatenate(known)).tolist()
    assert (reference.asked, teacher.asked) == ([], [])


def no_loss(tokens: LossTokens) -> Loss:
    raise AssertionError("credit is given before any loss")


def preset(
    *,
    advantages: Callable[[ScoredBatch], Advantages] | None = None,
) -> Preset:
    return Preset(name="test", loss=no_loss, weights=lambda lengths: np.ones(len(lengths)), advantages=advantages)


def test_a_teacher_of_the_ranks_fills_in_where_none_has_told_yet() -> None:
    told = np.array([0.0, -0.25, -0.5], dtype=np.float32)
    batch = flatten([sequence(1, 2, 3, trained=2, teacher_logprobs=told), sequence(4, 5, trained=1)])
    assert batch.teachers.tolist() == [-1, 0]
    teacher = IdScorer(100)
    found = score(
        batch, rows(batch), scorers=Scorers(proximal=IdScorer(1), teacher=teacher), passes=Passes(teacher=True)
    )
    alone = flatten([sequence(1, 2, 3, trained=2), sequence(4, 5, trained=1)])
    asked = score(
        alone, rows(alone), scorers=Scorers(proximal=IdScorer(1), teacher=teacher), passes=Passes(teacher=True)
    )
    assert found.teacher_logprobs is not None
    assert asked.teacher_logprobs is not None
    assert asked.teacher_logprobs[4] != 0
    assert found.teacher_logprobs.tolist() == [0.0, -0.25, -0.5, 0.0, asked.teacher_logprobs[4]]


def test_without_advantages_and_filters_every_trained_token_is_kept() -> None:
    batch = step()
    given = credit(batch, TokenScores(), preset=preset(), carried=CarriedState())
    assert given.kept.tolist() == [False, True, True, False, True]
    assert given.advantages.tolist() == [0] * 5
    assert (given.returns, given.means) == (None, {})
    assert given.kept_lengths(batch).tolist() == [2, 1]


def test_an_advantage_sees_trained_tokens_alone_and_comes_back_to_their_places() -> None:
    seen: list[ScoredBatch] = []

    def estimate(batch: ScoredBatch) -> Advantages:
        seen.append(batch)
        return Advantages(
            advantages=batch.rewards[batch.sequences] * torch.tensor([1.0, 2.0, 3.0]),
            returns=torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64),
            means={"mean": 1.5},
        )

    values = torch.tensor([50.0, 51.0, 52.0, 53.0, 54.0])
    given = credit(step(), TokenScores(values=values), preset=preset(advantages=estimate), carried=CarriedState())
    assert given.advantages.tolist() == [0, 1, 2, 0, -3]
    assert given.returns is not None
    assert given.returns.tolist() == [0, 7, 8, 0, 9]
    assert given.means == {"mean": 1.5}
    (batch,) = seen
    assert (batch.rewards.tolist(), batch.groups.tolist()) == ([1.0, -1.0], [0, 1])
    assert batch.sequences.tolist() == [0, 0, 1]
    assert batch.values is not None
    assert (batch.values.tolist(), batch.values.dtype) == ([51, 52, 54], torch.float64)
    assert (batch.proximal_logprobs, batch.reference_logprobs, batch.teacher_logprobs) == (None, None, None)


def test_a_token_that_is_filtered_out_no_longer_counts_in_its_sequence() -> None:
    batch = step()

    def filtered(_: ScoredBatch) -> Advantages:
        return Advantages(advantages=torch.zeros(3), kept=torch.tensor([True, False, False]), correction_scale=1.25)

    given = credit(batch, TokenScores(), preset=preset(advantages=filtered), carried=CarriedState())
    assert given.correction_scale == 1.25
    assert given.kept.tolist() == [False, True, False, False, False]
    assert given.kept_lengths(batch).tolist() == [1, 0]
    assert given.advantages.tolist() == [0] * 5


@dataclass
class OneTokenTeacher:
    """Holds one token likeliest everywhere."""

    token: int

    def top_candidates(self, microbatch: Microbatch, *, count: int) -> TopTokens:
        places = torch.full((len(microbatch.targets), count), self.token)
        return TopTokens(places, -places.float())


def test_each_sequence_is_compared_with_its_own_teachers_candidates() -> None:
    teachers = LocalTeachers([OneTokenTeacher(5), OneTokenTeacher(6), OneTokenTeacher(7)])  # type: ignore[list-item]
    microbatch = SimpleNamespace(
        teachers=torch.tensor([2, 0, 1]),
        sequences=torch.tensor([0, 0, 1, 2]),
        targets=torch.zeros(4, dtype=torch.int64),
    )
    token_ids, logprobs = teachers.candidates(microbatch, count=2)  # type: ignore[arg-type]
    assert token_ids.tolist() == [[7, 7], [7, 7], [5, 5], [6, 6]]
    assert torch.equal(logprobs, -token_ids.float())
