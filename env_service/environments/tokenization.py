"""Text to tokens and back, with the model's own files and without transformers.

Rendering of Hugging Face chat templates: sandboxed Jinja with the functions that templates expect.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from env_service.environments.interface import ChatMessage, Prompt
from protocol.fingerprints import chat_template


class ChatTemplateError(ValueError):
    """The template is missing, does not compile, or refuses the messages; the text is the template's own."""


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, such as `bos_token`."""

    def __init__(self, text: str, *, special_tokens: dict[str, str]) -> None:
        if not text:
            raise ChatTemplateError("the model has no chat template: set chat = false, or use a model that has one")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation up to where the policy is to answer."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}`, by which templates mark the assistant's text, changes nothing in what is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration of the attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


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
