"""A judge as a verifier: its verdicts on one completion, or on a pair in both orders, kept or asked for until given."""

import json
import logging
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from pydantic import JsonValue

from protocol.rewards import ScoreItem
from reward_service.endpoints.asking import AskingLane, together
from reward_service.endpoints.cache import Cache, key_of, open_cache
from reward_service.endpoints.endpoint import Endpoint, InputRefused, open_endpoint
from reward_service.judges.config import JudgeConfig, PairwiseArguments, ScoreArguments, check_template
from reward_service.judges.verdict import (
    PATH,
    RUBRIC,
    ChatAnswer,
    ChatRequest,
    asked_verdict,
    built_in,
    chat_request,
    fill,
    mark_of,
    placeholders,
    schema_of,
    system_text,
    verdict_of,
    without_thought,
)
from reward_service.verifier.lanes import Lane, Surroundings, Verifier
from reward_service.verifier.submission import InfrastructureError, Outcome, Score, UserError
from reward_service.verifiers.extraction import strip_thinking

logger = logging.getLogger(__name__)

_RETRY_TEMPERATURE = 0.7
_SHOWN_CHARS = 200
_KEPT_CHARS = 500
TIE = 0.5
_FINGERPRINT_CHARS = 12
# Settings that change what is asked; the others change only how.
_ASKED = ("model", "kind", "system", "rubric", "temperature", "max_tokens", "keep_thinking", "extra")
_DESCRIPTIONS = {
    "score": "What a language model says of the completion: 0 to 10, scaled to 0 to 1.",
    "pairwise": "Whether a language model prefers the completion to a baseline: 1 won, 0.5 tie, 0 lost.",
}


@dataclass(frozen=True, kw_only=True)
class Material:
    """Texts that a verdict is about: the texts of the template's placeholders."""

    template: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class JudgeVerdict:
    """From 0 to 1, whether it was kept from an earlier question, and the judge's words."""

    value: float
    kept: bool
    words: str = ""


class Asking:
    """Asks the judge at an endpoint. `fingerprint` stands for all settings that a verdict depends on."""

    def __init__(self, config: JudgeConfig, *, fingerprint: str, endpoint: Endpoint, cache: Cache) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._endpoint = endpoint
        self._cache = cache
        self._takes_schema: bool | None = {"always": True, "never": False}.get(config.structured)

    async def verdict(self, material: Material, *, vote: int, deadline: float) -> JudgeVerdict:
        """The verdict; `vote` tells apart those on one material that are to be asked for one by one.

        Raises DataError for material that the endpoint refuses, InfrastructureError.
        """
        texts = (part for pair in sorted(material.texts.items()) for part in pair)
        key = key_of(self._config.url, self._fingerprint, material.template, str(vote), *texts)

        async def make() -> str:
            value, words = await self._asked(material, deadline=deadline)
            return f"{value!r}\n{words}"

        found = await self._cache.get(key, make)
        value, _, words = found.text.partition("\n")  # an earlier release kept no words
        return JudgeVerdict(float(value), kept=found.kept, words=words)

    async def _asked(self, material: Material, *, deadline: float) -> tuple[float, str]:
        mark, texts = mark_of(material.texts), material.texts.values()
        reply = ""
        for attempt in range(self._config.reply_attempts):
            reply = await self._reply(material, mark=mark, again=attempt > 0, deadline=deadline)
            verdict = verdict_of(reply, kind=self._config.kind, mark=mark, material=texts)
            if verdict is not None:
                return verdict, without_thought(reply).strip()[-_KEPT_CHARS:]
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


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A judge that is ready to be asked. `template` is the user's, if there is one."""

    config: JudgeConfig
    template: str | None
    asking: Asking

    async def judge(self, item: ScoreItem, arguments: ScoreArguments, deadline: float) -> Outcome:
        """The mean verdict on the completion, from 0 to 1; of a pair 1 if it is always the better one.

        Raises UserError for an item that lacks what the template shows, and what `Asking.verdict` raises.
        """
        if isinstance(arguments, PairwiseArguments):
            return await self._compared(item, arguments, deadline=deadline)
        material = self._material(item, arguments, completion=self._shown(item.completion))
        verdicts = await self._verdicts([material], deadline=deadline)
        values = [verdict.value for verdict in verdicts]
        score = Score(reward=statistics.fmean(values), components={"lowest": min(values), "highest": max(values)})
        return Outcome(result=replace(score, explanation=_words(verdicts)), cached=_all_kept(verdicts))

    async def _compared(self, item: ScoreItem, arguments: PairwiseArguments, *, deadline: float) -> Outcome:
        ours, theirs = self._shown(item.completion), self._shown(arguments.baseline)
        if ours == theirs:
            return Outcome(result=Score(reward=TIE))
        there = self._material(item, arguments, first=ours, second=theirs)
        back = self._material(item, arguments, first=theirs, second=ours)
        verdicts = await self._verdicts([there, back] if self.config.swap else [there], deadline=deadline)
        shown_first = [verdict.value for verdict in verdicts[: self.config.votes]]
        shown_second = [1.0 - verdict.value for verdict in verdicts[self.config.votes :]]
        score = _agreed(shown_first, shown_second) if shown_second else Score(reward=statistics.fmean(shown_first))
        return Outcome(result=replace(score, explanation=_words(verdicts)), cached=_all_kept(verdicts))

    async def _verdicts(self, materials: Sequence[Material], *, deadline: float) -> list[JudgeVerdict]:
        """All votes on each of the materials, one material after the other."""
        votes = range(self.config.votes)
        return await together(
            [self.asking.verdict(material, vote=vote, deadline=deadline) for material in materials for vote in votes]
        )

    def _material(self, item: ScoreItem, arguments: ScoreArguments, **judged: str) -> Material:
        reference = arguments.reference
        template = self.template or built_in(self.config.kind, with_reference=reference is not None)
        shown = placeholders(template)
        if "reference" in shown and reference is None:
            raise UserError("the judge's template shows a reference: give the argument `reference`")
        if "reference" not in shown and reference is not None:
            raise UserError("the judge's template has no {reference}: leave the argument `reference` out, or add it")
        asked = self._asked(item)
        if "prompt" in shown and not asked:
            raise UserError(
                "the item has no prompt, which the judge's template shows: what does the completion answer?"
            )
        rubric = arguments.rubric or self.config.rubric or RUBRIC
        texts = {**judged, "prompt": asked, "reference": reference or "", "rubric": rubric}
        return Material(template=template, texts={name: text for name, text in texts.items() if name in shown})

    def _asked(self, item: ScoreItem) -> str:
        """The text that the completion answers; of a conversation each message with its role."""
        said = (
            f"{each.role.capitalize()}: {self._shown(each.content) if each.role == 'assistant' else each.content}"
            for each in item.messages
        )
        return "\n\n".join(said) or item.prompt

    def _shown(self, completion: str) -> str:
        return completion if self.config.keep_thinking else strip_thinking(completion)


def _agreed(shown_first: Sequence[float], shown_second: Sequence[float]) -> Score:
    """Score of verdicts in both orders; where they disagree, the order has decided: a tie."""
    agreed = [one if one == other else TIE for one, other in zip(shown_first, shown_second, strict=True)]
    disagreements = [float(one != other) for one, other in zip(shown_first, shown_second, strict=True)]
    return Score(
        reward=statistics.fmean(agreed),
        components={
            "shown_first": statistics.fmean(shown_first),
            "shown_second": statistics.fmean(shown_second),
            "disagreement": statistics.fmean(disagreements),
        },
    )


def _words(verdicts: Sequence[JudgeVerdict]) -> str:
    """The judge's words, of each vote."""
    return "\n---\n".join(verdict.words for verdict in verdicts if verdict.words)


def _all_kept(verdicts: Sequence[JudgeVerdict]) -> bool:
    return all(verdict.kept for verdict in verdicts)


def judge_verifier(config: JudgeConfig) -> Verifier:
    """Its version holds the model's name and a fingerprint of all that the model is told.

    Raises UserError for a template that cannot be read or used.
    """
    template = _template_of(config)
    fingerprint = _fingerprint(config, template)
    arguments = ScoreArguments if config.kind == "score" else PairwiseArguments

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        async with (
            open_endpoint(config, metrics=surroundings.metrics, tls=surroundings.config.http.tls) as endpoint,
            open_cache(config.cache) as cache,
        ):
            asking = Asking(config, fingerprint=fingerprint, endpoint=endpoint, cache=cache)
            judge = Judge(config=config, template=template, asking=asking)
            yield AskingLane(arguments=arguments, function=judge.judge, asked=endpoint)

    return Verifier(
        name=config.name,
        version=f"3+{config.model}+{fingerprint[:_FINGERPRINT_CHARS]}",
        description=_DESCRIPTIONS[config.kind],
        arguments=arguments,
        open=opened,
    )


def _template_of(config: JudgeConfig) -> str | None:
    if config.template_file is None:
        return config.template
    try:
        template = config.template_file.read_text(encoding="utf-8-sig")
        check_template(template, kind=config.kind, name=config.name)
    except (OSError, ValueError) as error:
        raise UserError(f"template_file {config.template_file}: {error}") from error
    return template


def _fingerprint(config: JudgeConfig, template: str | None) -> str:
    told = [
        *([template] if template else (built_in(config.kind, with_reference=given) for given in (False, True))),
        system_text(config.system, mark=""),
        asked_verdict(config.kind, mark=""),
        RUBRIC,
    ]
    settings = config.model_dump(mode="json", include=set(_ASKED))
    return key_of(*told, json.dumps(settings, sort_keys=True))
