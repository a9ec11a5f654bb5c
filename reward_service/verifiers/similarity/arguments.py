"""The arguments of `similarity`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Metric = Literal["bleu", "rouge_l", "chrf", "jaccard", "edit"]
Reference = Annotated[str, StringConstraints(max_length=100_000)]


class SimilarityArguments(BaseModel):
    """The references and the metric; each metric gives 1 for a text equal to the reference."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    metric: Metric = Field(
        description="bleu: sentence BLEU-4; rouge_l: F1 of the longest common subsequence of words; chrf: character "
        "n-grams up to 6, beta 2; jaccard: n-grams of words in common; edit: 1 - edit distance / longer length"
    )
    references: tuple[Reference, ...] = Field(
        min_length=1, max_length=16, strict=False, description="texts to be close to, each compared by itself"
    )
    aggregate: Literal["max", "mean"] = Field("max", description="what the reward is of several references")
    case: bool = Field(False, description="upper and lower case differ")
    n: int = Field(1, ge=1, le=8, description="words of an n-gram, for jaccard only")
    strip_thinking: bool = Field(True, description="judge only what stands after the last </think>")
