"""Describes the server in OpenAPI 3.1, out of its entries and the bodies that they take; and /docs, a page
that shows this without anything from elsewhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from msgspec.json import schema_components
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from .files import PURPOSES
from .http import json_response
from .page import page_response, page_text
from .site import Entry

_OBJECT = {"type": "object"}
_JSON = {"content": {"application/json": {"schema": _OBJECT}}}
_FILE = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 1},
    },
    "required": ["file", "purpose"],
}
_SHARED_KEYS = [{"bearer": []}, {"x-api-key": []}, {}]


def routes(entries: Sequence[Entry], plain: Sequence[Route]) -> list[Route]:
    """Returns the paths that describe the others. plain: those that no face answers."""
    found, text = describe(entries, plain), page_text("docs.html")

    async def openapi(request: Request) -> Response:
        """Answers with this description."""
        return json_response(found)

    async def docs(request: Request) -> Response:
        """Answers with a page that shows this description."""
        return page_response(text)

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def describe(entries: Sequence[Entry], plain: Sequence[Route]) -> dict[str, Any]:
    """Returns the OpenAPI description of paths. Of two with one path and method the first counts, as it answers."""
    paths: dict[str, dict[str, Any]] = {}
    kinds = list(dict.fromkeys(kind for entry in entries for kind in entry.bodies))
    references, schemas = schema_components(kinds, ref_template="#/components/schemas/{name}")
    for entry in entries:
        path = entry.path.replace(":path}", "}")
        bodies = [reference for kind, reference in zip(kinds, references, strict=True) if kind in entry.bodies]
        paths.setdefault(path, {}).setdefault(entry.method.lower(), _operation(entry, path, bodies))
    for route in plain:
        found = {"responses": {"200": {"description": "The answer."}}}
        paths.setdefault(route.path, {}).setdefault("get", _about("GET", route.path, route.endpoint, "server") | found)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    about = (
        "Requests of several APIs, answered by one model. Keys are needed where the server was started with --api-keys."
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "prefold", "version": __version__, "description": about},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _about(method: str, path: str, described: Any, tag: str) -> dict[str, Any]:
    """Returns what an operation is. described: what has a docstring that says so."""
    name = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
    summary = (inspect.getdoc(described) or "Answers.").split("\n\n")[0]
    return {"tags": [tag], "operationId": name, "summary": " ".join(summary.split())}


def _operation(entry: Entry, path: str, bodies: list[Any]) -> dict[str, Any]:
    face, is_post = entry.face.name, entry.method == "POST"
    described = entry.bodies[0] if len(entry.bodies) == 1 else entry.handle
    operation = _about(entry.method, path, described, "server" if entry.admin or path == "/version" else face)
    operation["security"] = _SHARED_KEYS
    if entry.admin:
        operation["description"] = "For admins, where the server has keys."
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": one, "in": "path", "required": True, "schema": {"type": "string"}} for one in names]
    if entry.query is not None:
        fields = schema_components([entry.query])[1][entry.query.__name__]["properties"]
        parameters += [{"name": one, "in": "query", "schema": schema} for one, schema in fields.items()]
    if parameters:
        operation["parameters"] = parameters
    if path == "/v1/files" and is_post:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FILE}}}
    elif is_post and not names:
        schema = {"anyOf": bodies} if len(bodies) > 1 else bodies[0] if bodies else _OBJECT
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    answer: dict[str, Any] = {"description": "The answer."} | _JSON
    if any("stream" in kind.__struct_fields__ for kind in entry.bodies):
        answer["content"] = answer["content"] | {"text/event-stream": {"schema": {"type": "string"}}}
    wrong = f"What is wrong, in the form of {face}'s errors: 400 for the request, 401 and 403 for keys, 404, 429, 5xx."
    return operation | {"responses": {"200": answer, "default": {"description": wrong} | _JSON}}
