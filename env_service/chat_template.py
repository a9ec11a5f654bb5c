"""Rendering of Hugging Face chat templates: sandboxed Jinja with the functions that templates expect."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from env_service.environments.interface import ChatMessage


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
