"""Instructions on the words and letters of the response.

A keyword is plain text and is looked for as a whole word in any case. The reference takes it for a regular expression,
and but for forbidden words it counts parts of words: `war` in `forward`.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from reward_service.verifiers.ifeval.instruction import Count, Instruction, Phrase, Relation, Response, holds
from reward_service.verifiers.ifeval.words import count_whole_words, has_whole_word

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
