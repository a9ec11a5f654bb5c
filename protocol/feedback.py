"""HTTP bodies of late rewards: what a generator of users has answered, and what users say of it, days later perhaps."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from protocol.model import VersionText, WireModel

KEY_HEADER = "X-Headway-Feedback-Key"
"""The header of an answer with the key by which its completion may be rated; its id is the `id` in the body."""
MAX_ANSWER_CHARS = 1 << 20
CompletionId = Annotated[str, StringConstraints(min_length=8, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]


class ServedCompletion(WireModel):
    """`POST /v1/served` at the learner: an answer to a user. `version` was served when the request came, `until` when
    it was answered; `key_hash` is the SHA-256 of its key, in hexadecimal, so that the key is the user's alone.
    `cut_off` are the indices of those choices that the policy did not end by itself.
    """

    id: CompletionId
    key_hash: str = Field(min_length=64, max_length=64)
    version: VersionText
    until: VersionText
    served_at: float = Field(ge=0)
    prompt: JsonValue
    choices: tuple[Annotated[str, StringConstraints(max_length=MAX_ANSWER_CHARS)], ...] = Field(
        min_length=1, max_length=128
    )
    cut_off: tuple[Annotated[int, Field(ge=0, lt=128)], ...] = ()


class ServedAnswer(WireModel):
    """The learner keeps it, or has kept it before."""

    id: CompletionId


class Feedback(WireModel):
    """`POST /v1/feedback`: a user's reward for a completion, from 0 (bad) to 1 (good), by its id and key. `choice` is
    the index of the one that is meant, of several answers.
    """

    id: CompletionId
    key: str = Field(min_length=16, max_length=128)
    reward: float = Field(ge=0, le=1, allow_inf_nan=False)
    choice: int = Field(default=0, ge=0, lt=128)
    comment: str = Field(default="", max_length=4000)


class FeedbackAnswer(WireModel):
    """The reward is on the disk, with the completion and its version, once: `repeated` if it was there before."""

    id: CompletionId
    version: VersionText
    outcome: Literal["kept", "repeated"]
