"""Text to tokens and back, with the model's own files and without transformers.

Rendering of Hugging Face chat templates: sandboxed Jinja with the functions that templates expect. And bridges: what a
template writes between the end of the policy's text and where it is to answer again, as tokens.

    … sampled text ▏<|im_end|>▏\\n<|im_start|>user\\n7 is too low<|im_end|>\\n<|im_start|>assistant\\n▏ sampled text …
                     closer    rest

A bridge is read off a short fixed conversation in which the policy's text is a marker, never off the real one: what was
sampled is so never rendered, and templates that rewrite earlier turns (25 of 41 that were looked at) have nothing to
rewrite. Its tokens do not depend on what stands before them, since it begins with a special token.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from env_service.environments.interface import ChatMessage, Prompt, Role, Tool
from env_service.environments.rules import History, ToolFormat
from env_service.environments.tool_formats import family_of
from protocol.fleet import chat_template, template_in

_MARKER = "ZQMARKQZ"
_FROM_TEXT = "<template>"
_MOST_KEPT = 4096
_LONGEST_KEPT = 16_384
_QUESTION = ChatMessage("user", "x")


class ChatTemplateError(ValueError):
    """The template is missing, does not compile, or refuses the messages; the text is the template's own."""


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, such as `bos_token`; errors call it `name`
    and say the line.
    """

    def __init__(self, text: str, *, special_tokens: dict[str, str], name: str = "the chat template") -> None:
        if not text:
            raise ChatTemplateError(
                "the model has no chat template: set chat = false in the environment's table, "
                "[[env-service.environments]], use a model that has one, or give it one (chat_template in [run])"
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
        except TemplateError as error:
            raise ChatTemplateError(f"{self._place(error)} does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage | Mapping[str, object]],
        *,
        tools: Sequence[Tool] = (),
        answer: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The conversation, with `answer` up to where the policy is to answer. `now` is the date that it may show."""
        date = now or datetime.now()
        plain = [_plain(message) for message in messages]
        try:
            return self._rendered(plain, [dict(tool) for tool in tools] or None, answer, date)
        except (TemplateError, TypeError, AttributeError) as error:  # templates add None to text, iterate over it
            raise ChatTemplateError(f"{self._place(error)} refuses the messages: {error}") from error

    def _place(self, error: Exception) -> str:
        line = _line_of(error)
        return self._name if line is None else f"{self._name}, line {line},"

    def _rendered(self, messages: list[object], tools: list[object] | None, answer: bool, now: datetime) -> str:
        return self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=answer,
            strftime_now=now.strftime,
            **self._special_tokens,
        )


def _line_of(error: Exception) -> int | None:
    """The line of a template at which it could not go on; Jinja writes it into the traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == _FROM_TEXT]
    return lines[-1] if lines else None


def _plain(message: ChatMessage | Mapping[str, object]) -> object:
    """As templates take it; one that is none of ours is taken as it is."""
    if not isinstance(message, ChatMessage):
        return dict(message)
    called = {"name": message.name, "tool_call_id": CALL_ID} if message.role == "tool" else {}
    return {"role": message.role, "content": message.content, **called}


CALL_ID = "call00001"
"""Of every call: some templates want one, of nine letters and digits."""


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


_PROBE_NAME = "zqprobe"
_PROBE: Tool = {
    "type": "function",
    "function": {"name": _PROBE_NAME, "description": "x", "parameters": {"type": "object", "properties": {}}},
}


OWN_TEMPLATE = "the model's chat template"


class TokenizerError(ValueError):
    """A tokenizer.json is not what it should be."""


class Tokenization:
    """The tokenizer and chat template of a Hugging Face model directory; or the template of the file `chat_template`.

    Raises FileNotFoundError without a tokenizer.json, TokenizerError for one that cannot be read, ChatTemplateError for
    a file that cannot, or that renders no question. The model's own template is compiled when it is first needed.
    """

    def __init__(self, model: Path, *, chat_template: Path | None = None) -> None:
        file = model / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist: expected a model directory with a fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{file} cannot be read ({error}): expected the file of a fast tokenizer") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.folder = model
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

    def _check_template(self) -> None:
        if _MARKER not in self.template.render((ChatMessage("user", _MARKER),)):
            raise ChatTemplateError(
                f"{self.template_name} loses the user's message: its text is not in what it renders"
            )

    @cached_property
    def call_format(self) -> ToolFormat | None:
        """How the model's chat template has calls of tools written; None if it is none that is known, if it shows no
        tools, or if there is no template.
        """
        try:
            family = family_of(self.template.text)
            shown = self.template.render((_QUESTION,), tools=(_PROBE,))
        except ChatTemplateError:
            return None
        return family if _PROBE_NAME in shown else None

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

    def render(self, prompt: Prompt, *, tools: Sequence[Tool] = (), now: datetime | None = None) -> str:
        """The text that the policy continues: a plain prompt as it is, messages through the chat template.

        Raises ChatTemplateError.
        """
        return prompt if isinstance(prompt, str) else self.template.render(prompt, tools=tools, now=now)

    def encode(
        self, prompt: Prompt, *, tools: Sequence[Tool] = (), now: datetime | None = None
    ) -> tuple[str, list[int]]:
        """The rendered text and its token ids.

        Plain text gets the special tokens that the tokenizer adds; a chat template writes its own.
        """
        text = self.render(prompt, tools=tools, now=now)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=isinstance(prompt, str)).ids
        return text, ids

    def encode_after(self, anchor: str, text: str) -> list[int]:
        """The ids of `text` as it stands behind `anchor`, a special token or nothing: some tokenizers put a space
        before what they encode alone. Raises ChatTemplateError where the two do not come apart.
        """
        before: list[int] = self._tokenizer.encode(anchor, add_special_tokens=False).ids
        both: list[int] = self._tokenizer.encode(anchor + text, add_special_tokens=False).ids
        if both[: len(before)] != before:
            raise ChatTemplateError(f"the tokens of {anchor!r} change when {text[:80]!r} follows it")
        return both[len(before) :]

    def decode(self, completions: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Texts of token rows, with special tokens or without them."""
        # Row by row: decode_batch hands short rows to a pool of threads, which takes longer than the decoding.
        return [self._tokenizer.decode(row, skip_special_tokens=not special) for row in completions]


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


class RoleNotCarried(ChatTemplateError):
    """The template refuses messages of a role, or loses them in silence; the text names the role."""


@dataclass(frozen=True)
class Bridge:
    """`closer` ends the policy's turn, and is empty where the next message's header does that; `rest` is all behind."""

    closer: tuple[int, ...]
    rest: tuple[int, ...]

    def after(self, sampled: Sequence[int], *, ended: bool) -> tuple[int, ...]:
        """What is appended to a turn. One that ended itself keeps the end token that it sampled, whatever the template
        would have put there; one that was cut off gets the closer.
        """
        if not ended:
            return (*self.closer, *self.rest)
        if self.closer:
            return self.rest
        return self.rest[1:] if self.rest[:1] == tuple(sampled[-1:]) else self.rest

    def fits(self, sampled: Sequence[int], *, ended: bool) -> bool:
        """Whether the template could have written this: not, if a turn ended itself with another message's header."""
        return not ended or bool(self.closer) or self.rest[:1] == tuple(sampled[-1:])


class Bridges:
    """The bridges of a model's template. `stop_ids` are token ids that end a turn besides the model's own."""

    def __init__(self, tokenization: Tokenization, *, stop_ids: Collection[int] = ()) -> None:
        self._tokenization = tokenization
        special = tokenization.special_tokens
        self._special = sorted(special, key=len, reverse=True)
        self._ends = tokenization.end_tokens | {text for text, number in special.items() if number in stop_ids}
        self._kept: OrderedDict[tuple[tuple[ChatMessage, ...], str], Bridge] = OrderedDict()

    def check_roles(self, roles: Sequence[Role], *, history: History = "append") -> None:
        """Raises RoleNotCarried for a role that the template cannot carry, and says what to do."""
        for role in roles:
            try:
                self._probe(ChatMessage(role, "seen", name="look" if role == "tool" else ""), history)
            except ChatTemplateError as error:
                remedy = "; send such messages as user" if role != "user" else ""
                name = self._tokenization.template_name
                raise RoleNotCarried(f"{name} cannot carry role {role}: {error}{remedy}") from error

    def _probe(self, message: ChatMessage, history: History) -> None:
        if message.role != "system":
            self.bridge((message,))
            if history == "split":
                self._tokenization.template.render((_QUESTION, ChatMessage("assistant", _MARKER), message))
        elif message.content not in self._tokenization.template.render((message, _QUESTION)):
            raise ChatTemplateError("it loses a message of role system")

    def bridge(self, said: tuple[ChatMessage, ...], *, tools: Sequence[Tool] = ()) -> Bridge:
        """What follows a turn of the policy when `said` comes. Raises ChatTemplateError."""
        key = (said, json.dumps([dict(tool) for tool in tools]))
        found = self._kept.get(key)
        if found is None:
            found = self._made(said, tools)
            # What is long, such as a file that a tool has read, hardly comes again, and would be kept for long.
            if sum(len(message.content) for message in said) + len(key[1]) <= _LONGEST_KEPT:
                self._kept[key] = found
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return found

    def _made(self, said: tuple[ChatMessage, ...], tools: Sequence[Tool]) -> Bridge:
        errors: list[ChatTemplateError] = []
        for spoken in _spoken(said):
            try:
                return self._read_off((_QUESTION, spoken), said, tools)
            except ChatTemplateError as error:
                errors.append(error)
        raise errors[0]

    def _read_off(
        self,
        opening: tuple[ChatMessage | Mapping[str, object], ...],
        said: tuple[ChatMessage, ...],
        tools: Sequence[Tool],
    ) -> Bridge:
        tail = self._after_marker((*opening, *said), tools, answer=True)
        for message in said:
            if not any(form in tail for form in (message.content.strip(), json.dumps(message.content)[1:-1])):
                raise ChatTemplateError(f"it loses a message of role {message.role}")
        closer = self._leading(tail) if self._leading(self._after_marker(opening, tools, answer=False)) else ""
        anchor = closer or next(iter(self._ends), "")
        encode = self._tokenization.encode_after
        return Bridge(closer=tuple(encode("", closer)), rest=tuple(encode(anchor, tail[len(closer) :])))

    def _after_marker(
        self, messages: Sequence[ChatMessage | Mapping[str, object]], tools: Sequence[Tool], *, answer: bool
    ) -> str:
        """From the first end of turn on; templates put their own words between the policy's and that."""
        text = self._tokenization.template.render(messages, tools=tools, answer=answer)
        _, found, after = text.rpartition(_MARKER)
        if not found:
            raise ChatTemplateError("it drops the content of the policy's turn")
        ends = [token for token in self._ends if token in after] or [token for token in self._special if token in after]
        return after[min((after.index(token) for token in ends), default=0) :]

    def _leading(self, text: str) -> str:
        """The special token that the text begins with, if it does."""
        known = (token for token in (*sorted(self._ends, key=len, reverse=True), *self._special))
        return next((token for token in known if text.startswith(token)), "")


def _spoken(said: Sequence[ChatMessage]) -> Iterator[ChatMessage | Mapping[str, object]]:
    """The policy's turn with the marker where its text ends: in the content, or in the arguments of the call that some
    templates want before a tool's result, as an object or as text.
    """
    yield ChatMessage("assistant", _MARKER)
    name = next((message.name for message in said if message.role == "tool"), "")
    for arguments in ({"m": _MARKER}, json.dumps({"m": _MARKER})) if name else ():
        call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}


class LightTokenizer:
    """What reading a learner's examples needs of a Hugging Face tokenizer, without transformers, which takes seconds to
    load.
    """

    eos_token_id: int | None = 0

    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; none of the special ones is added in either case."""
        return self._tokenization.encode_after("", text)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Always text: `tokenize` is False where this is called."""
        return self._tokenization.template.render(conversation, answer=add_generation_prompt)
