"""The tokenizer of a model's folder, as the learner's examples are tokenized."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import transformers

from learner.data.examples import DataTokenizer


def open_tokenizer(model: Path, *, template: str, told: Mapping[str, object]) -> DataTokenizer:
    """The tokenizer of a model's folder, with the text of a chat template in place of its own, if that is not empty.

    The template is `told` these variables.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **told)
    return cast(DataTokenizer, tokenizer)
