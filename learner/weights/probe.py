"""The probe of a publish: texts of the policy's own, and the learner's logprobs of their tokens.

The texts are renewed at every publish, from the batch that was trained last. Each is looked at twice: by the version
that was new when it was chosen, and by the next one, under which it is published. So it is known of each token how the
update has moved it, which is what tells weights from those that are an update old.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Self

import numpy as np
from numpy.typing import NDArray

from protocol.fleet import MAX_PROBE_TEXTS
from protocol.trajectories import Trajectory, TrajectoryGroup

Texts = tuple[tuple[int, ...], ...]

HIGH_QUANTILE = 0.95
_SHARE = 4
"""A text is cut to this part of all tokens of the probe."""
_SMALLEST_GAP = 1e-9
_TOLD_APART = 1e-4
_TOLD_APART_OF_NOISE = 0.1
"""An update that moves logprobs by less, in nats or as a part of the noise, says nothing about who serves which."""
_FEWEST_TEXTS = 4
_OLD_STANDS_OUT = 4.0
"""By so many standard errors, or more, weights that are a version old are supposed to fit the version before better."""


@dataclass(frozen=True)
class Probe:
    """The learner's logprobs in nats of the tokens 1… of each text, one text after another, at temperature 1.

    `before` are those under the version that was published before; empty if they are not known.
    """

    texts: Texts = ()
    logprobs: tuple[float, ...] = ()
    before: tuple[float, ...] = ()

    @property
    def usable(self) -> bool:
        """False for logprobs that are not finite: the learner's own weights are broken, and judge nobody."""
        return all(map(math.isfinite, self.logprobs))

    def within(self, length: int) -> Self:
        """The part whose texts are shorter than `length`, which is what an engine of that length can score."""
        if all(len(text) < length for text in self.texts):
            return self
        kept = np.repeat([len(text) < length for text in self.texts], [len(text) - 1 for text in self.texts])
        return type(self)(
            texts=tuple(text for text in self.texts if len(text) < length),
            logprobs=_where(kept, self.logprobs),
            before=_where(kept, self.before),
        )


def _where(kept: NDArray[np.bool_], logprobs: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value for value, keep in zip(logprobs, kept, strict=True) if keep) if logprobs else ()


@dataclass(frozen=True)
class ProbeGap:
    """Gap between a generator's logprobs of a probe and the learner's, in nats: over all tokens, absolute.

    `tokens` is 0 where nothing was compared. `age` is the evidence, in nats of log likelihood, that they are those of
    the version before, over that neither is nearer: by how many standard errors the texts are nearer to that version
    is supposed to be normal, around 4 or around 0. (Not by the size of the gaps alone. The learner's own numbers are
    rounded, too, and by other amounts in the two versions, alike over much of a text: after an update that moves less
    than that, a usual one in bfloat16, one of the two seems much nearer by chance.)
    """

    tokens: int = 0
    mean: float = 0.0
    high: float = 0.0
    age: float = 0.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean)

    @classmethod
    def of(cls, probe: Probe, theirs: Sequence[float]) -> Self:
        """Infinite if there are not as many logprobs as tokens, or one is not finite."""
        ours, answer = np.array(probe.logprobs), np.array(theirs)
        if ours.shape != answer.shape or not np.isfinite(answer).all():
            return cls(tokens=ours.size, mean=math.inf, high=math.inf)
        if not ours.size or not probe.usable:
            return cls()
        off = np.abs(answer - ours)
        high = float(np.quantile(off, HIGH_QUANTILE))
        return cls(tokens=off.size, mean=float(off.mean()), high=high, age=_age(probe, answer, off))


def _age(probe: Probe, theirs: NDArray[np.float64], off: NDArray[np.float64]) -> float:
    before = np.array(probe.before)
    if before.shape != theirs.shape or not np.isfinite(before).all():
        return 0.0
    off_before = np.abs(theirs - before)
    noise = min(off.mean(), off_before.mean())
    if np.abs(np.array(probe.logprobs) - before).mean() < max(_TOLD_APART, _TOLD_APART_OF_NOISE * noise):
        return 0.0
    starts = np.cumsum([0, *(len(text) - 1 for text in probe.texts[:-1])])
    nearer = np.add.reduceat(off - off_before, starts)
    if nearer.size < _FEWEST_TEXTS:
        return 0.0
    errors = nearer.mean() * math.sqrt(nearer.size) / (nearer.std(ddof=1) + _SMALLEST_GAP)
    # The likelihood ratio of two normal distributions of width 1; of few texts, no more than they can say.
    return float(np.clip(_OLD_STANDS_OUT * errors - _OLD_STANDS_OUT**2 / 2, -nearer.size, nearer.size))


class Prober:
    """Makes the probe of each publish. `logprobs` asks the present weights; without a batch `first` is the text."""

    def __init__(self, *, first: tuple[int, ...], tokens: int, logprobs: Callable[[Texts], Sequence[float]]) -> None:
        self._texts: Texts = (first,)
        self._tokens = tokens
        self._logprobs = logprobs
        self._before: tuple[float, ...] = ()
        self._next: Texts = ()

    def renew(self, groups: Sequence[TrajectoryGroup]) -> None:
        """From the publish after the next one on, the texts are of these groups."""
        self._next = texts_of(groups, tokens=self._tokens) or self._next

    def probe(self) -> Probe:
        """For the weights as they are now, which are about to be published."""
        values = tuple(float(value) for value in self._logprobs((*self._texts, *self._next)))
        now = sum(len(text) - 1 for text in self._texts)
        probe = Probe(texts=self._texts, logprobs=values[:now], before=self._before)
        self._texts, self._before = (self._next, values[now:]) if self._next else (self._texts, values)
        self._next = ()
        return probe


def texts_of(groups: Sequence[TrajectoryGroup], *, tokens: int) -> Texts:
    """The beginnings of trajectories, of each group its best first, until there are about so many tokens.

    Text that the policy was made for: on other tokens a trained policy's logits grow so large that the type of the
    numbers alone makes large gaps.
    """
    ranked = [sorted(group.trajectories, key=_reward, reverse=True) for group in groups]
    wanted: dict[tuple[int, ...], None] = {}
    size = 0
    for trajectory in chain.from_iterable(zip_longest(*ranked)):
        if size >= tokens or len(wanted) >= MAX_PROBE_TEXTS:
            break
        text = () if trajectory is None else tuple(map(int, trajectory.token_ids[: max(tokens // _SHARE, 2)]))
        if len(text) > 1 and text not in wanted:
            wanted[text] = None
            size += len(text)
    return tuple(wanted)


def _reward(trajectory: Trajectory) -> float:
    return trajectory.reward.reward or 0.0
