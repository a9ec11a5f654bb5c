"""`format`: the completion has the parts that it should have, in order."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from reward_service.extraction import boxed
from reward_service.verifier import Score, Submission

TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]


class FormatArguments(BaseModel):
    r"""Tags that follow each other, as <think>..</think><answer>..</answer>, and a \boxed{..}."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tags: tuple[TagName, ...] = Field(
        ("think", "answer"), max_length=16, strict=False, description="names of the tags, in order; none if empty"
    )
    first_tag_in_prompt: bool = Field(
        False, description="the prompt opens the first tag, the completion only closes it"
    )
    nothing_outside: bool = Field(True, description="outside the tags there is only white space")
    boxed: bool = Field(
        False, description=r"a \boxed{..} that is not empty stands in the last tag; anywhere, if no tags"
    )
    reward: Literal["fraction", "all"] = Field(
        "all", description="all: 1 when all checks pass, else 0; fraction: the share of checks that pass"
    )

    @model_validator(mode="after")
    def _some_check(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            raise ValueError("tags names one twice; each tag stands once in the completion")
        if not self.tags and not self.boxed:
            raise ValueError("there is nothing to check; name tags or set boxed")
        return self


def well_formed(submission: Submission, arguments: FormatArguments) -> Score:
    """Whether the completion has its tags, each once and in order, and its box."""
    text = submission.completion
    if arguments.first_tag_in_prompt and arguments.tags:
        text = f"<{arguments.tags[0]}>{text}"
    checks = {**_tag_checks(text, arguments), **_box_check(text, arguments)}
    fraction = sum(checks.values()) / len(checks)
    reward = fraction if arguments.reward == "fraction" else float(all(checks.values()))
    return Score(reward=reward, components={name: float(passed) for name, passed in checks.items()})


def _tag_checks(text: str, arguments: FormatArguments) -> Mapping[str, bool]:
    """For each tag: it opens once, then closes once, around something. And for all of them: the order, the outside."""
    if not arguments.tags:
        return {}
    checks = {f"tag_{name}": bool((_content(text, name) or "").strip()) for name in arguments.tags}
    marks = re.findall(rf"</?(?:{'|'.join(map(re.escape, arguments.tags))})>", text)
    expected = [mark for name in arguments.tags for mark in (f"<{name}>", f"</{name}>")]
    checks["order"] = marks == expected
    if arguments.nothing_outside:
        checks["outside"] = marks == expected and not _outside(text, arguments).strip()
    return checks


def _box_check(text: str, arguments: FormatArguments) -> Mapping[str, bool]:
    if not arguments.boxed:
        return {}
    where = _content(text, arguments.tags[-1]) if arguments.tags else text
    return {"boxed": where is not None and bool(boxed(where))}


def _content(text: str, name: str) -> str | None:
    """What stands in the tag; None unless it opens once and then closes once."""
    if text.count(f"<{name}>") != 1 or text.count(f"</{name}>") != 1:
        return None
    _, _, rest = text.partition(f"<{name}>")
    content, close, _ = rest.partition(f"</{name}>")
    return content if close else None


def _outside(text: str, arguments: FormatArguments) -> str:
    """What stands outside the tags, which are known to be in order."""
    for name in arguments.tags:
        before, _, rest = text.partition(f"<{name}>")
        text = before + rest.partition(f"</{name}>")[2]
    return text
