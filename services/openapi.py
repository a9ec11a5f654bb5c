"""The OpenAPI document of an application whose handlers parse their bodies themselves."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def with_bodies(document: dict[str, Any], *, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document, to which is added the JSON body of each path whose handler reads one."""
    _, definitions = models_json_schema([(model, "validation") for model in bodies.values()], ref_template=_REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in definitions.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for path, model in bodies.items():
        for operation in document["paths"].get(path, {}).values():
            content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
            operation["requestBody"] = {"required": True, "content": content}
    return document


def with_token(document: dict[str, Any], *, open_paths: Collection[str]) -> None:
    """Add that all but the open paths want a bearer token."""
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in open_paths:
        for operation in document["paths"].get(path, {}).values():
            operation["security"] = []
