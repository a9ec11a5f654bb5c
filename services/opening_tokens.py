"""Tokens of plain text with which a sequence begins, alike for what trains on it and for what scores it."""

from typing import Protocol


class Encode(Protocol):
    """The `encode` of a Hugging Face tokenizer."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def opening_tokens(text: str, encode: Encode) -> list[int]:
    """Tokens that the tokenizer adds by itself go before the text, unless the text has them already, as one that a chat
    template has made.
    """
    bare, whole = (encode(text, add_special_tokens=each) for each in (False, True))
    return bare if bare[:1] == whole[:1] else whole
