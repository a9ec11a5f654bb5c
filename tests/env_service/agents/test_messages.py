"""Messages of agents in one form: what survives a client that parses calls and writes them again."""

from datetime import datetime

import pytest

from env_service.agents.messages import AgentMessage, MadeCall, chat_messages
from env_service.agents.rendering import prompt_of


def canonical(arguments: str) -> bytes:
    return AgentMessage("assistant", calls=(MadeCall("id", "name", arguments),)).canonical


@pytest.mark.parametrize(
    ("written", "again"),
    [
        ('{"x": 1.0, "y": [-0.0, {"z": 2e3}]}', '{"x":1,"y":[0,{"z":2000}]}'),
        ('{"n": 12345678901234567890}', '{"n":12345678901234567000}'),
        ('{"n": 1e21}', '{"n":1e+21}'),
        ('{"b": 1, "a": 0.5}', '{"a":0.5,"b":1}'),
    ],
)
def test_numbers_that_javascript_has_written_again_are_the_same(written: str, again: str) -> None:
    assert canonical(written) == canonical(again)


def test_other_arguments_are_others() -> None:
    several = ['{"x": 1}', '{"x": true}', '{"x": "1"}', '{"x": 1.5}', '{"x": 2}', '{"x": %s}' % ("9" * 400)]
    assert len({canonical(each) for each in several}) == len(several)


def test_arguments_are_read_at_whatever_depth_json_is() -> None:
    deep = "[" * 600 + "1.0" + "]" * 600
    assert canonical(f'{{"x": {deep}}}') == canonical(f'{{"x": {deep.replace("1.0", "1")}}}')


def test_what_was_thought_is_the_same_wherever_it_stands_and_not_where_it_is_missing() -> None:
    whole = AgentMessage("assistant", "<think>\nhm\n</think>\n\n7")
    alike = [
        AgentMessage("assistant", "7", thought="\nhm\n"),
        AgentMessage("assistant", "hm</think> 7"),  # the prompt may have opened it
        AgentMessage("assistant", "<think>hm</think>7", thought="hm"),
    ]
    others = [
        AgentMessage("assistant", "7"),
        AgentMessage("assistant", "<think>\nhm\n</think>\n\n8"),
        AgentMessage("assistant", "<think>hm 7"),
        AgentMessage("user", whole.text),
    ]

    assert {each.canonical for each in alike} == {whole.canonical}
    assert len({each.canonical for each in (whole, *others)}) == len(others) + 1


def test_thinking_beside_the_text_is_told_to_templates_that_show_it() -> None:
    (_, said) = chat_messages(
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": "7", "reasoning_content": "hm"}]
    )
    shown: list[object] = []

    class Shows:
        has_own_marks = False

        def text_of(self, messages: list[dict[str, str]], **_: object) -> str:
            shown.extend(each.get("reasoning_content") for each in messages)
            return "".join(each["content"] for each in messages)

        def encode_after(self, before: str, text: str) -> list[int]:
            return []

    prompt_of([AgentMessage("user", "go"), said], (), tokenization=Shows(), now=datetime(2026, 1, 1))  # type: ignore[arg-type]

    assert shown == [None, "hm"]
