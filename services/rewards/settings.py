"""Whom a client of reward services asks, and how much it tries.

When a second service is asked for what a first one is slow with, and how much of that is afforded.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from pydantic import SecretStr

from services.http.backoff import Backoff
from services.http.breakers import BreakerSettings

_WINDOW = 256
_LEAST_OBSERVATIONS = 32
_LEAST_DELAY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class HedgeSettings:
    """Items without an answer are asked of a second service after `after_s` seconds, or, if that is None, after the
    `percentile` of their verifier's recent latencies. At most `share` of all items, and `burst` more, are asked twice.
    """

    after_s: float | None = None
    percentile: float = 0.95
    share: float = 0.05
    burst: int = 16


class Hedges:
    """The latencies seen, by verifier, and what may still be asked twice."""

    def __init__(self, settings: HedgeSettings) -> None:
        self._settings = settings
        self._budget = float(settings.burst)
        self._latencies: dict[str, deque[float]] = {}

    def sent(self, items: int) -> None:
        """So many items were asked for the first time."""
        self._budget = min(self._settings.burst + items, self._budget + self._settings.share * items)

    def answered(self, verifier: str, latency_s: float) -> None:
        """An item had its reward so many seconds after it was sent."""
        self._latencies.setdefault(verifier, deque(maxlen=_WINDOW)).append(latency_s)

    def delay_s(self, verifier: str) -> float | None:
        """Time after which an answer counts as slow; None while too few are known to say so."""
        if self._settings.after_s is not None:
            return self._settings.after_s
        seen = sorted(self._latencies.get(verifier, ()))
        if len(seen) < _LEAST_OBSERVATIONS:
            return None
        return max(_LEAST_DELAY_S, seen[min(len(seen) - 1, int(self._settings.percentile * len(seen)))])

    @property
    def left(self) -> int:
        """Number of items that may be asked twice now."""
        return int(self._budget)

    def afford(self, items: int) -> int:
        """Number of so many items that may be asked twice; they are taken from the budget."""
        afforded = min(items, int(self._budget))
        self._budget -= afforded
        return afforded


@dataclass(frozen=True, kw_only=True)
class RewardService:
    """A service to be asked, at `url`. With `verifiers` it is asked for these and nothing else, and no service without
    them is asked for these. `token` is its bearer token.
    """

    url: str
    verifiers: tuple[str, ...] = ()
    token: SecretStr | None = None


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Limits on requests, in number and time.

    `deadline_s` is for the scoring in one request, whose answer may take `margin_s` longer; `patience_s` for a whole
    call, None if the caller bounds it. `attempts` is how many requests for an item may fail after they were taken up,
    `item_attempts` how often it may be answered with an error of a service. Services that are busy, or do not answer at
    all, are waited for. A request has at most `batch_items` items; smaller calls are gathered for `batch_wait_s`
    seconds, and at most `requests` are under way at once at each set of services. Without `hedging` nothing is asked
    twice for being slow. `rests` are those of a service that fails.
    """

    deadline_s: float = 30.0
    margin_s: float = 5.0
    patience_s: float | None = 120.0
    attempts: int = 8
    item_attempts: int = 2
    batch_items: int = 256
    batch_wait_s: float = 0.002
    requests: int = 64
    hedging: HedgeSettings | None = None
    rests: BreakerSettings = field(default_factory=BreakerSettings)
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.2, max_s=5.0, sleep=asyncio.sleep))
