"""The ASGI application: the dialects, the probes and the metrics."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from msgspec.json import schema_components
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from . import admin, dialects, files
from .admin import page_response, page_text
from .context import Entry, RequestContext
from .dialects import ANTHROPIC, OPENAI
from .files import PURPOSES
from .http import Hosts, Refusal, json_response
from .state import AppState, new_id

LAG_SECONDS = 0.5  # between two measurements of the event loop's lag
_ID = re.compile(rb"[!-~]{1,128}")
DIALECTS: list[ModuleType] = [dialects, files, admin]  # modules with ENTRIES; the first entry of a path wins


class Direct:
    """The outer ASGI application. It calls the endpoints of paths without parameters directly.

    All other requests go to Starlette, which is slower: it tries its routes in order and wraps `send` twice.

    For every request it also counts the responses that have not been sent completely, and sends `x-request-id`: the
    client's id or a new one. Without keys it refuses requests of foreign pages.

    Attributes:
        routes: all routes, also Starlette's
    """

    def __init__(self, app: Starlette, state: AppState, routes: Mapping[tuple[str, str], Route]):
        self._app, self.routes, self._state, self._routes = app, app.routes, state, routes
        self._hosts = Hosts(state.options) if state.options.api_keys is None else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._state.open += 1
        id = scope["request_id"] = request_id(scope["headers"])
        names = [b"x-request-id", b"request-id"] if ANTHROPIC.paths.match(scope["path"]) else [b"x-request-id"]
        named = [(name, id.encode()) for name in names]

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *named]
            await send(message)

        try:
            await (await self._answer(scope, receive, sent))(scope, receive, sent)
        finally:
            self._state.open -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> Any:
        """Return the response to a request, or the application that makes the response."""
        try:
            if self._hosts is not None:
                self._hosts.check(scope["headers"])
        except Refusal as refusal:
            return OPENAI.refuse(self._state, refusal)
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            return self._app
        scope["route"] = route
        return await route.endpoint(Request(scope, receive, send))


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's x-request-id if it is short and printable, else a new id."""
    sent = next((value for name, value in headers if name == b"x-request-id"), b"")
    return sent.decode() if _ID.fullmatch(sent) else new_id()


def make_app(state: AppState) -> Direct:
    """Return the application of a server."""

    async def wrong_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        try:
            state.tenant_of(request.headers)
            message, remedy, code = f"there is no {path!r:.200}", "GET /docs shows the paths", "not_found"
            if any(entry.path == f"/v1{path}" for entry in entries):
                remedy = f"use /v1{path}: an OpenAI client's base URL ends in /v1"
            if error.status_code == 405:
                message = f"{path!r:.200} does not take {request.method}"
                remedy, code = f"use {(error.headers or {})['Allow']}", "method_not_allowed"
            refusal = Refusal(error.status_code, message, remedy=remedy, code=code)
            refusal.headers.update(error.headers or {})
        except Refusal as unknown:
            refusal = unknown
        dialect = next((entry.dialect for entry in entries if entry.dialect.paths.match(path)), OPENAI)
        return dialect.refuse(state, refusal)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(watch_loop(state))
        yield
        looking.cancel()

    async def health(request: Request) -> Response:
        """Return 200 if the server accepts requests, else 503 with the reason."""
        failing = state.failing
        body = {"status": state.status} if failing is None else {"status": "failing", "reason": failing}
        return json_response(body, 200 if body["status"] == "ready" else 503)

    async def alive(request: Request) -> Response:
        """Return 200 while the process works, also while it loads the model or drains.

        Return 503 if it must be restarted.
        """
        return json_response({"status": state.status}, 200 if state.is_alive else 503)

    entries = [*SERVER, *(entry for dialect in DIALECTS for entry in dialect.ENTRIES)]
    routes = [Route(entry.path, entry.endpoint(state), methods=[entry.method]) for entry in entries]
    probes = dict.fromkeys(("/health", "/healthz", "/ping", "/readyz"), health) | {"/livez": alive}
    routes_before = [admin.route(), *(Route(path, answer, methods=["GET"]) for path, answer in probes.items())]
    direct = {(entry.method, entry.path): route for entry, route in reversed([*zip(entries, routes, strict=True)])}
    direct = {place: route for place, route in direct.items() if "{" not in route.path}
    routes += [*routes_before, *describing(entries, routes_before)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: wrong_path}, lifespan=lifespan)
    return Direct(app, state, direct)


async def version(context: RequestContext) -> Response:
    """Return prefold's version."""
    return json_response({"version": __version__})


async def metrics(context: RequestContext) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(context.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


SERVER = [Entry(OPENAI, "GET", "/version", version), Entry(OPENAI, "GET", "/metrics", metrics, admin=True)]


async def watch_loop(state: AppState) -> None:
    """Measure the event loop's lag until cancelled."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(LAG_SECONDS)
        state.metrics.lag.observe(max(0.0, time.perf_counter() - start - LAG_SECONDS))


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
_SHARED_KEYS: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}, {}]


def describing(entries: Sequence[Entry], plain: Sequence[Route]) -> list[Route]:
    """Return the routes of the OpenAPI description and its page.

    Args:
        plain: routes outside of the dialects, for the description
    """
    description, text = describe(entries, plain), page_text("docs.html")

    async def openapi(request: Request) -> Response:
        """Return this OpenAPI description."""
        return json_response(description)

    async def docs(request: Request) -> Response:
        """Return a page that shows the OpenAPI description."""
        return page_response(text)

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def describe(entries: Sequence[Entry], plain: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI description of the routes. The first entry of a path and method wins."""
    paths: dict[str, dict[str, Any]] = {}
    kinds = list(dict.fromkeys(kind for entry in entries for kind in entry.bodies))
    references, schemas = schema_components(kinds, ref_template="#/components/schemas/{name}")
    for entry in entries:
        path = entry.path.replace(":path}", "}")
        bodies = [reference for kind, reference in zip(kinds, references, strict=True) if kind in entry.bodies]
        paths.setdefault(path, {}).setdefault(entry.method.lower(), _operation(entry, path, bodies))
    for route in plain:
        answer = {"responses": {"200": {"description": "The answer."}}}
        paths.setdefault(route.path, {}).setdefault("get", _about("GET", route.path, route.endpoint, "server") | answer)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    about = "Several APIs, answered by one model. A server that was started with --api-keys requires a key."
    return {
        "openapi": "3.1.0",
        "info": {"title": "prefold", "version": __version__, "description": about},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _about(method: str, path: str, source: Any, tag: str) -> dict[str, Any]:
    """Return the head of an operation.

    Args:
        source: the object whose docstring is the summary
    """
    name = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
    summary = (inspect.getdoc(source) or "Answers.").split("\n\n")[0]
    return {"tags": [tag], "operationId": name, "summary": " ".join(summary.split())}


def _operation(entry: Entry, path: str, bodies: list[Any]) -> dict[str, Any]:
    dialect, is_post = entry.dialect.name, entry.method == "POST"
    source = entry.bodies[0] if len(entry.bodies) == 1 else entry.handle
    operation = _about(entry.method, path, source, "server" if entry.admin or path == "/version" else dialect)
    operation["security"] = _SHARED_KEYS
    if entry.admin:
        operation["description"] = "Needs an admin's key if the server has keys."
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if entry.query is not None:
        fields = schema_components([entry.query])[1][entry.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
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
    wrong = f"An error in the form of {dialect}'s API: 400 for the request, 401 and 403 for keys, 404, 429, 5xx."
    return operation | {"responses": {"200": answer, "default": {"description": wrong} | _JSON}}
