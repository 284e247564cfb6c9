"""The page of a server: its trie as it is now, who runs, what was shared, and its steps over time.

The page itself holds no data and is for everybody; what it shows comes from /page/data, which is for admins.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from functools import partial
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..cache.tree import RadixTree
from ..report.live import TreeShape
from ..report.page import with_drawing
from ..text.prompts import readable
from .http import json_response
from .keys import Tenant
from .metrics import hits_of
from .openai import OPENAI
from .site import Entry, Site

MOST_RUNNING = 40


def route() -> Route:
    """Returns the path of the page."""
    text = page_text("page.html")

    async def page(request: Request) -> Response:
        """Answers with the page that shows the trie and who runs."""
        return page_response(text)

    return Route("/", page, methods=["GET"])


def page_text(name: str) -> str:
    """Returns a page of this package, with the style and the drawing of reports in it."""
    return with_drawing(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def page_response(text: str) -> Response:
    """Returns the response that holds a page, which may load nothing, and ask for data only here."""

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


async def data(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with what the page shows now; `tenant` in the query: with the trie of that tenant only."""
    desk = site.desk_for(request)
    of = request.query_params.get("tenant") or None
    names = site.keys.names
    # A look makes no store: it may be large, and one that only reads numbers never needs it.
    has_store, nothing = desk.engine.has_generator, (TreeShape(RadixTree(), {}, str), {"sequences": [], "owners": []})
    shape, running = await desk.look(partial(_look, names, of)) if has_store else nothing
    now = desk.engine.snapshot()
    stats = now.stats
    generation = stats.generation
    waiting, waiting_tokens = desk.room.waiting
    tokenizer = desk.llm.tokenizer
    decode = None if tokenizer is None else readable(lambda tokens: tokenizer.decode(tokens.tolist()))
    found: dict[str, Any] = await desk.in_pool(tenant.owner, shape.data, decode)
    found |= {
        "model": site.names[0],
        "version": __version__,
        "status": site.failing or site.state,
        "tenants": sorted(name for name in names.values() if name),
        "paths": len(shape.owners),
        "whole": shape.is_whole,
        "rows": shape.num_rows,
        "tokens": int(shape.arrays()[0].sum()),
        "computed": {"tokens": stats.tokens, "rows": stats.rows_computed, "steps": stats.steps},
        "hits": 0 if generation is None else hits_of(generation),
        "generated": 0 if generation is None else generation.generated_tokens,
        "slots": [now.used_slots, now.slots],
        "waiting": [waiting, waiting_tokens],
        "running": running,
        "steps": desk.watch.bins(),
        "batches": [] if site.batches is None else await desk.in_pool(tenant.owner, site.batches.open_counts),
    }
    return json_response(found, headers={"cache-control": "no-store"})


def _look(names: Mapping[str, str | None], of: str | None, scheduler: Any) -> tuple[TreeShape, dict[str, Any]]:
    """Returns the shape of the trie, and which sequences run. No step may run meanwhile."""

    def owner_of(namespace: Hashable) -> str:
        assert isinstance(namespace, tuple)
        return names.get(str(namespace[1]).partition("/")[0]) or ""

    tails: dict[Any, list[Any]] = defaultdict(list)
    counts: dict[str, list[int]] = {}
    rows = []
    for sequence in scheduler.running:
        tails[sequence.leaf].append(sequence.tail.tokens)
        root = sequence.leaf
        while root.parent is not None:
            root = root.parent
        owner = owner_of(root.namespace)
        made = sequence.known
        count = counts.setdefault(owner, [0, 0])
        count[0] += 1
        count[1] += made
        if len(rows) < MOST_RUNNING:
            rows.append([owner, sequence.leaf.stop, sequence.cached_tokens or 0, made, sequence.limit])
    who = {"sequences": rows, "owners": [[owner, *count] for owner, count in sorted(counts.items())]}
    return TreeShape(scheduler.tree, tails, owner_of, of=of), who


ENTRIES = [Entry(OPENAI, "GET", "/page/data", data, admin=True)]
