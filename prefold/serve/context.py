"""What the dialects do alike with a body: whose model it asks for, what it asks of a task, and the response to that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..api.body import Asked, renamed
from ..errors import InputError
from .handler import RequestHandler, TaskOrder
from .http import EventStream, json_of, json_response, unless_gone
from .keys import Tenant
from .limits import are_soon_written, check_samples, check_texts
from .state import AppState, new_id, refusal_of

T = TypeVar("T")
Handle = Callable[[AppState, Request, Tenant], Awaitable[Response]]
Read = Callable[[dict[str, Any], RequestHandler], Asked]


class RequestContext:
    """One request on its way: who asks, and what its body holds."""

    def __init__(
        self,
        state: AppState,
        handler: RequestHandler,
        request: Request,
        tenant: Tenant,
        body: dict[str, Any],
        num_bytes: int,
    ):
        self.state, self.handler, self.request, self.tenant = state, handler, request, tenant
        self.body, self.num_bytes = body, num_bytes
        self.model, self.adapter = state.model_of(body.get("model"))

    @classmethod
    async def of(cls, state: AppState, request: Request, tenant: Tenant, *, computes: bool = True) -> RequestContext:
        """Returns what a request asks, once its body is there. Raises Refusal, ClientGone.

        computes  whether it will wait for the engine: where too many do, it is refused before its body is read
        """
        handler = state.handler_for(request)
        if computes:
            handler.backpressure.check(tenant.owner)
        return cls(state, handler, request, tenant, *await state.bodies.json(request, tenant))

    def order(self, task: str, items: Any, options: Any = (), *, share: bool = True) -> TaskOrder:
        """Returns what is asked of a task, for this tenant and this model."""
        check_texts(self.body, self.state.options.max_texts)
        check_samples(items, self.state.options.max_texts)
        if self.adapter is not None:
            items = [item | {"adapter": self.adapter} for item in items]
        namespace = self.state.keys.namespace(self.tenant)
        if task != "generate" and not share:  # numbers share nothing with others in a namespace of their own
            namespace += new_id()
        return TaskOrder(task, items, dict(options), namespace, share, self.tenant.owner)

    async def without_engine(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, which needs no engine but may take long. Raises InputError, Refusal,
        ClientGone."""
        check_texts(self.body, self.state.options.max_texts)
        return await unless_gone(self.request, self.handler.without_engine(self.tenant.owner, self.num_bytes, function))

    async def written(self, results: Sequence[Mapping[str, Any]], function: Callable[[], T]) -> T:
        """Returns what `function` returns, which writes a response of results. Raises ClientGone."""
        if are_soon_written(results):  # before a client that leaves could be noticed
            return function()
        found: T = await unless_gone(self.request, self.handler.in_pool(self.tenant.owner, function))
        return found


async def answer_asked(context: RequestContext, asked: Asked, *, share: bool = True) -> Response:
    """Returns the response to what a body asks of a task. share: whether prompts may be shared with others'."""
    try:
        order = context.order(asked.task, asked.items, asked.options, share=share)
        results = await unless_gone(context.request, context.handler.answer(order, context.num_bytes))
    except InputError as wrong:
        raise wrong.renamed(renamed(wrong.field, asked.fields)) from None
    return await context.written(results, lambda: json_response(asked.make(results)))


def handle_of(read: Read) -> Handle:
    """Returns what answers the requests whose bodies `read` reads."""

    async def handle(state: AppState, request: Request, tenant: Tenant) -> Response:
        context = await RequestContext.of(state, request, tenant)
        return await answer_asked(context, read(context.body, context.handler))

    return handle


Event = dict[str, Any]


class Events(Protocol):
    """Makes the events of one response."""

    def begin(self, prompts: list[Event]) -> Iterator[Event]: ...
    def piece(self, item: int, sample: int, text: str, tokens: list[Event], count: int) -> Iterator[Event]: ...
    def end(self, item: int, result: Event) -> Iterator[Event]: ...
    def last(self) -> Iterator[Event]: ...
    def failed(self, status: int, message: str, code: str, param: str | None) -> Event: ...


def named(event: Event) -> bytes:
    """Returns an event as it is sent with its "type" as its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_of(event))


def unnamed(event: Event) -> bytes:
    """Returns an event as it is sent without a name."""
    return b"data: %b\n\n" % json_of(event)


def _joined(write: Callable[[Event], bytes], make: Callable[..., Iterator[Event]], *what: Any) -> bytes:
    """Returns the events that are made of something, as they are sent."""
    return b"".join(map(write, make(*what)))


async def in_events(
    context: RequestContext,
    order: TaskOrder,
    made: Events,
    write: Callable[[Event], bytes] = named,
    *,
    mark: bytes = b"",
) -> EventStream:
    """Returns the response that answers an order in events. What is wrong with the request is raised before.

    mark  sent behind all events
    """
    events = _events(context, order, made, write, mark)
    await unless_gone(context.request, anext(events))
    return EventStream(events, context.request, context.state.options, context.state.metrics.cancelled.inc)


async def _events(
    context: RequestContext,
    order: TaskOrder,
    made: Events,
    write: Callable[[Event], bytes],
    mark: bytes,
) -> AsyncGenerator[bytes]:
    """Yields nothing once the request has been taken, and then what is sent. A stream that fails ends with an error."""
    started = False
    try:
        async with aclosing(context.handler.stream(order, context.num_bytes)) as answers:
            async for event in answers:
                if not started:
                    started = True
                    yield b""
                    body = _joined(write, made.begin, *event)
                elif len(event) == 5:
                    body = _joined(write, made.piece, *event)
                else:
                    end = partial(_joined, write, made.end, *event)
                    body = await context.handler.written(context.tenant.owner, [event[1]], end)
                if body:
                    yield body
        if body := b"".join(map(write, made.last())):
            yield body
    except Exception as wrong:
        if not started:
            raise
        refusal, message = refusal_of(context.state, wrong)
        yield write(made.failed(refusal.status, message, refusal.code, refusal.param))
    if mark:
        yield mark
