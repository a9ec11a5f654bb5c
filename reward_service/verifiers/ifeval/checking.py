"""The verifier `ifeval`, and its arguments in the shape of the dataset's rows. It judges in workers, for langdetect."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.extraction import strip_thinking
from reward_service.verifiers.ifeval.instruction import Instruction, Response, detect_language
from reward_service.verifiers.ifeval.kinds import (
    CapitalWordFrequency,
    ConstrainedResponse,
    EndChecker,
    EnglishCapital,
    EnglishLowercase,
    ForbiddenWords,
    JsonFormat,
    KeywordExistence,
    KeywordFrequency,
    LetterFrequency,
    MultipleSections,
    NoComma,
    NthParagraphFirstWord,
    NumberBulletLists,
    NumberHighlightedSections,
    NumberParagraphs,
    NumberPlaceholders,
    NumberSentences,
    NumberWords,
    Postscript,
    Quotation,
    RepeatPrompt,
    ResponseLanguage,
    Title,
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


def ifeval(submission: Submission, arguments: IfevalArguments) -> Score:
    """The share of IFEval's instructions that the completion follows, or whether it follows all."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    text = text.replace("\r\n", "\n")
    variants = _variants(text) if arguments.strictness == "loose" else (text,)
    responses = [Response(text=variant, detect=detect_language) for variant in variants if variant.strip()]
    followed = [_followed(instruction, responses) for instruction in arguments.instructions()]
    fraction = sum(followed) / len(followed)
    components = dict(zip(_names(arguments.instruction_id_list), map(float, followed), strict=True))
    reward = fraction if arguments.reward == "fraction" else float(all(followed))
    return Score(reward=reward, components={"fraction": fraction, "all": float(all(followed)), **components})


def _followed(instruction: Instruction, responses: Sequence[Response]) -> bool:
    """True if any form of the response follows. A blank one follows nothing, not even to have no comma."""
    return any(instruction.followed(response) for response in responses)


def _variants(text: str) -> tuple[str, ...]:
    """The text with and without its first line, its last line and its asterisks: eight forms, the text itself first."""
    lines = text.split("\n")
    spans = [text, *("\n".join(lines[first:last]).strip() for first, last in ((1, None), (None, -1), (1, -1)))]
    return tuple(dict.fromkeys(span.replace("*", "") if bare else span for bare, span in product((False, True), spans)))


def _names(instruction_ids: Sequence[str]) -> Iterator[str]:
    """The ids, and `#2` after the second of one id: some rows of the dataset name one twice."""
    seen = Counter[str]()
    for instruction_id in instruction_ids:
        seen[instruction_id] += 1
        yield instruction_id if seen[instruction_id] == 1 else f"{instruction_id}#{seen[instruction_id]}"
