"""The sequential test of all generators: a step's tokens in, evidence against each process out. Pure.

    test       bets that                                                        unit of a bet   what shows it
    gap        its logprobs are further from the learner's than the others'     group           other weights, coarser
                                                                                                numbers, a temperature
    tail       more of them are off by a nat or more                            group           tokens that were edited
    ratio      exp(ours - theirs) is above 1 on average                         token           logprobs stated too low
    likely     its tokens are more likely than samples are: ours + entropy      token           a colder temperature,
                                                                                                the likeliest of n
    unlikely   its tokens are less likely than samples are                      token           a hotter one, edits
    repeat     whole trajectories come again                                    trajectory      answers from a store

Of a sample from the learner's own policy, ours + entropy is 0 on average, and so is exp(ours - theirs) - 1 of any
policy that states its logprobs truly. An honest generator's are not, by as much as the policy has moved since, and by
what the choice of groups by their rewards does; both are the others', too. So a bound lies between 0 and the others'
level, and a tolerance beyond. Where there are no others, the gap alone is looked at, at lag 0, and repeats.

What is sampled with keys and values of an older version is the policy's of neither version: of such tokens nothing is
asked but if they repeat.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from learner.trust.levels import Floats, Levels, Moments, OthersLevels
from learner.trust.repeats import RepeatMemory
from learner.trust.tokens import StepTokens
from learner.trust.wagers import Wager, growth_of_means, growth_of_shares, log_mean_exp

Test = Literal["gap", "tail", "ratio", "likely", "unlikely", "repeat"]
TESTS: tuple[Test, ...] = get_args(Test)

NEAR = 4
"""Older tokens, in versions, are not looked at."""
MAX_PROCESSES = 4096
"""Evidence is kept against those that were seen last; a step of more is tested whole."""
_GAP, _TAIL, _RATIO, _FIT = range(4)
"""Rows of the outcomes of tokens."""
_TAIL_BEGINS = 1.0
_MOST_RATIO = 5.0
_MOST_FIT = 4.0
"""Nats: what is more unlikely counts as this, so that few tokens do not decide."""
_FLOORS = {"float32": 1e-4, "": 0.002}
"""Nats, of the gap: one that is smaller does no harm, however small the others' are."""
_BANDS = ((0, 0), (1, 1), (2, NEAR))
"""Lags whose gaps are bet on by themselves: what the policy has moved covers coarser numbers at the older ones."""
_TAIL_FLOOR = 1e-3
_TAIL_TIMES = 2.0
_ALONE_TAIL = 0.05
_FAIR_TOLERANCE = 0.02
"""Of fit, in nats a token, and of the ratio."""
_MEAN_TOKENS = 4000.0
"""Of each of the others, as far as a few steps have as many: these means are small against their spread."""
_MEANS: tuple[tuple[Test, int, float], ...] = (("ratio", _RATIO, 1.0), ("likely", _FIT, 1.0), ("unlikely", _FIT, -1.0))
"""Tests of means: the outcome's row, and the sign of what speaks against a generator."""
_SHARE_STAKES = (0.1, 0.3, 0.6, 0.9)
_MEAN_STAKES = (0.01, 0.03, 0.08, 0.2)
"""A value is at least -4.1, so that the largest leaves something."""


@dataclass(frozen=True)
class Suspicion:
    """A process that is no longer believed: `evidence` in nats of the strongest `test`, after so many of its tokens.

    `level` is its mean over the last step in which it was compared, `expected` the most that was expected of it, both
    of what the test looks at.
    """

    name: str
    instance: str
    test: Test
    evidence: float
    tokens: int
    level: float
    expected: float

    @property
    def text(self) -> str:
        """All of it in words, with the generator's name."""
        return (
            f"generator {self.name} samples otherwise than it says: {_in_words(self.test, self.level, self.expected)}"
        )

    def shown(self) -> dict[str, object]:
        """As a line of `metrics.jsonl` has it; None for what is no number."""
        level, expected = (None if math.isnan(value) else value for value in (self.level, self.expected))
        return {
            "generator_id": self.name, "instance": self.instance, "test": self.test, "evidence": self.evidence,
            "tokens": self.tokens, "level": level, "expected": expected,
        }  # fmt: skip


def _in_words(test: Test, level: float, expected: float) -> str:
    match test:
        case "gap":
            return (
                f"its logprobs are {level:.3g} nats from the learner's in the mean, where at most {expected:.3g} are "
                "expected: other weights, coarser numbers or another temperature"
            )
        case "tail":
            return (
                f"{level:.2%} of its logprobs are off by a nat or more, where at most {expected:.2%} are expected: its "
                "tokens may have been edited"
            )
        case "ratio":
            return (
                f"it states logprobs that are too low: the mean of exp(ours - theirs) - 1 is {level:.3g}, where at "
                f"most {expected:.3g} is expected"
            )
        case "likely":
            return (
                f"its tokens are likelier than samples by {level:.3g} nats, where at most {expected:.3g} are expected: "
                "a lower temperature, or the likeliest of several"
            )
        case "unlikely":
            return (
                f"its tokens are less likely than samples by {level:.3g} nats, where at most {expected:.3g} are "
                "expected: a higher temperature, or edited tokens"
            )
        case "repeat":
            return "it sends whole trajectories again that it has sent before"


@dataclass
class _Case:
    """Wealth against one process."""

    name: str
    wagers: Mapping[Test, Sequence[Wager]]
    tokens: int = 0
    last: dict[Test, tuple[float, float]] = field(default_factory=dict)
    suspicion: Suspicion | None = None

    @property
    def evidence(self) -> float:
        return log_mean_exp(map(self.of, TESTS))

    def of(self, test: Test) -> float:
        return log_mean_exp(wager.evidence for wager in self.wagers[test])


@dataclass(frozen=True)
class _Outcomes:
    """A step's outcomes [4, N] of the tokens that are compared, with theirs."""

    rows: Floats
    processes: NDArray[np.int64]
    lags: NDArray[np.int64]
    groups: NDArray[np.int64]
    texts: NDArray[np.int64]

    def by_process(self, count: int) -> Iterator["_Outcomes"]:
        """The outcomes of each process, by its number."""
        order = np.argsort(self.processes, kind="stable")
        bounds = np.searchsorted(self.processes[order], np.arange(count + 1))
        return (self._at(order[start:end]) for start, end in pairwise(bounds.tolist()))

    def between(self, first: int, last: int) -> "_Outcomes":
        """The outcomes at some lags."""
        return self._at(np.flatnonzero((self.lags >= first) & (self.lags <= last)))

    def _at(self, at: NDArray[np.int64]) -> "_Outcomes":
        return _Outcomes(self.rows[:, at], self.processes[at], self.lags[at], self.groups[at], self.texts[at])


@dataclass(frozen=True)
class _Others:
    """The others of the process with this number."""

    levels: OthersLevels
    process: int

    def level(self, lag: int, row: int, *, sign: float = 1.0) -> tuple[float, float] | None:
        return self.levels.of(self.process, lag, row, sign=sign)


class TrustTest:
    """Evidence against each process. `threshold` in nats; `tolerance` is how many times as large as the others' a gap
    may be; `dtype` that of the learner's numbers; `alone` the largest mean gap where there are no others, in nats.
    """

    def __init__(self, *, threshold: float, tolerance: float, dtype: str, alone: float) -> None:
        self._threshold = threshold
        self._tolerance = tolerance
        self._floor = _FLOORS.get(dtype, _FLOORS[""])
        self._alone = alone
        self._levels = Levels()
        self._repeats = RepeatMemory()
        self._accused: dict[str, _Case] = {}

    def observe(self, tokens: StepTokens) -> list[Suspicion]:
        """Takes a step's tokens. Returns the suspicions that are new."""
        for instance, name in zip(tokens.instances, tokens.names, strict=True):
            self._take_in(instance, name)
        self._forget_oldest(most=max(MAX_PROCESSES, len(tokens.instances)))
        outcomes = outcomes_of(tokens)
        self._levels.see(tokens.instances, _moments(outcomes, processes=len(tokens.instances)))
        former = {instance for instance, one in self._accused.items() if one.suspicion is not None}
        near = self._levels.of_others(left_out=former)
        wide = self._levels.of_others(left_out=former, wanted=_MEAN_TOKENS)
        counts = np.bincount(tokens.processes, minlength=len(tokens.instances)).tolist()
        for number, own in enumerate(outcomes.by_process(len(counts))):
            one = self._accused[tokens.instances[number]]
            one.tokens += counts[number]
            self._bet_on_shares(one, own, _Others(near, number))
            _bet_on_means(one, own, _Others(wide, number))
        self._bet_on_repeats(tokens)
        seen = [(instance, self._accused[instance]) for instance in tokens.instances]
        return [found for instance, one in seen if (found := self._suspect(instance, one)) is not None]

    def evidence(self) -> dict[str, float]:
        """Evidence against the newest process of each generator in nats, by name, not below 0."""
        return {one.name: max(one.evidence, 0.0) for one in self._accused.values()}

    def suspicions(self) -> list[Suspicion]:
        """Suspicions of the newest process of each generator; one that was restarted begins anew."""
        newest = {one.name: one.suspicion for one in self._accused.values()}
        return [suspicion for suspicion in newest.values() if suspicion is not None]

    def _take_in(self, instance: str, name: str) -> None:
        known = self._accused.pop(instance, None)
        self._accused[instance] = known or _Case(name=name, wagers=_wagers())

    def _forget_oldest(self, *, most: int) -> None:
        while len(self._accused) > most:
            del self._accused[next(iter(self._accused))]

    def _suspect(self, instance: str, one: _Case) -> Suspicion | None:
        if one.suspicion is not None or one.evidence < self._threshold:
            return None
        test = max(TESTS, key=one.of)
        level, expected = one.last.get(test, (math.nan, math.nan))
        one.suspicion = Suspicion(one.name, instance, test, one.evidence, one.tokens, level, expected)
        return one.suspicion

    def _bet_on_shares(self, one: _Case, own: _Outcomes, others: _Others) -> None:
        """Bets, group by group, that gaps and their tail are above what is allowed."""
        bands = zip(one.wagers["gap"], _BANDS, strict=True)
        bets: list[tuple[Test, int, Wager, _Outcomes]] = [
            ("gap", _GAP, wager, own.between(first, last)) for wager, (first, last) in bands
        ]
        bets.append(("tail", _TAIL, one.wagers["tail"][0], own))
        for test, row, wager, part in bets:
            bounds = np.full(part.lags.shape, math.inf)
            for lag in np.unique(part.lags).tolist():
                bounds[part.lags == lag] = self._allowed(row, lag, others)
            compared = np.isfinite(bounds)
            if compared.any():
                _settle_shares(one, test, wager, part.rows[row, compared], bounds[compared], part.groups[compared])

    def _allowed(self, row: int, lag: int, others: _Others) -> float:
        """Largest mean of an honest generator; infinite where nothing is known."""
        level = others.level(lag, row)
        if level is None:
            alone = self._alone if row == _GAP else _ALONE_TAIL
            return alone if lag == 0 else math.inf
        if row == _GAP:
            return self._tolerance * level[0] + self._floor
        return max(self._tolerance, _TAIL_TIMES) * level[0] + _TAIL_FLOOR

    def _bet_on_repeats(self, tokens: StepTokens) -> None:
        growth: dict[int, float] = {}
        for text in tokens.whole:
            growth[text.process] = growth.get(text.process, 0.0) + self._repeats.bet(text)
        for number, grown in growth.items():
            self._accused[tokens.instances[number]].wagers["repeat"][0].settle(np.array([grown]))


def _wagers() -> dict[Test, Sequence[Wager]]:
    stakes: dict[Test, Sequence[float]] = {"gap": _SHARE_STAKES, "tail": _SHARE_STAKES, "repeat": (1.0,)}
    counts: dict[Test, int] = {"gap": len(_BANDS)}
    return {test: [Wager(stakes.get(test, _MEAN_STAKES)) for _ in range(counts.get(test, 1))] for test in TESTS}


def _settle_shares(
    one: _Case, test: Test, wager: Wager, values: Floats, bounds: Floats, groups: NDArray[np.int64]
) -> None:
    _, inverse = np.unique(groups, return_inverse=True)
    shares = np.bincount(inverse, weights=values) / np.bincount(inverse, weights=bounds)
    before = wager.evidence
    wager.settle(growth_of_shares(wager.stakes, shares))
    if wager.evidence >= max(before, one.of(test)) or test not in one.last:
        one.last[test] = float(values.mean()), float(bounds.mean())


def _bet_on_means(one: _Case, own: _Outcomes, others: _Others) -> None:
    """Bets, token by token, that an outcome is above what is allowed, or with the sign -1 below.

    The others' level is itself an average of few tokens: what its error may win is taken off again, as if it were
    normal.
    """
    for test, row, sign in _MEANS:
        bounds, variances = np.full(own.lags.shape, np.nan), 0.0
        for lag in np.unique(own.lags).tolist():
            level = others.level(lag, row, sign=sign)
            if level is None:
                continue
            at = own.lags == lag
            bounds[at] = max(0.0, level[0]) + _FAIR_TOLERANCE
            counted = int((at & np.isfinite(own.rows[row])).sum())
            variances += counted**2 * level[1] if level[0] > 0 else 0.0
        values = sign * own.rows[row]
        compared = np.isfinite(bounds) & np.isfinite(values)
        if not compared.any():
            continue
        values, bounds = values[compared], bounds[compared]
        one.last[test] = float(values.mean()), float(bounds.mean())
        wager = one.wagers[test][0]
        wager.settle(growth_of_means(wager.stakes, values - bounds) - 0.5 * wager.stakes**2 * variances)


def outcomes_of(tokens: StepTokens) -> _Outcomes:
    """Outcomes of each token that can be compared; the fit is NaN where there is no entropy."""
    compared = (tokens.lags >= 0) & (tokens.lags <= NEAR) & ~tokens.old_cache
    ours, theirs, entropies = tokens.ours[compared], tokens.theirs[compared], tokens.entropies[compared]
    off = np.abs(theirs - ours)
    rows = np.stack([
        np.minimum(off, _TAIL_BEGINS),
        (off >= _TAIL_BEGINS).astype(np.float64),
        np.minimum(np.exp(np.minimum(ours - theirs, _MOST_RATIO)), _MOST_RATIO) - 1.0,
        np.clip(ours + entropies, -_MOST_FIT, _MOST_FIT),
    ])  # fmt: skip
    return _Outcomes(
        rows=rows,
        processes=tokens.processes[compared],
        lags=tokens.lags[compared],
        groups=tokens.groups[compared],
        texts=tokens.texts[compared],
    )


def _moments(outcomes: _Outcomes, *, processes: int) -> Moments:
    lags = NEAR + 1
    return Moments.of(
        np.nan_to_num(outcomes.rows),
        outcomes.processes * lags + outcomes.lags,
        texts=outcomes.texts,
        groups=outcomes.groups,
        shape=(processes, lags),
    )
