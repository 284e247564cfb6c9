"""One request, from its body to the response, and the entries of the dialects."""

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
# The part of an error's remedy that says how to truncate in Python and on the command line.
_CUT = re.compile(rf"(,? or have (?:it|documents) cut with ){re.escape(TRUNCATE)}")


class RequestContext:
    """A request with the server's state for it.

    Attributes:
        body: the JSON object of the request, after `read`
        num_bytes: the size of the body, after `read`
        model: the model's name for the response
        adapter: the request's LoRA adapter, or None
        id: unique; a part of the response's id
    """

    model: str
    adapter: str | None

    def __init__(self, state: AppState, request: Request, tenant: Tenant):
        self.state, self.request, self.tenant = state, request, tenant
        self.body: dict[str, Any] = {}
        self.num_bytes, self.id = 0, new_id()

    @property
    def handler(self) -> RequestHandler:
        """Return the handler. Raise Refusal (503) while the server does not accept requests."""
        return self.state.handler_for_requests()

    @property
    def served(self) -> ServedModel:
        """Return the facts of the server that an order needs besides the body. Call this after `read`."""
        handler = self.handler
        return ServedModel(handler.llm, self.model, self.id, handler.fingerprint, self.state.options.max_logprobs)

    async def read(self, *, computes: bool = True) -> None:
        """Read the body. Raise Refusal or ClientGone.

        Args:
            computes: whether the request will wait for the engine. If too many requests wait, it is refused before its
                body is read.
        """
        handler = self.handler
        if computes:
            handler.backpressure.check(self.tenant.owner)
        self.body, self.num_bytes = await self.state.bodies.json(self.request, self.tenant)
        self.model, self.adapter = self.state.model_of(self.body.get("model"))

    def order(self, order: TaskOrder) -> TaskOrder:
        """Return an order with this request's tenant, adapter and salt prefix."""
        check_texts(self.body, self.state.options.max_texts)
        check_samples(order.items, self.state.options.max_texts)
        items, salt_prefix = order.items, self.state.keys.salt_prefix(self.tenant)
        if self.adapter is not None:
            items = [item | {"adapter": self.adapter} for item in items]
        if order.task != "generate" and not order.share:  # a unique salt prefix prevents sharing
            salt_prefix += new_id()
        order.items, order.salt_prefix = items, salt_prefix
        order.owner, order.num_bytes = self.tenant.owner, self.num_bytes
        return order

    async def answer(self, order: TaskOrder) -> Response:
        """Return the response to an order. Raise InputError, Refusal or ClientGone."""
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

        if is_short:  # not worth watching for a disconnect
            return write()
        return await unless_gone(self.request, self.handler.in_pool(self.tenant.owner, write))

    async def tokens(self, order: TaskOrder) -> list[list[int]]:
        """Return the token ids of an order's prompts without running them. Raise InputError, Refusal or ClientGone."""
        try:
            requests = await unless_gone(self.request, self.handler.requests(self.order(order)))
        except InputError as wrong:
            raise wrong.renamed(renamed(wrong.field, order.fields)) from None
        return [request.tokens.tolist() for request in requests]

    async def without_engine(self, function: Callable[[], T]) -> T:
        """Return function(), which needs no engine but may be slow. Raise InputError, Refusal or ClientGone."""
        check_texts(self.body, self.state.options.max_texts)
        return await unless_gone(self.request, self.handler.without_engine(self.tenant.owner, self.num_bytes, function))


async def _events(context: RequestContext, order: TaskOrder) -> AsyncGenerator[bytes]:
    """Yield b"" when the request has been accepted, then the bytes of events.

    A stream that fails ends with an error event.
    """
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
    """An API whose paths the server answers, with the form of its errors."""

    name: str
    error: Callable[[int, str, str, str | None], tuple[int, Any]]  # (status, message, code, param) -> (status, body)
    truncate: str = ""  # the parameter that truncates long prompts, for error messages; "": the API has none
    paths: re.Pattern[str] = re.compile("(?!)")  # matches the API's paths; unknown ones get errors in its form

    def refuse(self, state: AppState, error: Exception) -> Response:
        """Return the error response in the form of the API."""
        refusal, message = state.refusal(error)
        message = _CUT.sub(lambda match: match[1] + self.truncate if self.truncate else "", message)
        status, body = self.error(refusal.status, message, refusal.code, refusal.param)
        return json_response(body, status, refusal.headers)


@dataclass(frozen=True)
class Entry:
    """A path of a dialect with its handler."""

    dialect: Dialect
    method: str
    path: str
    handle: Handle
    bodies: Sequence[type[Body]] = ()  # structs of the body; if there are any, the body is read before `handle` runs
    query: type[Body] | None = None  # struct of the query
    admin: bool = False  # True if only admins may use this route
    computes: bool = True  # True if requests wait for the engine, and are refused if too many wait

    def endpoint(self, state: AppState) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint, which turns exceptions of `handle` into the dialect's errors."""

        async def answer(request: Request) -> Response:
            try:
                tenant = state.tenant_of(request.headers)
                request.scope["tenant"] = tenant.name  # for the access log
                if self.admin and not tenant.admin:
                    message, remedy = "this path is for admins", "use an admin's API key"
                    raise Refusal(403, message, remedy=remedy, code="forbidden")
                context = RequestContext(state, request, tenant)
                if self.bodies:
                    await context.read(computes=self.computes)
                return await self.handle(context)
            except ClientGone:
                return Response(status_code=499)
            except Exception as error:
                # On a path that several dialects share, `handle` sets the dialect.
                dialect: Dialect = request.scope.get("dialect", self.dialect)
                return dialect.refuse(state, error)

        async def respond(request: Request) -> Response:
            return state.metrics.answered(self.dialect.name, self.path, await answer(request))

        return respond
