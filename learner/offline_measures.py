"""What is measured on examples that are held out, by the model as it stands. Rewards and scores have no unit."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.config import AlgorithmConfig, DpoConfig, RmConfig
from learner.offline_examples import Unit
from learner.training.batch import TrainSequence
from learner.training.trainer import Trainer

_AT_ONCE = 256
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def measure(trainer: Trainer, algo: AlgorithmConfig, units: Sequence[Unit]) -> dict[str, float]:
    """Accuracy and distributions of scores of pairs, or the mean negative log-likelihood, in nats per token."""
    sequences = [sequence for unit in units for sequence in unit]
    outputs = _outputs(trainer, sequences)
    if isinstance(algo, RmConfig):
        return of_scores(np.array([values[0] for values in outputs]).reshape(-1, 2))
    likelihood = {"nll": -float(np.concatenate(outputs).mean())}
    if isinstance(algo, DpoConfig) and algo.loss in ("sigmoid", "ipo"):
        rewards = algo.beta * (_sums(outputs) - _sums(_known(trainer, sequences)))
        return likelihood | of_scores(rewards.reshape(-1, 2))
    return likelihood


def of_scores(pairs: NDArray[np.floating]) -> dict[str, float]:
    """Of the scores [P, 2] of chosen and rejected: how often the chosen one is higher (ties count half), and both
    distributions.
    """
    chosen, rejected = pairs[:, 0], pairs[:, 1]
    wins = (chosen > rejected).mean() + 0.5 * (chosen == rejected).mean()
    found = {"accuracy": float(wins), "margin_mean": float((chosen - rejected).mean())}
    for name, scores in (("chosen", chosen), ("rejected", rejected)):
        found |= {f"{name}_mean": float(scores.mean()), f"{name}_deviation": float(scores.std())}
        found |= {f"{name}_p{100 * q:g}": float(np.quantile(scores, q)) for q in _QUANTILES}
    return found


def _outputs(trainer: Trainer, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    return [
        values
        for start in range(0, len(sequences), _AT_ONCE)
        for values in trainer.outputs(sequences[start : start + _AT_ONCE])
    ]


def _known(trainer: Trainer, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
    if all(len(sequence.reference_logprobs) for sequence in sequences):
        return [sequence.reference_logprobs[sequence.loss_mask] for sequence in sequences]
    return trainer.reference_logprobs(sequences)


def _sums(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    return np.array([float(part.sum(dtype=np.float64)) for part in parts])
