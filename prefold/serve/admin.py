"""The page of a server, and the paths that inspect and manage the cache.

The page shows the trie, the running sequences and the steps over time. The page itself contains no data and is public.
Its data come from /page/data, which needs an admin's key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..engine.cache.listing import HeldRows
from ..engine.protocol import RunningSequence, Snapshot
from ..engine.schedule.generate_step import NO_OWNER
from ..errors import InputError
from ..jobs.report.page import TreeShape, with_drawing
from ..text.prompts import readable
from ..wire.body import TaskOrder
from ..wire.completions import Chat, Completion
from .context import Entry, RequestContext
from .dialects import OPENAI
from .http import Refusal, json_response, unless_gone
from .metrics import hits_of

MOST_RUNNING, MOST_PATHS = 40, 5000  # running sequences and paths that the page shows


def route() -> Route:
    """Return the route of the page."""
    text = page_text("page.html")

    async def page(request: Request) -> Response:
        """Return the page that shows the trie and the running sequences."""
        return page_response(text)

    return Route("/", page, methods=["GET"])


def page_text(name: str) -> str:
    """Return an HTML file of this package, with the style and the scripts of reports inserted."""
    return with_drawing(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def page_response(text: str) -> Response:
    """Return the response with a page.

    Its policy forbids loading anything, and allows fetching data from this server.
    """

    def hashes(tag: str) -> str:
        parts = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in parts)

    policy = f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'"
    policy += "; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text, 200, headers, "text/html; charset=utf-8")


async def data(context: RequestContext) -> Response:
    """Return the current data of the page as JSON. `tenant` in the query limits the trie to that tenant."""
    handler, state, owner = context.handler, context.state, context.tenant.owner
    of = context.request.query_params.get("tenant") or None

    def owner_of(namespace: Hashable) -> str:
        return str(state.keys.tenant_of(namespace) or "")

    wants = None if of is None else lambda namespace: owner_of(namespace) == of
    listing = partial(handler.engine.snapshot, paths=MOST_PATHS + 1, wants=wants)
    now: Snapshot = await handler.in_pool(NO_OWNER, listing)
    shape = TreeShape(now.paths, owner_of, most=MOST_PATHS)
    stats = now.stats
    # The engine counts rows when they are computed, but a request's tokens only when the request ends.
    tokens = stats.tokens + sum(sequence.prompt_tokens + sequence.output_tokens for sequence in now.running)
    generation = stats.generation
    waiting, waiting_tokens = handler.backpressure.waiting
    tokenizer = handler.llm.tokenizer
    decode = None if tokenizer is None else readable(lambda tokens: tokenizer.decode(tokens.tolist()))
    answer: dict[str, Any] = await handler.in_pool(owner, shape.data, decode)
    answer |= {
        "model": state.names[0],
        "version": __version__,
        "status": state.failing or state.status,
        "tenants": sorted(name for name in state.keys.names.values() if name),
        "paths": len(shape.owners),
        "whole": shape.is_whole,
        "rows": shape.num_rows,
        "tokens": int(shape.arrays()[0].sum()),
        "computed": {"tokens": tokens, "rows": stats.rows_computed, "steps": stats.steps},
        "hits": 0 if generation is None else hits_of(generation),
        "generated": 0 if generation is None else generation.generated_tokens,
        "slots": [now.used_slots, now.slots],
        "waiting": [waiting, waiting_tokens],
        "running": sequences_shown(now.running, owner_of),
        "steps": handler.watch.bins(),
        "batches": [] if state.batches is None else await handler.in_pool(owner, state.batches.open_counts),
    }
    return json_response(answer, headers={"cache-control": "no-store"})


def sequences_shown(running: Sequence[RunningSequence], owner_of: Callable[[Hashable], str]) -> dict[str, list[Any]]:
    """Return the first running sequences, and for each owner the number of its sequences and their tokens."""
    counts: dict[str, list[int]] = {}
    rows = []
    for namespace, *numbers in running:
        owner, tokens = owner_of(namespace), numbers[2]
        count = counts.setdefault(owner, [0, 0])
        count[0] += 1
        count[1] += tokens
        rows.append([owner, *numbers])
    return {"sequences": rows[:MOST_RUNNING], "owners": [[owner, *count] for owner, count in sorted(counts.items())]}


async def cache_state(context: RequestContext) -> Response:
    """Return the settings of the cache and the rows that it contains, in total and by tenant."""
    handler = context.handler
    cache: Any = handler.engine.facts.options.generation.cache
    if cache is None:
        raise _off()
    options = {name: getattr(cache, name) for name in ("policy", "ttl", "max_tokens", "min_overlap")}
    if cache.shifted is not None:
        options["shifted"] = asdict(cache.shifted)
    now: Snapshot = await handler.in_pool(NO_OWNER, partial(handler.engine.snapshot, rows=True))
    tenants: dict[str, dict[str, int]] = {}
    for namespace, rows in now.rows.items():
        tenant = str(context.state.keys.tenant_of(namespace) or "")
        counts = tenants.setdefault(tenant, dict.fromkeys(rows._fields, 0))
        for name, count in rows._asdict().items():
            counts[name] += count
    total = {name: sum(counts[name] for counts in tenants.values()) for name in HeldRows._fields}
    state = {"slots": now.slots, "used_slots": now.used_slots, "rows": total, "tenants": tenants}
    generation = now.stats.generation
    if now.slots and generation is not None:
        state["hits"] = hits_of(generation)
    return json_response(options | state)


async def pin(context: RequestContext) -> Response:
    """Compute a prompt if it is not cached, and keep it until it is unpinned. Return its number of tokens."""
    return await place(context, compute=True)


async def unpin(context: RequestContext) -> Response:
    """Release a pinned prompt. Return the number of tokens that the pin held."""
    return await place(context, compute=False)


async def place(context: RequestContext, *, compute: bool) -> Response:
    """Pin or unpin a prompt or a conversation of the tenant that the body names (default: the admin's own)."""
    await context.read(computes=compute)
    cache_of(context.handler)
    body = {name: value for name, value in context.body.items() if name != "tenant"}
    name = context.body.get("tenant")
    if name is not None:
        context.tenant = next((item for item in context.state.keys.tenants if item.name == name), None)  # type: ignore[assignment]
        if context.tenant is None:
            message, remedy = f"there is no tenant {name!r:.100}", "name a tenant of the file of keys"
            raise InputError(message, field="tenant", remedy=remedy, code="unknown_tenant")
    kind = Chat if "messages" in body else Completion
    items, _ = kind.of({**body, "max_tokens": 1, "temperature": 0}, in_batch=True).read({})
    order = context.order(TaskOrder("generate", items))
    if compute:
        await unless_gone(context.request, context.handler.answer(order))
    requests = await context.handler.requests(order)

    def change() -> int:
        cache = cache_of(context.handler)
        act = cache.pin if compute else cache.unpin
        return sum(act(*cache.place_of(request)) for request in requests)

    tokens = await context.handler.in_pool(NO_OWNER, change)
    return json_response({"pinned" if compute else "unpinned": tokens, "tokens": sum(len(r.tokens) for r in requests)})


async def clear(context: RequestContext) -> Response:
    """Evict all rows that are neither pinned nor in use. Return the number of evicted rows."""
    cache = cache_of(context.handler)
    return json_response({"cleared": await context.handler.in_pool(NO_OWNER, cache.clear)})


def cache_of(handler: Any) -> Any:
    """Return the cache. Raise Refusal if it is off."""
    if handler.engine.cache is None:
        raise _off()
    return handler.engine.cache


def _off() -> Refusal:
    return Refusal(400, "the cache is off", remedy="start the server with --cache lru", code="cache_off")


ENTRIES = [
    Entry(OPENAI, "GET", "/page/data", data, admin=True),
    Entry(OPENAI, "GET", "/cache", cache_state, admin=True),
    Entry(OPENAI, "POST", "/cache/pin", pin, admin=True),
    Entry(OPENAI, "POST", "/cache/unpin", unpin, admin=True),
    Entry(OPENAI, "POST", "/cache/clear", clear, admin=True),
]
