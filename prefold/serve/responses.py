"""OpenAI's responses: answered like chats, kept in the store where there is one, so that a later one can go on.

What is kept of a response is its body, and beside it:

_own          the items of its own input; what was said before is in those that it goes on from
_input        instead of _own, where the one that it goes on from was deleted meanwhile: the items of the whole input
_is_followed  True where another goes on from it
_is_deleted   True where it was deleted after that: it is kept for the other only
"""

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
from .asking import Asking, Handle
from .events import in_events
from .http import Refusal, json_response, unless_gone
from .keys import Tenant
from .openai import OPENAI
from .site import Site, new_id
from .store import Body, Store

__all__ = ["routes"]

KEPT_SECONDS = 30 * 86400


def routes(site: Site) -> list[BaseRoute]:
    """Returns the paths of responses."""
    table: list[tuple[str, str, Handle]] = [
        ("/v1/responses", "POST", create),
        ("/v1/responses/input_tokens", "POST", count_input),
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
        if (
            keep
            and site.store is not None
            and (left := await asyncio.to_thread(site.store.left, tenant.name or "")) <= 0
        ):
            raise site.store.full(-left)
        (items_before, ids_before), own = await _before(site, tenant, previous), input_items(body.get("input"))
        body["input"] = [*items_before, *own]
        items, meta = read_responses(body, {})
        meta |= {"store": keep, "previous": previous}
        order, id = asking.order("generate", items, options, share=share), new_id()

        async def kept(response: Body | None) -> None:
            if keep and response is not None:
                await asyncio.to_thread(_keep, site.store, tenant, response, own, items_before, ids_before)

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


async def count_input(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with how many tokens the prompt of an input has, after what was said before."""
    asking = await Asking.of(site, request, tenant, computes=False)
    try:
        options, _, body = read_options("generate", asking.body)
        (before, _), own = await _before(site, tenant, body.pop("previous_response_id", None)), body.get("input")
        items, _ = read_responses({**body, "input": [*before, *input_items(own)]}, {})
        order = asking.order("generate", items, options)
        (ids,) = await unless_gone(request, asking.desk.tokens(order, asking.num_bytes))
    except InputError as wrong:
        raise wrong.renamed(KINDS["response"].name_of(wrong.field, {})) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


def _is_kept(site: Site, body: Body) -> bool:
    """Returns whether a response is kept: where there is a store, unless the request says no."""
    if body.get("store") is True and site.store is None:
        message, remedy = "this server keeps no responses", "leave store out, or start the server with --data-dir"
        raise InputError(message, field="store", remedy=remedy, code="unsupported")
    return site.store is not None and flag(body, "store", default=True)


async def _before(site: Site, tenant: Tenant, previous: Any) -> tuple[list[Body], list[str]]:
    """Returns the items of the conversation that a kept response ends, and the ids of its responses."""
    if previous is None:
        return [], []
    found = await _one(site, tenant, previous, "previous_response_id")
    assert site.store is not None
    return await asyncio.to_thread(_conversation, site.store, tenant, found)


def _conversation(store: Store, tenant: Tenant, last: Body) -> tuple[list[Body], list[str]]:
    """Returns the items of a conversation, of which each response holds its own, and the ids of its responses. Raises
    Refusal (404) where one of them is gone."""
    found = [last]
    # Those that hold all of it as `_input` go on from none that has to be there; so do those of earlier versions.
    while (previous := found[-1]["previous_response_id"]) is not None and "_input" not in found[-1]:
        body = store.get("response", tenant.name or "", previous)
        if body is None:
            raise _gone(previous, "previous_response_id")
        found.append(body)
    turns = [one["_input"] if "_input" in one else one["_own"] for one in found]
    items = [item for own, one in zip(turns[::-1], found[::-1], strict=True) for item in (*own, *one["output"])]
    return items, [one["id"] for one in found]


def _keep(
    store: Store | None, tenant: Tenant, response: Body, own: list[Body], items_before: list[Body], before: list[str]
) -> None:
    """Keeps a response with its own input, and with it those that it goes on from. Where the last of them was deleted
    while this one was being made, the whole input is kept with this one.

    items_before, before  as `_before` returns them
    """
    assert store is not None
    drop_at = time.time() + KEPT_SECONDS
    store.keep_until("response", before, drop_at)
    said: Body = {"_own": own}
    for previous in before[:1]:
        found = store.change("response", previous, {"_is_followed": True})
        # One that is said to be deleted may be gone in a moment: `_delete` has not seen that it is followed.
        if found is None or found.get("_is_deleted"):
            said = {"_input": [*items_before, *own]}
    store.add("response", tenant.name or "", response | said, drop_at=drop_at)


def _delete(store: Store, tenant: Tenant, id: str) -> None:
    """Forgets a response, or hides it where others go on from it."""
    # It is hidden first, so that `_keep` of another thread sees at any time whether it can rely on it.
    found = store.change("response", id, {"_is_deleted": True})
    if found is not None and not found.get("_is_followed"):
        store.delete("response", tenant.name or "", id)


async def _one(site: Site, tenant: Tenant, id: Any, param: str = "id") -> Body:
    found = None
    if site.store is not None and isinstance(id, str):
        found = await asyncio.to_thread(site.store.get, "response", tenant.name or "", id)
    if found is None or found.get("_is_deleted"):
        raise _gone(id, param)
    return found


def _gone(id: Any, param: str) -> Refusal:
    remedy = "responses are kept with --data-dir, for 30 days, unless store is false"
    return Refusal(404, f"there is no response {id!r:.100}", param=param, remedy=remedy, code="not_found")


async def retrieve(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with a kept response."""
    found = await _one(site, tenant, request.path_params["id"])
    return json_response({name: value for name, value in found.items() if name[0] != "_"})


async def delete(site: Site, request: Request, tenant: Tenant) -> Response:
    """Forgets a kept response. Of one that others go on from, these keep its items."""
    found = await _one(site, tenant, request.path_params["id"])
    assert site.store is not None
    await asyncio.to_thread(_delete, site.store, tenant, found["id"])
    return json_response({"id": found["id"], "object": "response", "deleted": True})


async def list_input(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with the items that a kept response answered, all of them on one page."""
    found = await _one(site, tenant, request.path_params["id"])
    assert site.store is not None
    items, _ = await asyncio.to_thread(_conversation, site.store, tenant, found)
    items = items[: len(items) - len(found["output"])]
    data = [_with_parts(item) | {"id": f"item_{i}_{found['id']}"} for i, item in enumerate(items)]
    data = data if request.query_params.get("order") == "asc" else data[::-1]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data, **ids, "has_more": False})


def _with_parts(item: Body) -> Body:
    """Returns an item with its content as a list of parts, as clients expect it."""
    if not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {"type": "message", "status": "completed"} | item | {"content": [{"type": kind, "text": item["content"]}]}
