"""Tokens until a generator that cheats is named, and honest groups without a false alarm: a synthetic policy.

    .venv/bin/python -m benchmarks.trust [--groups N] [--seeds N] [--output benchmarks/results/trust.md]

The policy is a small softmax in numpy, no language model: the hidden state of prompt, last token and place, a tanh, and
logits over a vocabulary of 64. Four generators sample a step's groups; each step moves the weights, so that tokens of
lag 0 to 4 differ from what the learner would say now. Honest differences are in all streams: the engine's logits are
rounded to bfloat16, by a fifth more noise in one generator; a third of the trajectories go over a new version in their
middle, half of these with keys and values of the version before, and say so; groups whose rewards are all equal are
left out, which makes rare answers commoner than a policy samples them. Of each cheat one generator of the four is one.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import print_and_write
from learner.trust.evidence import NEAR, Suspicion, TrustTest
from learner.trust.tokens import StepTokens, WholeText

VOCABULARY, WIDTH, LENGTH = 64, 32, 32
PROMPTS, GROUP_SIZE, GROUPS_PER_STEP, GENERATORS = 512, 8, 32, 4
MOST_STEPS = 60
THRESHOLD = 16.0
_MOVES = 0.006
"""Of a step, relative to the size of the weights."""
_SHARPENS = 1.0005

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ToyWeights:
    """ToyWeights of the policy: of prompts [P, H], of last tokens [V, H], of places [T, H], and the output [H, V]."""

    prompts: Floats
    tokens: Floats
    places: Floats
    output: Floats

    def logits(self, prompts: Ints, last: Ints, places: Ints | int) -> Floats:
        """Logits [N, V] after `last` [N] at `places`."""
        hidden = np.tanh(self.prompts[prompts] + self.tokens[last] + self.places[places])
        return hidden @ self.output

    def moved(self, random: np.random.Generator, by: float, *, sharper: float = 1.0) -> "ToyWeights":
        """The weights after an update of this relative size."""
        parts = (self.prompts, self.tokens, self.places, self.output)
        moved = [part + by * part.std() * random.standard_normal(part.shape) for part in parts]
        return ToyWeights(moved[0], moved[1], moved[2], sharper * moved[3])

    def mixed(self, other: "ToyWeights") -> "ToyWeights":
        """Half of each: what keys and values of two versions come to."""
        return ToyWeights(
            (self.prompts + other.prompts) / 2,
            (self.tokens + other.tokens) / 2,
            (self.places + other.places) / 2,
            (self.output + other.output) / 2,
        )

    def rounded(self, bits: int) -> "ToyWeights":
        """Each weight to so many bits, by one scale for a matrix."""

        def rounded(part: Floats) -> Floats:
            step = np.abs(part).max() / (2 ** (bits - 1) - 1)
            return np.asarray(np.round(part / step) * step)

        return ToyWeights(*(rounded(part) for part in (self.prompts, self.tokens, self.places, self.output)))


def new_weights(random: np.random.Generator) -> ToyWeights:
    """A policy of about 2 nats a token."""
    return ToyWeights(
        0.5 * random.standard_normal((PROMPTS, WIDTH)),
        0.8 * random.standard_normal((VOCABULARY + 1, WIDTH)),
        0.3 * random.standard_normal((LENGTH, WIDTH)),
        1.3 * random.standard_normal((WIDTH, VOCABULARY)),
    )


def bfloat16(values: Floats) -> Floats:
    """Rounded to 8 bits of mantissa."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(mantissa * 256) / 256, exponent))


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    top = logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))


@dataclass(frozen=True)
class Completions:
    """Completions [B, T]: tokens, stated logprobs, versions behind, and which have an old cache."""

    tokens: Ints
    logprobs: Floats
    lags: Ints
    old: NDArray[np.bool_]

    def chosen(self, at: Ints) -> "Completions":
        """Some of them, in this order."""
        return Completions(self.tokens[at], self.logprobs[at], self.lags[at], self.old[at])


def joined(parts: Sequence[Completions]) -> Completions:
    """All of them, in order."""
    return Completions(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.lags for part in parts]),
        np.concatenate([part.old for part in parts]),
    )


@dataclass
class ToyEngine:
    """A generator. `serves` makes of the weights that it was sent those that it serves, `temperature` is its own, and
    `noise` the standard deviation of what its logits are off besides bfloat16, of each completion if it is an array.
    `states` is the temperature that it states logprobs for, its own if None. `low` is taken off what it states.
    """

    serves: Callable[[ToyWeights], ToyWeights] = lambda weights: weights
    temperature: float = 1.0
    states: float | None = None
    noise: float | Floats = 0.0
    low: float = 0.0

    def sample(self, versions: Sequence[ToyWeights], prompts: Ints, random: np.random.Generator) -> Completions:
        """A completion for each prompt. `versions` are the learner's last, the newest first."""
        count = len(prompts)
        lag = random.integers(max(1, min(NEAR + 1, len(versions) - 1)), size=count)
        switch = np.where((random.random(count) < 1 / 3) & (lag > 0), random.integers(1, LENGTH, size=count), LENGTH)
        old_keys = random.random(count) < 0.5
        served = stacked([self.serves(weights) for weights in versions])
        tokens, stated = np.zeros((count, LENGTH), dtype=np.int64), np.zeros((count, LENGTH))
        after = np.arange(LENGTH) >= switch[:, None]
        lags, old = lag[:, None] - after, after & old_keys[:, None]
        last, kinds = np.full(count, VOCABULARY), 2 * lags + old
        output = served.output[kinds[:, 0]]
        for place in range(LENGTH):
            turned = np.flatnonzero(switch == place)
            output[turned] = served.output[kinds[turned, place]]
            hidden = np.tanh(
                served.prompts[kinds[:, place], prompts]
                + served.tokens[kinds[:, place], last]
                + served.places[kinds[:, place], place]
            )
            logits = bfloat16(np.matmul(hidden[:, None], output)[:, 0])
            tokens[:, place], stated[:, place] = self._choose(logits, random)
            last = tokens[:, place]
        return Completions(tokens, stated - self.low, lags, old)

    def _choose(self, logits: Floats, random: np.random.Generator) -> tuple[Ints, Floats]:
        if np.any(self.noise):
            logits = logits + np.reshape(self.noise, (-1, 1)) * random.standard_normal(logits.shape, dtype=np.float32)
        logprobs = log_softmax(logits / self.temperature)
        below = np.exp(logprobs).cumsum(axis=1) < random.random((len(logits), 1), dtype=np.float32)
        chosen = np.minimum(below.sum(axis=1), VOCABULARY - 1)
        stated = logprobs if self.states is None else log_softmax(logits / self.states)
        return chosen, stated[np.arange(len(chosen)), chosen]


def stacked(versions: Sequence[ToyWeights]) -> ToyWeights:
    """ToyWeights of all kinds [2K, ...]: 2 lag, and one more for keys and values of the version before that."""
    pairs = zip(versions, [*versions[1:], versions[-1]], strict=True)
    kinds = [kind for weights, before in pairs for kind in (weights, weights.mixed(before))]
    return ToyWeights(
        np.stack([kind.prompts for kind in kinds]).astype(np.float32),
        np.stack([kind.tokens for kind in kinds]).astype(np.float32),
        np.stack([kind.places for kind in kinds]).astype(np.float32),
        np.stack([kind.output for kind in kinds]).astype(np.float32),
    )


Trick = Callable[["Stream", ToyEngine, Sequence[ToyWeights], Ints], Completions]


@dataclass
class Stream:
    """Steps of a run whose first generator does as `trick` says; with None it is like the others."""

    seed: int
    engine: ToyEngine = field(default_factory=ToyEngine)
    trick: Trick | None = None
    begins_at: int = 0
    store: dict[int, tuple[Ints, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.versions = [new_weights(self.random)]
        self._wanted = self.random.random((PROMPTS, VOCABULARY)) < 0.03
        self.steps = 0

    def rewards(self, prompts: Ints, tokens: Ints) -> NDArray[np.bool_]:
        """1 where one of the last four tokens is one of a few that the prompt asks for."""
        return np.asarray(self._wanted[prompts[:, None], tokens[:, -4:]].any(axis=1))

    def step(self) -> StepTokens:
        """The next step's tokens; the weights move."""
        newest = self.versions[0].moved(self.random, _MOVES, sharper=_SHARPENS)
        self.versions = [newest, *self.versions][: NEAR + 2]
        parts = [self._sampled(number) for number in (0, 1)]
        self.steps += 1
        of_each = GROUPS_PER_STEP // GENERATORS * GROUP_SIZE
        owners = np.repeat(np.arange(GENERATORS), of_each)
        kept = np.flatnonzero(np.concatenate([spread for _, _, spread in parts]))
        prompts = np.concatenate([prompts for prompts, _, _ in parts])
        made = joined([completions for _, completions, _ in parts])
        return self._seen(owners[kept], prompts[kept], made.chosen(kept))

    def _sampled(self, number: int) -> tuple[Ints, Completions, NDArray[np.bool_]]:
        """Prompts and completions of the first generator, or with the number 1 of all others, and which are kept."""
        cheats = number == 0 and self.steps >= self.begins_at
        count = GROUPS_PER_STEP // GENERATORS * (1 if number == 0 else GENERATORS - 1)
        prompts = np.repeat(self.random.integers(PROMPTS, size=count), GROUP_SIZE)
        noise = np.zeros(len(prompts))
        noise[: len(prompts) // (GENERATORS - 1) if number else 0] = 0.004
        engine = self.engine if cheats else ToyEngine(noise=noise)
        if cheats and self.trick is not None:
            made = self.trick(self, engine, self.versions, prompts)
        else:
            made = engine.sample(self.versions, prompts, self.random)
        rewards = self.rewards(prompts, made.tokens).reshape(count, GROUP_SIZE)
        spread = np.repeat(rewards.any(axis=1) & ~rewards.all(axis=1), GROUP_SIZE)
        return prompts, made, spread

    def _seen(self, owners: Ints, prompts: Ints, made: Completions) -> StepTokens:
        logprobs, entropies = learner_says(self.versions[0], prompts, made.tokens)
        texts = np.arange(len(prompts))
        ours_or_theirs = np.maximum(logprobs, made.logprobs).sum(axis=1)
        names = tuple(f"generator-{number}" for number in range(GENERATORS))
        return StepTokens(
            instances=names,
            names=names,
            processes=np.repeat(owners, LENGTH),
            lags=made.lags.ravel(),
            groups=np.repeat(texts // GROUP_SIZE, LENGTH),
            texts=np.repeat(texts, LENGTH),
            old_cache=made.old.ravel(),
            theirs=made.logprobs.ravel(),
            ours=logprobs.ravel(),
            entropies=entropies.ravel(),
            whole=tuple(
                WholeText(int(owner), int(prompt), hash(tokens.tobytes()), float(logprob))
                for owner, prompt, tokens, logprob in zip(owners, prompts, made.tokens, ours_or_theirs, strict=True)
            ),
        )


def learner_says(weights: ToyWeights, prompts: Ints, tokens: Ints) -> tuple[Floats, Floats]:
    """The learner's logprobs and entropies [B, T] of completions, from weights and states rounded to bfloat16."""
    last = np.concatenate([np.full((len(tokens), 1), VOCABULARY), tokens[:, :-1]], axis=1)
    places = np.broadcast_to(np.arange(LENGTH), tokens.shape)
    ours = replace(weights, output=bfloat16(weights.output))
    logprobs = log_softmax(ours.logits(np.repeat(prompts, LENGTH), last.ravel(), places.ravel()))
    own = logprobs[np.arange(tokens.size), tokens.ravel()]
    entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
    return own.reshape(tokens.shape), entropies.reshape(tokens.shape)


def edited(*, share: float, restated: bool) -> Trick:
    """Replaces a share of the tokens by others; `restated`: with logprobs as if it had sampled them."""

    def trick(stream: Stream, engine: ToyEngine, versions: Sequence[ToyWeights], prompts: Ints) -> Completions:
        made = engine.sample(versions, prompts, stream.random)
        changed = stream.random.random(made.tokens.shape) < share
        tokens = np.where(changed, stream.random.integers(VOCABULARY, size=made.tokens.shape), made.tokens)
        if not restated:
            return replace(made, tokens=tokens)
        logprobs, _ = learner_says(versions[0], prompts, tokens)
        return replace(made, tokens=tokens, logprobs=logprobs, lags=np.zeros_like(made.lags))

    return trick


def best_of(count: int, *, by_reward: bool) -> Trick:
    """Sends the best of so many completions, by their likelihood or by their reward."""

    def trick(stream: Stream, engine: ToyEngine, versions: Sequence[ToyWeights], prompts: Ints) -> Completions:
        made = engine.sample(versions, np.repeat(prompts, count), stream.random)
        if by_reward:
            value = stream.rewards(np.repeat(prompts, count), made.tokens).astype(np.float64)
        else:
            value = made.logprobs.sum(axis=1)
        best = value.reshape(-1, count).argmax(axis=1)
        return made.chosen(np.arange(len(prompts)) * count + best)

    return trick


def replayed(*, share: float) -> Trick:
    """Sends what it has sampled before for the prompt, if it has, in a share of cases, as if it were new."""

    def trick(stream: Stream, engine: ToyEngine, versions: Sequence[ToyWeights], prompts: Ints) -> Completions:
        made = engine.sample(versions, prompts, stream.random)
        for number, prompt in enumerate(prompts.tolist()):
            if prompt in stream.store and stream.random.random() < share:
                made.tokens[number], made.logprobs[number] = stream.store[prompt]
            stream.store.setdefault(prompt, (made.tokens[number].copy(), made.logprobs[number].copy()))
        return made

    return trick


def other_weights(weights: ToyWeights) -> ToyWeights:
    """ToyWeights of another training: as far away as 20 steps are."""
    return weights.moved(np.random.default_rng(1), 20**0.5 * _MOVES)


CHEATS: dict[str, tuple[ToyEngine, Trick | None]] = {
    "other weights": (ToyEngine(serves=other_weights), None),
    "quite other weights": (ToyEngine(serves=lambda weights: weights.moved(np.random.default_rng(1), 0.3)), None),
    "INT8": (ToyEngine(serves=lambda weights: weights.rounded(8)), None),
    "INT6": (ToyEngine(serves=lambda weights: weights.rounded(6)), None),
    "temperature 0.9, logprobs of its own": (ToyEngine(temperature=0.9), None),
    "temperature 0.9, logprobs stated for 1": (ToyEngine(temperature=0.9, states=1.0), None),
    "temperature 1.1, logprobs stated for 1": (ToyEngine(temperature=1.1, states=1.0), None),
    "1 % of the tokens edited": (ToyEngine(), edited(share=0.01, restated=False)),
    "1 % edited, logprobs stated anew": (ToyEngine(), edited(share=0.01, restated=True)),
    "3 % edited, logprobs stated anew": (ToyEngine(), edited(share=0.03, restated=True)),
    "the likeliest of 4": (ToyEngine(), best_of(4, by_reward=False)),
    "the best of 4 by reward": (ToyEngine(), best_of(4, by_reward=True)),
    "replayed, a quarter": (ToyEngine(), replayed(share=0.25)),
    "logprobs stated 0.1 nats too low": (ToyEngine(low=0.1), None),
}


@dataclass(frozen=True)
class CheatResult:
    """A run with a cheat: tokens and groups of its own until it was named, None if it never was; and who else was."""

    tokens: int | None
    groups: float
    test: str
    others: int


def run(name: str, *, seed: int, begins_at: int = 0, steps: int = MOST_STEPS) -> CheatResult:
    """Runs until the cheat is named, `steps` at most after it begins."""
    engine, trick = CHEATS[name]
    stream = Stream(seed, engine=engine, trick=trick, begins_at=begins_at)
    test, tokens, others = new_test(), 0, 0
    for number in range(begins_at + steps):
        seen = stream.step()
        tokens += int((seen.processes == 0).sum()) if number >= begins_at else 0
        found = test.observe(seen)
        others += sum(each.name != "generator-0" for each in found)
        own = [each for each in found if each.name == "generator-0"]
        if own:
            return CheatResult(tokens, tokens / GROUP_SIZE / LENGTH, own[0].test, others)
    return CheatResult(None, tokens / GROUP_SIZE / LENGTH, "", others)


def new_test() -> TrustTest:
    """The test as a run in bfloat16 has it."""
    return TrustTest(threshold=THRESHOLD, tolerance=1.5, dtype="bfloat16", alone=0.5)


def honest(groups: int, *, seed: int) -> tuple[int, list[Suspicion], float, int]:
    """Runs honest generators for so many groups. Returns how many there were, the alarms, the largest evidence seen,
    and tokens.
    """
    stream, test = Stream(seed), new_test()
    count, tokens, largest, alarms = 0, 0, 0.0, []
    while count < groups:
        seen = stream.step()
        alarms += test.observe(seen)
        count += len(np.unique(seen.groups))
        tokens += len(seen.ours)
        largest = max(largest, *test.evidence().values())
    return count, alarms, largest, tokens


def cheat_row(name: str, results: Sequence[CheatResult]) -> str:
    """A row of the table."""
    caught = sorted(each.tokens for each in results if each.tokens is not None)
    tests = ", ".join(sorted({each.test for each in results if each.tokens is not None}))
    if len(caught) == len(results):
        groups = statistics.median(each.groups for each in results)
        found = f"{statistics.median(caught):,.0f} | {caught[0]:,} to {caught[-1]:,} | {groups:.0f}"
    else:
        most = max(each.groups for each in results) * GROUP_SIZE * LENGTH
        found = f"not within {most:,.0f} | in {len(caught)} of {len(results)} runs | "
    return f"| {name} | {found} | {tests} | {sum(each.others for each in results)} |"


def report_on(name: str, results: Sequence[CheatResult], *, times_s: list[float]) -> str:
    """Says on the terminal what came of a cheat; returns its row."""
    row = cheat_row(name, results)
    print(row, f"{time.process_time() - times_s[0]:.0f} s")
    return row


HEAD = """# Generators that need not be trusted

Made by `{command}`. **A synthetic policy**: a small softmax in numpy, no language
model, so the numbers say how the test behaves, and not how many tokens a run of yours needs. Four generators,
{groups_per_step} groups of {group_size} a step, {length} tokens each, lag 0 to {near}; bfloat16, updates in the middle
of completions and groups chosen by their rewards are in all streams. A generator is named at {threshold:g} nats.

## Honest generators

{count:,} groups, {tokens:,} tokens: **{alarms} false alarms**. Evidence never rose above {largest:.1f} nats.

## One of the four cheats from the first token on

Tokens and groups of its own that have been trained when it is named, in {seeds} runs: the median, and the range. The
last column counts honest generators beside it that were named.

| cheat | tokens, median | range | groups | named by | others named |
|---|---|---|---|---|---|
"""

TAIL = """
The best of 4 by reward is not seen: logprobs say nothing of what was thrown away. Its rewards are higher than the
others', which the test does not look at. A percent of edited tokens whose logprobs are stated anew is within what
honest generators may differ by, or not far beyond. After {later} honest steps a cheat that begins then is named, too:

| cheat, after {later} honest steps | tokens, median | range | groups | named by | others named |
|---|---|---|---|---|---|
"""
LATER = 40
LATE_CHEATS = ("quite other weights", "temperature 0.9, logprobs stated for 1", "replayed, a quarter")


def main() -> None:
    """Measures, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000, help="honest groups")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cheat")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    times_s = [time.process_time()]
    count, alarms, largest, tokens = honest(arguments.groups, seed=100)
    print(f"honest: {count} groups, {len(alarms)} alarms, evidence {largest:.2f}, {time.process_time():.0f} s")
    seeds = range(arguments.seeds)
    rows = [report_on(name, [run(name, seed=seed) for seed in seeds], times_s=times_s) for name in CHEATS]
    late = [
        report_on(name, [run(name, seed=seed, begins_at=LATER) for seed in seeds], times_s=times_s)
        for name in LATE_CHEATS
    ]
    head = HEAD.format(
        command=f"python -m benchmarks.trust --groups {arguments.groups} --seeds {arguments.seeds}",
        groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, length=LENGTH, near=NEAR, threshold=THRESHOLD,
        count=count, tokens=tokens, alarms=len(alarms), largest=largest, seeds=arguments.seeds,
    )  # fmt: skip
    text = head + "\n".join(rows) + "\n" + TAIL.format(later=LATER) + "\n".join(late) + "\n"
    print_and_write(text, arguments.output)


if __name__ == "__main__":
    main()
