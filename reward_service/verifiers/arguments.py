"""The arguments of the verifiers that run in workers, apart from their code so that the service need not load it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

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


Metric = Literal["bleu", "rouge_l", "chrf", "jaccard", "edit"]
Reference = Annotated[str, StringConstraints(max_length=100_000)]


class SimilarityArguments(BaseModel):
    """The references and the metric; each metric gives 1 for a text equal to the reference."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    metric: Metric = Field(
        description="bleu: sentence BLEU-4 with add-one smoothing, which is not sacrebleu's default; rouge_l: F1 of "
        "the longest common subsequence of words, where unlike in rouge-score punctuation and all scripts count; chrf: "
        "sacrebleu's chrF2; jaccard: n-grams of words in common; edit: 1 - edit distance / longer length"
    )
    references: tuple[Reference, ...] = Field(
        min_length=1, max_length=16, strict=False, description="texts to be close to, each compared by itself"
    )
    aggregate: Literal["max", "mean"] = Field("max", description="what the reward is of several references")
    case: bool = Field(False, description="upper and lower case differ")
    n: int = Field(1, ge=1, le=8, description="words of an n-gram, for jaccard only")
    strip_thinking: bool = Field(True, description="judge only what stands after the last </think>")


Place = Literal["fenced", "last_value", "whole"]
Draft = Literal["2020-12", "2019-09", "7", "6", "4"]
JsonSchema = dict[str, JsonValue] | bool


class JsonSchemaArguments(BaseModel):
    """The schema, and how the value is found and judged."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    # The wire calls it `schema`, a name that pydantic's models already use.
    json_schema: JsonSchema = Field(
        alias="schema",
        description="a JSON Schema; references must lead into itself or a draft's own schema; format is not checked",
    )
    draft: Draft = Field("2020-12", description="draft of a schema that does not name its own in $schema")
    extract: tuple[Place, ...] = Field(
        ("fenced", "whole"),
        min_length=1,
        strict=False,
        description="where the value is: the first place that there is. fenced: the last block fenced as json, or "
        "without a language; last_value: the last object or array, between any text; whole: all of the text",
    )
    partial: bool = Field(
        False,
        description="reward of an object that is not valid: valid required properties / (required properties + 1)",
    )
    allow_duplicate_keys: bool = Field(False, description="take an object with a key twice, and the last value of it")
    allow_nan: bool = Field(False, description="take NaN and Infinity, which are not JSON")
    strip_thinking: bool = Field(True, description="judge only what stands after the last </think>")
