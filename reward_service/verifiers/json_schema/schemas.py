"""Schemas, checked whole before the first value is, so that it depends on no completion whether one is good.

Nothing is ever fetched: a reference leads into the schema itself or to a draft's own schema, or it is an error.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache

from jsonschema import Draft4Validator, Draft6Validator, Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema_specifications import REGISTRY
from pydantic import JsonValue
from referencing.exceptions import Unresolvable
from referencing.jsonschema import SchemaRegistry, specification_with

from reward_service.verifier import DataError, UserError
from reward_service.verifiers.json_schema.arguments import Draft, JsonSchema

_DRAFTS: Mapping[Draft, type[Validator]] = {
    "2020-12": Draft202012Validator,
    "2019-09": Draft201909Validator,
    "7": Draft7Validator,
    "6": Draft6Validator,
    "4": Draft4Validator,
}
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class Schema:
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
        except (ValueError, RecursionError) as error:
            raise UserError(f"the schema cannot be read: {error}") from error
        required = schema.get("required") if isinstance(schema, dict) else None
        self.required = frozenset(map(str, required)) if isinstance(required, list) else frozenset[str]()
        self._validator = kind(schema, registry=REGISTRY)

    def allows(self, value: JsonValue) -> bool:
        """Whether the value is valid. Raises DataError if that cannot be told."""
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
def open_schema(text: str, *, draft: Draft) -> Schema:
    """The schema that the JSON text is. Raises UserError."""
    return Schema(json.loads(text), draft=draft)


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
        for name in _REFERENCES:
            if name in contents:
                target = resolver.lookup(str(contents[name]))
                _check(target.contents, kind)
                pending.append((target.resolver, specification.create_resource(target.contents)))
        pending.extend((resolver.in_subresource(part), part) for part in resource.subresources())


def _check(schema: object, kind: type[Validator]) -> None:
    if isinstance(schema, dict):
        kind.check_schema(schema)
    elif not isinstance(schema, bool):
        raise ValueError(f"a reference leads to {type(schema).__name__}, expected a schema")
