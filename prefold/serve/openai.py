"""OpenAI's face, and vLLM's, whose bodies are read and written by `api/`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..api import ENDPOINTS, KINDS, response_body
from ..api.chunks import Chunks, read_stream
from ..api.options import read_options
from ..errors import InputError
from .desk import Desk, Order
from .http import EventStream, Refusal, json_of, json_response, read_json, unless_gone
from .keys import Tenant
from .site import Face, Site, as_refusal, new_id

__all__ = ["OPENAI", "answer_kind", "routes"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error(status: int, message: str, code: str, param: str | None) -> tuple[int, dict[str, Any]]:
    """Returns (status, body) of an error in OpenAI's form."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code or None}}


OPENAI = Face("openai", error)


def routes(site: Site) -> list[BaseRoute]:
    """Returns the paths of this face."""
    found: list[BaseRoute] = [
        Route("/v1/models", OPENAI.endpoint(site, models), methods=["GET"]),
        Route("/v1/models/{name:path}", OPENAI.endpoint(site, model), methods=["GET"]),
    ]
    for path, kind in ENDPOINTS.items():
        found.append(Route(path, OPENAI.endpoint(site, handler(kind)), methods=["POST"]))
    return found


def handler(kind: str) -> Any:
    """Returns what answers requests of one kind."""

    async def handle(site: Site, request: Request, tenant: Tenant) -> Response:
        desk = site.desk_for(request)
        body, num_bytes = await read_json(request, site.options)
        return await answer_kind(site, desk, request, tenant, kind, body, num_bytes)

    return handle


async def answer_kind(
    site: Site, desk: Desk, request: Request, tenant: Tenant, kind: str, body: dict[str, Any], num_bytes: int
) -> Response:
    """Returns the response to a body of one of the kinds that `api/endpoints.py` knows."""
    found, meta = KINDS[kind], {}
    try:
        stream, usage, body = read_stream(body) if found.task == "generate" else (False, False, body)
        model, adapter = site.model_of(body.get("model"))
        options, share, body = read_options(found.task, body)
        items, meta = found.read(body, {})
        check_texts(items, body, site.options.max_texts)
        if adapter is not None:
            items = [item | {"adapter": adapter} for item in items]
        order = Order(found.task, items, options, site.keys.namespace(tenant), share)
        if not stream:
            results = await unless_gone(request, desk.answer(order, num_bytes))
            return json_response(response_body(kind, meta, results, model=model, id=new_id()))
        sampling = items[0]["sampling"]
        chunks = Chunks(kind, meta, model=model, id=new_id(), usage=usage, samples=sampling.get("n") or 1)
        events = events_of(desk.stream(order, num_bytes), chunks, len(items), site)
        await unless_gone(request, events.__anext__())
        return EventStream(events, request, site.options)
    except InputError as wrong:
        raise wrong.renamed(found.name_of(wrong.field, meta)) from None


def check_texts(items: list[Any], body: dict[str, Any], most: int) -> None:
    """Raises InputError for a request with more than `most` texts."""
    for name in ("input", "documents", "text_1", "text_2", "queries", "prompt"):
        value = body.get(name)
        if isinstance(value, list) and len(value) > most and not all(isinstance(one, int) for one in value):
            raise InputError(
                f"{name!r} holds {len(value)} texts", field=name, remedy=f"send at most {most} at once", code="too_many"
            )


async def events_of(answers: AsyncGenerator[Any], chunks: Chunks, items: int, site: Site) -> AsyncGenerator[bytes]:
    """Yields nothing once the request has been taken, and then the events of its stream; the last says "[DONE]"."""
    started = False
    try:
        async with aclosing(answers):
            async for event in answers:
                if not started:
                    started = True
                    yield b""
                    made = chunks.begin(items)
                elif len(event) == 3:
                    made = chunks.piece(*event)
                else:
                    made = chunks.end(*event)
                if body := b"".join(b"data: %b\n\n" % json_of(chunk) for chunk in made):
                    yield body
        for chunk in chunks.last():
            yield b"data: %b\n\n" % json_of(chunk)
    except Exception as wrong:
        if not started:
            raise
        refusal = as_refusal(wrong)
        if refusal.status >= 500 and refusal is not wrong:
            site.metrics.log(wrong)
        _, body = error(refusal.status, str(refusal), refusal.code, refusal.param)
        yield b"data: %b\n\n" % json_of(body)
    yield b"data: [DONE]\n\n"


async def models(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with the models that are served: the one, its further names, and its adapters."""
    return json_response({"object": "list", "data": entries(site, request)})


async def model(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with one of the models that are served."""
    name = request.path_params["name"]
    found = next((entry for entry in entries(site, request) if entry["id"] == name), None)
    if found is None:
        raise Refusal(404, f"the model {name!r:.100} is not served here", param="model", code="model_not_found")
    return json_response(found)


def entries(site: Site, request: Request) -> list[dict[str, Any]]:
    """Returns an entry of the list of models for each name."""
    llm = site.desk_for(request).llm
    head = {"object": "model", "created": int(time.time()), "owned_by": "prefold"}
    return [
        {"id": name, **head, "root": llm.checkpoint.name, "parent": parent, "max_model_len": llm.config.max_positions}
        for names, parent in ((site.names, None), (llm.engine.adapters, site.names[0]))
        for name in names
    ]
