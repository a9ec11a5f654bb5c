"""`overlong`: the soft punishment of completions that come close to the longest length or go over it."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.verifier import Score, Submission
from reward_service.verifiers.text_length import MOST, TOKEN_COUNT, UNITS, Unit, measure


class OverlongArguments(BaseModel):
    """The longest length, and how far before it the punishment starts, both in `unit`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    maximum: int = Field(ge=1, le=MOST, description="the longest length; the reward falls to -1 there")
    buffer: int = Field(ge=0, description="how far below maximum the reward starts to fall from 0; 0: just past it")
    unit: Unit = Field("words", description=UNITS)
    token_count: int | None = Field(None, ge=0, le=MOST, description=TOKEN_COUNT)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.buffer > self.maximum:
            raise ValueError(f"buffer {self.buffer} is above maximum {self.maximum}")
        return self


def overlong(submission: Submission, arguments: OverlongArguments) -> Score:
    """0 up to maximum - buffer, from there linear down to -1 at maximum, and -1 beyond.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13), over the whole completion.
    """
    measured = measure(submission.completion, unit=arguments.unit, token_count=arguments.token_count)
    over = measured - (arguments.maximum - arguments.buffer)
    share = min(1.0, max(0, over) / max(1, arguments.buffer))
    return Score(reward=0.0 - share, components={"length": float(measured)})
