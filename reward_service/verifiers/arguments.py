"""The arguments of the verifiers that run in workers, apart from their code so that the service need not load it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Extraction = Literal["tag", "boxed", "whole"]


NonEmpty = Annotated[str, Field(min_length=1)]


class MathArguments(BaseModel):
    r"""`answer`: the right answer, or several of which each is right. What it leaves unsaid (a unit) may be added."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: NonEmpty | Annotated[tuple[NonEmpty, ...], Field(min_length=1, max_length=32, strict=False)] = Field(
        description=r"the right answer, LaTeX or plain ($..$ and \boxed{..} may be left out); or a list of alternatives"
    )
    tolerance: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="relative, for every comparison in which there is a decimal; if not given, a decimal stands for a "
        "value without a finite decimal (1/3, pi) within one millionth of it, and two decimals must be the same number",
    )
    convert_units: bool = Field(
        False, description="50 cm is 0.5 m, 180 degrees are pi; else a unit that both answers have must be the same"
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
