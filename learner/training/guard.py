"""The guard: when what is trained on has come too far from the policy that learns, less lag is allowed for a while.

A pure state machine: one step's readings in, the bound on the lag out. It never exceeds the configured `max_lag`.

    beyond a limit, `patience` steps in a row   the bound is halved (of 8: 4, 2, 1, 0), from the largest lag in the step
                                                if that is less
    well within the limits, `recovery_steps`    the bound rises by one version, until it is the configured one
      steps in a row
    in between                                  neither is counted any further

"Well within" is a quarter of the way, in nats, from the limit to where equal policies would be, so that a measure which
hovers about its limit moves nothing. A bound that had to fall again after a rise is given twice as long before the next
rise, up to sixteen times as long: it settles where the run is healthy.

At 0 training is synchronous, and that is the pause: a step waits until the generators serve the learner's own version,
and takes only groups that were sampled by it from end to end. Nothing is skipped. What is beyond a limit even then does
not come from lag; the guard says so once, and cannot do more. Nor does it bring back a policy that a few steps of too
high a learning rate have ruined: its metrics are healthy again soon, and its rewards are not.

Beside these limits a rule of its own looks at how far the gradients of old groups turn away from those of new ones
(`lag_rule`), where that is measured. The bound is the lesser of both.

The effective sample share is Kish's, (sum w)^2 / (n sum w^2), for importance ratios w; for ratios of log-normal
distribution with variance s^2 it is exp(-s^2), and the KL divergence s^2 / 2.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from learner.training.config import GuardConfig
from learner.training.lag_gradients import LagReading, Moments
from learner.training.lag_rule import GradientLag, GradientLagState, GradientRule

_MARGIN = 0.25
_MAX_DOUBLINGS = 4

Measure = Literal["effective_sample_share", "behavior_kl", "mismatch_kl", "importance_ratio_max", "gradient_cosine"]


class GuardedMetrics(Protocol):
    """Part of a step's metrics that the guard reads; None where the step could not tell. KL in nats."""

    @property
    def effective_sample_share(self) -> float | None: ...
    @property
    def behavior_kl(self) -> float | None: ...
    @property
    def mismatch_kl(self) -> float | None: ...
    @property
    def importance_ratio_max(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureReading:
    """A measure of a step. `beyond`: outside its limit, or no number. `well_within`: by more than the margin."""

    measure: Measure
    value: float
    limit: float
    beyond: bool
    well_within: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """The guard's state in a checkpoint: JSON holds `dataclasses.asdict` of it.

    max_lag: the bound while it is below the configured one, else None. beyond, healthy: steps in a row. relapses: how
    often the bound fell again after a rise, since it was last the configured one. rose: whether its last move was a
    rise. powerless: whether it was said that lag is not the cause. tightened, loosened: moves since the run began.
    gradients: what was measured of gradients, and the bound by it; None without a measurement.
    """

    max_lag: int | None = None
    beyond: int = 0
    healthy: int = 0
    relapses: int = 0
    rose: bool = False
    powerless: bool = False
    tightened: int = 0
    loosened: int = 0
    gradients: GradientLagState | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "GuardState":
        """From what JSON made of it."""
        gradients = found.get("gradients")
        return cls(**{**found, "gradients": None if gradients is None else GradientLagState.read(gradients)})


NEW_GUARD = GuardState()
"""Of a guard that has seen nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardChange:
    """The guard's action after a step. `reading`: what was beyond its limit; None for a rise. steps: in a row, or
    measurements of gradients, as `counted` says. `reused_lag`: the bound of groups that are trained again, where they
    have one of their own, else 0; the guard lowers both, but for a configured bound of 0, which cannot fall.
    """

    kind: Literal["tightened", "loosened", "powerless"]
    before: int
    after: int
    configured: int
    steps: int
    reading: MeasureReading | None = None
    counted: Literal["steps", "measurements"] = "steps"
    reused_lag: int = 0

    @property
    def text(self) -> str:
        """The change as the log says it."""
        if self.reading is None:
            whole = "" if self.after < self.configured else ", the configured bound"
            healthy = f"{self.steps} healthy {self.counted}"
            return f"the lag bound rises from {self.before} to {self.after}{whole}: {healthy}"
        crossed = f"{_crossed(self.reading)}, for {self.steps} {self.counted} in a row"
        if self.kind == "powerless" and self.configured == 0 < self.reused_lag and not self._is_of_lag_0:
            return (
                f"{crossed}, and max_lag is 0 already, but groups that are trained again lag up to {self.reused_lag}: "
                "lower reuse.max_lag or reuse.share, or the learning rate"
            )
        if self.kind == "powerless":
            return f"{crossed}, and the lag bound is 0 already, so lag is not the cause. {_cause(self.reading.measure)}"
        waits = "; steps now wait until generators serve the learner's version" if self.after == 0 else ""
        return f"{crossed}: the lag bound falls from {self.before} to {self.after}{waits}"

    @property
    def _is_of_lag_0(self) -> bool:
        """True if tokens that have no lag alone make what was beyond its limit."""
        return self.reading is not None and self.reading.measure == "mismatch_kl"


class Guard:
    """Follows one run's steps; `max_lag` is the bound that its present state asks for."""

    def __init__(
        self,
        config: GuardConfig,
        *,
        max_lag: int,
        state: GuardState = NEW_GUARD,
        rule: GradientRule | None = None,
        reused_lag: int = 0,
    ) -> None:
        """`rule` is that for measurements of gradients, where there are any; `reused_lag` as in GuardChange."""
        self._config = config
        self._reused_lag = reused_lag
        self._configured = max_lag
        self._state = state if config.enabled else NEW_GUARD
        self._rule = rule or GradientRule()
        self._gradients = GradientLag(self._rule, max_lag=max_lag, state=state.gradients)

    @property
    def state(self) -> GuardState:
        """To be kept in a checkpoint."""
        gradients = self._gradients.state
        return replace(self._state, gradients=gradients if gradients.history else None)

    @property
    def max_lag(self) -> int:
        """The bound on the lag of the next step, in 0..the configured one."""
        return min(self._by_limits, self._gradients.bound)

    @property
    def _by_limits(self) -> int:
        held = self._state.max_lag
        return self._configured if held is None else min(held, self._configured)

    def compare(
        self, moments: Moments, *, version: int, wait_s: float = 0.0, pass_s: float = 0.0
    ) -> tuple[LagReading, GuardChange | None]:
        """Takes a measurement of gradients by lag. Returns its reading, and what it changes, if anything."""
        before, steps = self.max_lag, self._gradients.state
        reading = self._gradients.observe(moments, version=version, wait_s=wait_s, pass_s=pass_s)
        if self.max_lag == before:
            return reading, None
        newest = reading.at(reading.newest)
        if self.max_lag > before:
            return reading, self._change("loosened", before, steps=steps.within + 1, counted="measurements")
        assert newest is not None, "what has made the bound fall"
        assert newest.cosine is not None, "what has made the bound fall"
        crossed = _reading("gradient_cosine", newest.cosine, self._rule.min_cosine, beyond=True, within=False)
        return reading, self._change(
            "tightened", before, steps=steps.beyond + 1, reading=crossed, counted="measurements"
        )

    def observe(self, metrics: GuardedMetrics, *, lag: int) -> GuardChange | None:
        """Takes the metrics of a step, and the largest lag in it. Returns what that changes, if anything."""
        if not self._config.enabled:
            return None
        readings = tuple(readings_of(metrics, self._config))
        crossed = next((reading for reading in readings if reading.beyond), None)
        if crossed is not None:
            return self._beyond(crossed, lag=lag)
        if not readings:
            return None
        if all(reading.well_within for reading in readings):
            return self._healthy()
        self._state = replace(self._state, beyond=0, healthy=0)
        return None

    def _beyond(self, crossed: MeasureReading, *, lag: int) -> GuardChange | None:
        self._state = state = replace(self._state, beyond=self._state.beyond + 1, healthy=0)
        if state.beyond < self._config.patience:
            return None
        before = self.max_lag
        if before == 0:
            self._state = replace(state, powerless=True)
            return None if state.powerless else self._change("powerless", before, steps=state.beyond, reading=crossed)
        self._state = replace(
            state,
            max_lag=min(before, lag) // 2,
            beyond=0,
            rose=False,
            relapses=min(state.relapses + state.rose, _MAX_DOUBLINGS),
            tightened=state.tightened + 1,
        )
        return self._change("tightened", before, steps=state.beyond, reading=crossed)

    def _healthy(self) -> GuardChange | None:
        self._state = state = replace(self._state, beyond=0, healthy=self._state.healthy + 1)
        if state.healthy < self._config.recovery_steps << state.relapses:
            return None
        before, held = self.max_lag, self._by_limits
        if held == self._configured:
            self._state = replace(state, max_lag=None, healthy=0, relapses=0, rose=False, powerless=False)
            return None
        after = held + 1
        self._state = replace(
            state,
            max_lag=after if after < self._configured else None,
            healthy=0,
            rose=True,
            powerless=False,
            loosened=state.loosened + 1,
        )
        return None if self.max_lag == before else self._change("loosened", before, steps=state.healthy)

    def _change(
        self,
        kind: Literal["tightened", "loosened", "powerless"],
        before: int,
        *,
        steps: int,
        reading: MeasureReading | None = None,
        counted: Literal["steps", "measurements"] = "steps",
    ) -> GuardChange:
        return GuardChange(
            kind=kind,
            before=before,
            after=self.max_lag,
            configured=self._configured,
            steps=steps,
            reading=reading,
            counted=counted,
            reused_lag=self._reused_lag,
        )


def readings_of(metrics: GuardedMetrics, config: GuardConfig) -> Iterator[MeasureReading]:
    """Readings of the metrics that have a limit and a value, the one that is looked at first before the others."""
    share, ratio = metrics.effective_sample_share, metrics.importance_ratio_max
    if share is not None and (limit := config.min_effective_sample_share) is not None:
        within = share >= limit ** (1 - _MARGIN)
        yield _reading("effective_sample_share", share, limit, beyond=share < limit, within=within)
    if metrics.behavior_kl is not None and config.max_behavior_kl is not None:
        yield _kl("behavior_kl", metrics.behavior_kl, config.max_behavior_kl)
    if metrics.mismatch_kl is not None and config.max_mismatch_kl is not None:
        yield _kl("mismatch_kl", metrics.mismatch_kl, config.max_mismatch_kl)
    if ratio is not None and (limit := config.max_importance_ratio) is not None:
        within = ratio <= limit ** (1 - _MARGIN)
        yield _reading("importance_ratio_max", ratio, limit, beyond=ratio > limit, within=within)


def _kl(measure: Measure, value: float, limit: float) -> MeasureReading:
    return _reading(measure, value, limit, beyond=value > limit, within=value <= (1 - _MARGIN) * limit)


def _reading(measure: Measure, value: float, limit: float, *, beyond: bool, within: bool) -> MeasureReading:
    lost = not math.isfinite(value)
    return MeasureReading(
        measure=measure, value=value, limit=limit, beyond=beyond or lost, well_within=within and not lost
    )


def _crossed(reading: MeasureReading) -> str:
    side = "under" if reading.measure in ("effective_sample_share", "gradient_cosine") else "over"
    side = side if math.isfinite(reading.value) else "no number beside"
    return f"{reading.measure} is {reading.value:.3g}, {side} its limit of {reading.limit:g}"


def _cause(measure: Measure) -> str:
    if measure == "mismatch_kl":
        return (
            "The generators' logprobs are not the learner's at equal weights: compare dtype, quantization and kernels"
        )
    return "Lower the learning rate or the updates per step, or look at mismatch_kl"
