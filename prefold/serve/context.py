"""What dialects are, and do alike: the way from a request to its response, which is whole or in events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..api.body import Body, Served, TaskOrder, renamed
from ..errors import InputError
from ..tasks.base import TRUNCATE
from .handler import RequestHandler, event_bytes
from .http import ClientGone, EventStream, Refusal, json_response, unless_gone
from .keys import Tenant
from .limits import check_samples, check_texts
from .state import AppState, new_id

T = TypeVar("T")
# What an error's remedy says of cutting, in the words of Python and of the command line.
_CUT = re.compile(rf"(,? or have (?:it|documents) cut with ){re.escape(TRUNCATE)}")


class RequestContext:
    """A RequestContext is one request on its way.

    body, num_bytes  the object that was sent, and its size, once `read` has returned
    model, adapter   the model's name in the response, and the LoRA adapter that the request is for
    id               makes the response's id different from all others
    """

    model: str
    adapter: str | None

    def __init__(self, state: AppState, request: Request, tenant: Tenant):
        self.state, self.request, self.tenant = state, request, tenant
        self.body: dict[str, Any] = {}
        self.num_bytes, self.id = 0, new_id()

    @property
    def handler(self) -> RequestHandler:
        """Returns the handler. Raises Refusal (503) while no requests are taken."""
        return self.state.handler_for_requests()

    @property
    def served(self) -> Served:
        """Returns the things on which an order depends besides its body, which has been read."""
        handler = self.handler
        return Served(handler.llm, self.model, self.id, handler.fingerprint, self.state.options.max_logprobs)

    async def read(self, *, computes: bool = True) -> None:
        """Reads the body. Raises Refusal, ClientGone.

        computes  whether the request will wait for the engine: where too many do, it is refused before its body is read
        """
        handler = self.handler
        if computes:
            handler.backpressure.check(self.tenant.owner)
        self.body, self.num_bytes = await self.state.bodies.json(self.request, self.tenant)
        self.model, self.adapter = self.state.model_of(self.body.get("model"))

    def order(self, order: TaskOrder) -> TaskOrder:
        """Returns an order for this tenant and this model."""
        check_texts(self.body, self.state.options.max_texts)
        check_samples(order.items, self.state.options.max_texts)
        items, namespace = order.items, self.state.keys.namespace(self.tenant)
        if self.adapter is not None:
            items = [item | {"adapter": self.adapter} for item in items]
        if order.task != "generate" and not order.share:  # numbers share nothing in a namespace of their own
            namespace += new_id()
        return replace(order, items=items, namespace=namespace, owner=self.tenant.owner, num_bytes=self.num_bytes)

    async def answer(self, order: TaskOrder) -> Response:
        """Returns the response to an order. What is wrong with the request is raised. Raises InputError, Refusal,
        ClientGone."""
        try:
            placed = self.order(order)
            if order.events is not None:
                events = _events(self, placed)
                await unless_gone(self.request, anext(events))
                return EventStream(events, self.request, self.state.options, self.state.metrics.cancelled.inc)
            results, is_short = await unless_gone(self.request, self.handler.answer(placed))
        except InputError as wrong:
            raise wrong.renamed(renamed(wrong.field, order.fields)) from None

        def write() -> Response:
            return json_response(order.make(results))

        if is_short:  # before a client that leaves could be noticed
            return write()
        return await unless_gone(self.request, self.handler.in_pool(self.tenant.owner, write))

    async def tokens(self, order: TaskOrder) -> list[list[int]]:
        """Returns the token ids of every prompt that an order makes; computes nothing. Raises InputError, Refusal,
        ClientGone."""
        try:
            requests = await unless_gone(self.request, self.handler.requests(self.order(order)))
        except InputError as wrong:
            raise wrong.renamed(renamed(wrong.field, order.fields)) from None
        return [request.tokens.tolist() for request in requests]

    async def without_engine(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, which needs no engine but may take long. Raises InputError, Refusal,
        ClientGone."""
        check_texts(self.body, self.state.options.max_texts)
        return await unless_gone(self.request, self.handler.without_engine(self.tenant.owner, self.num_bytes, function))


async def _events(context: RequestContext, order: TaskOrder) -> AsyncGenerator[bytes]:
    """Yields nothing once the request has been taken, and then what is sent. A stream that fails ends with an error."""
    started, made = False, order.events
    try:
        async with aclosing(context.handler.stream(order)) as bodies:
            async for body in bodies:
                if body or not started:
                    yield body
                started = True
    except Exception as wrong:
        if not started:
            raise
        refusal, message = context.state.refusal(wrong)
        yield event_bytes(made, [made.failed(refusal.status, message, refusal.code, refusal.param)])
    if made.mark:
        yield made.mark


Handle = Callable[[RequestContext], Awaitable[Response]]


@dataclass(frozen=True)
class Dialect:
    """A Dialect is one API's way to speak: how its errors look.

    error     (status, message, code, param) -> (status, body) of an error's response
    truncate  what a request says to have a prompt cut that is too long; empty: nothing does
    paths     those of its API: what is not served of them is refused in its form
    """

    name: str
    error: Callable[[int, str, str, str | None], tuple[int, Any]]
    truncate: str = ""
    paths: re.Pattern[str] = re.compile("(?!)")

    def refuse(self, state: AppState, error: Exception) -> Response:
        """Returns the response that says what is wrong."""
        refusal, message = state.refusal(error)
        message = _CUT.sub(lambda match: match[1] + self.truncate if self.truncate else "", message)
        status, body = self.error(refusal.status, message, refusal.code, refusal.param)
        return json_response(body, status, refusal.headers)


@dataclass(frozen=True)
class Entry:
    """An Entry is a path of a dialect, and what answers it.

    handle    (context) -> response
    bodies    those that it takes, of which one is read before
    query     what it takes of a query
    admin     whether only tenants that are admins are let in
    computes  whether its requests wait for the engine in any case, and are refused where too many do
    """

    dialect: Dialect
    method: str
    path: str
    handle: Handle
    bodies: Sequence[type[Body]] = ()
    query: type[Body] | None = None
    admin: bool = False
    computes: bool = True

    def endpoint(self, state: AppState) -> Callable[[Request], Awaitable[Response]]:
        """Returns the endpoint that answers with `handle`, and with the dialect's error where that raises one."""

        async def answer(request: Request) -> Response:
            try:
                tenant = state.tenant_of(request.headers)
                request.scope["tenant"] = tenant.name  # for the access log
                if self.admin and not tenant.admin:
                    message, remedy = "this is for admins", "use the key of an admin"
                    raise Refusal(403, message, remedy=remedy, code="forbidden")
                context = RequestContext(state, request, tenant)
                if self.bodies:
                    await context.read(computes=self.computes)
                return await self.handle(context)
            except ClientGone:
                return Response(status_code=499)  # its client is gone
            except Exception as error:
                # Of a path that several share, the body says whose it is.
                dialect: Dialect = request.scope.get("dialect", self.dialect)
                return dialect.refuse(state, error)

        async def respond(request: Request) -> Response:
            return state.metrics.answered(self.dialect.name, self.path, await answer(request))

        return respond
