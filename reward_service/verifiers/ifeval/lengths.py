"""Instructions on how many sentences, words and paragraphs the response has."""

import re
from typing import Annotated, Literal

from pydantic import Field

from reward_service.verifiers.ifeval.instruction import Count, Instruction, Phrase, Relation, Response, holds
from reward_service.verifiers.ifeval.sentences import split_sentences
from reward_service.verifiers.ifeval.words import count_words

# Not inside a longer run, as in the six asterisks between two responses, and not around a word, where it is emphasis.
_DIVIDER = re.compile(r"(?<!\S)\*\*\*(?!\S)")


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
