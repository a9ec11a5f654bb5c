"""Text to tokens and back, with the model's own files and without transformers."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from env_service.chat_template import ChatTemplate, ChatTemplateError
from env_service.environments.interface import Prompt
from protocol.fingerprints import chat_template


class Tokenization:
    """The tokenizer and chat template of a Hugging Face model directory.

    Raises FileNotFoundError without a tokenizer.json. The chat template is compiled when it is first needed.
    """

    def __init__(self, model: Path) -> None:
        file = model / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist: expected a model directory with a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._model = model
        self._template: ChatTemplate | None = None

    def render(self, prompt: Prompt) -> str:
        """The text that the policy continues: a plain prompt as it is, messages through the chat template.

        Raises ChatTemplateError.
        """
        if isinstance(prompt, str):
            return prompt
        if self._template is None:
            text = _default_template(chat_template(self._model))
            self._template = ChatTemplate(text, special_tokens=_special_tokens(self._model))
        return self._template.render(prompt)

    def encode(self, prompt: Prompt) -> tuple[str, list[int]]:
        """The rendered text and its token ids.

        Plain text gets the special tokens that the tokenizer adds; a chat template writes its own.
        """
        text = self.render(prompt)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=isinstance(prompt, str)).ids
        return text, ids

    def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token rows, without special tokens."""
        # Row by row: decode_batch hands short rows to a pool of threads, which takes longer than the decoding.
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in completions]


def _default_template(text: str) -> str:
    """Of several named templates, which `chat_template` gives as JSON, the one called default."""
    if not text.startswith("[{"):
        return text
    named = {each["name"]: each["template"] for each in json.loads(text)}
    if "default" not in named:
        raise ChatTemplateError(f"the model has chat templates {', '.join(sorted(named))} and none called default")
    return str(named["default"])


def _special_tokens(model: Path) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json and special_tokens_map.json, as text."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = model / name
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for key, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens
