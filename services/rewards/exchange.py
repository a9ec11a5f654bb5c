"""One request to one reward service, over HTTP."""

from collections.abc import AsyncGenerator, Mapping, Sequence

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from services.http_client import HttpClient, ServiceFailed
from services.verdicts import see_alive


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

    async def ask(self, url: str, items: Sequence[ScoreItem]) -> AsyncGenerator[tuple[str, ScoreResult]]:
        """The results, as they come, each with the id of the service that made it. Raises ServiceError."""
        body = ScoreRequest(items=tuple(items), deadline_s=self._deadline_s)
        address = f"{url}/v1/score"
        response = await self._http[url].post(
            address, body, ScoreResponse, deadline_s=self._deadline_s + self._margin_s
        )
        if sorted(result.id for result in response.results) != sorted(item.id for item in items):
            text = f"it answered with {len(response.results)} results that are not those of the request"
            raise ServiceFailed(address, status=200, kind="bad_answer", message=text)
        for result in response.results:
            yield response.service_id, result
