"""Metrics on held-out examples, against numbers worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.algorithms.presets.dpo import DpoConfig
from learner.algorithms.presets.rm import RmConfig
from learner.algorithms.presets.sft import SftConfig
from learner.offline import measure, of_scores
from learner.training.batch import TrainSequence
from learner.training.trainer import Trainer


@dataclass
class FixedTrainer:
    """Gives as logprob or score of each trained token the token's id, negative; as the reference's, half of that."""

    asked_reference: int = 0

    def outputs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        return [-sequence.token_ids[sequence.loss_mask].astype(np.float32) for sequence in sequences]

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        self.asked_reference += 1
        return [(values / 2).astype(np.float32) for values in self.outputs(sequences)]


def sequence(*token_ids: int, reference: float | None = None) -> TrainSequence:
    """The first token is the prompt; `reference` is the logprob of each of the others."""
    tokens = np.array(token_ids, dtype=np.int32)
    mask = np.arange(len(tokens)) > 0
    known = np.zeros(0) if reference is None else np.where(mask, reference, 0)
    return TrainSequence.supervised(token_ids=tokens, loss_mask=mask, reference_logprobs=known.astype(np.float32))


def fixed(trainer: FixedTrainer | None = None) -> Trainer:
    return cast(Trainer, trainer or FixedTrainer())


def test_accuracy_counts_ties_half_and_the_distributions_are_those_of_each_side() -> None:
    """Wins 2 of 4, one tie: (2 + 0.5) / 4. Chosen 1, 2, 3, 4: mean 2.5, deviation sqrt(1.25), quantiles on a line
    through ranks 0 to 3: the 5 % one at rank 0.15. Rejected 0, 2, 1, 9: mean 3. Margins 1, 0, 2, -5: mean -0.5.
    """
    found = of_scores(np.array([[1.0, 0.0], [2.0, 2.0], [3.0, 1.0], [4.0, 9.0]]))
    assert found["accuracy"] == 0.625
    assert found["margin_mean"] == -0.5
    assert (found["chosen_mean"], found["rejected_mean"]) == (2.5, 3.0)
    assert found["chosen_deviation"] == pytest.approx(1.25**0.5)
    quantiles = [found[f"chosen_p{q}"] for q in (5, 25, 50, 75, 95)]
    assert quantiles == pytest.approx([1.15, 1.75, 2.5, 3.25, 3.85])


def test_a_reward_model_is_measured_by_the_scores_of_its_pairs() -> None:
    """Scores -2 and -5, -7 and -3: one of two is right, the margins are 3 and -4."""
    units = [(sequence(1, 2), sequence(1, 5)), (sequence(1, 7), sequence(1, 3))]
    found = measure(fixed(), RmConfig(), units)
    assert (found["accuracy"], found["margin_mean"]) == (0.5, -0.5)
    assert "nll" not in found


def test_a_likelihood_is_a_mean_over_tokens_and_not_over_sequences() -> None:
    """Three tokens of 2, 4 and 9 nats, in sequences of one and two: 15 / 3."""
    assert measure(fixed(), SftConfig(), [(sequence(1, 2),), (sequence(1, 4, 9),)]) == {"nll": pytest.approx(5.0)}


def test_dpo_is_measured_by_its_own_rewards_with_the_reference_of_the_trainer() -> None:
    """Sums of logprobs -3 and -8, by the reference half of them: rewards 0.1 x -1.5 and 0.1 x -4, margin 0.25."""
    trainer = FixedTrainer()
    found = measure(fixed(trainer), DpoConfig(beta=0.1), [(sequence(1, 1, 2), sequence(1, 8))])
    assert trainer.asked_reference == 1
    assert found["nll"] == pytest.approx(11 / 3)
    assert found["chosen_mean"] == pytest.approx(-0.15)
    assert found["margin_mean"] == pytest.approx(0.25)


def test_dpo_takes_the_references_logprobs_that_are_known() -> None:
    """-3 less -2 and -8 less -9: rewards -0.1 and 0.1."""
    trainer = FixedTrainer()
    unit = (sequence(1, 1, 2, reference=-1.0), sequence(1, 8, reference=-9.0))
    found = measure(fixed(trainer), DpoConfig(beta=0.1), [unit])
    assert trainer.asked_reference == 0
    assert [found["chosen_mean"], found["rejected_mean"]] == pytest.approx([-0.1, 0.1])
    assert found["accuracy"] == 0.0


UNIT = (sequence(1, 1, 2), sequence(1, 4))
"""Chosen: logprobs -1 and -2; rejected: -4; the trainer's reference gives half of them."""


@pytest.mark.parametrize(
    ("config", "chosen", "rejected"),
    [
        # Per token: gaps (-1.5)/2 and -2, times 0.1.
        ({"loss": "ipo"}, -0.075, -0.2),
        ({"loss": "length_normalised", "beta": 0.1}, -0.075, -0.2),
        # Mean logprobs -1.5 and -4, times 0.1 and 2.
        ({"loss": "orpo"}, -0.15, -0.4),
        ({"loss": "simpo"}, -3.0, -8.0),
        # Sums -3 and -4, less -1.5 and -2; without a reference as they are.
        ({"loss": "hinge"}, -0.15, -0.2),
        ({"loss": "bco"}, -0.15, -0.2),
        ({"loss": "sigmoid", "reference_free": True}, -0.3, -0.4),
    ],
)
def test_pairs_are_measured_as_their_loss_sees_them(config: dict[str, object], chosen: float, rejected: float) -> None:
    trainer = FixedTrainer()
    algo = DpoConfig.model_validate(config)
    found = measure(fixed(trainer), algo, [UNIT])
    assert [found["chosen_mean"], found["rejected_mean"]] == pytest.approx([chosen, rejected])
    assert found["accuracy"] == 1.0
    assert found["nll"] == pytest.approx(7 / 3)
    assert trainer.asked_reference == int(algo.uses_reference)


def test_by_length_the_longer_of_two_completions_does_not_win_or_lose() -> None:
    """Sums -3 and -2.5 (rewards -0.15, -0.125): wrong for dpo; per token -0.75 and -1.25: right for ipo."""
    unit = (sequence(1, 1, 2), sequence(1, 5, reference=None))
    halved = (replace(unit[0]), replace(unit[1], token_ids=np.array([1, 2], dtype=np.int32)))
    assert measure(fixed(), DpoConfig(), [halved])["accuracy"] == 0.0
    assert measure(fixed(), DpoConfig(loss="ipo"), [halved])["accuracy"] == 1.0


def test_kto_is_measured_against_the_reference_point_of_mismatched_completions() -> None:
    """Gaps are minus half the ids: good -0.5, bad -2 and 0.5 of reference -4.5 for -4; beta 1. Mismatched gaps 1, -0.5:
    mean 0.25. Above it is only the last, a bad one: right is the first bad one alone, 1 of 3.
    """
    good, bad = sequence(1, 1, reference=-0.5), replace(sequence(1, 4, reference=-2.0), label=False)
    worse = replace(sequence(1, 4, reference=-4.5), label=False)
    up = replace(sequence(1, 1, reference=-2.0), mismatched=True)
    down = replace(sequence(1, 1, reference=-0.5), mismatched=True)
    found = measure(fixed(), DpoConfig(loss="kto", beta=1.0), [(good, up), (bad, down), (worse,)])
    assert found["reference_point"] == pytest.approx(0.25)
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["good_mean"] == pytest.approx(-0.5)
    assert found["bad_mean"] == pytest.approx(-0.75)
    assert found["nll"] == pytest.approx(3.0)


def test_many_examples_are_measured_in_parts_and_in_order() -> None:
    """600 pairs, more than go at once: the score of each chosen one is 1 above that of its rejected one."""
    units = [(sequence(1, number), sequence(1, number + 1)) for number in range(600)]
    found = measure(fixed(), RmConfig(), units)
    assert (found["accuracy"], found["margin_mean"]) == (1.0, 1.0)
