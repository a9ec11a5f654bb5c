"""What all kinds of instructions share."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Relation = Literal["less than", "at least"]
Phrase = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to be judged. `detect` names the language of a text, or None where it cannot tell."""

    text: str
    detect: Callable[[str], str | None] = field(repr=False)

    @cached_property
    def language(self) -> str | None:
        """The language of all of it, as langdetect's code; None if it is not one language.

        A text all in capitals is read in small letters: the detector leaves out what it takes for acronyms.
        """
        return self.detect(self.text.lower() if self.text.isupper() else self.text)


class Instruction(BaseModel):
    """One instruction with its arguments, named as in the dataset.

    Numbers need not be strict: readers of tables turn an integer column with gaps into floats.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def followed(self, response: Response) -> bool:
        """Whether the response, which is not blank, follows the instruction."""


def holds(count: int, relation: Relation, bound: int) -> bool:
    """Whether the count is less than, or at least, the bound."""
    return count < bound if relation == "less than" else count >= bound
