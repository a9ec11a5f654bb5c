"""What a chat template writes between the end of the policy's text and where it is to answer again, as tokens.

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

from env_service.environments.interface import ChatMessage, Role, Tool
from env_service.environments.rules import History
from env_service.environments.tokenization import (
    CALL_ID,
    MARKER,
    QUESTION,
    ChatTemplateError,
    TemplateArguments,
    Tokenization,
)

_MOST_KEPT = 4096
_LONGEST_KEPT = 16_384
_MOST_OTHERS = 64


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
        self.tokenization = tokenization
        special = tokenization.special_tokens
        self._special = sorted(special, key=len, reverse=True)
        self._ends = tokenization.end_tokens | {text for text, number in special.items() if number in stop_ids}
        self._stop_ids = frozenset(stop_ids)
        self._kept: OrderedDict[tuple[tuple[ChatMessage, ...], str], Bridge] = OrderedDict()
        self._others: OrderedDict[int, Bridges] = OrderedDict()

    def with_arguments(self, arguments: TemplateArguments) -> "Bridges":
        """Those of the same template when it is told these, too; they go before those that it is told here."""
        tokenization = self.tokenization.with_arguments(arguments)
        if tokenization is self.tokenization:
            return self
        found = self._others.get(id(tokenization))
        if found is None or found.tokenization is not tokenization:
            found = self._others[id(tokenization)] = Bridges(tokenization, stop_ids=self._stop_ids)
            if len(self._others) > _MOST_OTHERS:
                self._others.popitem(last=False)
        return found

    def check_roles(self, roles: Sequence[Role], *, history: History = "append") -> None:
        """Raises RoleNotCarried for a role that the template cannot carry, and says what to do."""
        for role in roles:
            try:
                self._probe(ChatMessage(role, "seen", name="look" if role == "tool" else ""), history)
            except ChatTemplateError as error:
                remedy = "; send such messages as user" if role != "user" else ""
                name = self.tokenization.template_name
                raise RoleNotCarried(f"{name} cannot carry role {role}: {error}{remedy}") from error

    def _probe(self, message: ChatMessage, history: History) -> None:
        if message.role != "system":
            self.bridge((message,))
            if history == "split":
                self.tokenization.text_of((QUESTION, ChatMessage("assistant", MARKER), message))
        elif message.content not in self.tokenization.text_of((message, QUESTION)):
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
                return self._read_off((QUESTION, spoken), said, tools)
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
        encode = self.tokenization.encode_after
        return Bridge(closer=tuple(encode("", closer)), rest=tuple(encode(anchor, tail[len(closer) :])))

    def _after_marker(
        self, messages: Sequence[ChatMessage | Mapping[str, object]], tools: Sequence[Tool], *, answer: bool
    ) -> str:
        """From the first end of turn on; templates put their own words between the policy's and that."""
        text = self.tokenization.text_of(messages, tools=tools, answer=answer)
        _, found, after = text.rpartition(MARKER)
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
    yield ChatMessage("assistant", MARKER)
    name = next((message.name for message in said if message.role == "tool"), "")
    for arguments in ({"m": MARKER}, json.dumps({"m": MARKER})) if name else ():
        call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
