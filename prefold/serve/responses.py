"""OpenAI's responses: answered like chats, kept in the store where there is one, so that a later one can go on."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..api import KINDS, response_body
from ..api.asked import flag
from ..api.chunks import read_stream
from ..api.options import read_options
from ..api.responses import ResponseEvents, input_items, read_responses
from ..errors import InputError
from .events import in_events
from .faces import Asking, Handle
from .http import Refusal, json_response, unless_gone
from .keys import Tenant
from .openai import OPENAI
from .site import Site, new_id
from .store import Body

__all__ = ["routes"]

KEPT_SECONDS = 30 * 86400


def routes(site: Site) -> list[BaseRoute]:
    """Returns the paths of responses."""
    table: list[tuple[str, str, Handle]] = [
        ("/v1/responses", "POST", create),
        ("/v1/responses/{id}", "GET", retrieve),
        ("/v1/responses/{id}", "DELETE", delete),
        ("/v1/responses/{id}/input_items", "GET", list_input),
    ]
    return [Route(path, OPENAI.endpoint(site, handle), methods=[method]) for path, method, handle in table]


async def create(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers an input, after what was said before where it goes on from a kept response."""
    asking = await Asking.of(site, request, tenant)
    meta: Body = {}
    try:
        stream, _, body = read_stream(asking.body)
        options, share, body = read_options("generate", body)
        keep, previous = _is_kept(site, body), body.pop("previous_response_id", None)
        body["input"] = [*await _before(site, tenant, previous), *input_items(body.get("input"))]
        items, meta = read_responses(body, {})
        meta |= {"store": keep, "previous": previous}
        order, id = asking.order("generate", items, options, share=share), new_id()

        async def kept(response: Body | None) -> None:
            if keep and response is not None:
                await asyncio.to_thread(_keep, site, tenant, response, body["input"])

        if not stream:
            results = await unless_gone(request, asking.desk.answer(order, asking.num_bytes))
            write = partial(response_body, "response", meta, results, model=asking.model, id=id)
            found = await asking.written(results, write)
            await kept(found)
            return await asking.written(results, lambda: json_response(found))
        made = ResponseEvents(meta, model=asking.model, id=id)
        return await in_events(asking, order, made, ended=lambda: kept(made.whole))
    except InputError as wrong:
        raise wrong.renamed(KINDS["response"].name_of(wrong.field, meta)) from None


def _is_kept(site: Site, body: Body) -> bool:
    """Returns whether a response is kept: where there is a store, unless the request says no."""
    if body.get("store") is True and site.store is None:
        message, remedy = "this server keeps no responses", "leave store out, or start the server with --data-dir"
        raise InputError(message, field="store", remedy=remedy, code="unsupported")
    return site.store is not None and flag(body, "store", default=True)


async def _before(site: Site, tenant: Tenant, previous: Any) -> list[Body]:
    """Returns the items of the conversation that a kept response ends."""
    if previous is None:
        return []
    found = await _one(site, tenant, previous, "previous_response_id")
    return [*found["_input"], *found["output"]]


def _keep(site: Site, tenant: Tenant, response: Body, items: list[Body]) -> None:
    assert site.store is not None
    kept = response | {"_input": items}
    site.store.add("response", tenant.name or "", kept, drop_at=time.time() + KEPT_SECONDS)


async def _one(site: Site, tenant: Tenant, id: Any, param: str = "id") -> Body:
    found = None
    if site.store is not None and isinstance(id, str):
        found = await asyncio.to_thread(site.store.get, "response", tenant.name or "", id)
    if found is None:
        remedy = "responses are kept with --data-dir, for 30 days, unless store is false"
        raise Refusal(404, f"there is no response {id!r:.100}", param=param, remedy=remedy, code="not_found")
    return found


async def retrieve(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with a kept response."""
    found = await _one(site, tenant, request.path_params["id"])
    return json_response({name: value for name, value in found.items() if name[0] != "_"})


async def delete(site: Site, request: Request, tenant: Tenant) -> Response:
    """Forgets a kept response."""
    found = await _one(site, tenant, request.path_params["id"])
    assert site.store is not None
    await asyncio.to_thread(partial(site.store.delete, "response", tenant.name or "", found["id"]))
    return json_response({"id": found["id"], "object": "response", "deleted": True})


async def list_input(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with the items that a kept response answered, all of them on one page."""
    found = await _one(site, tenant, request.path_params["id"])
    data = [_with_parts(item) | {"id": f"item_{i}_{found['id']}"} for i, item in enumerate(found["_input"])]
    data = data if request.query_params.get("order") == "asc" else data[::-1]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data, **ids, "has_more": False})


def _with_parts(item: Body) -> Body:
    """Returns an item with its content as a list of parts, as clients expect it."""
    if not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {"type": "message", "status": "completed"} | item | {"content": [{"type": kind, "text": item["content"]}]}
