"""The rule of `lag.adapt = "gradient"`: how much lag is used, by where the gradients of old groups point.

A pure state machine: one measurement in, the bound out. What it looks at is the bucket of the largest lag in the newest
measurement, and its cosine to lag 0 over the last WINDOW of them, with its standard error:

    cosine + 2 errors under the limit   PATIENCE measurements in a row: the bound falls to the bucket below (of 8: 4,
                                        2, 1, 0)
    cosine - 2 errors well over it      PATIENCE in a row: the bound rises to the next bucket, never above the
                                        configured one
    in between                          neither is counted any further
    not known, or lag 0 is all noise    nothing changes

"Well over" is a quarter of the way from the limit to 1; what uses less lag than the bound says nothing of more. What is
measured of a bucket that is given up is forgotten: when the bound rises again, only what is measured from then on
counts. At 0 nothing old is left to be measured, so that each measurement counts as well over. A bound that had to fall
again after a rise is given twice as long before the next one, up to sixteen times as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from learner.training.lag_gradients import (
    WINDOW,
    BucketMoments,
    LagReading,
    Moments,
    bucket_of,
    largest_lag,
    reading_of,
)

PATIENCE = 2
_MARGIN = 0.25
_MAX_DOUBLINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRule:
    """Settings: whether the bound moves at all, and the least cosine to lag 0 that it puts up with."""

    adapts: bool = False
    min_cosine: float = 0.8

    @property
    def well_over(self) -> float:
        """Cosine from which on more lag is tried."""
        return self.min_cosine + _MARGIN * (1 - self.min_cosine)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientLagState:
    """State in a checkpoint, where JSON holds `dataclasses.asdict` of it.

    bound: None while it is the configured one. beyond, within: measurements in a row. relapses, rose: as those of
    GuardState. history: the newest measurements, the oldest first.
    """

    bound: int | None = None
    beyond: int = 0
    within: int = 0
    relapses: int = 0
    rose: bool = False
    history: tuple[Moments, ...] = ()

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "GradientLagState":
        """From what JSON made of it, in which a bucket is a text."""
        history = tuple(
            {int(bucket): BucketMoments(**moments) for bucket, moments in one.items()} for one in found["history"]
        )
        return cls(**{**found, "history": history})


class GradientLag:
    """Follows the measurements of one run; `bound` is the largest lag that they allow."""

    def __init__(self, rule: GradientRule, *, max_lag: int, state: GradientLagState | None = None) -> None:
        self._rule, self._configured = rule, max_lag
        self._state = state or GradientLagState()

    @property
    def state(self) -> GradientLagState:
        """To be kept in a checkpoint."""
        return self._state

    @property
    def bound(self) -> int:
        """The bound on the lag, in 0..the configured one."""
        held = self._state.bound
        return self._configured if held is None or not self._rule.adapts else min(held, self._configured)

    def observe(self, moments: Moments, *, version: int, wait_s: float = 0.0, pass_s: float = 0.0) -> LagReading:
        """Takes a measurement, of which at least lag 0 has moments, and moves the bound."""
        self._state = replace(self._state, history=(*self._state.history, moments)[-WINDOW:])
        reading = reading_of(self._state.history, version=version, wait_s=wait_s, pass_s=pass_s)
        if self._rule.adapts:
            self._judge(reading)
        return reading

    def _judge(self, reading: LagReading) -> None:
        state, newest = self._state, reading.at(reading.newest)
        if self.bound == 0:
            self._state = replace(state, beyond=0, within=state.within + 1)
        elif newest is None or newest.error is None or not reading.tells:
            return
        elif newest.is_under(self._rule.min_cosine):
            self._state = replace(state, beyond=state.beyond + 1, within=0)
        elif newest.is_over(self._rule.well_over) and newest.bucket >= bucket_of(self.bound):
            self._state = replace(state, beyond=0, within=state.within + 1)
        else:
            self._state = replace(state, beyond=0, within=0)
        if self._state.beyond >= PATIENCE:
            self._fall(reading.newest)
        elif self._state.within >= PATIENCE << state.relapses:
            self._rise()

    def _fall(self, bucket: int) -> None:
        state = self._state
        after = min(self.bound, largest_lag(bucket - 1))
        self._state = replace(
            state,
            bound=after,
            beyond=0,
            rose=False,
            relapses=min(state.relapses + state.rose, _MAX_DOUBLINGS),
            history=_up_to(bucket_of(after), state.history),
        )

    def _rise(self) -> None:
        state, before = self._state, self.bound
        if before == self._configured:
            self._state = replace(state, bound=None, within=0, relapses=0, rose=False)
            return
        after = min(self._configured, largest_lag(bucket_of(before) + 1))
        self._state = replace(state, bound=after if after < self._configured else None, within=0, rose=True)


def _up_to(bucket: int, history: Sequence[Moments]) -> tuple[Moments, ...]:
    """The measurements without what was found of larger lags."""
    return tuple({each: moments for each, moments in one.items() if each <= bucket} for one in history)
