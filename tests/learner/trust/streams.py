"""Steps of a made-up policy of three tokens, for the test of generators: each generator's tokens by a function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from learner.trust.evidence import Suspicion, TrustTest
from learner.trust.tokens import StepTokens, WholeText

PROBABILITIES = np.array([0.6, 0.3, 0.1])
"""Of the learner's policy, everywhere."""
ENTROPY = float(-(PROBABILITIES * np.log(PROBABILITIES)).sum())
GROUPS, TEXTS, LENGTH = 4, 4, 20
"""Of each generator in a step: groups, trajectories of a group, tokens of one."""
NOISE = 0.01
"""Nats: honest generators differ from the learner by normal numbers of this size."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SampledRow:
    """Tokens of one generator in a step, [N] each: the learner's logprobs, its own, and versions behind."""

    ours: Floats
    theirs: Floats
    lags: NDArray[np.int64]
    old_cache: NDArray[np.bool_]
    whole: tuple[int, ...] = ()
    """Digests of its trajectories."""


Sampler = Callable[[np.random.Generator], SampledRow]


def sampled(
    random: np.random.Generator,
    *,
    probabilities: Floats = PROBABILITIES,
    noise: float = NOISE,
    drift: float = 0.0,
    lag: int = 0,
) -> SampledRow:
    """Tokens sampled from these probabilities and stated with this noise; `drift` moves what both sides say."""
    count = GROUPS * TEXTS * LENGTH
    ours = np.log(PROBABILITIES)[random.choice(3, size=count, p=probabilities)] + drift
    theirs = ours + noise * random.standard_normal(count)
    return SampledRow(ours, theirs, np.full(count, lag), np.zeros(count, dtype=np.bool_))


def step(random: np.random.Generator, generators: Mapping[str, Sampler]) -> StepTokens:
    """A step with tokens of these generators."""
    rows = [sampler(random) for sampler in generators.values()]
    count = GROUPS * TEXTS * LENGTH
    texts = np.arange(len(rows) * GROUPS * TEXTS)
    return StepTokens(
        instances=tuple(f"{name}-process" for name in generators),
        names=tuple(generators),
        processes=np.repeat(np.arange(len(rows)), count),
        lags=np.concatenate([row.lags for row in rows]),
        groups=np.repeat(texts // TEXTS, LENGTH),
        texts=np.repeat(texts, LENGTH),
        old_cache=np.concatenate([row.old_cache for row in rows]),
        theirs=np.concatenate([row.theirs for row in rows]),
        ours=np.concatenate([row.ours for row in rows]),
        entropies=np.full(len(rows) * count, ENTROPY),
        whole=tuple(
            WholeText(process=number, prompt=0, whole=whole, logprob=-18.0)
            for number, row in enumerate(rows)
            for whole in row.whole
        ),
    )


def new_test(*, tolerance: float = 1.5, alone: float = 0.5) -> TrustTest:
    """A test with the settings of a run in bfloat16."""
    return TrustTest(threshold=16.0, tolerance=tolerance, dtype="bfloat16", alone=alone)


def run(generators: Mapping[str, Sampler], *, steps: int = 60, seed: int = 0, alone: float = 0.5) -> list[Suspicion]:
    """The suspicions of a run of so many steps."""
    random, test = np.random.default_rng(seed), new_test(alone=alone)
    return [found for _ in range(steps) for found in test.observe(step(random, generators))]


def without_entropies(tokens: StepTokens) -> StepTokens:
    """The same of a learner that computes no entropy."""
    return replace(tokens, entropies=np.full(len(tokens.ours), np.nan))
