"""What a task may say to a judge."""

from pydantic import BaseModel, ConfigDict, Field


class ScoreArguments(BaseModel):
    """What the judge is shown beside the prompt and the completion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    reference: str | None = Field(default=None, description="a right answer, for a template that has {reference}")
    rubric: str | None = Field(default=None, description="criteria for this task in place of the judge's own")


class PairwiseArguments(ScoreArguments):
    """The completion is compared with `baseline`."""

    baseline: str = Field(description="the completion that this one is compared with")
