"""The benchmark of trust: its engines do what they are named after, and its streams are what the test takes."""

import numpy as np
import pytest

from benchmarks.trust import (
    PROMPTS,
    VOCABULARY,
    ToyEngine,
    bfloat16,
    honest,
    learner_says,
    log_softmax,
    new_weights,
    run,
)


def test_bfloat16_keeps_eight_bits() -> None:
    """1 + 2^-7 can be told from 1, and 1 + 2^-9 cannot."""
    assert bfloat16(np.array([1 + 2**-7, 1 + 2**-9, -3.0])).tolist() == [1 + 2**-7, 1.0, -3.0]


def test_an_honest_engine_states_what_the_learner_says_but_for_rounding() -> None:
    random = np.random.default_rng(0)
    weights, prompts = new_weights(random), random.integers(PROMPTS, size=64)

    made = ToyEngine().sample([weights, weights], prompts, random)
    ours, _ = learner_says(weights, prompts, made.tokens)

    assert 1e-4 < np.abs(ours - made.logprobs).mean() < 0.02


def test_an_engine_samples_its_own_distribution() -> None:
    """Of first tokens; twice the standard error of 8,000 samples is below 0.012."""
    random = np.random.default_rng(0)
    weights, prompts = new_weights(random), np.zeros(8000, dtype=np.int64)

    made = ToyEngine(temperature=0.5).sample([weights, weights], prompts, random)
    shares = np.bincount(made.tokens[:, 0], minlength=VOCABULARY) / len(prompts)
    logits = weights.logits(prompts[:1], np.array([VOCABULARY]), 0)

    assert shares == pytest.approx(np.exp(log_softmax(logits / 0.5))[0], abs=0.02)


def test_honest_generators_are_not_named_and_a_cheat_is() -> None:
    count, alarms, largest, tokens = honest(100, seed=1)
    found = run("quite other weights", seed=1)

    assert (alarms, largest) == ([], 0.0)
    assert count >= 100
    assert tokens > 0
    assert found.tokens is not None
    assert found.others == 0
