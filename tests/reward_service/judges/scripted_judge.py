"""A language model behind the OpenAI chat API, whose replies a test scripts, and services that ask it."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pydantic import BaseModel, ConfigDict

from protocol.rewards import ScoreItem
from reward_service.config import RewardServiceConfig
from tests.reward_service.scripted_api import Answer, JsonObject, ScriptedApi
from tests.reward_service.serving import OpenService, item_of, serving

TOKENS = 100


class _Message(BaseModel):
    role: str
    content: str


class JudgeRequest(BaseModel):
    """A request that a judge got."""

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
        return str(re.findall(r'\{"mark": "(\w+)"', self.user)[-1])

    def text(self, number: int) -> str:
        """The texts between delimiters, in order."""
        return str(re.findall(rf"<text {self.mark}>\n(.*?)\n</text {self.mark}>", self.user, re.DOTALL)[number])


def said(text: str, *, finish_reason: str = "stop") -> JsonObject:
    """An answer that holds a reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"id": "x", "model": "m", "choices": [choice], "usage": {"total_tokens": TOKENS, "prompt_tokens": 60}}


def score(asked: JudgeRequest, value: object) -> JsonObject:
    """An answer with a score as it is asked for."""
    return said(f'{{"mark": "{asked.mark}", "reasoning": "fine", "score": {value}}}')


def winner(asked: JudgeRequest, value: str) -> JsonObject:
    """An answer with the winner of a pair as it is asked for."""
    return said(f'{{"mark": "{asked.mark}", "reasoning": "fine", "winner": "{value}"}}')


def judge(script: Callable[[int, JudgeRequest], Answer]) -> ScriptedApi:
    return ScriptedApi(lambda number, body: script(number, JudgeRequest.model_validate(body)))


def asked_of(api: ScriptedApi) -> list[JudgeRequest]:
    """Requests that the judge got, in order."""
    return [JudgeRequest.model_validate(body) for body in api.bodies]


@asynccontextmanager
async def judged_by(api: ScriptedApi, **settings: object) -> AsyncIterator[OpenService]:
    """A service whose verifier `judge` asks a scripted model."""
    async with api.running() as url:
        entry = {"name": "judge", "url": f"{url}/v1", "model": "m", **settings}
        async with serving(RewardServiceConfig.model_validate({"judges": (entry,)})) as service:
            yield service


def item(completion: str, *, prompt: str = "Name a prime.", **arguments: object) -> ScoreItem:
    return item_of("judge", completion, prompt=prompt, **arguments)
