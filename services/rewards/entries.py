"""The items under way: what is known of each, and when nothing more is to be expected of a round of requests.

Part ── the items of one call in one round; over when each is settled or no request owes an answer for it
  └─ Entry ── one item over all rounds: settled by its first good answer, or its last bad one
"""

import asyncio
from collections.abc import Collection, Sequence

from protocol.rewards import ScoreError, ScoreItem, ScoreResult
from protocol.trajectories import ErrorKind
from services.http_client import ServiceError
from services.rewards.scored import Scored, answered

_MESSAGE_LENGTH = 4096


class Entry:
    """One item of one call. `item` has an id of the client's own, so that items of many calls can share a request.

    It is settled by a reward, by an error that is the item's own, or by the `item_attempts`-th error of a service.
    `setback` is why it was not settled the last time.
    """

    def __init__(self, given: ScoreItem, *, wire_id: str, item_attempts: int) -> None:
        self.item = given.model_copy(update={"id": wire_id})
        self.scored: Scored | None = None
        self.setback = ""
        self.requests = 0
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
            self.scored = Scored(
                id=self._given_id,
                verifier=self.item.verifier,
                error=ScoreError(kind=kind, message=why[:_MESSAGE_LENGTH]),
                answered=False,
                attempts=max(1, self.requests),
            )

    def outcome(self) -> Scored:
        """What it was settled with."""
        assert self.scored is not None, "an item is not settled"
        return self.scored


class Part:
    """The entries of one call in one round. `over` ends when no answer is to be expected any more.

    `asked` are the addresses of the requests that held them, `failure` is the last error of such a request,
    `is_shared` tells whether these held entries of other calls, too.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked: list[str] = []
        self.failure: ServiceError | None = None
        self.is_shared = False
        self._owing = dict.fromkeys(entries, 0)

    @property
    def awaited(self) -> Collection[Entry]:
        """Those for which an answer is awaited."""
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
