"""The arguments of the verifiers that run in workers, apart from their code so that the service need not load it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Extraction = Literal["tag", "boxed", "whole"]


class MathArguments(BaseModel):
    r"""`answer`: the right answer as LaTeX or plain, with or without `$..$` or `\boxed{..}`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: str = Field(
        min_length=1, description=r"the right answer, LaTeX or plain; $..$ and \boxed{..} may be left out"
    )


class ReasoningGymEntry(BaseModel):
    """An entry of a reasoning-gym dataset as the dataset yields it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    question: str
    answer: str | None
    metadata: dict[str, JsonValue]


class ReasoningGymArguments(BaseModel):
    """The dataset's registered name, the entry, and where the answer is looked for: the first place that has one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    dataset: str = Field(min_length=1, description="the dataset's name in reasoning-gym")
    entry: ReasoningGymEntry
    extract: tuple[Extraction, ...] = Field(
        default=("tag", "boxed"),
        min_length=1,
        strict=False,
        description=r"tag: the last <answer>..</answer>; boxed: the last \boxed{..}; whole: all of the text, stripped",
    )
