r"""The text of the final answer in a completion, best guess first.

    <answer>..</answer>, else the last \boxed{..} with those beside it, else `#### ..`, else "the answer is ..",
    else the last line if it is all mathematics, else the last formula or number

The first guess that can be read is the answer: further ones are no second chances.
"""

import re
from collections.abc import Iterable, Sequence

from reward_service.verifiers.extraction import (
    boxed,
    boxed_together,
    last_line,
    last_stated,
    last_tagged,
    strip_thinking,
)
from reward_service.verifiers.mathematics.words import number_of

# Without a box the answer is at the end.
_TAIL_CHARS = 4096
_MAX_LINE_CHARS = 300

_ENVIRONMENT = r"\\begin\{(?:align|equation|gather|multline|eqnarray)\*?\}(?P<rows>.+?)\\end\{[a-z]+\*?\}"
_MATRIX = r"(?:\\left[(\[|])?\\begin\{([a-z]*matrix|cases|array)\}.+?\\end\{[a-z]+\}(?:\\right[)\]|])?"
_DISPLAYED = re.compile(
    rf"\$\$(.+?)\$\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|{_ENVIRONMENT}|(?P<matrix>{_MATRIX})|(?<!\\)(?P<dollar>\$)",
    re.DOTALL,
)
_MAX_FORMULA_CHARS = 1000
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_ROMAN = re.compile(r"\\(?:text|mathrm|mbox)\s?\{[^{}]*\}")
_JOINT = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*")
# Formulas that stand in plain text, and numbers.
_LATEX_VALUE = (
    r"[-−]?\d{0,9}\s?\\(?:[dt]?frac\s?\{[^{}]{1,100}\}\s?\{[^{}]{1,100}\}|sqrt\s?(?:\[\d\])?\{[^{}]{1,100}\})"
    r"(?:\s?\\pi(?![A-Za-z]))?"
)
_MEMBER = r"\s*[-−+]?(?:\d{1,9}(?:\.\d{1,9})?(?:/\d{1,9})?|∞|\\infty)\s*"
# `(3, -1)` and `[2, 5)`, the option `(B)`, and `3 out of 8`, `1 in 100`.
_OTHER_VALUE = (
    rf"[(\[]{_MEMBER}(?:[,;]{_MEMBER}){{1,5}}[)\]]|\([A-J]\)(?![\w(])"
    r"|\d{1,9}\s+out\s+of\s+\d[\d,]{0,15}\d?|1\s+in\s+\d[\d,]{0,15}\d?(?=[.\s]|$)"
    r"|\d{1,9}(?:\s?:\s?\d{1,9})+(?:\s?[AaPp]\.?[Mm]\b)?|\d{0,9}\s?[½⅓⅔¼¾⅕⅛⅜⅝⅞]"
)
# An expression without marks, `2x + 1`, `√3`, `-1 < x < 3`; letters of words are no variables.
_IN_PARENTHESES = r"\([^()A-Za-z\n]{0,20}(?:[A-Za-z](?![A-Za-z])[^()A-Za-z\n]{0,20}){0,6}\)"
_ATOM = (
    rf"(?:(?:sqrt|sin|cos|tan|ln|log|exp)\s?{_IN_PARENTHESES}|√\s?(?:\d+|{_IN_PARENTHESES})|\d+(?:\.\d+)?|π|pi(?![a-z])"
    rf"|(?![aAI]\s+\w)[A-Za-z](?![A-Za-z'])|{_IN_PARENTHESES})"
)
_TERM = rf"[-−]?(?:{_ATOM}(?:\s?\^\s?\{{?[-−]?\w{{1,6}}\}}?|[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+|!)?[ ]?){{1,6}}"
_PLAIN = re.compile(rf"{_TERM}(?:(?:<=|>=|[-−+*/×·÷<>≤≥≠])\s?{_TERM}){{0,8}}")
_COMPOSED = re.compile(r".[-−+*/×·÷<>≤≥≠^!π⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]|√|\w(?:pi|qrt|in|os|an|n|og|xp)\b", re.DOTALL)
_LEAD_IN = re.compile(
    r"(?:\b(?:is|are|be|was|equals?|gives?|yields?|gets?|obtain|so|then|thus|hence|therefore)\b|[=:])"
    r"[,:]?\s+(?:equal to\s+|exactly\s+|just\s+|that\s+)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.])(?:{_LATEX_VALUE}|{_OTHER_VALUE}|[-−]?(?:\\?[$€£]\s?)?(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?)"
)
# What says that the value follows.
_COPULA = re.compile(
    r"(?:\b(?:is|are|be|was|equals?|gives?|yields?|est|ist|es|è)\b\s?\}?|[=:：]|是|为|等于)\s*"
    r"(?:(?:equal to|approximately|about|exactly|simply|just|only|therefore|thus|either|roughly|then)\s+){0,2}"
    r"[*_\s$(]*$"
)
# What is denied, and what is only a bound.
_NEGATED = re.compile(
    r"\b(?:not|isn't|never|than|or equal to|at least|at most|below|above|exceeds?)\s+[*_$(]*$", re.IGNORECASE
)
_COPULA_CHARS = 60
# What says how many there are, and what leads to the value, in a sentence that need not be about the answer.
_COUNTS = re.compile(r"\bthere (?:is|are|was|were)\s+(?:exactly |only )?[*_\s$(]*$", re.IGNORECASE)
_LEADS = re.compile(
    r"\b(?:gets?|obtain|makes?|leaves?|leaving|totals?|total of|so|then|thus|hence|therefore|needs?|takes?(?: \w+)?"
    r"|costs?|earns?|pays?|spends?|saves?|receives?|requires?|ends? at|comes? (?:out )?to(?: be)?)\b,?\s*[*_\s$(]*$"
)
_IS_IT = re.compile(r"[\s$*_)]*(?:is|are) (?:the|our)\b")
_ASIDE = re.compile(
    r"(?:,\s*|(?<=[\d$)])\s+)(?:where|which|while|not|but)\b|(?:,\s*|\s+)(?:because|since)\b", re.IGNORECASE
)
_CONDITION = re.compile(r"\s*(?:if|since|when|as|because|for|given)\b[^,$\n]*,", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s)(?!\s*[=+*/<>-])|\n|(?:\.\$|\$\$|\\\])(?=\s+[A-Z])")
_SAID_IN_WORDS = re.compile(
    r"\b(?:there are|there is|is|are|equals)\s+(?P<words>(?:minus |negative )?[a-z]+(?:[- ][a-z]+){0,4}?)"
    r"(?=\s*[.!]?\s*$|\s+(?:such|ways?|integers?|solutions?|values?|numbers?|pairs?|points?|units?)\b)"
)
# `D, it cannot be A`, and not `A, B` or `A or B`.
_CHOSEN = re.compile(r"\(?([A-J])\)?[,.;:]\s+(?!(?:and|or)\b|\(?[A-J]\b)[a-z]")
_OPTION = re.compile(r"(?:option|choice)\s+\(?([A-J])\)?(?![\w(])(?!\s*(?:,|and|or)\s*\(?[A-J]\b)", re.IGNORECASE)
_YES_OR_NO = re.compile(r"[*_]*(yes|no)\b[*_]*[,.]", re.IGNORECASE)
_CORRECT = re.compile(
    r"\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+\(?([A-J])\)? is (?:correct|right|true)\b"
    r"|(?<![\w'])\(?([A-J])\)? is the (?:correct|right|best) (?:answer|option|choice)\b"
)
_CHOICE_LINE = re.compile(r"\(?[A-J][).:]\s+\S")
_CHOICE_MARK = re.compile(r"(?<![\w.])[A-J][).]\s")
_SAYS_IN_ROMAN = re.compile(r"\\text\s?\{[^{}]*\b(?:is|are|=|:)\s*\}")
_LEADING_WORDS = re.compile(r"[^\\\d=]*?(?:[^\W\d_]{2}|[\u3040-\u30ff\u3400-\u9fff])")
_NAMED = re.compile(r"\s*(?:sqrt|pi|sin|cos|tan|ln|log|exp|inf|abs|arc)")
_ONLY_NAME = re.compile(
    r"\s*(?:\\(?:triangle|angle|overline|vec)\s?\{?)?\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\(\w\))?\s*\}?\s*"
)


def final_answers(completion: str) -> tuple[Sequence[str], Sequence[str]]:
    """The guesses at the final answer, best first; and all boxes if there are several different ones.

    Several boxes may be the parts of one answer, or corrections by the last. Thoughts are not looked at.
    """
    text = strip_thinking(completion)
    tagged = last_tagged(text)
    within = text if tagged is None else tagged
    boxes = boxed(within)
    if boxes:
        return _whole_first(", ".join(boxed_together(within))), list(dict.fromkeys(boxes))
    if tagged:
        return _whole_first(tagged), ()
    return list(_unmarked(text[-_TAIL_CHARS:])), ()


def _unmarked(text: str) -> Iterable[str]:
    _, marker, after = text.rpartition("####")
    if marker and (marked := last_line(after.strip().partition("\n")[0])):
        yield marked
        yield from _within(marked)
    stated = last_stated(text)
    if stated is not None:
        stated = _main_clause(stated)
        if choice := _CHOSEN.match(stated) or _OPTION.match(stated):
            yield choice[1]
        if not _is_prose(stated) or _is_number(stated):
            yield stated
        yield from _within(stated)
    if choice := _CORRECT.search(text, _last_sentence(text)):
        yield choice[1] or choice[2]
    line = last_line(text)
    if line is not None:
        line = _main_clause(line.strip("*").strip())
        if len(line) <= _MAX_LINE_CHARS and (not _is_prose(line) or _names_a_choice(line) or _is_number(line)):
            yield line
    if last := _last(text):
        yield last


def _is_number(text: str) -> bool:
    """True of `twenty-one` and the like, and `Twelve.`."""
    return number_of(text.rstrip(".").lower().replace("-", " ").split()) is not None


def _names_a_choice(line: str) -> bool:
    """True if it begins with the letter of an option, `C) oxidants`, and names no other."""
    return _CHOICE_LINE.match(line) is not None and len(_CHOICE_MARK.findall(line)) == 1


def _main_clause(text: str) -> str:
    """Without what is said of the answer: `$x = 42$, where $y = 3$`, `4, not 5`."""
    aside = _ASIDE.search(text)
    if aside is None or text.count("$", 0, aside.start()) % 2:
        return text
    return text[: aside.start()].strip() or text


def _whole_first(text: str) -> Sequence[str]:
    """The text that was set off as the answer; of a sentence, also the formula in it."""
    return [text, *_within(text)] if _is_prose(text) or _SAYS_IN_ROMAN.search(text) else [text]


def words_of(completion: str) -> Sequence[str]:
    """The guesses at a final answer that is in words, best first: also prose, which no formula is looked for in."""
    text = strip_thinking(completion)
    tagged = last_tagged(text)
    box = ", ".join(boxed_together(text if tagged is None else tagged))
    tail = text[-_TAIL_CHARS:]
    decided = _YES_OR_NO.match(last_line(tail) or "")
    found = (box, tagged, decided and decided[1], last_stated(tail), last_line(tail))
    return [guess for guess in found if guess]


def _within(text: str) -> Iterable[str]:
    """The answer in a sentence: what follows the first `is`, else the first formula, else the first number.

    A formula that is only a name is none if there is another, or a number.
    """
    text = text[:_TAIL_CHARS]
    spans = _spans(text)
    numbers = _numbers_outside(text, spans)
    said = [span for span in sorted([*spans, *numbers]) if _COPULA.search(_before(text, span))]
    formulas = [span for span in spans if not _ONLY_NAME.fullmatch(span[2])]
    for found in (said, formulas, numbers, spans):
        if found:
            yield found[0][2]


def _last(text: str) -> str | None:
    """The value that the last sentence says, or else its last formula or number; of all the text if it has none.

    A formula that is only a name is one if there is nothing else, and one that is denied is none.
    """
    start = _last_sentence(text)
    sentence = _main_clause(text[start:])
    if condition := _CONDITION.match(sentence):
        sentence = " " * condition.end() + sentence[condition.end() :]
    found = _values(sentence)
    if not found:
        return _in_words(sentence) or next((span[2] for span in reversed(_values(text))), None)
    counted = [span for span in found if _COUNTS.search(_before(sentence, span))]
    said = [span for span in found if _is_said(sentence, span)]
    return (counted or said or found)[-1][2]


def _last_sentence(text: str) -> int:
    """Start of the last sentence; formulas are not cut."""
    inside = [(start, end) for start, end, _ in _formulas(text)]
    ends = [
        match.end()
        for match in _SENTENCE_END.finditer(text.rstrip())
        if not any(start < match.end() < end for start, end in inside)
    ]
    return ends[-1] if ends else 0


def _values(text: str) -> list["_Span"]:
    spans = _spans(text)
    found = [*(span for span in spans if not _ONLY_NAME.fullmatch(span[2])), *_numbers_outside(text, spans)]
    return sorted(span for span in found or spans if not _NEGATED.search(_before(text, span)))


def _is_said(text: str, span: "_Span") -> bool:
    """True if `is` or the like comes before it, or `is the` after it, or it is an equation."""
    before = _before(text, span)
    if _IS_IT.match(text, span[1]):
        return True
    return _COPULA.search(before) is not None or _LEADS.search(before) is not None or "=" in span[2]


def _before(text: str, span: "_Span") -> str:
    return text[max(0, span[0] - _COPULA_CHARS) : span[0]]


def _in_words(sentence: str) -> str | None:
    """The number in `there are seven such integers`."""
    for match in _SAID_IN_WORDS.finditer(sentence.lower()):
        if _is_number(match["words"]):
            return match["words"]
    return None


_Span = tuple[int, int, str]  # where it starts and ends, and what it holds


def _numbers_outside(text: str, spans: Sequence[_Span]) -> list[_Span]:
    """The numbers that stand in no formula; those that only `and`, `or` or a comma parts are one list."""
    bounds = [0, *(place for start, end, _ in spans for place in (start, end)), len(text)]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    found: list[_Span] = []
    for start, end in gaps:
        plain = list(_plain(text, start, end))
        numbers = [(one.start(), one.end(), one.group()) for one in _NUMBER.finditer(text, start, end)]
        apart = [one for one in numbers if not any(one[0] < other[1] and other[0] < one[1] for other in plain)]
        found.extend(sorted([*plain, *apart]))
    return _joined(text, found)


def _plain(text: str, start: int, end: int) -> Iterable[_Span]:
    """The expressions without marks that `is` and the like lead to."""
    for lead in _LEAD_IN.finditer(text, start, end):
        match = _PLAIN.match(text, lead.end(), end)
        if match is not None and _COMPOSED.search(match.group()):
            yield match.start(), match.end(), match.group().rstrip()


def _spans(text: str) -> list[_Span]:
    """The formulas; those that only `and`, `or` or a comma parts are one."""
    return _joined(text, _formulas(text))


def _joined(text: str, parts: Iterable[_Span]) -> list[_Span]:
    found: list[_Span] = []
    for start, end, content in parts:
        gap = text[found[-1][1] : start] if found else ""
        if found and _JOINT.fullmatch(gap):
            first, stop, before = found.pop()
            plain = before == text[first:stop] and content == text[start:end]  # `2,5` stays as it is
            found.append((first, end, f"{before}{gap}{content}" if plain else f"{before} {gap} {content}"))
        else:
            found.append((start, end, content))
    return found


def _formulas(text: str) -> Iterable[_Span]:
    opened: int | None = None  # where a single dollar sign may have opened a formula
    for match in _DISPLAYED.finditer(text):
        if match["dollar"] is None:
            opened = None
            content = match["matrix"] or next(group for group in match.groups() if group is not None)
            yield match.start(), match.end(), _last_row(content) if match["rows"] else content
        elif opened is not None and _is_formula(text[opened + 1 : match.start()], text[match.end() : match.end() + 1]):
            yield opened, match.end(), text[opened + 1 : match.start()]
            opened = None
        else:
            opened = match.start()


def _last_row(rows: str) -> str:
    """Of equations below each other the last one, without the marks that align them."""
    return rows.strip().removesuffix(r"\\").rpartition(r"\\")[2].replace("&", "")


def _is_formula(content: str, after: str) -> bool:
    """True if what stands between two dollar signs is one, and not the words between two sums of money."""
    if not content.strip() or len(content) > _MAX_FORMULA_CHARS or after.isdigit() or "\n\n" in content:
        return False
    blanks = content[0].isspace(), content[-1].isspace()
    if not any(blanks):
        return "\n" not in content
    money = content[0].isdigit() if not all(blanks) else False
    return not money and _PROSE.search(_ROMAN.sub("", content)) is None


def _is_prose(text: str) -> bool:
    """True if words stand before anything mathematical."""
    text = re.sub(r"\$|\\\(|\\\[", "", text)
    return _NAMED.match(text) is None and _LEADING_WORDS.match(text) is not None
