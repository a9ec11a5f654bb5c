"""`length`: the completion is as long as it should be."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.extraction import strip_thinking
from reward_service.verifier import Score, Submission
from reward_service.verifiers.text_length import MOST, TOKEN_COUNT, UNITS, Unit, measure


class LengthArguments(BaseModel):
    """Reward = max(floor, in_range - penalty * distance to the range), all lengths in `unit`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    minimum: int = Field(0, ge=0, le=MOST, description="shortest length in the range")
    maximum: int | None = Field(None, ge=0, le=MOST, description="longest length in the range; none if not given")
    unit: Unit = Field("words", description=UNITS)
    token_count: int | None = Field(None, ge=0, le=MOST, description=TOKEN_COUNT)
    in_range: float = Field(1.0, allow_inf_nan=False, description="reward of a length in the range, its ends included")
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False, description="lost for each unit outside the range")
    floor: float = Field(0.0, allow_inf_nan=False, description="lowest reward, however far outside")
    strip_thinking: bool = Field(False, description="measure only what stands after the last </think>")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum {self.maximum} is below minimum {self.minimum}")
        if self.floor > self.in_range:
            raise ValueError(f"floor {self.floor} is above in_range {self.in_range}")
        return self


def length(submission: Submission, arguments: LengthArguments) -> Score:
    """Full reward in a range of lengths, and less with the distance outside it."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    measured = measure(text, unit=arguments.unit, token_count=arguments.token_count)
    longest = measured if arguments.maximum is None else arguments.maximum
    distance = max(arguments.minimum - measured, measured - longest, 0)
    reward = max(arguments.floor, arguments.in_range - arguments.penalty * distance)
    return Score(reward=reward, components={"length": float(measured), "distance": float(distance)})
