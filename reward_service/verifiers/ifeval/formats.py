"""Instructions on what the response contains and how it is laid out."""

import json
import re
from typing import Literal

from reward_service.verifiers.ifeval.instruction import Count, Instruction, Phrase, Response

_LETTER = re.compile(r"[^\W_]")
_PLACEHOLDER = re.compile(r"\[[^\S\n]*[^\s\[\]][^\[\]\n]*\]")
_BULLET = re.compile(r"^[ \t]*[*+-][ \t]+(?=\S)")
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?=[^\s*])[^*\n]*(?<=[^\s*])\1(?!\*)")
_TITLE = re.compile(r"<<([^<\n]*)>>")
_FENCE = re.compile(r"```[A-Za-z]*+\s*+(.*)```", re.DOTALL)
_LINE_DECORATION = r"^[ \t>#*_\"“(\[-]*"


class NumberPlaceholders(Instruction):
    """At least so many placeholders in square brackets, none blank."""

    instruction_id: Literal["detectable_content:number_placeholders"]
    num_placeholders: Count

    def followed(self, response: Response) -> bool:
        return sum(1 for _ in _PLACEHOLDER.finditer(response.text)) >= self.num_placeholders


class Postscript(Instruction):
    """The response ends with a postscript: text, the marker in any case, and text after it.

    The reference is content with the marker anywhere, also with the `P.S.` of `P.P.S.`, or without any text.
    """

    instruction_id: Literal["detectable_content:postscript"]
    postscript_marker: Phrase

    def followed(self, response: Response) -> bool:
        marker = re.escape(self.postscript_marker).replace(r"\.", r"\.\s?")
        first = _LETTER.search(response.text)
        found = re.finditer(rf"(?<![\w.]){marker}", response.text, re.IGNORECASE)
        starts_after_text = (match for match in found if first is not None and match.start() > first.start())
        postscript = next(starts_after_text, None)
        return postscript is not None and _LETTER.search(response.text, postscript.end()) is not None


class NumberBulletLists(Instruction):
    """Exactly so many items of markdown lists: lines with `*`, `-` or `+`, white space, and text.

    The reference also counts lines that start with emphasis, negative numbers, and the dividers `---`.
    """

    instruction_id: Literal["detectable_format:number_bullet_lists"]
    num_bullets: Count

    def followed(self, response: Response) -> bool:
        return sum(_is_bullet(line) for line in response.text.split("\n")) == self.num_bullets


class ConstrainedResponse(Instruction):
    """One of the three answers that IFEval allows, and not two of them, with or without more text."""

    instruction_id: Literal["detectable_format:constrained_response"]

    def followed(self, response: Response) -> bool:
        return sum(option in response.text for option in _OPTIONS) == 1


class NumberHighlightedSections(Instruction):
    """At least so many passages within one line that are emphasised: `*so*`, `**so**` or `***so***`.

    The reference counts the last form twice, and takes `2 * 3 * 4` for one.
    """

    instruction_id: Literal["detectable_format:number_highlighted_sections"]
    num_highlights: Count

    def followed(self, response: Response) -> bool:
        return sum(1 for _ in _HIGHLIGHT.finditer(response.text)) >= self.num_highlights


class MultipleSections(Instruction):
    """At least so many sections, each opened by a line that starts with the splitter and a number of its own.

    The reference also counts mentions in the text, and one number many times.
    """

    instruction_id: Literal["detectable_format:multiple_sections"]
    section_spliter: Phrase
    num_sections: Count

    def followed(self, response: Response) -> bool:
        opening = rf"{_LINE_DECORATION}{re.escape(self.section_spliter)}\s?(\d{{1,9}})(?!\w)"
        numbers = re.findall(opening, response.text, re.MULTILINE)
        return len(set(map(int, numbers))) >= self.num_sections


class JsonFormat(Instruction):
    """All of the response is one JSON value, in a fenced block or not. NaN and Infinity are not JSON."""

    instruction_id: Literal["detectable_format:json_format"]

    def followed(self, response: Response) -> bool:
        text = response.text.strip()
        fenced = _FENCE.fullmatch(text)
        return _is_json(fenced[1] if fenced else text)


class Title(Instruction):
    """A title in double angular brackets, not blank, within one line."""

    instruction_id: Literal["detectable_format:title"]

    def followed(self, response: Response) -> bool:
        return any(title.strip(">").strip() for title in _TITLE.findall(response.text))


def _is_bullet(line: str) -> bool:
    marks = line.split()
    is_divider = len(marks) > 2 and len(set(marks)) == 1
    return _BULLET.match(line) is not None and not is_divider


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        # Numbers stay text: Python refuses to convert an integer of some thousand digits, which is good JSON.
        json.loads(text, parse_constant=refuse, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True
