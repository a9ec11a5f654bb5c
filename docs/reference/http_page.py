"""The page of HTTP routes, made from the OpenAPI documents of the four applications."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.reference.processes import Described
from docs.reference.tables import table

_METHODS = ("get", "post", "put", "delete")

_HEAD = """\
# HTTP routes

The routes that each process answers at its HTTP address (`http.host` and `http.port` of its settings). All bodies are
JSON. Where a token is set, every route but `/healthz`, `/readyz` and `/metrics` wants `Authorization: Bearer TOKEN`.
`GET /openapi.json` of a running process has the same as an OpenAPI document. Every refusal (4xx) and failure (5xx) has
the body [`ErrorBody`](#errorbody). This page is made from the code by `python -m docs.reference`.

A generator with `openai = true` also has vLLM's OpenAI-compatible `/openai/v1/models`, `/openai/v1/completions` and
`/openai/v1/chat/completions`.

Left out are the routes of the run's page (`/` and `/page`), those of the Tinker API (`/api/v1`, as its SDK asks them),
and what other commands serve: `env-service host`
([its calls](../tinker.md#environments-and-rewards-of-headway)) and `headway relay`, which has the learner's routes of
the tree of weights."""

Document = Mapping[str, Any]


def http_page(processes: Mapping[str, Described]) -> str:
    """The page, as Markdown."""
    documents = {name: process.app.openapi() for name, process in processes.items()}
    lines = [_HEAD]
    for name, document in documents.items():
        lines += ["", f"## {name}", "", *table(("route", "what it does", "body", "answer"), _routes(document))]
    lines += ["", "## Bodies", "", "Fields without a default are required; a field that is not listed is refused."]
    for name, schema in sorted(_shown_schemas(documents).items()):
        lines += ["", *_schema_lines(name, schema)]
    return "\n".join(lines) + "\n"


def _routes(document: Document) -> Iterator[tuple[str, str, str, str]]:
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if operation := operations.get(method):
                text = _one_line(operation.get("description") or operation["summary"])
                yield f"`{method.upper()} {path}`", text, _body(operation), _answer(operation)


def _body(operation: Document) -> str:
    return _types(operation.get("requestBody", {}).get("content", {}))


def _answer(operation: Document) -> str:
    return _types(operation["responses"]["200"].get("content", {}))


def _types(content: Document) -> str:
    return " or ".join(
        _linked(media["schema"]) + ("" if kind == "application/json" else f" (`{kind}`)")
        for kind, media in content.items()
        if "$ref" in media.get("schema", {})
    )


def _shown_schemas(documents: Mapping[str, Document]) -> dict[str, Document]:
    """Of all documents, what a body or an answer holds, and what that holds."""
    shown: dict[str, Document] = {}
    for document in documents.values():
        schemas = document.get("components", {}).get("schemas", {})
        waiting = [name for operation in document["paths"].values() for name in _referred(operation)]
        while waiting:
            name = waiting.pop()
            if name not in shown and name in schemas and "properties" in schemas[name]:
                shown[name] = schemas[name]
                waiting += _referred(schemas[name])
    return shown


def _referred(node: object) -> list[str]:
    if isinstance(node, Mapping):
        here = [str(node["$ref"]).rpartition("/")[2]] if "$ref" in node else []
        return here + [name for inner in node.values() for name in _referred(inner)]
    return [name for inner in node for name in _referred(inner)] if isinstance(node, list) else []


def _schema_lines(name: str, schema: Document) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if text := schema.get("description"):
        yield text
        yield ""
    required = schema.get("required", ())
    rows = ((f"`{key}`", _value(field, required=key in required)) for key, field in schema["properties"].items())
    yield from table(("field", "value"), rows)


def _value(field: Document, *, required: bool) -> str:
    described = f": {field['description']}" if field.get("description") else ""
    return f"{_type(field)}{'' if required else _default(field.get('default'))}{described}"


def _default(value: object) -> str:
    if isinstance(value, bool):
        return f", default `{str(value).lower()}`"
    return f", default `{value}`" if isinstance(value, str | int | float) and value != "" else ", optional"


def _type(field: Document) -> str:
    if "$ref" in field:
        return _linked(field)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}" if "items" in field else "list"
    names = {"string": "text", "object": "object", "boolean": "true or false", "null": "null"}
    kind = str(field.get("type", "any"))
    return names.get(kind, kind)


def _linked(schema: Document) -> str:
    name = str(schema["$ref"]).rpartition("/")[2]
    return "any JSON" if name == "JsonValue" else f"[`{name}`](#{name.lower()})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
