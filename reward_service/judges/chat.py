"""What is used of the OpenAI chat completions API."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

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
