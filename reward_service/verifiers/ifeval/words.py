"""What a word is, in scripts with and without spaces between words."""

import re
import unicodedata
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


@lru_cache(maxsize=256)
def whole_word(phrase: str) -> re.Pattern[str]:
    """Matches the phrase, in any case, where it is not a part of a longer word; `_` and `*` around it do not count."""
    spaced = r"\s+".join(map(re.escape, phrase.split()))
    joined = rf"[^\W_{_WITHOUT_SPACES}]"
    before = rf"(?<!{joined})" if re.match(joined, phrase) else ""
    after = rf"(?!{joined})" if re.match(joined, phrase[-1:]) else ""
    return re.compile(rf"{before}{spaced}{after}(?![{_marks()}])", re.IGNORECASE)


def count_whole_words(text: str, phrase: str) -> int:
    """How often the phrase stands in the text as a whole word, in any case."""
    return sum(1 for _ in whole_word(phrase).finditer(text))
