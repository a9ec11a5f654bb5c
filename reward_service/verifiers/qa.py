"""`qa`: a short answer in words, as reading-comprehension and trivia questions have."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.extraction import (
    TAIL_CHARS,
    last_boxed,
    last_line,
    last_stated,
    last_tagged,
    strip_thinking,
)

Place = Literal["tag", "boxed", "stated", "last_line", "whole"]
Mode = Literal["loose", "soft", "strict"]
_NonEmpty = Annotated[str, Field(min_length=1, max_length=10_000)]
_ARTICLES = frozenset(("a", "an", "the"))
# Characters of scripts that are written without spaces: each is a word.
UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
# Marks without which it would be another word: `1.5`, `-5`, `9/11`, `x<1`, `C++`, `A-`; not the comma of `1,000`.
_OF_THE_WORD = re.compile(
    r"(?<=\d)[./:-](?=\d)|(?<=\d),(?=\d)(?!\d{3}(?!\d))|(?<![^\s(\[])-(?=[.$£€]?\d)|(?<![\w.])\.(?=\d)"
    r"|(?<=[\w\s])[<>=^](?=[\w\s-])|(?<=\b[a-z])(?:\+{1,2}|[#-])(?!\w)"
)
# `10²` is not 102, and `2½` is 2 1/2: what NFKC would put side by side.
_RAISED = re.compile(r"(?<=\d)(?=[⁰¹²³⁴-⁹])")
_VULGAR = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")
_DASHES = re.compile(r"−|(?<=\d)[‐‑–](?=\d)")
_ROMAN = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:rm|bf|it|sf)|mbox)(?![a-z])\s?")


class QaArguments(BaseModel):
    """`answer`: the right answer, or several names for it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: _NonEmpty | Annotated[tuple[_NonEmpty, ...], Field(min_length=1, max_length=256, strict=False)] = Field(
        description="the right answer, or a list of alternatives, of which the best match counts"
    )
    mode: Mode = Field(
        "strict",
        description="strict: the answer is the right one; loose: it contains the right one, word for word; soft: F1 of "
        "their words; all after normalisation: case, punctuation (but for that of 1.5, -5 or C++) and the articles a, "
        "an, the do not count",
    )
    extract: tuple[Place, ...] = Field(
        default=("tag", "whole"),
        min_length=1,
        strict=False,
        description=r"what the answer is, the first that there is: tag: <answer>..</answer>; boxed: \boxed{..}; "
        "stated: 'the answer is ..'; last_line; whole: all of the text",
    )
    max_words: int | None = Field(
        None, ge=1, description="a longer answer earns 0, so that in loose mode a list of everything wins nothing"
    )

    @model_validator(mode="after")
    def _has_words(self) -> "QaArguments":
        for answer in self.golds():
            if not normal_words(answer):
                raise ValueError(f"the answer {answer[:100]!r} has no words after normalisation")
        return self

    def golds(self) -> Sequence[str]:
        """The right answers."""
        return self.answer if isinstance(self.answer, tuple) else (self.answer,)


def qa(submission: Submission, arguments: QaArguments) -> Score:
    """By the mode: 1 or 0 for strict and loose, F1 for soft; components hold all three. No answer is 0.

    Normalisation (but for marks within words) and F1 are those of SQuAD (Rajpurkar et al., 2016). The last
    `TAIL_CHARS` characters are read.
    """
    text = strip_thinking(submission.completion)[-TAIL_CHARS:]
    found = (_PLACES[place](text) for place in arguments.extract)
    answer = next((answer for answer in found if answer), "")
    words = normal_words(answer)
    golds = [normal_words(gold) for gold in arguments.golds()]
    strict = float(any(words == gold for gold in golds))
    loose = float(any(_holds(answer, words, gold) for gold in golds))
    soft = max(_f1(words, gold) for gold in golds)
    too_long = arguments.max_words is not None and len(words) > arguments.max_words
    reward = 0.0 if too_long else {"strict": strict, "loose": loose, "soft": soft}[arguments.mode]
    return Score(reward=reward, components={"strict": strict, "loose": loose, "f1": soft, "words": float(len(words))})


def _whole(text: str) -> str | None:
    return text or None


def _boxed(text: str) -> str | None:
    box = last_boxed(text)
    return None if box is None else _ROMAN.sub("", box)


_PLACES: dict[Place, Callable[[str], str | None]] = {
    "tag": last_tagged,
    "boxed": _boxed,
    "stated": last_stated,
    "last_line": last_line,
    "whole": _whole,
}


def normal_words(text: str) -> tuple[str, ...]:
    """The words in lower case, without punctuation and articles; an answer that is only an article keeps it.

    Marks that make a word what it is stay: `-5` is not `5`, and `C++` is not `C`. So does an article at the end, which
    is none: `hepatitis A`.
    """
    words = _words(text)
    if _ARTICLES.issuperset(words):
        return words
    return tuple(word for word in words[:-1] if word not in _ARTICLES) + words[-1:]


def _words(text: str) -> tuple[str, ...]:
    apart = _RAISED.sub("^", _VULGAR.sub(" ", text))
    lowered = _DASHES.sub("-", unicodedata.normalize("NFKC", apart).lower()).replace("⁄", "/")
    kept = {at for match in _OF_THE_WORD.finditer(lowered) for at in range(*match.span())}
    bare = "".join(mark for at, mark in enumerate(lowered) if at in kept or not _is_punctuation(mark))
    return tuple(_WORD.findall(bare))


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _holds(answer: str, words: Sequence[str], gold: Sequence[str]) -> bool:
    """True if the gold's words stand in the answer's, with a last one that could be an article, `hepatitis A`."""
    with_articles = gold[-1] in _ARTICLES and not _ARTICLES.issuperset(gold)
    return _contains(_words(answer) if with_articles else words, gold)


def _contains(words: Sequence[str], gold: Sequence[str]) -> bool:
    return f" {' '.join(gold)} " in f" {' '.join(words)} "


def _f1(words: Sequence[str], gold: Sequence[str]) -> float:
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2 * shared / (len(words) + len(gold)) if shared else 0.0
