"""A service that is asked over HTTP on behalf of a verifier.

    ask ─▶ place ─▶ breaker ─▶ turn ─▶ budget ─▶ request ─▶ answer
                                                    ├─ 429: everybody pauses, then again
                                                    ├─ gone, slow, 5xx, nonsense: again, a few times
                                                    └─ other 4xx: at once an error

A place is freed when another request ends; the breaker's rest and a pause are over by themselves. Whoever asks bounds
it all by the item's deadline.

What may be spent at a service in the life of the process.

When the next request to a service may begin.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel, SecretStr

from reward_service.endpoints.config import EndpointConfig, LimitsConfig
from reward_service.verifier.lanes import ScoringMetrics
from reward_service.verifier.submission import DataError, InfrastructureError, UserError, VerifierError
from services.http.backoff import Backoff
from services.http.breakers import Breakers, BreakerSettings, GuardedCall
from services.http.client import HttpClient, ServiceError, ServiceRefused, ServiceTimeout, ServiceUnreachable
from services.http.tls import TlsFiles, public_tls
from services.rotating_secrets import RotatingSecret, accepted
from services.secret_files import SecretFileError

R = TypeVar("R", bound=BaseModel)
_BREAKER = BreakerSettings(failures=5, rest_s=0.5, rest_max_s=10.0)
_MAX_PAUSE_S = 10.0
_MAX_CHARS = 500
_INPUT_IS_WRONG = frozenset({400, 413, 422})
_AGAIN = frozenset({408, 409, 425})
_REMEDIES = {
    401: "check api_key_env or api_key_file",
    403: "check api_key_env or api_key_file, and what the key may do",
    404: "check url and model",
}


class SpendingBudget:
    """Counts requests and tokens. Those under way when the tokens run out are still paid."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.requests = 0
        self.tokens = 0

    def take_request(self) -> None:
        """Count a request that is about to be sent. Raises InfrastructureError if nothing is left."""
        for what, spent, most in (
            ("requests", self.requests, self._limits.most_requests),
            ("tokens", self.tokens, self._limits.most_tokens),
        ):
            if most is not None and spent >= most:
                raise InfrastructureError(
                    f"budget: {spent} {what} are spent, and limits.most_{what} is {most}: raise it and start the "
                    "service again"
                )
        self.requests += 1

    def spend(self, *, tokens: int) -> None:
        """Count what an answer has cost."""
        self.tokens += tokens


class RequestPace:
    """Gives turns to requests, in the order in which they ask: at most `per_s` a second, none in a pause."""

    def __init__(self, *, per_s: float | None) -> None:
        self._gap_s = 0.0 if per_s is None else 1.0 / per_s
        self._next = float("-inf")
        self._paused_until = float("-inf")
        self._front = asyncio.Lock()

    def pause(self, seconds: float) -> None:
        """No turns for so long, in seconds from now."""
        self._paused_until = max(self._paused_until, _now() + seconds)

    async def turn(self, *, deadline: float) -> None:
        """Wait for a turn. Raises InfrastructureError at once if a pause lasts beyond `deadline`."""
        self._check(deadline)
        async with self._front:
            while (begin := max(self._next, self._paused_until)) > _now():
                self._check(deadline)
                await asyncio.sleep(begin - _now())
            self._next = _now() + self._gap_s

    def _check(self, deadline: float) -> None:
        if self._paused_until > deadline:
            rest_s = self._paused_until - _now()
            raise InfrastructureError(
                f"busy: the service wants to be left alone for {rest_s:.1f} s more, beyond the item's deadline"
            )


def _now() -> float:
    return asyncio.get_running_loop().time()


class InputRefused(DataError):
    """The service will not take this input, now or later."""


class _TryAgain(Exception):
    """A request failed in a way that may pass. `counts`: it was taken up, so that it is one of the attempts."""

    def __init__(self, why: str, *, counts: bool) -> None:
        super().__init__(why)
        self.counts = counts


class Endpoint:
    """A service; made by `open_endpoint`. Errors name it, and never show its key."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        http: HttpClient,
        key: SecretStr | None,
        metrics: ScoringMetrics,
        breakers: Breakers | None = None,
        backoff_s: float = 0.5,
    ) -> None:
        self._url = config.url
        self._limits = config.limits
        self._http = http
        self._key = key
        self._name = config.name
        self._metrics = metrics
        for outcome in ("answered", "failed", "over_budget"):
            metrics.asked_requests.labels(config.name, outcome)
        self._breakers = breakers or Breakers(f"{config.name} at", settings=_BREAKER)
        self._breaker = self._breakers[config.url]
        self._backoff = Backoff(first_s=backoff_s, max_s=_MAX_PAUSE_S)
        self._places = asyncio.Semaphore(config.limits.concurrency)
        self._pace = RequestPace(per_s=config.limits.requests_per_s)
        self._budget = SpendingBudget(config.limits)
        self.last_problem = "no request has failed"

    def __str__(self) -> str:
        return self._url

    async def ask(self, path: str, body: BaseModel, answer: type[R], *, deadline: float) -> R:
        """The service's answer to `body`, posted at `path`; to be cancelled at `deadline`, on the event loop's clock.

        Raises InputRefused, and InfrastructureError, at once for what will not pass before the deadline.
        """
        async with self._places:
            return await self._attempts(path, body, answer, deadline=deadline)

    def spend(self, *, tokens: int) -> None:
        """Count what an answer has cost."""
        self._budget.spend(tokens=tokens)
        self._metrics.asked_tokens.labels(self._name).inc(tokens)

    def _count(self, outcome: str) -> None:
        self._metrics.asked_requests.labels(self._name, outcome).inc()

    async def _attempts(self, path: str, body: BaseModel, answer: type[R], *, deadline: float) -> R:
        failures, tries = 0, 0
        while True:
            await self._turn(deadline=deadline)
            self._take_request()
            try:
                return await self._attempt(path, body, answer, tries=tries)
            except _TryAgain as error:
                failures, tries = failures + error.counts, tries + 1
                self.last_problem = str(error)
                if failures >= self._limits.attempts:
                    raise InfrastructureError(f"{failures} attempts failed, last: {error}") from error
            await asyncio.sleep(self._backoff.pause_s(failures) if failures else 0)

    def _take_request(self) -> None:
        try:
            self._budget.take_request()
        except InfrastructureError:
            self._count("over_budget")
            raise

    async def _turn(self, *, deadline: float) -> None:
        """Wait until a request may begin. To be followed by `_attempt` without an await between them."""
        while True:
            looked_at = self._breakers.now()
            if not self._breaker.admits:
                await self._breakers.change([self._url], since=looked_at)
                continue
            await self._pace.turn(deadline=deadline)
            if self._breaker.admits:
                return

    async def _attempt(self, path: str, body: BaseModel, answer: type[R], *, tries: int) -> R:
        shown = self._words()
        with self._breaker.call() as call:
            try:
                found = await self._http.post(
                    f"{self._url}{path}", body, answer, deadline_s=self._limits.request_timeout_s
                )
            except ServiceError as error:
                self._count("failed")
                raise self._failure(error, call, tries=tries, shown=shown) from error
            call.succeeded()
        self._count("answered")
        return found

    def _failure(
        self, error: ServiceError, call: GuardedCall, *, tries: int, shown: Sequence[str]
    ) -> VerifierError | _TryAgain:
        """The outcome of a failed request for its item; the breaker and the pace hear of it, too."""
        said = self._said(error, shown)
        match error:
            case ServiceRefused(status=429, retry_after_s=wanted_s):
                call.succeeded()
                self._pace.pause(
                    self._backoff.pause_s(tries + 1) if wanted_s is None else max(wanted_s, self._backoff.first_s)
                )
                return _TryAgain(said, counts=False)
            case ServiceRefused(status=status) if status not in _AGAIN:
                call.succeeded()
                return InputRefused(said) if status in _INPUT_IS_WRONG else _refusal(said, status=status)
            case ServiceTimeout() | ServiceUnreachable():
                call.failed(said, silent=True)
            case _:
                call.failed(said, silent=False)
        return _TryAgain(said, counts=True)

    def _words(self) -> tuple[str, ...]:
        return () if self._key is None else accepted(self._key)

    def _said(self, error: ServiceError, shown: Sequence[str]) -> str:
        """Some services repeat the key that they were shown. `shown` were the keys before the call, which may have been
        exchanged since.
        """
        text = str(error)
        for word in sorted({*shown, *self._words()}, key=len, reverse=True):  # one may begin with another
            text = text.replace(word, "[the key]")
        return text[:_MAX_CHARS]


def _refusal(said: str, *, status: int) -> InfrastructureError:
    remedy = _REMEDIES.get(status, "the service's log may say more")
    return InfrastructureError(f"{said}; {remedy}")


@asynccontextmanager
async def open_endpoint(
    config: EndpointConfig, *, metrics: ScoringMetrics, tls: TlsFiles | None = None
) -> AsyncIterator[Endpoint]:
    """The endpoint with its connections. `tls` names a CA that is believed beside the system's.

    Raises UserError if there is no key where the configuration says.
    """
    key, trust = api_key(config), public_tls(tls or TlsFiles())
    async with HttpClient(token=key, max_connections=config.limits.concurrency, tls=trust) as http:
        yield Endpoint(config, http=http, key=key, metrics=metrics)


def api_key(config: EndpointConfig) -> SecretStr | None:
    """The key to show, if there is one. Raises UserError if it is not where the configuration says."""
    if config.api_key_file is not None:
        try:
            return RotatingSecret(config.api_key_file)
        except SecretFileError as error:
            raise UserError(f"api_key_file: {error}") from error
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise UserError(
            f"api_key_env names {config.api_key_env}, which is not set or empty: set it in the environment of the "
            "reward service"
        )
    return SecretStr(key)
