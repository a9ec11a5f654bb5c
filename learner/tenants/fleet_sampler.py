"""A sampler over generators: each request goes to the one with the least of ours under way, and elsewhere if that dies.

sample ─▶ the target's newest weights ─▶ endpoint ─▶ checked answer ─▶ SampleAnswer
                    ▲                       └─ is gone, starts, is busy: elsewhere, until none has answered for long
                    │                       └─ fails, or answers nonsense: again, a few times
                    └───────────────────────┘  refuses: the client's mistake

offer ─▶ told to each generator beside everything else; one that misses it fetches what a request needs
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from learner.tenants.lifelines import Lifelines
from learner.tenants.prompt_scores import PromptExtras
from learner.tenants.sample_wire import answer_to_client, asked_of_generator, fault_of_answer
from learner.tenants.sampling import SampleFailed
from learner.tenants.served_adapters import ServedAdapters
from learner.tenants.turns import TargetWeights
from protocol.adapters import AdapterSampleAnswer, AdapterSampleRequest, OfferAnswer, OfferedAdapter
from protocol.status import PeerStatus
from protocol.tinker.sampling import SampleAnswer, SampleRequest
from protocol.tinker.tensors import TinkerWireError
from services.http.backoff import Backoff
from services.http.breakers import Breakers
from services.http.client import HttpClient, ServiceError, ServiceFailed, ServiceRefused
from services.http.endpoints import Endpoints
from services.http.faults import fault_of, is_busy, see_alive
from services.http.status import peers_at

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 5.0
_OFFER_S = 30.0
_OF_THE_ADAPTER = "adapter_"
"""Kinds of a generator's failures begin so where the adapter cannot be fetched or loaded."""

ScorePrompt = Callable[[TargetWeights, SampleRequest], Awaitable[PromptExtras]]
"""Raises TinkerWireError, SampleFailed."""


@dataclass(frozen=True)
class SamplingLimits:
    """A request is given up after `failures` of generators that had taken it up, after `silence_s` seconds in which no
    generator gave any answer or took this one, or after `longest_s`. Once each has failed there is a pause of `pause_s`
    seconds, twice as long each time. A generator at work is asked every `look_every_s` seconds whether it lives.
    """

    failures: int = 5
    silence_s: float = 180.0
    longest_s: float = 3600.0
    pause_s: float = 0.2
    look_every_s: float = 5.0


@dataclass
class _Attempts:
    """Attempts at one sample so far: whom they were `tried` at in this round, and what came of them."""

    limits: SamplingLimits
    began: float
    last: str = "none has answered yet"
    tried: list[str] = field(default_factory=list)
    failures: int = 0
    rounds: int = 0
    turned_away_at: float | None = None

    def failed(self, url: str, error: ServiceError, *, now: float) -> None:
        """Notes one. Raises SampleFailed if there are to be no more."""
        self.tried.append(url)
        self.last = str(error)
        self.failures += _is_of_the_adapter(error) or fault_of(error) != "unavailable"
        if fault_of(error) == "counterpart":
            self.turned_away_at = now  # it had been taken up, however long ago the one before was not
        elif not is_busy(error) and self.turned_away_at is None:
            self.turned_away_at = now
        if self.failures >= self.limits.failures:
            raise SampleFailed(f"{self.failures} attempts at one sample failed, last: {self.last}")
        if self.turned_away_at is not None and now - self.turned_away_at > self.limits.silence_s:
            raise SampleFailed(f"no generator has taken it for {self.limits.silence_s:g} s, last: {self.last}")

    def next_round(self) -> int:
        """Begins anew with all of them, and returns how many rounds there were."""
        self.tried = []
        self.rounds += 1
        return self.rounds


class FleetSampler:
    """A Sampler over the generators at `urls`; an async context manager. `client` shows their token.

    What generators do not compute is asked of `score_prompt`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        client: HttpClient,
        adapters: ServedAdapters,
        score_prompt: ScorePrompt | None = None,
        limits: SamplingLimits | None = None,
        breakers: Breakers | None = None,
    ) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._client, self._adapters, self.score_prompt = client, adapters, score_prompt
        self._limits = limits or SamplingLimits()
        self._endpoints = Endpoints(self._urls, breakers=breakers or Breakers("generator at"))
        self._backoff = Backoff(first_s=self._limits.pause_s, max_s=_MAX_PAUSE_S)
        self._tasks = asyncio.TaskGroup()
        self._lifelines = Lifelines(client, every_s=self._limits.look_every_s)
        self._telling: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._answered_at = float("-inf")

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in [*self._telling.values()]:
            task.cancel()
        await self._tasks.__aexit__(kind, error, traceback)

    def peers(self) -> tuple[PeerStatus, ...]:
        """The generators, for `/v1/status`."""
        return peers_at(self._urls, self._client.contacts(), kind="generator")

    async def offer(self, weights: TargetWeights) -> None:
        """Take note of new weights of a target, and tell the generators without waiting for them."""
        try:
            await self._adapters.newest(weights)
        except SampleFailed as error:
            logger.warning("%s; a sample that needs them says so, too", error)
            return
        for url in self._urls:
            key = url, weights.target_id
            if key not in self._telling:
                self._telling[key] = self._tasks.create_task(self._tell(*key))

    async def sample(self, weights: TargetWeights, request: SampleRequest, *, namespace: str) -> SampleAnswer:
        """Sample from the target on some generator. Raises SampleFailed, TinkerWireError."""
        extras = PromptExtras()
        if request.targets is not None or request.alternatives:
            extras = await self._scored(weights, request)
        answer = await self._answer(weights, request, namespace)

        def policy_version(version: int) -> int:
            return self._adapters.policy_version(weights, version)

        return answer_to_client(request, answer, policy_version=policy_version, extras=extras)

    async def forget(self, target_id: str) -> None:
        """Nobody samples from the target any more; generators drop what they do not need by themselves."""
        self._adapters.forget(target_id)

    async def _scored(self, weights: TargetWeights, request: SampleRequest) -> PromptExtras:
        if self.score_prompt is None:
            field = "prompt_alt_tokens_k" if request.targets is None else "target_prompt_logprobs"
            raise TinkerWireError(f"{field}: the generators of this server do not compute it; leave it out")
        return await self.score_prompt(weights, request)

    async def _answer(self, weights: TargetWeights, request: SampleRequest, namespace: str) -> AdapterSampleAnswer:
        attempts = _Attempts(self._limits, began=self._now())
        try:
            async with asyncio.timeout(self._limits.longest_s):
                while True:
                    url = await self._choose(attempts)
                    # Anew each time: files of weights that were replaced meanwhile are gone.
                    asked = asked_of_generator(request, await self._adapters.newest(weights), namespace=namespace)
                    try:
                        return await self._attempt(url, asked, weight=request.samples)
                    except ServiceError as error:
                        self._look_at(error)
                        attempts.failed(url, error, now=self._now())
                    if len(attempts.tried) >= len(self._urls):  # a pause only once all of them have been tried
                        await self._backoff.pause(attempts.next_round())
        except TimeoutError:
            text = f"no generator has sampled in {self._limits.longest_s:g} s, last: {attempts.last}"
            raise SampleFailed(text) from None

    async def _choose(self, attempts: "_Attempts") -> str:
        silence_s = self._limits.silence_s
        while (left_s := max(attempts.began, self._answered_at) + silence_s - self._now()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    return await self._endpoints.choose(avoid=attempts.tried)
            except TimeoutError:
                continue  # others may have been answered meanwhile
        raise SampleFailed(f"no generator has answered for {silence_s:g} s, last: {attempts.last}")

    async def _attempt(self, url: str, asked: AdapterSampleRequest, *, weight: int) -> AdapterSampleAnswer:
        unheld: ServiceFailed | None = None
        with self._endpoints.call(url, weight=weight) as call:
            if call.is_probe:
                await see_alive(self._client, url)
            try:
                sampling = self._client.post(
                    f"{url}/v1/adapters/sample", asked, AdapterSampleAnswer, deadline_s=self._limits.longest_s
                )
                answer = await self._lifelines.during(url, sampling)
                if fault := fault_of_answer(asked, answer):
                    raise ServiceFailed(url, status=200, kind="bad_answer", message=fault)
            except ServiceFailed as error:
                if not _is_of_the_adapter(error):
                    raise
                unheld = error  # the generator is well, and others' adapters are not to wait for this one
        self._answered_at = self._now()
        if unheld is not None:
            raise unheld
        return answer

    def _look_at(self, error: ServiceError) -> None:
        """Raises TinkerWireError if it is the client's request that is wrong."""
        if isinstance(error, ServiceRefused) and fault_of(error) == "request":
            raise TinkerWireError(error.message) from error
        if is_busy(error):
            self._answered_at = self._now()
        logger.debug("a sample failed: %s", error)

    async def _tell(self, url: str, target_id: str) -> None:
        """Until the newest has been told: later ones may come while one is on its way."""
        told = None
        try:
            while (offered := self._adapters.current(target_id)) is not None and offered != told:
                told = offered
                await self._tell_once(url, offered)
        finally:
            del self._telling[url, target_id]

    async def _tell_once(self, url: str, offered: OfferedAdapter) -> None:
        try:
            await self._client.post(f"{url}/v1/adapters/offer", offered, OfferAnswer, deadline_s=_OFFER_S)
        except ServiceError as error:
            logger.debug("%s was not told of new weights, and fetches them when it needs them: %s", url, error)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _is_of_the_adapter(error: ServiceError) -> bool:
    return isinstance(error, ServiceFailed) and error.kind.startswith(_OF_THE_ADAPTER)
