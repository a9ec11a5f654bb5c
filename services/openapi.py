"""The OpenAPI document of an application whose handlers parse their bodies themselves."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


class ReadsBody:
    """A FastAPI dependency that reads a request's body as `model`."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model


class DescribedApp(FastAPI):
    """An application whose `/openapi.json` also holds the bodies of `ReadsBody`, and whether a token is wanted."""

    wants_token = False
    open_paths: frozenset[str] = frozenset()

    def openapi(self) -> dict[str, Any]:
        """The document; made once, when all routes are there."""
        if self.openapi_schema is None:
            self.openapi_schema = _with_bodies(super().openapi(), bodies=dict(self._bodies()))
            if self.wants_token:
                _with_token(self.openapi_schema, open_paths=self.open_paths)
        return self.openapi_schema

    def _bodies(self) -> Iterator[tuple[str, type[BaseModel]]]:
        for route in (route for route in self.routes if isinstance(route, APIRoute)):
            for dependency in route.dependant.dependencies:
                if isinstance(dependency.call, ReadsBody):
                    yield route.path, dependency.call.model


def _with_bodies(document: dict[str, Any], *, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
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


def _with_token(document: dict[str, Any], *, open_paths: Collection[str]) -> None:
    """Add that all but the open paths want a bearer token."""
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in open_paths:
        for operation in document["paths"].get(path, {}).values():
            operation["security"] = []
