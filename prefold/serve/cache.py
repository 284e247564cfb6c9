"""The cache for admins: its state, and pin, unpin, clear."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..api import KINDS
from ..errors import InputError
from .asking import Asking
from .http import Refusal, json_response, unless_gone
from .keys import Tenant
from .metrics import hits_of
from .openai import OPENAI
from .site import Entry, Site


async def state(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with how the cache is set, what it holds, and how much of that belongs to whom."""
    desk = site.desk_for(request)
    kept = desk.llm.engine.options.generation.cache
    if kept is None:
        raise _off()
    names = site.keys.names
    options = {name: getattr(kept, name) for name in ("policy", "ttl", "max_tokens", "min_overlap")}
    if kept.shifted is not None:
        options["shifted"] = asdict(kept.shifted)
    # A look makes no store: it may be large, and one that only reads numbers never needs it.
    held = await desk.look(partial(held_of, names)) if desk.engine.has_generator else {}
    generation = desk.llm.stats.generation
    if held and generation is not None:
        held["hits"] = hits_of(generation)
    return json_response(options | _NOTHING | held)


_NOTHING = {"slots": 0, "used_slots": 0, "rows": {"kept": 0, "pinned": 0, "in_use": 0, "nodes": 0}, "tenants": {}}


def held_of(names: Mapping[str, str | None], scheduler: Any) -> dict[str, Any]:
    """Returns what the cache holds. No step may run meanwhile.

    names  {namespace: name of its tenant}
    """
    rows: dict[str, dict[str, int]] = defaultdict(lambda: {"kept": 0, "pinned": 0, "in_use": 0, "nodes": 0})
    for node in scheduler.tree.nodes():
        root = node
        while root.parent is not None:
            root = root.parent
        salt = str(root.namespace[1])
        found = rows[names.get(salt.partition("/")[0]) or ""]
        found["nodes"] += 1
        found["pinned" if node.pins else "kept" if node.kept else "in_use"] += node.computed
    slots = {"slots": scheduler.pool.num_slots, "used_slots": scheduler.pool.used_slots}
    total = {name: sum(one[name] for one in rows.values()) for name in ("kept", "pinned", "in_use", "nodes")}
    return slots | {"rows": total, "tenants": dict(rows)}


async def pin(site: Site, request: Request, tenant: Tenant) -> Response:
    """Computes a prompt, where it is not there yet, and keeps it until it is unpinned; answers with its tokens."""
    return await place(site, request, tenant, compute=True)


async def unpin(site: Site, request: Request, tenant: Tenant) -> Response:
    """Takes a pin back; answers with how many tokens it held."""
    return await place(site, request, tenant, compute=False)


async def place(site: Site, request: Request, tenant: Tenant, *, compute: bool) -> Response:
    """Pins a prompt or a conversation, for the tenant that the body names, else the admin's own, or unpins it."""
    asking = await Asking.of(site, request, tenant, computes=compute)
    cache_of(asking.desk)
    body = {name: value for name, value in asking.body.items() if name != "tenant"}
    name = asking.body.get("tenant")
    if name is not None:
        asking.tenant = next((one for one in site.keys.tenants if one.name == name), None)  # type: ignore[assignment]
        if asking.tenant is None:
            message, remedy = f"there is no tenant {name!r:.100}", "name one of the file of keys"
            raise InputError(message, field="tenant", remedy=remedy, code="unknown_tenant")
    kind = "chat" if "messages" in body else "completion"
    items, _ = KINDS[kind].read({**body, "max_tokens": 1, "temperature": 0}, {})
    order = asking.order("generate", items)
    if compute:
        await unless_gone(request, asking.desk.answer(order, asking.num_bytes))
    requests = await asking.desk.requests(order, asking.num_bytes)

    def change() -> int:
        cache = cache_of(asking.desk)
        act = cache.pin if compute else cache.unpin
        namespace_of = asking.desk.llm.engine.namespace_of
        return sum(act(namespace_of(one), one.tokens) for one in requests)

    tokens = await asking.desk.look(lambda books: change())
    return json_response({"pinned" if compute else "unpinned": tokens, "tokens": sum(len(r.tokens) for r in requests)})


async def clear(site: Site, request: Request, tenant: Tenant) -> Response:
    """Lets all go that is not pinned and not in use; answers with how many rows went."""
    desk = site.desk_for(request)

    def empty() -> int:
        cache = cache_of(desk)
        rows = int(cache.rows)
        cache.clear()
        return rows - int(cache.rows)

    return json_response({"cleared": await desk.look(lambda books: empty())})


def cache_of(desk: Any) -> Any:
    """Returns the cache. Raises Refusal where nothing is kept."""
    if desk.llm.cache is None:
        raise _off()
    return desk.llm.cache


def _off() -> Refusal:
    return Refusal(400, "the cache is off", remedy="start the server with --cache lru", code="cache_off")


ENTRIES = [
    Entry(OPENAI, "GET", "/cache", state, admin=True),
    Entry(OPENAI, "POST", "/cache/pin", pin, admin=True),
    Entry(OPENAI, "POST", "/cache/unpin", unpin, admin=True),
    Entry(OPENAI, "POST", "/cache/clear", clear, admin=True),
]
