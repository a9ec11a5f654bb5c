"""What a task may say about its input to a reward model."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.rewards import ScoreItem
from reward_service.models.folder import RewardModel
from reward_service.models.messages import Message, ModelJob
from reward_service.verifier.submission import UserError, validate_arguments


class ConversationMessage(BaseModel):
    """A turn of the conversation before the completion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    role: str = Field(min_length=1)
    content: str


class RewardModelArguments(BaseModel):
    """All may be left out where the model's directory has a file headway_reward.json."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["chat", "plain"] | None = Field(
        default=None, description="chat: by the model's chat template; plain: prompt and completion as they stand"
    )
    tokenize: Literal["apart", "whole"] | None = Field(
        default=None, description="apart: prompt and completion apart, end token last; whole: the text in one piece"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="a longer input is an error")
    messages: tuple[ConversationMessage, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        description="the conversation before the completion; the prompt as a user's message if left out",
    )


def job_of(item: ScoreItem, model: RewardModel) -> ModelJob:
    """The input of an item. Raises UserError."""
    arguments = validate_arguments(model=RewardModelArguments, arguments=item.arguments)
    assert isinstance(arguments, RewardModelArguments)
    own = model.input
    format = arguments.format or (own.format if own else None)
    if format is None:
        raise UserError(
            f"{model.config.path} has no headway_reward.json that says what input the model takes: add one, such as "
            '{"format": "chat"}, or give the argument `format`'
        )
    return ModelJob(
        format=format,
        tokenize=arguments.tokenize or (own.tokenize if own else "whole"),
        max_tokens=_smallest(arguments.max_tokens, own.max_tokens if own else None, model.longest),
        messages=_messages(item, arguments) if format == "chat" else _no_messages(arguments),
        prompt=item.prompt,
        completion=item.completion,
    )


def _messages(item: ScoreItem, arguments: RewardModelArguments) -> tuple[Message, ...]:
    if arguments.messages is not None:
        return tuple(Message(role=message.role, content=message.content) for message in arguments.messages)
    if not item.prompt:
        raise UserError("the item has neither a prompt nor the argument `messages`: what does the completion answer?")
    return (Message(role="user", content=item.prompt),)


def _no_messages(arguments: RewardModelArguments) -> tuple[Message, ...]:
    if arguments.messages is not None:
        raise UserError("`messages` are for the format chat, and this model's input is plain; send a prompt")
    return ()


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
