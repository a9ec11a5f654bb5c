"""A language model behind the OpenAI chat API, whose replies a test scripts, and services that ask it."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel, ConfigDict

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.metrics import make_metrics
from reward_service.registry import build_registry
from reward_service.scoring import Scorer
from services.metrics import Metrics
from tests.reward_service.scripted_api import Answer, JsonObject, ScriptedApi

TOKENS = 100


class _Message(BaseModel):
    role: str
    content: str


class Asked(BaseModel):
    """What a judge was sent."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: tuple[_Message, ...]

    @property
    def system(self) -> str:
        return self.messages[0].content

    @property
    def user(self) -> str:
        return self.messages[1].content

    @property
    def mark(self) -> str:
        """As the last sentence asks for it."""
        return re.findall(r'\{"mark": "(\w+)"', self.user)[-1]

    def text(self, number: int) -> str:
        """The texts between delimiters, in order."""
        return re.findall(rf"<text {self.mark}>\n(.*?)\n</text {self.mark}>", self.user, re.DOTALL)[number]


def said(text: str, *, finish_reason: str = "stop") -> JsonObject:
    """An answer that holds a reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"id": "x", "model": "m", "choices": [choice], "usage": {"total_tokens": TOKENS, "prompt_tokens": 60}}


def score(asked: Asked, value: object) -> JsonObject:
    """An answer with a score as it is asked for."""
    return said(f'{{"mark": "{asked.mark}", "reasoning": "fine", "score": {value}}}')


def winner(asked: Asked, value: str) -> JsonObject:
    """An answer with the winner of a pair as it is asked for."""
    return said(f'{{"mark": "{asked.mark}", "reasoning": "fine", "winner": "{value}"}}')


def judge(script: Callable[[int, Asked], Answer]) -> ScriptedApi:
    return ScriptedApi(lambda number, body: script(number, Asked.model_validate(body)))


def asked_of(api: ScriptedApi) -> list[Asked]:
    """What the judge was sent, in order."""
    return [Asked.model_validate(body) for body in api.bodies]


@dataclass(frozen=True)
class Service:
    """A reward service with one judge."""

    scorer: Scorer
    metrics: Metrics

    async def results(self, items: Sequence[ScoreItem], *, deadline_s: float = 60.0) -> tuple[ScoreResult, ...]:
        return (await self.scorer.score(ScoreRequest(items=tuple(items), deadline_s=deadline_s))).results

    async def result(self, item: ScoreItem, *, deadline_s: float = 60.0) -> ScoreResult:
        (result,) = await self.results([item], deadline_s=deadline_s)
        return result

    async def reward(self, item: ScoreItem) -> float:
        result = await self.result(item)
        assert result.reward is not None, result.error
        return result.reward

    async def error(self, item: ScoreItem, *, deadline_s: float = 60.0) -> tuple[str, str]:
        result = await self.result(item, deadline_s=deadline_s)
        assert result.reward is None, "a failed score has no reward"
        assert result.error is not None
        return result.error.kind, result.error.message

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"headway_reward_service_{name}_total", labels) or 0.0


@asynccontextmanager
async def serving(config: RewardServiceConfig) -> AsyncIterator[Service]:
    """The service of a configuration, without HTTP."""
    metrics = Metrics("reward-service")
    registry = build_registry(config)
    scorer = Scorer(registry=registry, config=config, metrics=make_metrics(metrics), service_id="rewards-0")
    async with scorer:
        yield Service(scorer, metrics)


@asynccontextmanager
async def judged_by(api: ScriptedApi, **settings: object) -> AsyncIterator[Service]:
    """A service whose verifier `judge` asks a scripted model."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(api.running())
        entry = {"name": "judge", "url": f"{url}/v1", "model": "m", **settings}
        config = RewardServiceConfig.model_validate({"judges": (entry,)})
        yield await stack.enter_async_context(serving(config))


def item(completion: str, *, prompt: str = "Name a prime.", verifier: str = "judge", **arguments: object) -> ScoreItem:
    return ScoreItem.model_validate(
        {"id": "0", "verifier": verifier, "completion": completion, "prompt": prompt, "arguments": arguments}
    )


def components(result: ScoreResult) -> dict[str, float]:
    assert result.reward is not None, result.error
    return cast(dict[str, float], result.components)
