"""Instructions on the language, the case and the punctuation of the response, and on how it starts and ends."""

import re
from typing import Literal

from reward_service.verifiers.ifeval.instruction import Count, Instruction, Phrase, Relation, Response, holds

_SEPARATOR = re.compile(r"(?<!\*)\*{6}(?!\*)")
# A word goes over apostrophes, hyphens and the dots of abbreviations.
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_COMMAS = frozenset(",，､、،﹐︐")


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
