"""Puts the faces together with health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from . import anthropic, cache, cohere, files, openai, openapi, page, tei
from .hosts import Hosts
from .http import Refusal, json_response
from .keys import Tenant
from .openai import OPENAI
from .site import Entry, Site

LAG_SECONDS = 0.5  # between two looks at the event loop
# What is served. Of two entries of one path the first counts: /v2/rerank is vLLM's too, and its errors are Cohere's.
DIALECTS = (cohere, openai, files, tei, anthropic, cache, page)


class Direct:
    """An ASGI application that answers paths of faces without parameters itself, and leaves the rest to Starlette.

    It counts the requests whose answers have not been sent wholly, and without keys answers no foreign page.

    Starlette looks at its routes one after the other, and wraps what is sent twice, for errors that `Entry.endpoint`
    has answered.

    routes  of the whole application
    """

    def __init__(self, app: Starlette, site: Site, routes: Mapping[tuple[str, str], Route]):
        self._app, self.routes, self._site, self._routes = app, app.routes, site, routes
        self._hosts = Hosts(site.options) if site.options.api_keys is None else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._site.open += 1
        try:
            await (await self._answer(scope, receive, send))(scope, receive, send)
        finally:
            self._site.open -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> Any:
        """Returns the response to a request, or what gives it."""
        try:
            if self._hosts is not None:
                self._hosts.check(scope["headers"])
        except Refusal as refusal:
            return OPENAI.refuse(self._site, refusal)
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            return self._app
        scope["route"] = route
        return await route.endpoint(Request(scope, receive, send))


def make_app(site: Site) -> Direct:
    """Returns the application of a site."""

    async def wrong_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 405:
            refusal = Refusal(405, f"{path!r:.200} does not take {request.method}", code="method_not_allowed")
        else:
            remedy = "see docs/serving.md for the paths"
            refusal = Refusal(error.status_code, f"there is no {path!r:.200}", remedy=remedy, code="not_found")
        refusal.headers.update(error.headers or {})
        face = next((one.face for one in entries if one.face.paths.match(path)), OPENAI)
        return face.refuse(site, refusal)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(watch_loop(site))
        yield
        looking.cancel()

    def plain(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, answer, methods=["GET"])

    entries = [
        Entry(OPENAI, "GET", "/version", version),
        Entry(OPENAI, "GET", "/metrics", metrics, admin=True),
        *(entry for dialect in DIALECTS for entry in dialect.ENTRIES),
    ]
    routes = [Route(one.path, one.endpoint(site), methods=[one.method]) for one in entries]
    others = [page.route(), *(plain(path, health_of(site)) for path in ("/health", "/ping"))]
    direct = {(one.method, one.path): route for one, route in reversed([*zip(entries, routes, strict=True)])}
    direct = {place: route for place, route in direct.items() if "{" not in route.path}
    routes += [*others, *openapi.routes(entries, others)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: wrong_path}, lifespan=lifespan)
    return Direct(app, site, direct)


def health_of(site: Site) -> Any:
    """Returns what answers whether requests are taken: 200, or 503 while the model is loaded or the server drains."""

    async def health(request: Request) -> Response:
        """Answers whether requests are taken: 200, or 503 with the reason."""
        failing = site.failing
        body = {"status": site.state} if failing is None else {"status": "failing", "reason": failing}
        return json_response(body, 200 if body["status"] == "ready" else 503)

    return health


async def version(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with prefold's version."""
    return json_response({"version": __version__})


async def metrics(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with the metrics, in Prometheus' text format."""
    return Response(site.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def watch_loop(site: Site) -> None:
    """Notes, for ever, by how much the event loop is late."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(LAG_SECONDS)
        site.metrics.lag.observe(max(0.0, time.perf_counter() - started - LAG_SECONDS))
