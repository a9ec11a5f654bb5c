"""Text to tokens and back, with the model's own files and without transformers.

Rendering of Hugging Face chat templates: sandboxed Jinja with the functions that templates expect.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from typing import NoReturn, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue
from tokenizers import Tokenizer

from env_service.environments.interface import ChatMessage, Prompt, Tool, text_of
from env_service.environments.rules import ToolFormat
from env_service.environments.thinking_marks import CLOSED, MARKS, OPENED, OPENINGS, in_tags, marks_of
from env_service.environments.tool_formats import family_of
from services.model_folder import chat_template, positions, template_in
from services.opening_tokens import opening_tokens

MARKER = "ZQMARKQZ"
"""Stands where a text is looked for in what a template renders."""
QUESTION = ChatMessage("user", "x")
TemplateArguments = Mapping[str, JsonValue]
"""Values for a template besides the conversation, by the names that it reads, such as {"enable_thinking": False}."""
_NONE: TemplateArguments = {}
_GIVEN = ("documents", "strftime_now")
_OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
_FROM_TEXT = "<template>"
_MAX_VARIANTS = 64
_MAX_TOKENS = 1 << 20
"""Of a model that does not say how many tokens it takes."""
_CHARS_OF_A_TOKEN = 4
"""In most texts; where tokens are longer, more of a text is looked at."""
_SPLIT_TOKENS = 16
"""By so many a text's beginning may have more tokens than it has within the text: the last word is split."""
_REFUSALS = (TemplateError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RecursionError)
"""Raised by templates that are given what they do not expect: they add None to text, call it, count up to it."""
M = TypeVar("M", ChatMessage, ChatMessage | Mapping[str, object])
_PROBE_NAME = "zqprobe"
_PROBE: Tool = {
    "type": "function",
    "function": {"name": _PROBE_NAME, "description": "x", "parameters": {"type": "object", "properties": {}}},
}
OWN_TEMPLATE = "the model's chat template"
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_RENDERED = ("_shows_tools", "call_format", "prefilled")
"""The part of a Tokenization that depends on its arguments."""


class ChatTemplateError(ValueError):
    """The template is missing, does not compile, or refuses the messages; the text is the template's own."""


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, such as `bos_token`; errors call it `name`
    and say the line. `reads` are the names that it looks up, and does not set itself.
    """

    def __init__(self, text: str, *, special_tokens: dict[str, str], name: str = "the chat template") -> None:
        if not text:
            raise ChatTemplateError(
                "the model has no chat template: use a model that has one, give it one (chat_template in [run]), or do "
                "without: set chat = false in the table of an environment of source jsonl or reasoning_gym, "
                "[[env-service.environments]]; one that is a class says plain text with roles = ()"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self.text = text
        self._special_tokens, self._name = special_tokens, name
        try:
            self._template = environment.from_string(text)
            tree = environment.parse(text)
        except TemplateError as error:
            raise ChatTemplateError(f"{self._place(error)} does not compile: {error}") from error
        self._looked_up, self.reads = meta.find_undeclared_variables(tree), _arguments_in(tree)

    def check_arguments(self, arguments: TemplateArguments) -> None:
        """Raises ChatTemplateError, naming it, for an argument that would change nothing, or that is not to be set."""
        known = sorted(self.reads - {*_OWN_ARGUMENTS, *self._special_tokens, *_GIVEN})
        for name in arguments:
            if name in _OWN_ARGUMENTS:
                raise ChatTemplateError(f"{name} is what the conversation itself says; expected none of that name")
            if name not in self._looked_up:
                takes = f"it reads {', '.join(known)}" if known else "it reads no arguments"
                raise ChatTemplateError(f"{self._name} does not read {name}; {takes}")

    def without_thinking(self) -> TemplateArguments:
        """Tells the template that the policy is not to think; nothing where it knows of no thinking. Raises
        ChatTemplateError for one that knows of it, and cannot be told.
        """
        for name in _THINKING_SWITCHES:
            if name in self._looked_up:
                return {name: False}
        if any(mark in self.text for mark in OPENINGS):
            expected = f"expected it to read {' or '.join(_THINKING_SWITCHES)}"
            raise ChatTemplateError(f"{self._name} has no switch that keeps the policy from thinking: {expected}")
        return _NONE

    def render(
        self,
        messages: Sequence[ChatMessage | Mapping[str, object]],
        *,
        tools: Sequence[Tool] = (),
        answer: bool = True,
        now: datetime | None = None,
        arguments: TemplateArguments = _NONE,
    ) -> str:
        """The conversation, with `answer` up to where the policy is to answer. `now` is the date that it may show,
        `arguments` what else the template is told; they go before the model's special tokens.
        """
        given: dict[str, object] = {
            **self._special_tokens,
            "documents": None,
            "strftime_now": (now or datetime.now()).strftime,
            **arguments,
            "messages": [_plain(message) for message in numbered(messages)],
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": answer,
        }
        try:
            return self._template.render(given)
        except _REFUSALS as error:
            raise ChatTemplateError(f"{self._place(error)} refuses the messages: {error}") from error

    def _place(self, error: Exception) -> str:
        line = _line_of(error)
        return self._name if line is None else f"{self._name}, line {line},"


def _arguments_in(tree: nodes.Template) -> frozenset[str]:
    """The arguments that a template reads: its own variables are none, but for those that it sets if they are not
    given.
    """
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    optional = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    return frozenset(name for name in meta.find_undeclared_variables(tree) if name not in own or name in optional)


def _line_of(error: Exception) -> int | None:
    """The line of a template at which it could not go on; Jinja writes it into the traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == _FROM_TEXT]
    return lines[-1] if lines else None


def numbered(messages: Sequence[M]) -> Iterator[M]:
    """The messages, in which each result of a turn's calls has an id: those that have none are numbered."""
    count = 0
    for message in messages:
        is_result = isinstance(message, ChatMessage) and message.role == "tool"
        count = count + 1 if is_result else 0
        if isinstance(message, ChatMessage) and is_result and not message.tool_call_id:
            yield replace(message, tool_call_id=call_id(count))
        else:
            yield message


def call_id(number: int) -> str:
    """Of the `number`-th call of a turn, in a form that all templates take: nine letters and digits."""
    return f"call{number:05d}"


def _plain(message: ChatMessage | Mapping[str, object]) -> object:
    """As templates take it; one that is none of ours is taken as it is."""
    if not isinstance(message, ChatMessage):
        return dict(message)
    called = {"name": message.name, "tool_call_id": message.tool_call_id} if message.role == "tool" else {}
    return {"role": message.role, "content": message.content, **called}


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


class TokenizerError(ValueError):
    """A tokenizer.json is not what it should be."""


class Tokenization:
    """The tokenizer and chat template of a Hugging Face model directory; or the template of the file `chat_template`.
    All that it renders is rendered with the `arguments`.

    Raises FileNotFoundError without a tokenizer.json, TokenizerError for one that cannot be read, ChatTemplateError for
    a file that cannot, or that renders no question. The model's own template is compiled when it is first needed.
    """

    def __init__(self, model: Path, *, chat_template: Path | None = None, arguments: TemplateArguments = _NONE) -> None:
        file = model / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist: expected a model directory with a fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{file} cannot be read ({error}): expected the file of a fast tokenizer") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._marks = marks_of([mark for mark in MARKS if self.id_of(mark) is not None])
        self._marked = _keeping(self._tokenizer, self._marks)
        self.folder, self.arguments = model, dict(arguments)
        self._variants: dict[str, Tokenization] = {}
        self.template_name = OWN_TEMPLATE if chat_template is None else f"the chat template {chat_template}"
        self._given = "" if chat_template is None else _text_of(chat_template)
        if self._given:
            self._check_template()

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ChatTemplateError."""
        name = self.template_name if self._given else "the chat template"
        text = self._given or _default_template(chat_template(self.folder))
        return ChatTemplate(text, special_tokens=_special_tokens(self.folder), name=name)

    def with_arguments(self, arguments: TemplateArguments) -> "Tokenization":
        """The same one, which renders with these, too; they go before those that it has."""
        merged = {**self.arguments, **arguments}
        if merged == self.arguments:
            return self
        key = json.dumps(merged, sort_keys=True)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:  # agents may ask with whatever they like
                self._variants.pop(next(iter(self._variants)))
            other = copy(self)
            for name in _RENDERED:
                other.__dict__.pop(name, None)
            other.arguments, other._variants = merged, {}
            self._variants[key] = other
        return self._variants[key]

    def text_of(
        self,
        messages: Sequence[ChatMessage | Mapping[str, object]],
        *,
        tools: Sequence[Tool] = (),
        answer: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The conversation by the chat template, with the arguments. Raises ChatTemplateError."""
        return self.template.render(messages, tools=tools, answer=answer, now=now, arguments=self.arguments)

    def _check_template(self) -> None:
        if MARKER not in self.text_of((ChatMessage("user", MARKER),)):
            raise ChatTemplateError(
                f"{self.template_name} loses the user's message: its text is not in what it renders"
            )

    @cached_property
    def call_format(self) -> ToolFormat | None:
        """Format of tool calls in the model's chat template; None if it is none that is known, if it shows no
        tools, or if there is no template.
        """
        return family_of(self.template.text) if self._shows_tools else None

    @property
    def writes_unknown_calls(self) -> bool:
        """True if the chat template shows tools, and writes their calls in a format that is not known."""
        return self._shows_tools and self.call_format is None

    @cached_property
    def _shows_tools(self) -> bool:
        try:
            return _PROBE_NAME in self.text_of((QUESTION,), tools=(_PROBE,))
        except ChatTemplateError:
            return False

    @cached_property
    def prefilled(self) -> str:
        """The text that the template puts at the beginning of the policy's turn behind a question, and takes for a part
        of what the policy said: a message that is to be shown again begins with it. Empty where the template writes it
        itself, drops it from earlier turns, or puts nothing there.
        """
        try:
            shown = self.text_of((QUESTION,))
            header = self._before_answer(MARKER)
            prefill = shown.removeprefix(header) if shown.startswith(header) else ""
            return prefill if prefill and self._before_answer(prefill + MARKER) == shown else ""
        except ChatTemplateError:
            return ""

    def _before_answer(self, said: str) -> str:
        """The text before the marker in the policy's turn, when something follows it."""
        conversation = (QUESTION, ChatMessage("assistant", said), QUESTION)
        return self.text_of(conversation).partition(MARKER)[0]

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of all special tokens by their text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def end_tokens(self) -> frozenset[str]:
        """The texts of the tokens that end what the policy says, as the model's files name them."""
        ids = {number for name in ("config.json", "generation_config.json") for number in _ends(self.folder / name)}
        named = _special_tokens(self.folder).get("eos_token")
        texts = {self._tokenizer.id_to_token(number) for number in ids} | {named}
        return frozenset(text for text in texts if text)

    @cached_property
    def largest_id(self) -> int:
        """The largest id that it can come to."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=-1)

    def id_of(self, token: str) -> int | None:
        """The id of a token's text; None if it is no token."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def render(self, prompt: Prompt, *, tools: Sequence[Tool] = (), now: datetime | None = None) -> str:
        """The text that the policy continues: a plain prompt as it is, messages through the chat template.

        Raises ChatTemplateError.
        """
        return prompt if isinstance(prompt, str) else self.text_of(prompt, tools=tools, now=now)

    def encode(
        self, prompt: Prompt, *, tools: Sequence[Tool] = (), now: datetime | None = None
    ) -> tuple[str, list[int]]:
        """The rendered text and its token ids.

        Plain text gets the special tokens that the tokenizer adds, unless it has them; a chat template writes its own.
        """
        text = self.render(prompt, tools=tools, now=now)
        is_plain = isinstance(prompt, str)
        return text, opening_tokens(text, self._ids) if is_plain else self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_after(self, anchor: str, text: str) -> list[int]:
        """The ids of `text` as it stands behind `anchor`, a special token or nothing: some tokenizers put a space
        before what they encode alone. Raises ChatTemplateError where the two do not come apart.
        """
        before = self._ids(anchor, add_special_tokens=False)
        both = self._ids(anchor + text, add_special_tokens=False)
        if both[: len(before)] != before:
            raise ChatTemplateError(f"the tokens of {anchor!r} change when {text[:80]!r} follows it")
        return both[len(before) :]

    @cached_property
    def context_tokens(self) -> int:
        """Most tokens that the model takes, whatever a generator allows."""
        return positions(self.folder) or _MAX_TOKENS

    def beginning_beyond(self, prompt: Prompt, tokens: int) -> Prompt | None:
        """The beginning of a prompt that has more than so many tokens by itself; None if it has not.

        No more of it is tokenized than is needed: that takes seconds for each few million characters.
        """
        most = _CHARS_OF_A_TOKEN * (tokens + _SPLIT_TOKENS) + 1
        whole = characters_of(prompt)
        while most < whole:
            begun = beginning(prompt, most)
            if len(self.encode_after("", text_of(begun))) > tokens + _SPLIT_TOKENS:
                return begun
            most *= 2
        return None

    def decode(self, completions: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Texts of token rows, with special tokens or without them."""
        # Row by row: decode_batch hands short rows to a pool of threads, which takes longer than the decoding.
        return [self._tokenizer.decode(row, skip_special_tokens=not special) for row in completions]

    def said(self, token_ids: Sequence[int]) -> str:
        """The text of a completion without special tokens, with its thoughts between <think> and </think>."""
        text: str = self._marked.decode(token_ids, skip_special_tokens=True)
        return in_tags(text, self._marks)

    def in_tags(self, text: str) -> str:
        """A text that has its special tokens, with its thoughts between <think> and </think>."""
        return in_tags(text, self._marks)

    @property
    def has_own_marks(self) -> bool:
        """True if the model marks its thoughts with other tokens than <think> and </think>."""
        return bool(self._marks - {OPENED, CLOSED})


def _keeping(tokenizer: Tokenizer, kept: Collection[str]) -> Tokenizer:
    """A tokenizer whose texts without special tokens hold these; the same one if they do."""
    settings = None
    if any(token.special and token.content in kept for token in tokenizer.get_added_tokens_decoder().values()):
        settings = json.loads(tokenizer.to_str())
        for token in settings["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in kept
    return tokenizer if settings is None else Tokenizer.from_str(json.dumps(settings))


def _ends(path: Path) -> list[int]:
    """The `eos_token_id` of a JSON file, one or several; none if it says nothing."""
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    given = settings.get("eos_token_id")
    return given if isinstance(given, list) else [] if given is None else [given]


def _text_of(file: Path) -> str:
    try:
        return template_in(file)
    except (OSError, ValueError) as error:
        raise ChatTemplateError(str(error)) from error


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


def characters_of(prompt: Prompt) -> int:
    """Number of characters in all of its texts."""
    return len(prompt) if isinstance(prompt, str) else sum(len(message.content) for message in prompt)


def beginning(prompt: Prompt, most: int) -> Prompt:
    """The first so many characters of its texts."""
    if isinstance(prompt, str):
        return prompt[:most]
    messages, left = [], most
    for message in prompt:
        messages.append(replace(message, content=message.content[:left]))
        left -= len(messages[-1].content)
    return tuple(messages)


class LightTokenizer:
    """The part of a Hugging Face tokenizer that a learner's examples need, without transformers, which takes seconds to
    load.
    """

    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization
        end = _special_tokens(tokenization.folder).get("eos_token")
        named = None if end is None else tokenization.id_of(end)
        # Of a tokenizer whose files name none its class may: the model's config tells it then, or else any number does.
        others = [*_ends(tokenization.folder / "config.json"), 0]
        self.eos_token_id: int | None = others[0] if named is None else named

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; with those that the tokenizer adds by itself if these are wanted."""
        return self._tokenization.encode(text)[1] if add_special_tokens else self._tokenization.encode_after("", text)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Always text: `tokenize` is False where this is called."""
        return self._tokenization.text_of(conversation, answer=add_generation_prompt)
