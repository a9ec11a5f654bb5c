"""The verifier `json_schema`. Loaded only in worker processes: a schema's patterns can take without end."""

import json
from collections.abc import Iterable

from pydantic import JsonValue

from reward_service.extraction import strip_thinking
from reward_service.verifier import Score, Submission
from reward_service.verifiers.json_schema.arguments import JsonSchemaArguments
from reward_service.verifiers.json_schema.extraction import candidates
from reward_service.verifiers.json_schema.schemas import Schema, open_schema


class _NoValue(Exception):
    """The text holds no JSON value where the arguments look for it."""


def json_schema(submission: Submission, arguments: JsonSchemaArguments) -> Score:
    """1 when the completion holds a JSON value that the schema allows, else 0, or a part.

    What Python's parser cannot hold, as RFC 8259 lets a parser, is no value: some thousand brackets, or digits.
    """
    schema = open_schema(json.dumps(arguments.json_schema), draft=arguments.draft)
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    try:
        value = _value(text, arguments)
    except _NoValue:
        return Score(reward=0.0, components={"parsed": 0.0, "valid": 0.0})
    if schema.allows(value):
        return Score(reward=1.0, components={"parsed": 1.0, "valid": 1.0})
    return Score(reward=_part(schema, value) if arguments.partial else 0.0, components={"parsed": 1.0, "valid": 0.0})


def _part(schema: Schema, value: JsonValue) -> float:
    """The whole counts as one more than its required properties: so what is not valid never earns 1."""
    return len(schema.valid_required(value)) / (len(schema.required) + 1)


def _value(text: str, arguments: JsonSchemaArguments) -> JsonValue:
    for place in arguments.extract:
        found = list(candidates(text, place))
        if found:
            return _first_that_parses(found, arguments)
    raise _NoValue


def _first_that_parses(texts: Iterable[str], arguments: JsonSchemaArguments) -> JsonValue:
    for text in texts:
        try:
            return _parse(text, arguments)
        except (ValueError, RecursionError):
            continue
    raise _NoValue


def _parse(text: str, arguments: JsonSchemaArguments) -> JsonValue:
    """The value of the text. Raises ValueError or RecursionError."""
    pairs = None if arguments.allow_duplicate_keys else _object_of_distinct_keys
    constant = None if arguments.allow_nan else _refuse
    value: JsonValue = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    return value


def _object_of_distinct_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
