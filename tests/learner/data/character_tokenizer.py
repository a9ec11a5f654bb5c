"""A tokenizer that a reader can follow: one token a character."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

END = 0


class CharacterTokenizer:
    """A tokenizer with a token for each character; `|` is the end token. It adds `begin` by itself."""

    eos_token_id: int | None = END
    begin = ""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = self.begin + text if add_special_tokens else text
        return [END if character == "|" else ord(character) for character in text]

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"<{message['role'][0]}>{message['content']}|\n" for message in conversation)
        return text + ("<a>" if add_generation_prompt else "")


class Masked(Protocol):
    """A sequence with tokens and a mask."""

    @property
    def token_ids(self) -> NDArray[np.int32]: ...

    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...


def shown(sequence: Masked) -> tuple[str, str]:
    """The text, and below each trained character a mark."""
    text = "".join("|" if token == END else chr(token) for token in sequence.token_ids)
    return text, "".join("^" if trained else "." for trained in sequence.loss_mask)
