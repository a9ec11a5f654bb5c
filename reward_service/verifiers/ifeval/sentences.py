"""Where sentences end: a small rule for English that also knows the full stops of other scripts."""

import re

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
    """Whether the full stop at the index `stop` ends a sentence, by the word before it."""
    window = ("\n" if stop <= _WINDOW else "") + text[max(0, stop - _WINDOW) : stop]
    if _LIST_NUMBER.search(window):
        return False
    word = (window.split() or [""])[-1].lstrip("\"'“‘([*_")
    if word.lower() in _SOMETIMES_LAST:
        return not goes_on
    is_initial = word != "I" and _INITIALS.fullmatch(word) is not None
    return not (is_initial or word.lower() in _NEVER_LAST)
