"""The 25 kinds of instructions: on a response's words and language, and on what it contains and how it is laid out.

A keyword is plain text and is looked for as a whole word in any case. The reference takes it for a regular expression,
and but for forbidden words it counts parts of words: `war` in `forward`.
"""

import json
import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from reward_service.verifiers.ifeval.instruction import (
    Count,
    Instruction,
    Phrase,
    Relation,
    Response,
    count_whole_words,
    count_words,
    has_whole_word,
    holds,
    split_sentences,
)

_SEPARATOR = re.compile(r"(?<!\*)\*{6}(?!\*)")
# A word goes over apostrophes, hyphens and the dots of abbreviations.
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_COMMAS = frozenset(",，､、،﹐︐")
# Not inside a longer run, as in the six asterisks between two responses, and not around a word, where it is emphasis.
_DIVIDER = re.compile(r"(?<!\S)\*\*\*(?!\S)")
_LETTER = re.compile(r"[^\W_]")
_PLACEHOLDER = re.compile(r"\[[^\S\n]*[^\s\[\]][^\[\]\n]*\]")
_BULLET = re.compile(r"^[ \t]*[*+-][ \t]+(?=\S)")
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?=[^\s*])[^*\n]*(?<=[^\s*])\1(?!\*)")
_TITLE = re.compile(r"<<([^<\n]*)>>")
_FENCE = re.compile(r"```[A-Za-z]*+\s*+(.*)```", re.DOTALL)
_LINE_DECORATION = r"^[ \t>#*_\"“(\[-]*"


class ResponseLanguage(Instruction):
    """All of the response is in the language, a code of ISO 639-1; `zh` is Chinese in either script.

    A text without a language, such as a number, does not follow; for the reference it does.
    """

    instruction_id: Literal["language:response_language"]
    language: Phrase

    def followed(self, response: Response) -> bool:
        return response.language is not None and response.language in (self.language, f"{self.language}-cn")


class TwoResponses(Instruction):
    """Two responses that differ in more than case and white space, and six asterisks between them.

    The asterisks may also open or close all.
    """

    instruction_id: Literal["combination:two_responses"]

    def followed(self, response: Response) -> bool:
        parts = [_folded(part) for part in _SEPARATOR.split(response.text)]
        given = [part for part in parts if part]
        return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


class RepeatPrompt(Instruction):
    """The response starts with the prompt, but for case and white space, and an answer follows.

    The reference does not ask for the answer.
    """

    instruction_id: Literal["combination:repeat_prompt"]
    prompt_to_repeat: Phrase

    def followed(self, response: Response) -> bool:
        text, prompt = _folded(response.text), _folded(self.prompt_to_repeat)
        return text.startswith(prompt) and re.search(r"\w", text[len(prompt) :]) is not None


class EndChecker(Instruction):
    """The response ends with the phrase, in any case, but for quotes and white space around either."""

    instruction_id: Literal["startend:end_checker"]
    end_phrase: Phrase

    def followed(self, response: Response) -> bool:
        text, phrase = (part.strip().strip('"“”').strip().lower() for part in (response.text, self.end_phrase))
        before = text[: len(text) - len(phrase)]
        within_word = phrase[:1].isalnum() and before[-1:].isalnum()
        return text.endswith(phrase) and not within_word


class Quotation(Instruction):
    """All of the response is in double quotation marks, straight or curly (the reference knows the straight ones)."""

    instruction_id: Literal["startend:quotation"]

    def followed(self, response: Response) -> bool:
        text = response.text.strip()
        return len(text) > 2 and text[0] + text[-1] in ('""', "“”") and not text[1:-1].isspace()


class CapitalWordFrequency(Instruction):
    """Less than, or at least, so many words all in capitals; `I` is one, and so is `WELL-KNOWN`."""

    instruction_id: Literal["change_case:capital_word_frequency"]
    capital_frequency: Count
    capital_relation: Relation

    def followed(self, response: Response) -> bool:
        count = sum(word.group().isupper() for word in _WORD.finditer(response.text))
        return holds(count, self.capital_relation, self.capital_frequency)


class EnglishCapital(Instruction):
    """In English, and all letters are capitals."""

    instruction_id: Literal["change_case:english_capital"]

    def followed(self, response: Response) -> bool:
        return response.text.isupper() and response.language == "en"


class EnglishLowercase(Instruction):
    """In English, and no letter is a capital."""

    instruction_id: Literal["change_case:english_lowercase"]

    def followed(self, response: Response) -> bool:
        return response.text.islower() and response.language == "en"


class NoComma(Instruction):
    """No comma, of whichever script (the reference knows `,`)."""

    instruction_id: Literal["punctuation:no_comma"]

    def followed(self, response: Response) -> bool:
        return _COMMAS.isdisjoint(response.text)


def _folded(text: str) -> str:
    return " ".join(text.split()).lower()


Letter = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1)]


class KeywordExistence(Instruction):
    """All keywords occur."""

    instruction_id: Literal["keywords:existence"]
    keywords: tuple[Phrase, ...] = Field(min_length=1)

    def followed(self, response: Response) -> bool:
        return all(has_whole_word(response.text, keyword) for keyword in self.keywords)


class KeywordFrequency(Instruction):
    """The keyword occurs less than, or at least, so many times."""

    instruction_id: Literal["keywords:frequency"]
    keyword: Phrase
    frequency: Count
    relation: Relation

    def followed(self, response: Response) -> bool:
        return holds(count_whole_words(response.text, self.keyword), self.relation, self.frequency)


class ForbiddenWords(Instruction):
    """None of the words occurs."""

    instruction_id: Literal["keywords:forbidden_words"]
    forbidden_words: tuple[Phrase, ...] = Field(min_length=1)

    def followed(self, response: Response) -> bool:
        return not any(has_whole_word(response.text, word) for word in self.forbidden_words)


class LetterFrequency(Instruction):
    """The letter, in any case, occurs less than, or at least, so many times.

    Any one character will do: the dataset asks for `#` and `!` too, which older references replace by a random letter.
    """

    instruction_id: Literal["keywords:letter_frequency"]
    letter: Letter
    let_frequency: Count
    let_relation: Relation

    def followed(self, response: Response) -> bool:
        return holds(response.text.lower().count(self.letter.lower()), self.let_relation, self.let_frequency)


class NumberSentences(Instruction):
    """Less than, or at least, so many sentences, by the rule of `split_sentences` (the reference asks NLTK's model)."""

    instruction_id: Literal["length_constraints:number_sentences"]
    num_sentences: Count
    relation: Relation

    def followed(self, response: Response) -> bool:
        return holds(len(split_sentences(response.text)), self.relation, self.num_sentences)


class NumberWords(Instruction):
    """Less than, or at least, so many words, as `count_words` counts them."""

    instruction_id: Literal["length_constraints:number_words"]
    num_words: Count
    relation: Relation

    def followed(self, response: Response) -> bool:
        return holds(count_words(response.text), self.relation, self.num_words)


class NumberParagraphs(Instruction):
    """Exactly so many paragraphs, none empty, with the divider `***` between them; one may also open or close all.

    The reference takes the asterisks of `***bold italics***` for two dividers.
    """

    instruction_id: Literal["length_constraints:number_paragraphs"]
    num_paragraphs: Count

    def followed(self, response: Response) -> bool:
        paragraphs = [part.strip() for part in _DIVIDER.split(response.text)]
        if not all(paragraphs[1:-1]):
            return False
        return sum(map(bool, paragraphs)) == self.num_paragraphs


class NthParagraphFirstWord(Instruction):
    """Exactly so many paragraphs, two new lines between them, of which the nth, from 1, starts with the word.

    Empty paragraphs do not count, neither in the number nor in the order; the reference leaves them out of the number
    only, and so looks at the wrong paragraph after one. Quotes before the word do not count. The word may be several,
    and may have an apostrophe, at which the reference cuts it.
    """

    instruction_id: Literal["length_constraints:nth_paragraph_first_word"]
    num_paragraphs: Count
    nth_paragraph: Annotated[int, Field(ge=1)]
    first_word: Phrase

    def followed(self, response: Response) -> bool:
        paragraphs = [part.strip() for part in response.text.split("\n\n") if part.strip()]
        if len(paragraphs) != self.num_paragraphs or self.nth_paragraph > len(paragraphs):
            return False
        first = rf"[\"'“‘]*{re.escape(self.first_word)}(?!\w|['’-]\w)"
        return re.match(first, paragraphs[self.nth_paragraph - 1], re.IGNORECASE) is not None


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
    """Requires one of the three answers that IFEval allows, and not two of them, with or without more text."""

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
