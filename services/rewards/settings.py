"""Whom a client of reward services asks, and how much it tries."""

import asyncio
from dataclasses import dataclass, field

from pydantic import SecretStr

from services.backoff import Backoff
from services.breaker import BreakerSettings
from services.rewards.hedging import HedgeSettings


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
    """How much is tried, and for how long.

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
