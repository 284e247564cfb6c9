"""What the faces do alike with a body: whose model it asks for, what it asks of a task, and the response to that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ..api.asked import Asked
from ..errors import InputError
from .desk import Desk, TaskOrder
from .http import Refusal, json_of, json_response, read_json, unless_gone
from .keys import Tenant
from .site import Site, as_refusal

__all__ = ["Asking", "Handle", "answer_asked", "check_texts", "handle_of", "named_events"]

Handle = Callable[[Site, Request, Tenant], Awaitable[Response]]
Read = Callable[[dict[str, Any], Desk], Asked]


class Asking:
    """One request on its way: who asks, and what its body holds."""

    def __init__(self, site: Site, desk: Desk, request: Request, tenant: Tenant, body: dict[str, Any], num_bytes: int):
        self.site, self.desk, self.request, self.tenant = site, desk, request, tenant
        self.body, self.num_bytes = body, num_bytes
        self.model, self.adapter = site.model_of(body.get("model"))

    @classmethod
    async def of(cls, site: Site, request: Request, tenant: Tenant) -> Asking:
        """Returns what a request asks, once its body is there. Raises Refusal, ClientGone."""
        desk = site.desk_for(request)
        return cls(site, desk, request, tenant, *await read_json(request, site.options))

    def order(self, task: str, items: Any, options: Any = (), *, share: bool = True) -> TaskOrder:
        """Returns what is asked of a task, for this tenant and this model."""
        check_texts(self.body, self.site.options.max_texts)
        if self.adapter is not None:
            items = [item | {"adapter": self.adapter} for item in items]
        namespace = self.site.keys.namespace(self.tenant)
        return TaskOrder(task, items, dict(options), namespace, share, self.tenant.owner)


def check_texts(body: dict[str, Any], most: int) -> None:
    """Raises InputError for a request with more than `most` texts."""
    for name, value in body.items():
        value = value.get("sentences") if name == "inputs" and isinstance(value, dict) else value
        if isinstance(value, list) and len(value) > most and not all(isinstance(one, int) for one in value):
            message, remedy = f"{name!r} holds {len(value)} texts", f"send at most {most} at once"
            raise InputError(message, field=name, remedy=remedy, code="too_many")


async def answer_asked(asking: Asking, asked: Asked) -> Response:
    """Returns the response to what a body asks of a task."""
    try:
        order = asking.order(asked.task, asked.items, asked.options)
        results = await unless_gone(asking.request, asking.desk.answer(order, asking.num_bytes))
    except InputError as wrong:
        raise wrong.renamed(asked.name_of(wrong.field)) from None
    return json_response(asked.make(results))


def handle_of(read: Read) -> Handle:
    """Returns what answers the requests whose bodies `read` reads."""

    async def handle(site: Site, request: Request, tenant: Tenant) -> Response:
        asking = await Asking.of(site, request, tenant)
        return await answer_asked(asking, read(asking.body, asking.desk))

    return handle


class Events(Protocol):
    """Makes the events of one answer; each is a dict whose "type" is its name."""

    def begin(self, input_tokens: int) -> Iterator[dict[str, Any]]: ...
    def piece(self, text: str) -> Iterator[dict[str, Any]]: ...
    def end(self, result: dict[str, Any]) -> Iterator[dict[str, Any]]: ...


async def nothing() -> None:
    """Does nothing."""


async def named_events(
    answers: AsyncGenerator[Any],
    made: Events,
    site: Site,
    failed: Callable[[Refusal], dict[str, Any]],
    ended: Callable[[], Awaitable[None]] = nothing,
) -> AsyncGenerator[bytes]:
    """Yields nothing once the request has been taken, and then the events of its one answer, each with its name.

    failed  the event that ends a stream which fails
    ended   awaited when the answer is there, before its last events are sent
    """
    started = False
    try:
        async with aclosing(answers):
            async for event in answers:
                if not started:
                    started = True
                    yield b""
                    found = list(made.begin(*event))
                elif len(event) == 4:
                    found = list(made.piece(event[2]))
                else:
                    found = list(made.end(event[1]))
                    await ended()
                if body := b"".join(map(written, found)):
                    yield body
    except Exception as wrong:
        if not started:
            raise
        refusal = as_refusal(wrong)
        if refusal.status >= 500 and refusal is not wrong:
            site.metrics.log(wrong)
        yield written(failed(refusal))


def written(event: dict[str, Any]) -> bytes:
    """Returns an event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_of(event))
