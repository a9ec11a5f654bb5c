"""Verdicts sent to an address as they change: by a task of its own, so that nothing waits for whoever listens there."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from pydantic import BaseModel, SecretStr

from services.diagnosis.verdict import RunVerdict, State
from services.http.client import HttpClient, ServiceError

logger = logging.getLogger(__name__)
_DEADLINE_S = 10.0
_MOST_WAITING = 8


class VerdictNews(BaseModel):
    """The body of a webhook's POST. `text` is all of it in a sentence, as chat services show it."""

    run: str
    state: State
    cause: str
    who: str
    sentence: str
    remedy: str
    step: int
    unix_s: float
    text: str


class Webhook:
    """Posts news of a run to `url`, in their order; `outcome` is told `sent`, `failed` or `dropped` for each."""

    def __init__(self, url: SecretStr, *, run: str, outcome: Callable[[str], None]) -> None:
        self._url = url
        self._run = run
        self._outcome = outcome
        self._waiting: deque[VerdictNews] = deque()
        self._came = asyncio.Event()

    def tell(self, verdict: RunVerdict, *, step: int) -> None:
        """Takes news, without waiting; of too many the oldest are dropped."""
        news = VerdictNews(
            run=self._run, state=verdict.state, cause=verdict.cause, who=verdict.who, sentence=verdict.sentence,
            remedy=verdict.remedy, step=step, unix_s=round(time.time(), 3), text=f"{self._run}: {verdict.text}",
        )  # fmt: skip
        self._waiting.append(news)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._outcome("dropped")
        self._came.set()

    async def run(self) -> None:
        """Posts until cancelled. An address that fails is said once in a row, and never tried twice for one news."""
        failed = False
        async with HttpClient() as client:
            while True:
                await self._came.wait()
                self._came.clear()
                while self._waiting:
                    failed = await self._post(client, self._waiting.popleft(), quiet=failed)

    async def _post(self, client: HttpClient, news: VerdictNews, *, quiet: bool) -> bool:
        url = self._url.get_secret_value()
        try:
            await client.notify(url, news, deadline_s=_DEADLINE_S)
        except Exception as error:  # noqa: BLE001 - whatever a client says to an address, it must not end the run
            self._outcome("failed")
            if not quiet:  # its address may hold a secret
                why = f"{type(error).__name__}, on the way to its address"
                if isinstance(error, ServiceError):
                    why = str(error).replace(url, "its address")
                logger.warning("the webhook of [learner.verdict] does not take what it is sent: %s", why)
            return True
        self._outcome("sent")
        return False
