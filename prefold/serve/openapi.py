"""Describes the server in OpenAPI 3.1, out of its routes and the tables that requests are read by; and /docs, a page
that shows this without anything from elsewhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .. import __version__
from ..api import ENDPOINTS
from ..api.schema import BODIES, STREAMED, SUMMARIES, body_schema
from .files import PURPOSES
from .http import json_response
from .page import page_response, page_text

__all__ = ["describe", "routes"]

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
_BATCH = {
    "type": "object",
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
        "completion_window": {"type": "string", "pattern": "^[1-9][0-9]*[smhd]$", "default": "24h"},
        "metadata": {
            "type": "object",
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "output_expires_after": {"type": "object"},
    },
    "required": ["input_file_id", "endpoint"],
    "additionalProperties": False,
}
# {path: the bodies it takes, beside those of `ENDPOINTS`}
_TAKES = {
    "/v1/messages": ("message",), "/v1/messages/count_tokens": ("message_tokens",), "/v1/embed": ("cohere_embed",),
    "/v2/embed": ("cohere_embed",), "/v2/rerank": ("rerank",), "/embed": ("tei_embed",),
    "/embed_all": ("tei_embed_all",), "/predict": ("tei_predict",), "/similarity": ("tei_similarity",),
    "/decode": ("tei_decode",), "/": ("tei_embed", "tei_predict", "tei_similarity", "tei_rerank"),
    "/rerank": ("rerank", "tei_rerank"), "/tokenize": ("tokenize_prompt", "tokenize_chat", "tei_tokenize"),
    "/detokenize": ("detokenize",), "/classify": ("classify",), "/pooling": ("pooling",),
    "/v1/responses/input_tokens": ("response",),
}  # fmt: skip
_PAGED = {"/v1/files": ("after", "limit", "order", "purpose"), "/v1/batches": ("after", "limit", "order")}
# {path: what its handler, which is made of a reader, does not say itself}
_SAID = {
    "/health": "Answers whether requests are taken: 200, or 503 with the reason.",
    "/ping": "Answers as /health does.",
    "/embed": "Returns the vectors of texts.",
    "/v1/embed": "Returns the vectors of texts.",
    "/v2/embed": "Returns the vectors of texts.",
    "/v2/rerank": "Scores documents by how well they answer a query, the best first.",
    "/predict": "Returns the labels of texts, with their scores.",
    "/similarity": "Returns the cosines of one text and others.",
}
_SHARED_KEYS = [{"bearer": []}, {"x-api-key": []}, {}]


def routes(others: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Returns the paths that describe the others."""
    found, text = describe(others), page_text("docs.html")

    async def openapi(request: Request) -> Response:
        """Answers with this description."""
        return json_response(found)

    async def docs(request: Request) -> Response:
        """Answers with a page that shows this description."""
        return page_response(text)

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def describe(found: Sequence[BaseRoute]) -> dict[str, Any]:
    """Returns the OpenAPI description of routes. Of two with one path and method the first counts, as it answers."""
    paths: dict[str, dict[str, Any]] = {}
    for route in found:
        if isinstance(route, Route):
            path = re.sub(r"{(\w+)(:\w+)?}", r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {}).setdefault(method.lower(), _operation(path, method, route.endpoint))
    schemas = {kind: body_schema(kind) for kind in BODIES}
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


def _operation(path: str, method: str, endpoint: Any) -> dict[str, Any]:
    face, handle, admin = getattr(endpoint, "about", ("server", endpoint, False))
    kind = ENDPOINTS.get(path) if face == "openai" and method == "POST" else None
    said = (_SAID.get(path) or inspect.getdoc(handle) or "Answers.") if kind is None else SUMMARIES[kind]
    name = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
    operation: dict[str, Any] = {
        "tags": ["server" if admin or path == "/version" else face],
        "operationId": name,
        "summary": " ".join(said.split("\n\n")[0].split()),
    }
    if face != "server":
        operation["security"] = _SHARED_KEYS
    if admin:
        operation["description"] = "For admins, where the server has keys."
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": one, "in": "path", "required": True, "schema": {"type": "string"}} for one in names]
    if method == "GET":
        parameters += [{"name": one, "in": "query", "schema": {"type": "string"}} for one in _PAGED.get(path, ())]
    if parameters:
        operation["parameters"] = parameters
    if path == "/v1/files" and method == "POST":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FILE}}}
    elif method == "POST" and not names:
        taken = [_reference(one) for one in _TAKES.get(path, (kind,) if kind is not None else ())]
        many = {"anyOf": taken} if len(taken) > 1 else taken[0] if taken else _OBJECT
        schema = _BATCH if path == "/v1/batches" else many
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    answer: dict[str, Any] = {"description": "The answer."} | (_JSON if face != "server" else {})
    if kind in STREAMED:
        answer["content"] = answer["content"] | {"text/event-stream": {"schema": {"type": "string"}}}
    wrong = f"What is wrong, in the form of {face}'s errors: 400 for the request, 401 and 403 for keys, 404, 429, 5xx."
    operation["responses"] = {"200": answer} | ({"default": {"description": wrong} | _JSON} if face != "server" else {})
    return operation


def _reference(kind: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind}"}
