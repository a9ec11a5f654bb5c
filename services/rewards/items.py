"""The items under way: what is known of each, and when nothing more is to be expected of a round of requests.

Part ── the items of one call in one round; over when each is settled or no request owes an answer for it
  └─ Entry ── one item over all rounds: settled by its first good answer, or its last bad one

Scored is what came of an item: a reward, or why there is none. RewardMetrics are what a client counts.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from protocol.rewards import ScoreError, ScoreItem, ScoreResult
from protocol.trajectories import ErrorKind
from services.http.client import ServiceError
from services.http.metrics import Metrics, PeerCounter

_MESSAGE_LENGTH = 4096
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class ItemScore:
    """Exactly one of `reward` and `error` is set: what could not be scored is never a reward of 0.

    `answered` tells whether a service gave this result; without an answer the error is the client's own, of kind `user`
    (every service refuses the request) or `infrastructure` (none was reached, or all attempts at them failed).
    `service_id` is who answered, at the address `endpoint`; it took `latency_s` seconds there. `attempts` is the number
    of requests that held the item.
    """

    id: str
    verifier: str
    reward: float | None = None
    error: ScoreError | None = None
    answered: bool
    components: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    verifier_version: str = ""
    service_id: str = ""
    endpoint: str = ""
    latency_s: float = 0.0
    attempts: int = 1


def answered(result: ScoreResult, *, id: str, service_id: str, endpoint: str, attempts: int) -> ItemScore:
    """The service's answer about the item that its caller knows as `id`."""
    return ItemScore(
        id=id,
        verifier=result.verifier,
        reward=result.reward,
        error=result.error,
        answered=True,
        components=result.components,
        explanation=result.explanation,
        verifier_version=result.verifier_version,
        service_id=service_id,
        endpoint=endpoint,
        latency_s=result.latency_s,
        attempts=attempts,
    )


class Entry:
    """An item of a call. `item` has an id of the client's own, so that items of many calls can share a request.

    It is settled by a reward, by an error that is the item's own, or by the `item_attempts`-th error of a service.
    `setback` is why it was not settled the last time, `hangs` counts requests to services that were well.
    """

    def __init__(self, given: ScoreItem, *, wire_id: str, item_attempts: int) -> None:
        self.item = given.model_copy(update={"id": wire_id})
        self.scored: ItemScore | None = None
        self.setback = ""
        self.requests = 0
        self.hangs = 0
        self._given_id = given.id
        self._errors_left = item_attempts

    def take(self, result: ScoreResult, *, service_id: str, endpoint: str) -> bool:
        """A service's answer, ignored once the item is settled. Whether this one settles it."""
        if self.scored is not None:
            return False
        if result.error is not None and result.error.kind == "infrastructure":
            self._errors_left -= 1
            self.setback = result.error.message
            if self._errors_left > 0:
                return False
        self.scored = answered(
            result, id=self._given_id, service_id=service_id, endpoint=endpoint, attempts=self.requests
        )
        return True

    def give_up(self, *, kind: ErrorKind, why: str) -> None:
        """Settles it with an error of the client's own, unless it is settled."""
        if self.scored is None:
            self.scored = ItemScore(
                id=self._given_id,
                verifier=self.item.verifier,
                error=ScoreError(kind=kind, message=why[:_MESSAGE_LENGTH]),
                answered=False,
                attempts=max(1, self.requests),
            )

    def outcome(self) -> ItemScore:
        """The outcome that it was settled with."""
        assert self.scored is not None, "an item is not settled"
        return self.scored


class CallPart:
    """The entries of one call in one round. `over` ends when no answer is to be expected any more.

    The addresses in `avoid` are asked only if there is no other. `asked` are those of the requests that held them,
    `failure` is the last error of such a request, `was_sent` tells whether that request was sent, or only its service
    asked for a sign of life. `is_shared` tells whether these held entries of other calls, too, and `hung` whether one
    for a single entry ran out of time while its service answered others.
    """

    def __init__(self, entries: Sequence[Entry], *, avoid: Collection[str] = ()) -> None:
        self.avoid = frozenset(avoid)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked: list[str] = []
        self.failure: ServiceError | None = None
        self.was_sent = False
        self.is_shared = False
        self.hung = False
        self._owing = dict.fromkeys(entries, 0)

    @property
    def is_over(self) -> bool:
        return self.over.done()

    @property
    def awaited(self) -> Collection[Entry]:
        """The entries for which an answer is awaited."""
        return () if self.over.done() else self._owing.keys()

    def expect(self, entry: Entry, url: str) -> None:
        """A request to `url` holds the entry."""
        if url not in self.asked:
            self.asked.append(url)
        self._owing[entry] += 1
        entry.requests += 1

    def answered(self, entry: Entry) -> None:
        """A request has answered for an entry, or never will: none is awaited if it is settled, or no other owes it."""
        if entry not in self._owing:
            return
        self._owing[entry] -= 1
        if entry.scored is not None or self._owing[entry] == 0:
            del self._owing[entry]
        if not self._owing:
            self.close()

    def close(self) -> None:
        """Expect nothing more."""
        if not self.over.done():
            self.over.set_result(None)


class RewardMetrics:
    """The metrics of one client, among those of its process."""

    def __init__(self, metrics: Metrics) -> None:
        self.failures = PeerCounter(
            metrics.counter("reward_service_failures", "Failed requests to a reward service.", labels=("endpoint",))
        )
        self.busy = PeerCounter(
            metrics.counter(
                "reward_service_busy", "Requests that a reward service turned away with 429.", labels=("endpoint",)
            )
        )
        self.rescored = metrics.counter("rescored_items", "Items asked for again after an error of the service.")
        self.request_items = metrics.histogram(
            "reward_request_items", "Items in a request to a reward service.", buckets=_ITEMS
        )
        self.hedged = metrics.counter("hedged_items", "Items asked of a second service, since the first was slow.")
        self.hedges_won = metrics.counter("hedges_won", "Items that the second service answered first.")
