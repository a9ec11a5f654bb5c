"""The settings of a judge, and the arguments that a task may give to it."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from reward_service.endpoints.config import CacheConfig, EndpointConfig
from reward_service.judges.verdict import PLACEHOLDERS, Kind, strange_placeholders


class JudgeConfig(EndpointConfig):
    """A judge: an entry of [[reward-service.judges]]. `url` is that of the API, such as https://host/v1."""

    model: str = Field(min_length=1, description="name of the model at the endpoint")
    kind: Kind = Field(
        "score", description="score: 0 to 10, scaled to 0 to 1; pairwise: against a baseline, 1 won, 0.5 tie, 0 lost"
    )
    template: str | None = Field(
        None, description="text that shows the judge its material, with placeholders; built in if left out"
    )
    template_file: Path | None = Field(None, description="file that holds the template")
    system: str | None = Field(None, description="system message of the judge; built in if left out")
    rubric: str = Field("", description="criteria for {rubric}, where an item gives none; built in if left out")
    structured: Literal["auto", "always", "never"] = Field(
        "auto", description="ask for a reply that fits a JSON schema: auto asks until the endpoint refuses that"
    )
    votes: int = Field(1, ge=1, le=64, description="verdicts of the judge that are averaged, for each order of a pair")
    swap: bool = Field(True, description="of a pair, ask in both orders; where they disagree it is a tie")
    temperature: float | Literal["default"] = Field(
        0.0, description="sampling temperature, at least 0; default leaves it to the endpoint"
    )
    max_tokens: int = Field(1024, ge=1, description="longest reply, thoughts included, in tokens")
    reply_attempts: int = Field(3, ge=1, le=20, description="replies without a verdict before the item is an error")
    keep_thinking: bool = Field(False, description="show the judge the completion's thought before </think>, too")
    extra: dict[str, JsonValue] = Field({}, description="more fields of the request, such as max_completion_tokens")
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="after")
    def _template_fits(self) -> Self:
        if self.template is not None and self.template_file is not None:
            raise ValueError(f"judge {self.name}: template and template_file are both set; set one of them")
        if self.template is not None:
            check_template(self.template, kind=self.kind, name=self.name)
        return self

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if isinstance(self.temperature, float) and self.temperature < 0:
            raise ValueError(f"judge {self.name}: temperature is {self.temperature:g}, expected at least 0")
        if self.votes > 1 and self.temperature == 0.0:
            raise ValueError(f"judge {self.name}: {self.votes} votes at temperature 0 are one vote: set temperature")
        return self


def check_template(template: str, *, kind: Kind, name: str) -> None:
    """Raises ValueError for a template that lacks what is to be judged, or has placeholders that are not known."""
    known = PLACEHOLDERS[kind]
    shown = ", ".join(f"{{{word}}}" for word in known)
    strange = strange_placeholders(template, kind=kind)
    if strange:
        raise ValueError(
            f"judge {name}: the template has the placeholder {{{strange[0]}}}, and those of kind {kind} are {shown}; "
            "for the braces themselves put a space inside"
        )
    needed = ("completion",) if kind == "score" else ("first", "second")
    missing = [word for word in needed if f"{{{word}}}" not in template]
    if missing:
        raise ValueError(
            f"judge {name}: the template lacks {{{missing[0]}}}, which is to be judged; it can use {shown}"
        )


class ScoreArguments(BaseModel):
    """Shown to the judge beside the prompt and the completion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    reference: str | None = Field(default=None, description="a right answer, for a template that has {reference}")
    rubric: str | None = Field(default=None, description="criteria for this task in place of the judge's own")


class PairwiseArguments(ScoreArguments):
    """The completion is compared with `baseline`."""

    baseline: str = Field(description="the completion that this one is compared with")
