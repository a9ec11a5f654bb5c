"""Messages of agents in one form: what survives a client that parses calls and writes them again."""

import pytest

from env_service.agents.messages import AgentMessage, MadeCall


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
