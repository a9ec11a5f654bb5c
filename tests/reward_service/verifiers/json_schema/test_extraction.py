import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.verifiers.arguments import Place
from reward_service.verifiers.json_schema import candidates


def found(text: str, place: Place) -> list[str]:
    return list(candidates(text, place))


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ('Here:\n```json\n{"a": 1}\n```\nDone.', ['{"a": 1}']),
        ("```\n[1]\n```", ["[1]"]),
        ("```JSON\n[1]\n```\nNo:\n  ```json  \n[2]\n  ```", ["[2]"]),
        ("```json\n[1]\n```\n```python\nx = 1\n```", ["[1]"]),
        ("```json\n[1]\n```\n```\noutput\n```", ["[1]"]),
        ("```json\n[\n1\n]\n```", ["[\n1\n]"]),
        ("```json\n[1]", []),
        ("```python\n[1]\n```", []),
        ("```json\n```", [""]),
        ("````json\n[1]\n````", ["[1]"]),
        ("````json\n[\n```\n]\n````", ["[\n```\n]"]),
        ("~~~json\n[1]\n~~~", ["[1]"]),
        ("[1]", []),
    ],
)
def test_the_last_fenced_block_of_json(text: str, blocks: list[str]) -> None:
    assert found(text, "fenced") == blocks


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('The result is {"a": [1, {"b": 2}]}.', ['{"a": [1, {"b": 2}]}']),
        ("First [1], then [2].", ["[2]", "[1]"]),
        ('{"a": "}]{["}', ['{"a": "}]{["}']),
        ('{"a": "\\"}"} or', ['{"a": "\\"}"}']),
        ('He said "look: [1]', ["[1]"]),
        ("[note: [1] and {2}", ["{2}", "[1]"]),
        ("[ { ] } [3]", ["[3]"]),
        ("no value", []),
        ("[1", []),
        ("1]", []),
    ],
)
def test_balanced_values_from_the_last_to_the_first(text: str, values: list[str]) -> None:
    assert found(text, "last_value") == values


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(JSON_VALUES, max_size=3) | st.dictionaries(st.text(), JSON_VALUES, max_size=3), st.booleans())
def test_any_object_or_array_is_found_between_words(value: object, escape: bool) -> None:
    text = f"The value is: {json.dumps(value, ensure_ascii=escape)} as you see."
    assert json.loads(found(text, "last_value")[0]) == value


@settings(deadline=None)
@given(st.text(alphabet='{}[]"\\\n a'))
def test_what_is_found_lies_in_the_text_and_never_overlaps(text: str) -> None:
    values = found(text, "last_value")
    assert sum(map(len, values)) <= len(text)
    assert all(value in text for value in values)


@pytest.mark.parametrize("place", ["fenced", "last_value"])
@pytest.mark.parametrize("opening", ["", "[", '["'])
@pytest.mark.parametrize("unit", ["[", "]", "{[", '["', '"\\', '\\"', "```json\n", "[]", "[1,"])
def test_a_mebibyte_of_one_token_is_read_once(opening: str, unit: str, place: Place) -> None:
    assert len(found(opening + unit * ((1 << 20) // len(unit)), place)) <= 1 << 19
