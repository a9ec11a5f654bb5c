"""The arguments of `ifeval`, in the shape of the dataset's rows."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from reward_service.verifiers.ifeval.formats import (
    ConstrainedResponse,
    JsonFormat,
    MultipleSections,
    NumberBulletLists,
    NumberHighlightedSections,
    NumberPlaceholders,
    Postscript,
    Title,
)
from reward_service.verifiers.ifeval.wording import (
    CapitalWordFrequency,
    EndChecker,
    EnglishCapital,
    EnglishLowercase,
    ForbiddenWords,
    KeywordExistence,
    KeywordFrequency,
    LetterFrequency,
    NoComma,
    NthParagraphFirstWord,
    NumberParagraphs,
    NumberSentences,
    NumberWords,
    Quotation,
    RepeatPrompt,
    ResponseLanguage,
    TwoResponses,
)

AnyInstruction = Annotated[
    KeywordExistence
    | KeywordFrequency
    | ForbiddenWords
    | LetterFrequency
    | ResponseLanguage
    | NumberSentences
    | NumberParagraphs
    | NumberWords
    | NthParagraphFirstWord
    | NumberPlaceholders
    | Postscript
    | NumberBulletLists
    | ConstrainedResponse
    | NumberHighlightedSections
    | MultipleSections
    | JsonFormat
    | Title
    | TwoResponses
    | RepeatPrompt
    | EndChecker
    | Quotation
    | CapitalWordFrequency
    | EnglishCapital
    | EnglishLowercase
    | NoComma,
    Field(discriminator="instruction_id"),
]

_ADAPTER: TypeAdapter[AnyInstruction] = TypeAdapter(AnyInstruction)


class IfevalArguments(BaseModel):
    """A row of the dataset, unchanged, and how it is judged."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    instruction_id_list: tuple[str, ...] = Field(
        min_length=1, max_length=64, strict=False, description="kinds of the instructions, as keywords:existence"
    )
    kwargs: tuple[dict[str, JsonValue] | None, ...] | None = Field(
        strict=False,
        description="arguments of each instruction, in that order; null, for any or for all of them, is as if left out",
    )
    key: int | str | None = Field(None, description="the row's number; it is not used")
    prompt: str | None = Field(None, description="the row's prompt; it is not used")
    strictness: Literal["strict", "loose"] = Field(
        "strict",
        description="loose: followed if it is without the first line, the last line, the asterisks, or any of these",
    )
    reward: Literal["fraction", "all"] = Field(
        "fraction", description="fraction: the share of instructions followed; all: 1 when all are, else 0"
    )
    strip_thinking: bool = Field(True, description="judge only what stands after the last </think>")

    @model_validator(mode="after")
    def _instructions_fit(self) -> Self:
        self.instructions()
        return self

    def instructions(self) -> tuple[AnyInstruction, ...]:
        """The instructions with their arguments. Raises ValueError that names the first one that does not fit."""
        kwargs = self.kwargs if self.kwargs is not None else (None,) * len(self.instruction_id_list)
        if len(self.instruction_id_list) != len(kwargs):
            raise ValueError(
                f"instruction_id_list has {len(self.instruction_id_list)} entries and kwargs {len(kwargs)}; "
                "give one object of arguments, or null, for each instruction"
            )
        return tuple(
            _instruction(each, given or {}) for each, given in zip(self.instruction_id_list, kwargs, strict=True)
        )


def _instruction(instruction_id: str, arguments: Mapping[str, JsonValue]) -> AnyInstruction:
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return _ADAPTER.validate_python({**given, "instruction_id": instruction_id})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))} {fault['msg']}".strip() for fault in error.errors())
        raise ValueError(f"instruction {instruction_id!r}: {faults}") from error
