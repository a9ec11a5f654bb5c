r"""`multiple_choice`: the completion's final statement names the right option."""

import re
import string
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.extraction import (
    TAIL_CHARS,
    boxed_together,
    last_tagged,
    statements,
    strip_thinking,
)
from reward_service.verifiers.qa import UNSPACED

_DEFAULT_CHOICES = 10  # A to J
_LATEX = re.compile(
    r"\\(?:text(?:bf|it|rm|sf)?|math(?:rm|bf|sf|it)|mbox|operatorname|boxed)\s?|\\[()\[\],;:! ]|[{}$*`_]"
)
_LEAD = re.compile(
    r"(?:(?:the|option|choice|answer|letter|correct|final|it|is|are|be|must|both|either|for sure|definitely|clearly"
    r"|probably|certainly|thus|hence|therefore|so)\b[\s:,–—-]*|(?:因此|所以|综上|显然|故|选项)[,，:：]?\s?)*",
    re.IGNORECASE,
)
# Letters of scripts that are written without spaces may follow: `答案是B选项`, `정답은 B입니다`.
_LETTER = re.compile(rf"\(\s?([A-Za-z])\s?\)|\[([A-Za-z])\]|([A-Za-z])(?![^\W{UNSPACED}\uac00-\ud7a3]|['’])")
# What may follow a letter that is an option; after "A" as an article comes a noun.
_AFTER = re.compile(
    r"\s*(?:$|[.,;:!?)\]\-–—=/&。，；、）」【\"”।]|\n|です|だ|である|입니다|이다|번|选?项|是?正确|(?:because|since|as|for|which|with|and|or|is|that|due|so|given|not|non|rather|\()(?:\s|$)|\()"
)
_ANOTHER = re.compile(r"[\s,/&、，和或与]*(?:(?:or|and)\b\s*)?(?:(?:option|choice)\s*)?\(?([A-Z])\)?(?![\w'’])")
_JOINER = re.compile(r"\s*(?:[,/&、，和或与]|or\b|and\b)")
_DENIED = re.compile(r"\s*(?:is|was)\s(?:not|wrong|incorrect|false)\b")
# Letters and nothing else: `B; A`, `(B) (A)`, `B, or perhaps C`.
_LETTERS = re.compile(
    r"[(\[]?[A-Z][)\]]?(?:(?:(?<=[)\]])|[\s.,;:/|&+、，–—-]+)(?:(?:or|and|perhaps|maybe|possibly|also)\s+){0,3}"
    r"[(\[]?[A-Z][)\]]?)+[\s.]*"
)
_CORRECT = re.compile(
    r"(?<!\w)[(*$]{0,4}([A-Z])[)*$.]{0,4}\s(?:is|must be|would be|seems)\s(?:the\s)?(?:only\s|most\s)?"
    r"(?:correct|right|best|true|appropriate|answer)\b"
)
_CHOSEN = re.compile(
    r"(?:\b(?:choose|chose|select|pick|going with|go with|choosing|selecting|picking)"
    r"|\b(?:selection|pick|guess|it|that) is|\bit's|\bnot \(?[A-Za-z]\)?,? but)\s(?=\S)|选(?:择|项)?[:：]?\s?",
    re.IGNORECASE,
)
# What says at the end of a calculation which option its result is: `12, which corresponds to option D`, `12 (D)`.
_MATCHED = re.compile(
    r"(?<!not )(?<!n['’]t )(?<!never )\b(?:corresponds? to|match(?:es|ing)?|is|namely|i\.e\.,?)\s(?:the\s)?"
    r"(?=(?:option|choice|answer)\s\(?[A-Z]\b)",
    re.IGNORECASE,
)
_BEHIND = re.compile(r"(?<=[\s,])\(([A-Z])\)\W*$")
# Analyses in Chinese call options right one after the other.
_CALLED_RIGHT = re.compile(r"(?<![A-Za-z])([A-Z])\s?(?:选?项)?\s?(?:才?是)?(?:正确|对)(?=的|答案|[，。,.;；、\s]|$)")
# What is said of an option, where it is not the text of one: `A) is incorrect`.
_VERDICT = re.compile(
    r"[\s*_–—-]*(?:(?:this|it)\s)?(?:is|was|are)\s(?:(?:not|also|clearly)\s){0,2}(?:(?:in)?(?:correct|right|wrong|false|true|valid)|too\s)"
    r"|[\s是]*(?:错误|不?正确)",
    re.IGNORECASE,
)
_MAX_CHOSEN_CHARS = 200
_MAX_STATEMENTS = 20
_MAX_BLANK_LINES = 50
_LONE_LETTER = re.compile(r"[(\[]?[A-Za-z][)\].:。]{0,2}")
_LINE_LETTER = re.compile(r"[(\[]?([A-Z])([)\].:]|(?=\s)|$)")
_SPACE = re.compile(r"\s+")


class MultipleChoiceArguments(BaseModel):
    """`answer`: the right option's letter. `options`: their texts in order, from A on."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: str = Field(pattern=r"^[A-Za-z]$", description="the letter of the right option")
    options: tuple[str, ...] | None = Field(
        None,
        min_length=2,
        max_length=26,
        strict=False,
        description="the texts of the options, from A on; if given, an option's text alone is an answer too",
    )
    choices: int | None = Field(
        None, ge=2, le=26, description="how many options there are; if not given, as many as `options`, or else 10"
    )

    @model_validator(mode="after")
    def _answer_is_an_option(self) -> "MultipleChoiceArguments":
        if self.options is not None and self.choices not in (None, len(self.options)):
            raise ValueError(f"choices is {self.choices}, but options has {len(self.options)}; leave one of them out")
        if self.answer.upper() not in self.letters():
            raise ValueError(f"answer {self.answer!r} is none of the options {self.letters()}")
        return self

    def letters(self) -> str:
        """The letters of the options."""
        count = self.choices or (len(self.options) if self.options is not None else _DEFAULT_CHOICES)
        return string.ascii_uppercase[:count]


@dataclass(frozen=True, slots=True)
class _ChosenOption:
    """The option that a statement names; None if it names several."""

    letter: str | None


def multiple_choice(submission: Submission, arguments: MultipleChoiceArguments) -> Score:
    r"""1 when the final statement names the right option and no other, else 0.

    That is the last <answer>..</answer>, else the last \boxed{..}, else what the last `####` marks, else the last of:
    "the answer is ..", "(B) is correct", "I choose B", a last line that is an option. Without any of these it is what
    a result is said to be ("12, which is option B"), else a first line that is an option, before an explanation. The
    last `TAIL_CHARS` characters are read.
    """
    text = strip_thinking(submission.completion)[-TAIL_CHARS:]
    chosen = _final(text, _Options(letters=arguments.letters(), texts=arguments.options or ()))
    correct = chosen is not None and chosen.letter == arguments.answer.upper()
    named = chosen is not None and chosen.letter is not None
    return Score(reward=float(correct), components={"parsed": float(named)})


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of a question."""

    letters: str
    texts: Sequence[str]

    def with_text(self, text: str) -> str | None:
        """The letter of the only option that has this text."""
        wanted = _normal(text)
        found = [letter for letter, option in zip(self.letters, self.texts, strict=False) if _normal(option) == wanted]
        return found[0] if len(found) == 1 and wanted else None

    def text_starts(self, letter: str, rest: str) -> bool:
        """True if what follows a letter begins with the text of its option."""
        if letter not in self.letters:
            return False
        at = self.letters.index(letter)
        own = _normal(self.texts[at]) if at < len(self.texts) else ""
        return bool(own) and _normal(rest.lstrip(" .):-–—")).startswith(own)


def _final(text: str, options: _Options) -> _ChosenOption | None:
    tagged, box = last_tagged(text), ", ".join(boxed_together(text))
    if tagged is not None:
        return _named(tagged, options)
    # A box may hold the value, and a later sentence say which option that is.
    if box and (chosen := _named(box, options)) is not None:
        return chosen
    _, marker, after = text.rpartition("####")
    if marker and (marked := _named(after.strip().partition("\n")[0], options)) is not None:
        return marked
    found = [*_stated(text, options), *_last_line(text, options)] or [*_matched(text, options)]
    return max(found, key=lambda one: one[0])[1] if found else _first_line(text, options)


def _stated(text: str, options: _Options) -> Iterator[tuple[int, _ChosenOption]]:
    """The last statement of each kind that names an option, and where it stands."""
    for at, said in statements(text):
        if (chosen := _named(said, options)) is not None:
            yield at, chosen
            break
    for match in _last(_CORRECT, text):
        if match[1] in options.letters:
            yield match.end(), _ChosenOption(match[1])
            break
    for match in _last(_CHOSEN, text):
        said = text[match.end() : match.end() + _MAX_CHOSEN_CHARS].partition("\n")[0]
        if (chosen := _named(said, options)) is not None:
            yield match.end(), chosen
            break


def _last(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The last matches, the very last first."""
    return reversed(deque(pattern.finditer(text), maxlen=_MAX_STATEMENTS))


def _matched(text: str, options: _Options) -> Iterator[tuple[int, _ChosenOption]]:
    """The option that a result is said to be, and where it stands; and the only option that is called right."""
    for match in _last(_MATCHED, text):
        said = text[match.end() : match.end() + _MAX_CHOSEN_CHARS].partition("\n")[0]
        if (chosen := _named(said, options)) is not None:
            yield match.end(), chosen
            break
    for at, said in statements(text):
        behind = _BEHIND.search(_plain(said))
        if behind is not None and behind[1] in options.letters:
            other = options.with_text(_plain(said)[: behind.start()].rstrip(" ,;:"))
            yield at, _ChosenOption(behind[1] if other in (None, behind[1]) else None)
            break
    right = {match[1] for match in _last(_CALLED_RIGHT, text) if match[1] in options.letters}
    if len(right) == 1:
        yield 0, _ChosenOption(right.pop())


def _last_line(text: str, options: _Options) -> Iterator[tuple[int, _ChosenOption]]:
    """The last line, if it is an option; not the last of a list of options."""
    *before, line = [line for line in text.rsplit("\n", _MAX_BLANK_LINES) if line.strip()][-2:] or [""]
    letter = _opening(line)
    if letter is not None and before and _opening(before[0]) == chr(ord(letter) - 1):
        return  # a list
    if (chosen := _as_line(line, options)) is not None:
        yield len(text), chosen


def _first_line(text: str, options: _Options) -> _ChosenOption | None:
    """The first line, if it is an option and an explanation follows; not the first of a list of options."""
    first, *others = [line for line in text.split("\n") if line.strip()] or [""]
    letter = _opening(first)
    # After a letter alone an analysis of the options may follow, but not the next letter.
    following = others[:1] if letter == first.strip() else others
    return None if any(_is_after(_opening(line), letter) for line in following) else _as_line(first, options)


def _is_after(letter: str | None, before: str | None) -> bool:
    return letter is not None and before is not None and letter > before


def _opening(line: str) -> str | None:
    """The letter that a line is, or that stands marked at its beginning, as in a list of options."""
    starts = _LINE_LETTER.match(_plain(line).lstrip("-•+ "))
    return starts[1] if starts is not None and (starts[2] or not starts.string[starts.end() :]) else None


def _as_line(line: str, options: _Options) -> _ChosenOption | None:
    """The option that a line is: a letter, a letter with its text, or the text."""
    plain = _plain(line)
    lead = _LEAD.match(plain)
    rest = plain[lead.end() :] if lead is not None else plain
    if not (_LONE_LETTER.fullmatch(rest) or options.with_text(plain) or _starts_with_option(plain, options)):
        return None
    return _named(line, options)


def _starts_with_option(plain: str, options: _Options) -> bool:
    """True if a line begins with a marked letter. `C. elegans` is option C only if that is what the option says."""
    starts = _LINE_LETTER.match(plain)
    if starts is None:
        return False
    if options.text_starts(starts[1], plain[starts.end() :]):
        return True
    if _VERDICT.match(plain, starts.end()):
        return False
    return starts[2] in (")", "]") or (starts[2] in (".", ":") and not options.texts)


def _named(content: str, options: _Options) -> _ChosenOption | None:
    """The option that a short text begins with, or that it is; None if it names none."""
    plain = _plain(content)
    by_text = options.with_text(plain)
    if by_text is not None:
        return _ChosenOption(by_text)
    lead = _LEAD.match(plain)
    rest = plain[lead.end() :] if lead is not None else plain
    match = _LETTER.match(rest)
    if match is None:
        by_text = options.with_text(rest)
        return None if by_text is None else _ChosenOption(by_text)
    bare = match[3] is not None
    letter = (match[1] or match[2] or match[3]).upper()
    after = rest[match.end() :]
    several = _LETTERS.fullmatch(rest[:_MAX_CHOSEN_CHARS]) and len(set(options.letters).intersection(rest)) > 1
    if several and not options.text_starts(letter, after):  # `(B) A` where that is the option's text
        return _ChosenOption(None)
    if letter not in options.letters or (bare and not _is_choice(match[3], after, letter, options)):
        by_text = options.with_text(rest)
        return None if by_text is None else _ChosenOption(by_text)
    return _ChosenOption(None if _is_contradicted(letter, after, options) else letter)


def _is_choice(written: str, after: str, letter: str, options: _Options) -> bool:
    """True if a letter in no brackets is an option: a capital, or all that there is."""
    if not after.strip(" .,:;!?。)]"):
        return True
    return written.isupper() and (_AFTER.match(after) is not None or options.text_starts(letter, after))


def _is_contradicted(letter: str, after: str, options: _Options) -> bool:
    """True if another option is named beside the letter, `B or C`, `A, B`, or the text of another; or it is denied."""
    if _JOINER.match(after):
        another = _ANOTHER.match(after)
        if another is not None and another[1] in options.letters and another[1] != letter:
            return True
    if _DENIED.match(after):
        return True
    other = options.with_text(after.lstrip(" .):-–—"))
    return other is not None and other != letter


def _plain(text: str) -> str:
    """Without LaTeX and Markdown, and without quotes around it."""
    return _SPACE.sub(" ", _LATEX.sub("", text.replace(r"\ ", " "))).strip().strip("\"'“”").strip()


def _normal(text: str) -> str:
    return _plain(text).casefold().strip(" .,:;!?()")
