"""The base of all kinds of instructions, and the language, words and sentences of a text.

Loaded only in worker processes: its profiles take seconds and much memory.
"""

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Annotated, Literal

from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.lang_detect_exception import LangDetectException
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Relation = Literal["less than", "at least"]
Phrase = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Count = Annotated[int, Field(ge=0)]
# What langdetect reads of a text at most, from its start.
_WINDOW_CHARS = 10_000
# Thai to Lao, Burmese, Khmer, Japanese and Chinese: letters of one word touch those of the next.
_WITHOUT_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Each pattern starts only at the first of a run of marks: a megabyte of dots must not be read once from every dot.
_END = re.compile(
    r"(?<![.!?…])(?P<mark>[.!?…]++)(?P<closing>[\"'”’»)\]*_]*+)(?=\s|\Z)|(?<![。！？।॥؟۔])[。！？।॥؟۔]++[”」』）\"]*+"
)
_WORD_CHARACTER = re.compile(r"[^\W_]")
_INITIALS = re.compile(r"[A-Za-z](?:\.[A-Za-z])*")
_LIST_NUMBER = re.compile(r"\n[ \t>*#_-]*\d{1,3}\Z")
_QUOTES = frozenset("\"'”’»")
_WINDOW = 24
_TITLES = ("mr", "mrs", "ms", "mx", "dr", "prof", "st", "rev", "hon", "gen", "col", "sgt", "capt", "lt", "gov", "sen")
_NEVER_LAST = frozenset((*_TITLES, "fig", "vol", "approx", "e.g", "i.e", "vs", "cf", "viz", "ph.d"))
_SOMETIMES_LAST = frozenset(
    ("etc", "inc", "ltd", "co", "corp", "jr", "sr", "al", "a.m", "p.m", "no", "dept", "est", "ave")
)


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to be judged. `detect` names the language of a text, or None where it cannot tell."""

    text: str
    detect: Callable[[str], str | None] = field(repr=False)

    @cached_property
    def language(self) -> str | None:
        """The language of all of it, as langdetect's code; None if it is not one language.

        A text all in capitals is read in small letters: the detector leaves out what it takes for acronyms.
        """
        return self.detect(self.text.lower() if self.text.isupper() else self.text)


class Instruction(BaseModel):
    """An instruction with its arguments, named as in the dataset.

    Numbers need not be strict: readers of tables turn an integer column with gaps into floats.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def followed(self, response: Response) -> bool:
        """True if the response, which is not blank, follows the instruction."""


def holds(count: int, relation: Relation, bound: int) -> bool:
    """True if the count is less than, or at least, the bound."""
    return count < bound if relation == "less than" else count >= bound


def detect_language(text: str) -> str | None:
    """langdetect's code for the language; None if the text has no features of one, or two at its start and end."""
    windows = {text[:_WINDOW_CHARS], text[-_WINDOW_CHARS:]}
    found = {_detect(window) for window in windows}
    return found.pop() if len(found) == 1 else None


def _detect(text: str) -> str | None:
    detector = _FACTORY.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


def _load() -> DetectorFactory:
    """With a seed: langdetect samples the features of a text, and would otherwise judge one text in two ways."""
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


# Loaded with the module, as a part of the worker's start: at the first item it would count against that one's deadline.
_FACTORY = _load()


@cache
def _marks() -> str:
    """All combining marks. Python's `\\w` leaves them out, and so cuts Hindi or Thai words at each vowel sign."""
    return "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c).startswith("M"))


@cache
def _word() -> re.Pattern[str]:
    return re.compile(rf"[\w{_marks()}]+")


def count_words(text: str) -> int:
    """Runs of letters, digits, marks and underscores, as IFEval counts: `don't` and `well-known` are two each."""
    return sum(1 for _ in _word().finditer(text))


def count_whole_words(text: str, phrase: str) -> int:
    """Number of times that the phrase stands in the text, in any case, and not as a part of a longer word.

    White space of any length is equal, and `_` and `*` around the phrase do not belong to a word.
    """
    return sum(1 for _ in _whole_words(text, phrase))


def has_whole_word(text: str, phrase: str) -> bool:
    """True if the phrase stands in the text, as `count_whole_words` counts it."""
    return any(True for _ in _whole_words(text, phrase))


def _whole_words(text: str, phrase: str) -> Iterator[re.Match[str]]:
    for found in _pattern(phrase).finditer(text):
        following = text[found.end() : found.end() + 1]
        # A mark belongs to the letter before it, and makes another word of it.
        if not (following and unicodedata.category(following).startswith("M")):
            yield found


@lru_cache(maxsize=1024)
def _pattern(phrase: str) -> re.Pattern[str]:
    spaced = r"\s+".join(map(re.escape, phrase.split()))
    joined = rf"[^\W_{_WITHOUT_SPACES}]"
    before = rf"(?<!{joined})" if re.match(joined, phrase) else ""
    after = rf"(?!{joined})" if re.match(joined, phrase[-1:]) else ""
    # Only the phrase ignores case: to fold the ranges of all those scripts takes 20 ms for each phrase.
    return re.compile(f"{before}(?i:{spaced}){after}")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, stripped; a last one need not be closed, and a new line alone ends none.

    A sentence ends at `.`, `!`, `?` or `…` with any closing quotes and brackets, before white space or the end; not
    after an initial, a title or the number of a list's item, and not where a small letter goes on after an ellipsis, a
    quotation or an abbreviation such as `etc.`. What has neither letter nor digit is no sentence.
    """
    parts, start = [], 0
    for end in _END.finditer(text):
        if _ends_sentence(text, end):
            parts.append(text[start : end.end()].strip())
            start = end.end()
    parts.append(text[start:].strip())
    return [part for part in parts if _WORD_CHARACTER.search(part)]


def _ends_sentence(text: str, end: re.Match[str]) -> bool:
    following = text[end.end() : end.end() + _WINDOW].lstrip()
    mark = end["mark"]
    if not following or mark is None:
        return True
    goes_on = following[0].islower()
    if mark == "." and not end["closing"]:
        return _stop_ends_sentence(text, end.start(), goes_on=goes_on)
    is_soft = "…" in mark or ".." in mark or not _QUOTES.isdisjoint(end["closing"])
    return not (is_soft and goes_on)


def _stop_ends_sentence(text: str, stop: int, *, goes_on: bool) -> bool:
    """True if the full stop at the index `stop` ends a sentence, by the word before it."""
    window = ("\n" if stop <= _WINDOW else "") + text[max(0, stop - _WINDOW) : stop]
    if _LIST_NUMBER.search(window):
        return False
    word = (window.split() or [""])[-1].lstrip("\"'“‘([*_")
    if word.lower() in _SOMETIMES_LAST:
        return not goes_on
    is_initial = word != "I" and _INITIALS.fullmatch(word) is not None
    return not (is_initial or word.lower() in _NEVER_LAST)
