"""Anthropic's face: messages, whole or in events, and the count of their tokens."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..api.anthropic import CountTokens, Message, MessageEvents, anthropic_error, message_body, read_message
from ..errors import InputError
from .asking import Asking
from .events import in_events
from .http import json_response, unless_gone
from .keys import Tenant
from .site import Entry, Face, Site, new_id

ANTHROPIC = Face("anthropic", anthropic_error, paths=re.compile(r"/v1/(messages|complete)(/|$)"))
# {field of the task's items: what a request calls it}
_NAMES = {"stop": "stop_sequences", "grammar": "tools"}


async def message(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers a conversation."""
    asking = await Asking.of(site, request, tenant)
    meta: dict[str, Any] = {}
    try:
        items, meta = read_message(asking.body)
        order = asking.order("generate", items)
        if not asking.body.get("stream"):
            (result,) = await unless_gone(request, asking.desk.answer(order, asking.num_bytes))
            write = partial(message_body, meta, result, model=asking.model, id=new_id())
            return await asking.written([result], lambda: json_response(write()))
        return await in_events(asking, order, MessageEvents(meta, model=asking.model, id=new_id()))
    except InputError as wrong:
        names = _NAMES | ({"grammar": "output_config.format"} if meta.get("format") == "response_format" else {})
        raise wrong.renamed(names.get((wrong.field or "").partition(".")[0], wrong.field)) from None


async def count_tokens(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with how many tokens the prompt of a conversation has."""
    asking = await Asking.of(site, request, tenant, computes=False)
    items, _ = read_message(asking.body, answered=False)
    (ids,) = await unless_gone(request, asking.desk.tokens(asking.order("generate", items), asking.num_bytes))
    return json_response({"input_tokens": len(ids)})


ENTRIES = [
    Entry(ANTHROPIC, "POST", "/v1/messages", message, (Message,)),
    Entry(ANTHROPIC, "POST", "/v1/messages/count_tokens", count_tokens, (CountTokens,)),
]
