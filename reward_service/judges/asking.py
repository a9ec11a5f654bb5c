"""One verdict of a judge: kept from an earlier time, or asked for until there is one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from reward_service.endpoints.cache import Cache, key_of
from reward_service.endpoints.endpoint import Endpoint, InputRefused
from reward_service.judges.chat import PATH, ChatAnswer, ChatRequest, chat_request
from reward_service.judges.config import JudgeConfig
from reward_service.judges.template import asked_verdict, fill, mark_of, system_text
from reward_service.judges.verdict import schema_of, verdict_of
from reward_service.verifier import InfrastructureError

logger = logging.getLogger(__name__)

_RETRY_TEMPERATURE = 0.7
_SHOWN_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Material:
    """What one verdict is about: the texts of the template's placeholders."""

    template: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """From 0 to 1, and whether it was kept from an earlier question."""

    value: float
    kept: bool


class Asking:
    """Asks the judge at an endpoint. `fingerprint` stands for all settings that a verdict depends on."""

    def __init__(self, config: JudgeConfig, *, fingerprint: str, endpoint: Endpoint, cache: Cache) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._endpoint = endpoint
        self._cache = cache
        self._takes_schema: bool | None = {"always": True, "never": False}.get(config.structured)

    async def verdict(self, material: Material, *, vote: int, deadline: float) -> Verdict:
        """The verdict; `vote` tells apart those on one material that are to be asked for one by one.

        Raises DataError for material that the endpoint refuses, InfrastructureError.
        """
        texts = (part for pair in sorted(material.texts.items()) for part in pair)
        key = key_of(self._config.url, self._fingerprint, material.template, str(vote), *texts)

        async def make() -> str:
            return repr(await self._asked(material, deadline=deadline))

        found = await self._cache.get(key, make)
        return Verdict(float(found.text), kept=found.kept)

    async def _asked(self, material: Material, *, deadline: float) -> float:
        mark, texts = mark_of(material.texts), material.texts.values()
        reply = ""
        for attempt in range(self._config.reply_attempts):
            reply = await self._reply(material, mark=mark, again=attempt > 0, deadline=deadline)
            verdict = verdict_of(reply, kind=self._config.kind, mark=mark, material=texts)
            if verdict is not None:
                return verdict
            logger.debug("judge %s gave no verdict: %r", self._config.name, reply[-_SHOWN_CHARS:])
        raise InfrastructureError(
            f"the judge gave no verdict in {self._config.reply_attempts} replies; the last one ends with "
            f"{reply[-_SHOWN_CHARS:]!r} (nothing, if it was cut at max_tokens or all of it was thought)"
        )

    async def _reply(self, material: Material, *, mark: str, again: bool, deadline: float) -> str:
        """Without a schema, if the endpoint refuses a schema that it has never taken."""
        plain = self._request(material, mark=mark, again=again, schema=None)
        if self._takes_schema is False:
            return await self._posted(plain, deadline=deadline)
        request = self._request(material, mark=mark, again=again, schema=schema_of(self._config.kind))
        try:
            text = await self._posted(request, deadline=deadline)
        except InputRefused as refused:
            if self._takes_schema:
                raise
            text = await self._posted(plain, deadline=deadline)
            logger.info("judge %s takes no response_format, and is asked without it: %s", self._config.name, refused)
            self._takes_schema = False
            return text
        self._takes_schema = True
        return text

    async def _posted(self, request: ChatRequest, *, deadline: float) -> str:
        answer = await self._endpoint.ask(PATH, request, ChatAnswer, deadline=deadline)
        self._endpoint.spend(tokens=answer.total_tokens)
        return answer.text

    def _request(
        self, material: Material, *, mark: str, again: bool, schema: Mapping[str, JsonValue] | None
    ) -> ChatRequest:
        config = self._config
        shown = fill(material.template, material.texts, mark=mark)
        return chat_request(
            model=config.model,
            system=system_text(config.system, mark=mark),
            user=f"{shown}\n\n{asked_verdict(config.kind, mark=mark)}",
            temperature=self._temperature(again=again),
            max_tokens=config.max_tokens,
            schema=schema,
            extra=config.extra,
        )

    def _temperature(self, *, again: bool) -> float | None:
        """A judge that is greedy would say the same again."""
        if self._config.temperature == "default":
            return None
        return max(self._config.temperature, _RETRY_TEMPERATURE) if again else self._config.temperature
