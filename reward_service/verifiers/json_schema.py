"""The verifier `json_schema`: finds the JSON value in a text and checks it by a schema that was checked whole before.

Loaded only in worker processes: a schema's patterns can take without end.

Nothing is ever fetched: a reference leads into the schema itself or to a draft's own schema, or it is an error.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    validators,
)
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema_specifications import REGISTRY
from pydantic import JsonValue
from referencing.exceptions import Unresolvable
from referencing.jsonschema import SchemaRegistry, specification_with

from reward_service.verifier.submission import DataError, Score, Submission, UserError
from reward_service.verifiers.arguments import Draft, JsonSchema, JsonSchemaArguments, Place
from reward_service.verifiers.extraction import strip_thinking

_FENCE = re.compile(r"(`{3,}|~{3,})([^`]*)")
_OPENING = re.compile(r"[{\[]")
# Within a value: a string on one line, an escaped character outside of one, or a bracket.
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\\.|[{}\[\]]')
_PAIRS = {"}": "{", "]": "["}
# Parts of a pattern that Python reads otherwise than JSON Schema does, which has them from ECMAScript: there the digits
# and letters are those of ASCII, and `$` is the end, not also the place before a last new line.
_PART = re.compile(r"\\.|.", re.DOTALL)
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
_NOT_ASCII = {r"\D": "[^0-9]", r"\W": "[^A-Za-z0-9_]"}
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern of a schema. Raises re.error for one that Python does not read."""
    parts, in_class = [], False
    for part in _PART.findall(pattern):
        if part in _ASCII:
            part = _ASCII[part] if in_class else f"[{_ASCII[part]}]"
        elif not in_class:
            part = _NOT_ASCII.get(part, r"\Z" if part == "$" else part)
        in_class = part != "]" and (in_class or part == "[")
        parts.append(part)
    return re.compile("".join(parts))


def _pattern(validator: Any, pattern: str, value: JsonValue, schema: JsonValue) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _compiled(pattern).search(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, schemas: Mapping[str, JsonSchema], value: JsonValue, schema: JsonValue
) -> Iterator[ValidationError]:
    for name, part in value.items() if isinstance(value, dict) else ():
        for pattern, each in schemas.items():
            if _compiled(pattern).search(name):
                yield from validator.descend(part, each, path=name, schema_path=pattern)


def _with_patterns(kind: type[Validator]) -> type[Validator]:
    keywords = {"pattern": _pattern, "patternProperties": _pattern_properties}
    extended: type[Validator] = validators.extend(kind, keywords)  # type: ignore[no-untyped-call]
    return extended


_DRAFTS: Mapping[Draft, type[Validator]] = {
    "2020-12": _with_patterns(Draft202012Validator),
    "2019-09": _with_patterns(Draft201909Validator),
    "7": _with_patterns(Draft7Validator),
    "6": _with_patterns(Draft6Validator),
    "4": _with_patterns(Draft4Validator),
}


def candidates(text: str, place: Place) -> Iterator[str]:
    """Texts that may be the value, best first; nothing where the text has no such place."""
    return _FINDERS[place](text)


def _last_fenced(text: str) -> Iterator[str]:
    """The content of the last closed block that is fenced as json; of the last without a language, if none is."""
    found: dict[str, str] = {}
    opened: str | None = None  # the backticks or tildes of the open block
    language = ""
    block: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.strip())
        if opened is None and fence is not None:
            opened, language, block = fence[1], fence[2].strip().lower(), []
        elif opened is not None and fence is not None and fence[1].startswith(opened) and not fence[2]:
            found[language] = "\n".join(block)
            opened = None
        elif opened is not None:
            block.append(line)
    yield from [found[name] for name in ("json", "") if name in found][:1]


def _last_values(text: str) -> Iterator[str]:
    """The balanced objects and arrays that stand in no other, the last one first."""
    for start, end in reversed(_balanced(text)):
        yield text[start:end]


def _balanced(text: str) -> list[tuple[int, int]]:
    """Spans from a bracket to its counterpart that lie in no other such span.

    A bracket that never closes hides nothing after it, and one that closes another kind closes all that is open.
    """
    closed: list[tuple[int, int]] = []
    open_at: list[int] = []
    position = 0
    while found := (_TOKEN if open_at else _OPENING).search(text, position):
        position = found.end()
        token = found.group()
        if token in "{[":
            open_at.append(found.start())
        elif token in _PAIRS and text[open_at[-1]] != _PAIRS[token]:
            open_at.clear()
        elif token in _PAIRS:
            start = open_at.pop()
            while closed and closed[-1][0] > start:
                closed.pop()
            closed.append((start, position))
    return closed


def _whole(text: str) -> Iterator[str]:
    yield text


_FINDERS: Mapping[Place, Callable[[str], Iterator[str]]] = {
    "fenced": _last_fenced,
    "last_value": _last_values,
    "whole": _whole,
}


class CheckedSchema:
    """A schema that is known to be good. Raises UserError if it is not."""

    def __init__(self, schema: JsonSchema, *, draft: Draft) -> None:
        kind = _validator_class(schema, draft=draft)
        try:
            _check_references(schema, kind)
        except SchemaError as error:
            path = "/".join(map(str, error.absolute_path)) or "its root"
            raise UserError(f"the schema is not valid at {path}: {error.message[:300]}") from error
        except Unresolvable as error:
            raise UserError(
                f"the schema refers to {error.ref!r}, which is not in it; nothing is fetched: put it under $defs"
            ) from error
        except re.error as error:
            raise UserError(
                f"the schema has the pattern {str(error.pattern)[:200]!r}, which Python's re does not read: {error}; "
                "write it without what only ECMAScript has, such as \\p{..}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"the schema cannot be read: {error}") from error
        required = schema.get("required") if isinstance(schema, dict) else None
        self.required = frozenset(map(str, required)) if isinstance(required, list) else frozenset[str]()
        self._validator = kind(schema, registry=REGISTRY)

    def allows(self, value: JsonValue) -> bool:
        """True if the value is valid. Raises DataError if that cannot be told."""
        return next(self._errors(value), None) is None

    def valid_required(self, value: JsonValue) -> frozenset[str]:
        """The properties required at the root that an object has and that are valid. Raises DataError."""
        if not isinstance(value, dict):
            return frozenset()
        invalid = {str(error.absolute_path[0]) for error in self._errors(value) if error.absolute_path}
        return frozenset(self.required & value.keys() - invalid)

    def _errors(self, value: JsonValue) -> Iterator[ValidationError]:
        try:
            yield from self._validator.iter_errors(value)
        except (RecursionError, ArithmeticError, ValueError) as error:
            raise DataError(
                f"the value cannot be judged by this schema: {type(error).__name__}: {error}; "
                "one of them nests too deep or refers to itself without end, or a number is too great"
            ) from error


@lru_cache(maxsize=256)
def open_schema(text: str, *, draft: Draft) -> CheckedSchema:
    """The schema that the JSON text is. Raises UserError."""
    return CheckedSchema(json.loads(text), draft=draft)


def _validator_class(schema: JsonSchema, *, draft: Draft) -> type[Validator]:
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return _DRAFTS[draft]
    known = {str(kind.META_SCHEMA["$schema"]).rstrip("#"): kind for kind in _DRAFTS.values()}
    kind = known.get(str(named).rstrip("#"))
    if kind is None:
        raise UserError(f"the schema names the draft {named!r}, expected one of: {', '.join(sorted(known))}")
    return kind


def _check_references(schema: JsonSchema, kind: type[Validator]) -> None:
    """Check the schema and whatever it refers to. Raises SchemaError, Unresolvable or ValueError."""
    specification = specification_with(str(kind.META_SCHEMA["$schema"]))
    registry: SchemaRegistry = REGISTRY
    root = specification.create_resource(schema)
    _check(schema, kind)
    pending = [(registry.resolver_with_root(root), root)]
    seen = set[int]()
    while pending:
        resolver, resource = pending.pop()
        contents = resource.contents
        if id(contents) in seen or not isinstance(contents, dict):
            continue
        seen.add(id(contents))
        _check_patterns(contents)
        for name in _REFERENCES:
            if name in contents:
                target = resolver.lookup(str(contents[name]))
                _check(target.contents, kind)
                pending.append((target.resolver, specification.create_resource(target.contents)))
        pending.extend((resolver.in_subresource(part), part) for part in resource.subresources())


def _check_patterns(schema: Mapping[str, object]) -> None:
    """Raises re.error."""
    own, of_properties = schema.get("pattern"), schema.get("patternProperties")
    for pattern in [own, *(of_properties if isinstance(of_properties, dict) else ())]:
        if isinstance(pattern, str):
            _compiled(pattern)


def _check(schema: object, kind: type[Validator]) -> None:
    if isinstance(schema, dict):
        kind.check_schema(schema)
    elif not isinstance(schema, bool):
        raise ValueError(f"a reference leads to {type(schema).__name__}, expected a schema")


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


def _part(schema: CheckedSchema, value: JsonValue) -> float:
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
