"""One request to one reward service, over HTTP."""

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from services.http.calls import see_alive
from services.http.client import HttpClient, ServiceFailed, ServiceUnreachable

_LINES = "application/x-ndjson"

Answers = AsyncGenerator[tuple[str, ScoreResult], None]
"""Results, each with the id of the service that made it."""


class Exchange:
    """Asks services at addresses for which there is an HTTP client in `http`.

    `deadline_s` is for the scoring, whose answer may take `margin_s` seconds longer.
    """

    def __init__(self, *, http: Mapping[str, HttpClient], deadline_s: float, margin_s: float) -> None:
        self._http = http
        self._deadline_s = deadline_s
        self._margin_s = margin_s

    async def see_alive(self, url: str) -> None:
        """Raises ServiceError if it does not answer at all, within seconds."""
        await see_alive(self._http[url], url)

    async def ask(self, url: str, items: Sequence[ScoreItem], *, streamed: bool) -> Answers:
        """The results, all at once, or as they come if `streamed`. Raises ServiceError.

        A whole answer that is lost on the way is asked for once more under the same idempotency key: nothing is judged,
        or paid for, twice. Of a streamed one nothing that came is lost.
        """
        body = ScoreRequest(items=tuple(items), deadline_s=self._deadline_s)
        if streamed:
            async with aclosing(self._lines(url, body)) as lines:
                async for line in lines:
                    yield line
            return
        for each in self._checked(url, body, await self._whole(url, body)):
            yield each

    async def _lines(self, url: str, body: ScoreRequest) -> Answers:
        limit_s = self._deadline_s + self._margin_s
        headers = {"Accept": _LINES}
        asked = self._http[url].stream(
            f"{url}/v1/score", body, ScoreResult, deadline_s=limit_s, idle_timeout_s=limit_s, headers=headers
        )
        async with asked as results:
            if results.content_type == _LINES:
                async for result in results:
                    yield result.service_id, result
                return
            # A service that knows no other way.
            response = await results.whole(ScoreResponse)
        for each in self._checked(url, body, response):
            yield each

    async def _whole(self, url: str, body: ScoreRequest) -> ScoreResponse:
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            return await self._post(url, body, headers)
        except ServiceUnreachable as error:
            if not error.sent:
                raise
            return await self._post(url, body, headers)

    async def _post(self, url: str, body: ScoreRequest, headers: Mapping[str, str]) -> ScoreResponse:
        limit_s = self._deadline_s + self._margin_s
        return await self._http[url].post(f"{url}/v1/score", body, ScoreResponse, deadline_s=limit_s, headers=headers)

    def _checked(self, url: str, body: ScoreRequest, response: ScoreResponse) -> list[tuple[str, ScoreResult]]:
        if sorted(result.id for result in response.results) != sorted(item.id for item in body.items):
            text = f"it answered with {len(response.results)} results that are not those of the request"
            raise ServiceFailed(f"{url}/v1/score", status=200, kind="bad_answer", message=text)
        return [(response.service_id, result) for result in response.results]
