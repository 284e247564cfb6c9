"""Puts the faces together with health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .. import __version__
from . import anthropic, cache, cohere, files, openai, openapi, page, tei
from .hosts import Hosts
from .http import Refusal, json_response
from .keys import Tenant
from .openai import OPENAI
from .site import Site

__all__ = ["make_app"]

LAG_SECONDS = 0.5  # between two looks at the event loop
# (face, the paths of its API): what is not served, or not in that way, is refused in its form; else in OpenAI's.
_PATHS = (
    (cohere.COHERE, re.compile(r"/v2/|/v1/(embed|chat|tokenize|detokenize|classify|summarize|generate)(-jobs)?$")),
    (anthropic.ANTHROPIC, re.compile(r"/v1/(messages|complete)(/|$)")),
    (tei.TEI, re.compile(r"/(embed\w*|predict|similarity|decode)$")),
)


class Direct:
    """An ASGI application that answers paths of faces without parameters itself, and leaves the rest to Starlette.

    It counts the requests whose answers have not been sent wholly, and without keys answers no foreign page.

    Starlette looks at its routes one after the other, and wraps what is sent twice, for errors that `Face.endpoint` has
    answered.

    routes  of the whole application
    """

    def __init__(self, app: Starlette, site: Site):
        self._app, self.routes, self._site = app, app.routes, site
        self._hosts = Hosts(site.options) if site.options.api_keys is None else None
        self._routes = {
            (method, route.path): route
            for route in reversed(app.routes)  # of two for one path the first counts
            if isinstance(route, Route) and "{" not in route.path and hasattr(route.endpoint, "about")
            for method in route.methods or ()
        }

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
        face = next((face for face, known in _PATHS if known.match(path)), OPENAI)
        return face.refuse(site, refusal)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(watch_loop(site))
        yield
        looking.cancel()

    routes: list[BaseRoute] = [
        Route("/health", health_of(site), methods=["GET"]),
        Route("/ping", health_of(site), methods=["GET"]),
        Route("/version", OPENAI.endpoint(site, version), methods=["GET"]),
        Route("/metrics", OPENAI.endpoint(site, metrics, admin=True), methods=["GET"]),
        # Cohere's come first: /v2/rerank is vLLM's too, and its errors are Cohere's.
        *(route for face in (cohere, openai, files, tei, anthropic, cache, page) for route in face.routes(site)),
    ]
    routes += openapi.routes(routes)
    return Direct(Starlette(routes=routes, exception_handlers={HTTPException: wrong_path}, lifespan=lifespan), site)


def health_of(site: Site) -> Any:
    """Returns what answers whether requests are taken: 200, or 503 while the model is loaded or the server drains."""

    async def health(request: Request) -> Response:
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
