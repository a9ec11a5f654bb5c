"""What a word is, in scripts with and without spaces between words."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache

# Thai to Lao, Burmese, Khmer, Japanese and Chinese: letters of one word touch those of the next.
_WITHOUT_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"


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
    """How often the phrase stands in the text, in any case, and not as a part of a longer word.

    White space of any length is equal, and `_` and `*` around the phrase do not belong to a word.
    """
    return sum(1 for _ in _whole_words(text, phrase))


def has_whole_word(text: str, phrase: str) -> bool:
    """Whether the phrase stands in the text, as `count_whole_words` counts it."""
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
