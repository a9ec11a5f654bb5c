"""The verdict in a judge's reply, and the part of OpenAI's chat completions API that asks for it.

A reply may quote what it judges, and that may look like a verdict. So a verdict is asked for with a mark that no judged
text contains (`template.mark_of`); one without the mark counts only if it is the only one, and is no quotation.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from reward_service.judges.template import Kind
from reward_service.verifiers.extraction import strip_thinking

HIGHEST_SCORE = 10.0

_WINNERS: Mapping[str, float] = {"first": 1.0, "tie": 0.5, "second": 0.0}
_FIELDS: Mapping[Kind, str] = {"score": "score", "pairwise": "winner"}
_LINES: Mapping[Kind, re.Pattern[str]] = {
    "score": re.compile(
        r"^[^\w\n]*(?:final )?(?:score|rating)[^\w\n]{1,5}(\d+(?:\.\d+)?)(?: */ *10)?[^\w\n]*$", re.I | re.M
    ),
    "pairwise": re.compile(r"^[^\w\n]*(?:winner|verdict)[^\w\n]{1,5}(first|second|tie)[^\w\n]*$", re.I | re.M),
}
# A reply that was made to be long or deep must not take quadratic time.
_MOST_CHARS = 1 << 14
_MOST_OBJECTS = 512


@dataclass(frozen=True)
class _Found:
    """A verdict's value, scaled to 0 to 1, the text that says it, and its mark if it has one."""

    value: float
    text: str
    mark: str | None


def verdict_of(reply: str, *, kind: Kind, mark: str, material: Collection[str]) -> float | None:
    """The verdict from 0 to 1: of a score its tenth, of a pair 1 if the first text won. None if there is no clear one.

    The reply's own thought before `</think>` does not count; of several verdicts with the mark the last does.
    """
    text = strip_thinking(reply)[-_MOST_CHARS:]
    found = [*_objects(text, kind=kind), *_lines(text, kind=kind)]
    marked = [each.value for each in found if each.mark == mark]
    if marked:
        return marked[-1]
    own = {each.value for each in found if each.mark is None and not any(each.text in shown for shown in material)}
    return own.pop() if len(own) == 1 else None


def schema_of(kind: Kind) -> dict[str, JsonValue]:
    """The JSON schema of a verdict: the same for all texts, since endpoints compile each new one."""
    verdict: dict[str, JsonValue] = (
        {"type": "integer", "enum": list(range(11))} if kind == "score" else {"type": "string", "enum": [*_WINNERS]}
    )
    text: dict[str, JsonValue] = {"type": "string"}
    return {
        "type": "object",
        "properties": {"mark": text, "reasoning": text, _FIELDS[kind]: verdict},
        "required": ["mark", "reasoning", _FIELDS[kind]],
        "additionalProperties": False,
    }


def _objects(text: str, *, kind: Kind) -> Iterator[_Found]:
    """JSON objects that hold a verdict, outermost ones only, in order."""
    decoder = json.JSONDecoder()
    start, tries = text.find("{"), 0
    while start >= 0 and tries < _MOST_OBJECTS:
        tries += 1
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            value = _value(found.get(_FIELDS[kind]), kind=kind)
            mark = found.get("mark")
            if value is not None:
                yield _Found(value, text[start:end], mark if isinstance(mark, str) else None)
        start = text.find("{", end)


def _lines(text: str, *, kind: Kind) -> Iterator[_Found]:
    """Lines such as `Score: 7`, for judges that write no JSON."""
    for match in _LINES[kind].finditer(text):
        said = match[1].lower() if kind == "pairwise" else float(match[1])
        value = _value(said, kind=kind)
        if value is not None:
            yield _Found(value, match[0].strip(), None)


def _value(said: object, *, kind: Kind) -> float | None:
    if kind == "pairwise":
        return _WINNERS.get(said) if isinstance(said, str) else None
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        return None
    return float(said) / HIGHEST_SCORE if 0 <= said <= HIGHEST_SCORE else None


PATH = "/chat/completions"


class ChatRequest(RootModel[dict[str, JsonValue]]):
    """A request; a field that is not set is not there at all, since endpoints differ in what they take as null."""

    model_config = ConfigDict(frozen=True)


class _Answered(BaseModel):
    """Fields that are not used may be there, and of any form."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ChatMessage(_Answered):
    """What the model said. Endpoints that tell thoughts apart have them in a field that is not looked at."""

    content: str | None = None


class ChatChoice(_Answered):
    """One completion; `finish_reason` is `length` if it was cut."""

    message: ChatMessage
    finish_reason: str | None = None


class Usage(_Answered):
    """Tokens that the request has cost, in and out."""

    total_tokens: int = Field(0, ge=0)


class ChatAnswer(_Answered):
    """The answer to a request."""

    choices: tuple[ChatChoice, ...] = Field(min_length=1)
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """What was said; nothing of a reply that was cut, whose verdict may be half of one."""
        choice = self.choices[0]
        return "" if choice.finish_reason == "length" else choice.message.content or ""

    @property
    def total_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.total_tokens


def chat_request(
    *,
    model: str,
    system: str,
    user: str,
    temperature: float | None,
    max_tokens: int,
    schema: Mapping[str, JsonValue] | None,
    extra: Mapping[str, JsonValue],
) -> ChatRequest:
    """A request for one reply, which fits `schema` if there is one. Fields in `extra` replace ours."""
    messages: list[JsonValue] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    fields: dict[str, JsonValue] = {"model": model, "messages": messages}
    if "max_completion_tokens" not in extra:
        fields["max_tokens"] = max_tokens
    if temperature is not None:
        fields["temperature"] = temperature
    if schema is not None:
        format: dict[str, JsonValue] = {"name": "verdict", "strict": True, "schema": dict(schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": format}
    return ChatRequest({**fields, **extra})
