"""Anthropic's face: messages, whole or in events, and the count of their tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..api.anthropic import MessageEvents, anthropic_error, message_body, read_message
from ..api.asked import flag
from ..errors import InputError
from .faces import Asking
from .http import EventStream, json_of, json_response, unless_gone
from .keys import Tenant
from .site import Face, Site, as_refusal, new_id

__all__ = ["ANTHROPIC", "routes"]

ANTHROPIC = Face("anthropic", anthropic_error)
# {field of the task's items: what a request calls it}
_NAMES = {"stop": "stop_sequences", "grammar": "tools"}


def routes(site: Site) -> list[BaseRoute]:
    """Returns the paths of this face."""
    paths: dict[str, Any] = {"/v1/messages": message, "/v1/messages/count_tokens": count_tokens}
    return [Route(path, ANTHROPIC.endpoint(site, handle), methods=["POST"]) for path, handle in paths.items()]


async def message(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers a conversation."""
    asking = await Asking.of(site, request, tenant)
    stream = flag(asking.body, "stream")
    try:
        items, meta = read_message(asking.body)
        order = asking.order("generate", items)
        if not stream:
            (result,) = await unless_gone(request, asking.desk.answer(order, asking.num_bytes))
            return json_response(message_body(meta, result, model=asking.model, id=new_id()))
        made = MessageEvents(meta, model=asking.model, id=new_id())
        events = events_of(asking.desk.stream(order, asking.num_bytes), made, site)
        await unless_gone(request, events.__anext__())
        return EventStream(events, request, site.options)
    except InputError as wrong:
        raise wrong.renamed(_NAMES.get((wrong.field or "").partition(".")[0], wrong.field)) from None


async def events_of(answers: AsyncGenerator[Any], made: MessageEvents, site: Site) -> AsyncGenerator[bytes]:
    """Yields nothing once the request has been taken, and then the events of its stream."""
    started = False
    try:
        async with aclosing(answers):
            async for event in answers:
                if not started:
                    started = True
                    yield b""
                    found = made.begin(*event)
                else:
                    found = made.piece(event[2]) if len(event) == 4 else made.end(event[1])
                if body := b"".join(map(written, found)):
                    yield body
    except Exception as wrong:
        if not started:
            raise
        refusal = as_refusal(wrong)
        if refusal.status >= 500 and refusal is not wrong:
            site.metrics.log(wrong)
        yield written(anthropic_error(refusal.status, str(refusal), refusal.code, refusal.param)[1])


def written(event: dict[str, Any]) -> bytes:
    """Returns an event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_of(event))


async def count_tokens(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with how many tokens the prompt of a conversation has."""
    asking = await Asking.of(site, request, tenant)
    items, _ = read_message(asking.body, answered=False)
    (ids,) = await unless_gone(request, asking.desk.tokens(asking.order("generate", items)))
    return json_response({"input_tokens": len(ids)})
