import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from reward_service.verifier.submission import DataError, Score, Submission, UserError, validate_arguments
from reward_service.verifiers.arguments import JsonSchemaArguments
from reward_service.verifiers.json_schema import json_schema

PERSON: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36, "tags": ["x"]}'


def judged(completion: str, schema: JsonValue = True, **more: JsonValue) -> Score:
    arguments = JsonSchemaArguments.model_validate({"schema": schema, **more})
    return json_schema(Submission(completion=completion), arguments)


@pytest.mark.parametrize(
    ("completion", "parsed", "valid"),
    [
        (GOOD, 1.0, 1.0),
        (f"\n{GOOD} \n", 1.0, 1.0),
        (f"Here you are:\n```json\n{GOOD}\n```\nAnything else?", 1.0, 1.0),
        (f"<think>{{}}</think>{GOOD}", 1.0, 1.0),
        ('{"name": "Ada", "age": "36", "tags": []}', 1.0, 0.0),
        ('{"name": "Ada"}', 1.0, 0.0),
        ("[]", 1.0, 0.0),
        (f"Here you are: {GOOD}", 0.0, 0.0),
        (GOOD[:-1], 0.0, 0.0),
        (f"```json\nnone\n```\n{GOOD}", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ("9" * 10_000, 0.0, 0.0),
    ],
)
def test_the_value_parses_and_is_valid(completion: str, parsed: float, valid: float) -> None:
    score = judged(completion, PERSON)
    assert (score.reward, score.components) == (valid, {"parsed": parsed, "valid": valid})


@pytest.mark.parametrize(
    ("completion", "extract", "reward"),
    [
        (f"Well, {GOOD} it is.", ["last_value"], 1.0),
        (f"{GOOD} or [better] {{so}}", ["last_value"], 1.0),
        (f"{GOOD} or {{}}", ["last_value"], 0.0),
        (f"Well, {GOOD} it is.", ["fenced", "last_value"], 1.0),
        (f"```\n{GOOD}\n```", ["whole"], 0.0),
        ("nothing", ["fenced", "last_value"], 0.0),
    ],
)
def test_the_value_is_taken_from_the_first_place_that_there_is(
    completion: str, extract: list[JsonValue], reward: float
) -> None:
    assert judged(completion, PERSON, extract=extract).reward == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (GOOD, 1.0),
        # Two of three required, and the whole is the fourth part.
        ('{"name": "Ada", "age": 36}', 0.5),
        ('{"name": "", "age": 36, "tags": ["x"]}', 0.5),
        ('{"name": "Ada", "age": 36, "tags": [1]}', 0.5),
        ('{"name": "Ada", "age": 36, "tags": [], "more": 1}', 0.75),
        ("{}", 0.0),
        ("[]", 0.0),
        ("none", 0.0),
    ],
)
def test_partial_credit_is_the_share_of_required_properties(completion: str, reward: float) -> None:
    assert judged(completion, PERSON, partial=True).reward == reward
    assert judged(completion, PERSON).reward == float(reward == 1.0)


@pytest.mark.parametrize(
    ("pattern", "value", "reward"),
    [
        (r"^\d{4}$", "2024", 1.0),
        (r"^\d{4}$", "２０２４", 0.0),
        (r"^\d{4}$", r"2024\n", 0.0),
        (r"^[\d-]+$", "2024-05", 1.0),
        (r"^[\w$]+$", "a_1$", 1.0),
        (r"^\w+$", "é", 0.0),
        (r"^\W$", "é", 1.0),
        (r"^\$\d$", "$5", 1.0),
    ],
)
def test_patterns_are_those_of_ecmascript(pattern: str, value: str, reward: float) -> None:
    schema: JsonValue = {"pattern": pattern}
    assert judged(f'"{value}"', schema).reward == reward
    named: JsonValue = {"patternProperties": {pattern: False}}
    assert judged(f'{{"{value}": 1}}', named).reward == 1.0 - reward


@pytest.mark.parametrize("draft", ["2020-12", "2019-09", "7", "6", "4"])
@pytest.mark.parametrize("schema", [{"pattern": r"^\p{L}+$"}, {"patternProperties": {r"^\p{L}+$": {}}}])
def test_a_pattern_that_cannot_be_read_is_the_callers_fault(draft: str, schema: JsonValue) -> None:
    with pytest.raises(UserError, match=r"\\p\{L\}"):
        judged('{"a": 1}', schema, draft=draft)


def test_duplicate_keys_and_nan_are_refused_unless_allowed() -> None:
    assert judged('{"a": 1, "a": 2}').components["parsed"] == 0.0
    assert judged('{"a": 1, "a": 2}', allow_duplicate_keys=True).reward == 1.0
    assert judged("[NaN]").components["parsed"] == 0.0
    assert judged("-Infinity").components["parsed"] == 0.0
    assert judged("[NaN, Infinity]", allow_nan=True).reward == 1.0


def test_a_schema_is_read_by_its_draft() -> None:
    pair: dict[str, JsonValue] = {"items": [{"type": "integer"}, {"type": "string"}]}
    assert judged('["a", 1]', pair, draft="7").reward == 0.0
    named = {**pair, "$schema": "http://json-schema.org/draft-07/schema#"}
    assert judged('["a", 1]', named).reward == 0.0
    with pytest.raises(UserError, match="items"):
        judged('["a", 1]', pair)


def test_references_lead_into_the_schema_and_to_the_drafts_own() -> None:
    tree: dict[str, JsonValue] = {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    assert judged("[[], [[]]]", tree).reward == 1.0
    assert judged("[[], [[1]]]", tree).reward == 0.0
    anchored: dict[str, JsonValue] = {"items": {"$ref": "#word"}, "$defs": {"w": {"$anchor": "word", "type": "string"}}}
    assert judged('["a"]', anchored).reward == 1.0
    assert judged('{"type": "array"}', {"$ref": "https://json-schema.org/draft/2020-12/schema"}).reward == 1.0
    assert judged('{"type": "tuple"}', {"$ref": "https://json-schema.org/draft/2020-12/schema"}).reward == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "tuple"},
        {"required": "name"},
        {"pattern": "("},
        {"$schema": "https://example.com/my-draft"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#missing"},
        {"$dynamicRef": "#missing"},
        {"properties": {"a": {"$ref": "other.json"}}},
        {"$ref": "#/title", "title": "no schema"},
        {"$ref": "#/x", "x": {"type": "tuple"}},
        {"$ref": "http://[1"},
        {"$id": "http://[1", "items": {"$ref": "#/a"}},
    ],
)
@pytest.mark.parametrize("completion", ["[]", "not JSON"])
def test_a_schema_that_is_not_valid_is_the_callers_error_whatever_the_completion(
    schema: JsonValue, completion: str
) -> None:
    with pytest.raises(UserError, match="schema"):
        judged(completion, schema)


@pytest.fixture
def requests_seen() -> Iterator[tuple[str, list[str]]]:
    """A web server's address, and the paths that it was asked for."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "where", [{"items": "HERE"}, {"$defs": {"unused": "HERE"}}, {"$id": "http://a.b/", "not": "HERE"}]
)
def test_a_schema_elsewhere_is_not_fetched(requests_seen: tuple[str, list[str]], where: dict[str, JsonValue]) -> None:
    address, seen = requests_seen

    def put(part: JsonValue) -> JsonValue:
        if isinstance(part, dict):
            return {key: put(value) for key, value in part.items()}
        return {"$ref": f"{address}/schema.json"} if part == "HERE" else part

    with pytest.raises(UserError, match="nothing is fetched"):
        judged("[1]", put(where))
    assert seen == []


@pytest.mark.parametrize(
    ("schema", "completion"),
    [
        ({"$ref": "#"}, "1"),
        ({"items": {"$ref": "#"}}, "[" * 900 + "]" * 900),
        ({"multipleOf": 0.1}, "9" * 400),
    ],
)
def test_what_cannot_be_told_is_an_error_and_not_a_zero(schema: JsonValue, completion: str) -> None:
    with pytest.raises(DataError, match="cannot be judged"):
        judged(completion, schema)


@pytest.mark.parametrize(
    "arguments", [{}, {"schema": "string"}, {"schema": {}, "extract": []}, {"schema": {}, "draft": "5"}]
)
def test_arguments_that_do_not_fit_are_the_callers_error(arguments: dict[str, JsonValue]) -> None:
    with pytest.raises(UserError):
        validate_arguments(model=JsonSchemaArguments, arguments=arguments)


@settings(deadline=None)
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from('{}[]":,1`\n'))), st.booleans())
def test_any_text_gets_a_score(completion: str, partial: bool) -> None:
    score = judged(completion, PERSON, partial=partial, extract=["fenced", "last_value", "whole"])
    assert 0.0 <= score.reward <= 1.0


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(["#", "string", "a", "#/items"]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["type", "items", "$ref", "$id", "anyOf", "$defs", "required"]), inner)
        ),
        max_leaves=6,
    )
)
def test_any_schema_gets_a_score_or_an_error_of_ours(schema: JsonValue) -> None:
    with suppress(UserError, DataError):
        validate_arguments(model=JsonSchemaArguments, arguments={"schema": schema})
        assert judged('[{"a": []}]', schema).reward in (0.0, 1.0)
