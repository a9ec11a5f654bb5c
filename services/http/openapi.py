"""The OpenAPI document of an application, with the bodies that handlers parse themselves, and what wants a token."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.http.bodies import JsonBody
from services.http.gates import is_open

_REF = "#/components/schemas/{model}"


class DescribedApp(FastAPI):
    """An application whose `/openapi.json` also holds the bodies of JsonBody, and which paths want a token.

    `settings` are FastAPI's.
    """

    def __init__(self, *, wants_token: bool, open_paths: Collection[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._wants_token = wants_token
        self._open_paths = open_paths

    def openapi(self) -> dict[str, Any]:
        """The document of the routes that there are now: a process adds some while it is already asked."""
        self.openapi_schema = None  # where FastAPI would keep the first one
        document = _with_bodies(super().openapi(), bodies=dict(self._bodies()))
        if self._wants_token:
            _with_token(document, open_paths=self._open_paths)
        return document

    def _bodies(self) -> Iterator[tuple[tuple[str, str], type[BaseModel]]]:
        """The model of the body that each path and method takes, if its handler reads one."""
        for route in (route for route in self.routes if isinstance(route, APIRoute)):
            for dependency in route.dependant.dependencies:
                if isinstance(dependency.call, JsonBody):
                    for method in route.methods:
                        yield (route.path_format, method.lower()), dependency.call.model


def _with_bodies(document: dict[str, Any], *, bodies: Mapping[tuple[str, str], type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document, to which is added the JSON body of each path and method that reads one."""
    models = dict.fromkeys(bodies.values())
    references, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in definitions.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for (path, method), model in bodies.items():
        operation = document["paths"].get(path, {}).get(method)
        if operation is not None:
            content = {"application/json": {"schema": references[model, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
    return document


def _with_token(document: dict[str, Any], *, open_paths: Collection[str]) -> None:
    """Add that all but the open paths want a bearer token."""
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path, operations in document["paths"].items():
        if is_open(path, open_paths):
            for operation in operations.values():
                operation["security"] = []
