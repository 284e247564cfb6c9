"""The context of a request, and the entries of a dialect: the way from a request to its response, whole or in
events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..errors import InputError
from ..tasks.base import TRUNCATE
from ..wire.body import Body, ServedModel, TaskOrder, renamed
from .handler import RequestHandler, event_bytes
from .http import ClientGone, EventStream, Refusal, json_response, unless_gone
from .keys import Tenant
from .limits import check_samples, check_texts
from .state import AppState, new_id

T = TypeVar("T")
# The part of an error's remedy that names truncation in Python and on the command line.
_CUT = re.compile(rf"(,? or have (?:it|documents) cut with ){re.escape(TRUNCATE)}")


class RequestContext:
    """A RequestContext holds one request and the server's state for it.

    body, num_bytes  the object that was sent, and its size, after `read`
    model, adapter   the model's name in the response, and the request's LoRA adapter
    id               unique, for the response's id
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
    def served(self) -> ServedModel:
        """Returns what an order depends on besides the body. Call it after `read`."""
        handler = self.handler
        return ServedModel(handler.llm, self.model, self.id, handler.fingerprint, self.state.options.max_logprobs)

    async def read(self, *, computes: bool = True) -> None:
        """Reads the body. computes: whether the request will wait for the engine; if too many do, it is refused before
        its body is read. Raises Refusal, ClientGone."""
        handler = self.handler
        if computes:
            handler.backpressure.check(self.tenant.owner)
        self.body, self.num_bytes = await self.state.bodies.json(self.request, self.tenant)
        self.model, self.adapter = self.state.model_of(self.body.get("model"))

    def order(self, order: TaskOrder) -> TaskOrder:
        """Returns an order with this request's tenant, adapter and prefix of salts."""
        check_texts(self.body, self.state.options.max_texts)
        check_samples(order.items, self.state.options.max_texts)
        items, salt_prefix = order.items, self.state.keys.salt_prefix(self.tenant)
        if self.adapter is not None:
            items = [item | {"adapter": self.adapter} for item in items]
        if order.task != "generate" and not order.share:  # numbers with a prefix of their own share nothing
            salt_prefix += new_id()
        order.items, order.salt_prefix = items, salt_prefix
        order.owner, order.num_bytes = self.tenant.owner, self.num_bytes
        return order

    async def answer(self, order: TaskOrder) -> Response:
        """Returns the response to an order. Raises InputError, Refusal, ClientGone."""
        try:
            order_here = self.order(order)
            if order.events is not None:
                events = _events(self, order_here)
                await unless_gone(self.request, anext(events))
                return EventStream(events, self.request, self.state.options, self.state.metrics.cancelled.inc)
            results, is_short = await unless_gone(self.request, self.handler.answer(order_here))
        except InputError as wrong:
            raise wrong.renamed(renamed(wrong.field, order.fields)) from None

        def write() -> Response:
            return json_response(order.make(results))

        if is_short:  # too short to watch for a client that leaves
            return write()
        return await unless_gone(self.request, self.handler.in_pool(self.tenant.owner, write))

    async def tokens(self, order: TaskOrder) -> list[list[int]]:
        """Returns the token ids of an order's prompts, without running them. Raises InputError, Refusal, ClientGone."""
        try:
            requests = await unless_gone(self.request, self.handler.requests(self.order(order)))
        except InputError as wrong:
            raise wrong.renamed(renamed(wrong.field, order.fields)) from None
        return [request.tokens.tolist() for request in requests]

    async def without_engine(self, function: Callable[[], T]) -> T:
        """Returns function(), which needs no engine but may take long. Raises InputError, Refusal, ClientGone."""
        check_texts(self.body, self.state.options.max_texts)
        return await unless_gone(self.request, self.handler.without_engine(self.tenant.owner, self.num_bytes, function))


async def _events(context: RequestContext, order: TaskOrder) -> AsyncGenerator[bytes]:
    """Yields b"" when the request has been accepted, and then the bytes of events. A failing stream ends with an error
    event."""
    has_started, writer = False, order.events
    try:
        async with aclosing(context.handler.stream(order)) as bodies:
            async for body in bodies:
                if body or not has_started:
                    yield body
                has_started = True
    except Exception as wrong:
        if not has_started:
            raise
        refusal, message = context.state.refusal(wrong)
        yield event_bytes(writer, [writer.failed(refusal.status, message, refusal.code, refusal.param)])
    if writer.mark:
        yield writer.mark


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
    bodies    the structs of its bodies; if there are any, the body is read before `handle` is called
    query     the struct of its query
    admin     whether it is for admins only
    computes  whether its requests wait for the engine, and are refused if too many do
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
        """Returns the endpoint that answers with `handle`, and turns exceptions into the dialect's errors."""

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
                return Response(status_code=499)
            except Exception as error:
                # A handle of a path that several dialects share sets the dialect.
                dialect: Dialect = request.scope.get("dialect", self.dialect)
                return dialect.refuse(state, error)

        async def respond(request: Request) -> Response:
            return state.metrics.answered(self.dialect.name, self.path, await answer(request))

        return respond
