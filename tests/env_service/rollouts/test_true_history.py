"""The prompt behind the policy's words is what transformers writes there for the true history.

The true history has the policy's calls as calls, with their ids, and the results that answer them. Templates may write
earlier turns otherwise; what comes behind the last one is compared.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from env_service.environments.bridges import Bridges
from env_service.environments.interface import ChatMessage, Tool
from env_service.environments.tokenization import Tokenization
from tests.env_service.chat_models import TEMPLATES, WITHOUT_TOOL_ROLE, make_model, model_with, text_of

TOOLS: tuple[Tool, ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "x", "parameters": {"type": "object"}}}
    for name in ("look", "take")
)
ARGUMENTS: tuple[Mapping[str, JsonValue], ...] = (
    {},
    {"at": "north"},
    {"at": 3, "far": True},
    {"path": ["a", {"b": None}], "z": {"y": "<|im_end|>"}},
)
TEXTS = ("no", "seven is\ntoo low", '{"a": 2, "b": [1]}', "ünïcödé 漢字")
ENDLESS = {"results_within_calls": ["<turn|>"]}
"""Templates with other ends of turns: the model's files may not name all of them."""
ONE_CALL = frozenset({"headers_with_date"})
"""Templates that refuse two calls in a turn."""
WITH_OWN_IDS = frozenset({"alternating_with_tools", "results_with_ids"})
"""Templates that show the ids of calls."""


class Theirs:
    """The same model's template in transformers."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(model)

    def render(self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[Tool] = ()) -> str:
        """Some want the arguments of a call as text."""
        try:
            return self._rendered(messages, tools)
        except TypeError:
            return self._rendered([with_text(message) for message in messages], tools)

    def _rendered(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Tool]) -> str:
        given = [dict(message) for message in messages]
        text = self._tokenizer.apply_chat_template(
            given, tools=[dict(tool) for tool in tools] or None, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text


def with_text(message: Mapping[str, Any]) -> Mapping[str, object]:
    """The message, with the arguments of its calls as JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def calls_and_results(
    chance: random.Random, turn: int, *, most: int
) -> tuple[Mapping[str, object], tuple[ChatMessage, ...]]:
    """A message of one or two calls, and the results that answer them."""
    names = chance.choice((["look"], ["take"], ["look", "take"], ["look", "look"]))[:most]
    ids = [f"id{turn:03d}{number:04d}" for number in range(len(names))]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(chance.choice(ARGUMENTS))}}
        for name, call_id in zip(names, ids, strict=True)
    ]
    results = tuple(
        ChatMessage("tool", chance.choice(TEXTS), name=name, tool_call_id=call_id)
        for name, call_id in zip(names, ids, strict=True)
    )
    return {"role": "assistant", "content": "", "tool_calls": calls}, results


def plain(message: ChatMessage) -> Mapping[str, object]:
    called = {"name": message.name, "tool_call_id": message.tool_call_id} if message.role == "tool" else {}
    return {"role": message.role, "content": message.content, **called}


def shown(tokenization: Tokenization, ids: Sequence[int]) -> str:
    (text,) = tokenization.decode([ids], special=True)
    return text


def with_tools() -> Iterator[tuple[str, tuple[str, ...] | None]]:
    yield from ((name, None) for name in TEMPLATES if name not in WITHOUT_TOOL_ROLE)
    yield from ((name, tuple(ends)) for name, ends in ENDLESS.items())


@pytest.mark.parametrize(("name", "ends"), [*with_tools()])
def test_results_of_tools_stand_behind_a_call_as_transformers_writes_them(
    name: str, ends: tuple[str, ...] | None, tmp_path: Path
) -> None:
    folder = model_with(name, tmp_path) if ends is None else make_model(tmp_path, text_of(name), ends=list(ends))
    tokenization, theirs, chance = Tokenization(folder), Theirs(folder), random.Random(name)
    bridges, compared = Bridges(tokenization), 0

    for _, with_list in itertools.product(range(20), (True, False)):
        tools = TOOLS if with_list else ()
        history: list[Mapping[str, object]] = [{"role": "user", "content": chance.choice(TEXTS)}]
        for turn in range(chance.choice((1, 2, 3))):
            call, results = calls_and_results(chance, turn, most=1 if name in ONE_CALL else 2)
            history += [call, *map(plain, results)]
            bridge = bridges.bridge(results, tools=tools)
            text = theirs.render(history, tools=tools)
            assert text.endswith(shown(tokenization, (*bridge.closer, *bridge.rest))), text
            compared += 1
    assert compared >= 40


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_user_says_stands_behind_an_answer_as_transformers_writes_it(name: str, tmp_path: Path) -> None:
    folder = model_with(name, tmp_path)
    tokenization, theirs, chance = Tokenization(folder), Theirs(folder), random.Random(name)
    bridges = Bridges(tokenization)

    for _ in range(20):
        history: list[Mapping[str, object]] = [{"role": "user", "content": chance.choice(TEXTS)}]
        for _ in range(chance.choice((1, 2, 3))):
            said = ChatMessage("user", chance.choice(TEXTS))
            history += [{"role": "assistant", "content": chance.choice(TEXTS)}, plain(said)]
            bridge = bridges.bridge((said,))
            text = theirs.render(history)
            assert text.endswith(shown(tokenization, (*bridge.closer, *bridge.rest))), text


@pytest.mark.parametrize("name", sorted(WITH_OWN_IDS))
def test_two_results_of_a_turn_have_the_ids_of_their_calls(name: str, tmp_path: Path) -> None:
    tokenization = Tokenization(model_with(name, tmp_path))
    bridges = Bridges(tokenization)
    own = tuple(ChatMessage("tool", "seen", name="look", tool_call_id=f"abcdefg0{number}") for number in range(2))
    without = tuple(ChatMessage("tool", "seen", name="look") for _ in range(2))

    text = shown(tokenization, bridges.bridge(own).rest)
    assert text.count("abcdefg00") == text.count("abcdefg01") == 1
    text = shown(tokenization, bridges.bridge(without).rest)
    assert text.count("call00001") == text.count("call00002") == 1
