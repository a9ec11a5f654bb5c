"""Bridges: tokens that a chat template writes between the policy's text and where it is to answer again.

    … sampled text ▏<|im_end|>▏\\n<|im_start|>user\\n7 is too low<|im_end|>\\n<|im_start|>assistant\\n▏ sampled text …
                     closer    rest

A bridge is read off a short fixed conversation in which the policy's text is a marker, never off the real one: what was
sampled is so never rendered, and templates that rewrite earlier turns (25 of 41 that were looked at) have nothing to
rewrite. Its tokens do not depend on what stands before them, since it begins with a special token.
"""

import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from pydantic import JsonValue

from env_service.environments.interface import ChatMessage, Role, Tool
from env_service.environments.rules import History
from env_service.environments.tokenization import (
    MARKER,
    QUESTION,
    ChatTemplateError,
    TemplateArguments,
    Tokenization,
    numbered,
)

_MAX_KEPT = 4096
_MAX_KEPT_CHARS = 16_384
_MAX_OTHERS = 64
_Message = ChatMessage | Mapping[str, object]
_CALLED_WITH: Sequence[Mapping[str, JsonValue]] = ({"m": MARKER}, {"k": [1], "m": {"n": [{"o": MARKER}]}})


class RoleNotCarried(ChatTemplateError):
    """The template refuses messages of a role, or loses them in silence; the text names the role."""


@dataclass(frozen=True)
class Bridge:
    """`closer` ends the policy's turn, and is empty where the next message's header does that; `rest` is all behind.
    With `opens` the closer is the beginning of the first result, too, behind whatever else a turn ended with.
    """

    closer: tuple[int, ...]
    rest: tuple[int, ...]
    opens: bool = False

    def after(self, sampled: Sequence[int], *, ended: bool) -> tuple[int, ...]:
        """The tokens that are appended to a turn. One that ended itself keeps the end token that it sampled, whatever
        the template would have put there; one that was cut off gets the closer.
        """
        if not ended or (self.opens and tuple(sampled[-len(self.closer) :]) != self.closer):
            return (*self.closer, *self.rest)
        if self.closer:
            return self.rest
        return self.rest[1:] if self.rest[:1] == tuple(sampled[-1:]) else self.rest

    def fits(self, sampled: Sequence[int], *, ended: bool) -> bool:
        """True if the template could have written this: not, if a turn ended itself with another message's header."""
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
        self._opening: dict[str, bool] = {}
        self._others: OrderedDict[int, Bridges] = OrderedDict()

    def with_arguments(self, arguments: TemplateArguments) -> "Bridges":
        """Bridges of the same template when it is told these, too; they go before those that it is told here."""
        tokenization = self.tokenization.with_arguments(arguments)
        if tokenization is self.tokenization:
            return self
        found = self._others.get(id(tokenization))
        if found is None or found.tokenization is not tokenization:
            found = self._others[id(tokenization)] = Bridges(tokenization, stop_ids=self._stop_ids)
            if len(self._others) > _MAX_OTHERS:
                self._others.popitem(last=False)
        return found

    @cached_property
    def _shows_ids(self) -> bool:
        """True if the ids of calls change what is written; where they do not, bridges are shared."""
        texts = set()
        for call_id in ("abcdefg01", "abcdefg02"):
            result = replace(_said_by("tool", 0), tool_call_id=call_id)
            try:
                texts.add(self.tokenization.text_of((QUESTION, _calling([result], {}), result)))
            except ChatTemplateError:
                return True
        return len(texts) > 1

    def check_roles(self, roles: Sequence[Role], *, history: History = "append") -> None:
        """Raises RoleNotCarried for a role that the template cannot carry, and says what to do."""
        for role in roles:
            remedy = "; send such messages as user" if role != "user" else ""
            self._check(partial(self._probe, role), role, remedy)
        for role in roles if history == "split" else ():
            self._check(partial(self._probe_split, role, roles), f"{role} with history = split", "; set append")

    def _check(self, probe: Callable[[], None], what: str, remedy: str) -> None:
        try:
            probe()
        except ChatTemplateError as error:
            name = self.tokenization.template_name
            raise RoleNotCarried(f"{name} cannot carry role {what}: {error}{remedy}") from error

    def _probe(self, role: Role) -> None:
        message = _said_by(role, 0)
        if role != "system":
            self.bridge((message,))
            if role == "tool":
                self.bridge((message, _said_by(role, 1)))
        elif message.content not in self.tokenization.text_of((message, QUESTION)):
            raise ChatTemplateError("it loses a message of role system")

    def _probe_split(self, role: Role, roles: Sequence[Role]) -> None:
        """Conversations of several turns, rendered as they will be: their calls are in what the policy said."""
        if role == "system":
            return
        for other in roles:
            conversation: list[ChatMessage] = [QUESTION]
            for turn, each in enumerate((role, role, other, role)):
                conversation += [ChatMessage("assistant", f"{MARKER}{turn}"), _said_by(each, turn)]
                text = self.tokenization.text_of(conversation)
                lost = next(
                    (said for said in conversation if said.role != "assistant" and said.content not in text), None
                )
                if lost is not None:
                    raise ChatTemplateError(f"it loses a message of role {lost.role}")

    def bridge(self, said: tuple[ChatMessage, ...], *, tools: Sequence[Tool] = ()) -> Bridge:
        """The tokens that follow a turn of the policy when `said` comes. Raises ChatTemplateError."""
        if not self._shows_ids:
            said = tuple(replace(message, tool_call_id="") for message in said)
        key = (said, json.dumps([dict(tool) for tool in tools]))
        found = self._kept.get(key)
        if found is None:
            found = self._made(said, tools)
            # What is long, such as a file that a tool has read, hardly comes again, and would be kept for long.
            if sum(len(message.content) for message in said) + len(key[1]) <= _MAX_KEPT_CHARS:
                self._kept[key] = found
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _made(self, said: tuple[ChatMessage, ...], tools: Sequence[Tool]) -> Bridge:
        errors: list[ChatTemplateError] = []
        for spoken in _spoken(said):
            try:
                return self._read_off(spoken, said, tools)
            except ChatTemplateError as error:
                errors.append(error)
        raise errors[-1]  # of the form without calls, which is the simplest

    def _read_off(self, spoken: Sequence[_Message], said: tuple[ChatMessage, ...], tools: Sequence[Tool]) -> Bridge:
        """`spoken` are turns of the policy that differ: what stands behind all of them is the template's own."""
        tail = self._behind([(QUESTION, each, *said) for each in spoken], said, tools, answer=True)
        alone = self._behind([(QUESTION, each) for each in spoken], (), tools, answer=False)
        closer = self._leading(tail) if self._leading(alone) else ""
        anchor = closer or next(iter(self._ends), "")
        encode = self.tokenization.encode_after
        return Bridge(
            closer=tuple(encode("", closer)),
            rest=tuple(encode(anchor, tail[len(closer) :])),
            opens=bool(closer) and any(message.role == "tool" for message in said) and self._opens(closer),
        )

    def _behind(
        self,
        conversations: Sequence[Sequence[_Message]],
        said: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        answer: bool,
    ) -> str:
        """The text that follows the policy's turn, from the first end of it on: templates put their own words between
        the policy's and that.
        """
        tails = [self._after_marker(messages, tools, answer=answer) for messages in conversations]
        common = _common_end(tails)
        found = [
            common[min(common.index(token) for token in tokens if token in common) :]
            for tokens in (self._ends, self._special)
            if any(token in common for token in tokens)
        ]
        if not found and len(tails) == 1:
            found = [common]
        lost: Sequence[ChatMessage] = said
        for tail in found:
            lost = [message for message in said if not _has(tail, message.content)]
            if not lost:
                return tail
        role = lost[0].role if lost else "assistant"
        raise ChatTemplateError(
            f"it loses a message of role {role}" if lost else "it ends a call with nothing that tells where it ends"
        )

    def _after_marker(self, messages: Sequence[_Message], tools: Sequence[Tool], *, answer: bool) -> str:
        text = self.tokenization.text_of(messages, tools=tools, answer=answer)
        _, found, after = text.rpartition(MARKER)
        if not found:
            raise ChatTemplateError("it drops the content of the policy's turn")
        return after

    def _leading(self, text: str) -> str:
        """The special token that the text begins with, if it does."""
        known = (token for token in (*sorted(self._ends, key=len, reverse=True), *self._special))
        return next((token for token in known if text.startswith(token)), "")

    def _opens(self, closer: str) -> bool:
        """True if this end of the policy's turn is the beginning of a result: it stands before each of several."""
        if closer not in self._opening:
            said = (_said_by("tool", 0), _said_by("tool", 1))
            spoken = next(iter(_spoken(said)))
            try:
                text = self._after_marker((QUESTION, spoken[0], *said), (), answer=True)
            except ChatTemplateError:
                text = ""
            _, _, behind = text.partition(said[0].content)
            between, _, last = behind.partition(said[1].content)
            self._opening[closer] = closer in between and closer not in last
        return self._opening[closer]


def _said_by(role: Role, number: int) -> ChatMessage:
    return ChatMessage(role, f"ZQSEENQZ{number}", name=("look", "take")[number % 2] if role == "tool" else "")


def _common_end(texts: Sequence[str]) -> str:
    """The longest text that all of them end with."""
    shortest = min(texts, key=len)
    size = len(shortest)
    start = bisect_left(range(size), True, key=lambda at: all(text.endswith(shortest[at:]) for text in texts))
    return shortest[start:]


def _has(text: str, said: str) -> bool:
    forms = (said.strip(), json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
    return any(form in text for form in forms)


def _spoken(said: Sequence[ChatMessage]) -> Iterator[Sequence[_Message]]:
    """The policy's turn with the marker where its text ends, in the forms that are tried in turn: before results of
    tools as their calls, twice with other arguments, which are objects or text; and as content.
    """
    results = [message for message in numbered(said) if message.role == "tool"]
    for write in (dict, json.dumps) if results else ():
        yield [_calling(results, write(arguments)) for arguments in _CALLED_WITH]
    yield [ChatMessage("assistant", MARKER)]


def _calling(results: Sequence[ChatMessage], arguments: object) -> _Message:
    calls = [
        {
            "id": result.tool_call_id,
            "type": "function",
            "function": {"name": result.name, "arguments": arguments},
        }
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
