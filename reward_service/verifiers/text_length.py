"""How long a text is, in units that the caller can know too."""

import re
from typing import Literal

from reward_service.verifier import UserError

Unit = Literal["characters", "words", "whitespace", "tokens"]
UNITS = (
    "characters: Unicode code points; words: runs of letters, digits and underscores; whitespace: what stands between "
    "white space; tokens: the model's, as the caller counted them in token_count"
)
# Far above any text, and small enough to be a float.
MOST = 1 << 40
TOKEN_COUNT = "tokens of the completion, counted by the caller; for the unit tokens, and for no other"

_WORD = re.compile(r"\w+")


def measure(text: str, *, unit: Unit, token_count: int | None) -> int:
    """The length in the unit. Raises UserError if it is tokens and the caller sent no count, or the reverse."""
    if (unit == "tokens") is (token_count is None):
        missing = "token_count is missing" if token_count is None else "token_count is given"
        raise UserError(f"unit is {unit!r} and {missing}; send the completion's token_count with the unit tokens only")
    if token_count is not None:
        return token_count
    if unit == "characters":
        return len(text)
    return sum(1 for _ in _WORD.finditer(text)) if unit == "words" else len(text.split())
