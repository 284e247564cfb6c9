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
from ..api.asked import checked, flag, need
from ..api.chunks import Chunks, read_stream
from ..api.options import read_options
from ..api.tokens import DETOKENIZE_NAMES, TOKENIZE_NAMES
from ..errors import InputError
from . import tei
from .faces import Asking, Handle
from .http import EventStream, Refusal, json_of, json_response, unless_gone
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
        handle = rerank if path == "/rerank" else handler(kind)
        found.append(Route(path, OPENAI.endpoint(site, handle), methods=["POST"]))
    for path, own in {"/tokenize": tokenize, "/detokenize": detokenize}.items():
        found.append(Route(path, OPENAI.endpoint(site, own), methods=["POST"]))
    return found


def handler(kind: str) -> Handle:
    """Returns what answers requests of one kind."""

    async def handle(site: Site, request: Request, tenant: Tenant) -> Response:
        return await answer_kind(await Asking.of(site, request, tenant), kind)

    return handle


async def rerank(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /rerank: TEI's with `texts`, else vLLM's, Cohere's and Jina's."""
    asking = await Asking.of(site, request, tenant)
    if "texts" in asking.body:
        request.scope["face"] = tei.TEI
        return await tei.rerank(asking)
    return await answer_kind(asking, "rerank")


async def answer_kind(asking: Asking, kind: str) -> Response:
    """Returns the response to a body of one of the kinds that `api/endpoints.py` knows."""
    found, meta = KINDS[kind], {}
    try:
        is_text = found.task == "generate"
        stream, usage, body = read_stream(asking.body) if is_text else (False, False, asking.body)
        options, share, body = read_options(found.task, body)
        check_template(body, asking)
        items, meta = found.read(body, {})
        order = asking.order(found.task, items, options, share=share)
        if not stream:
            results = await unless_gone(asking.request, asking.desk.answer(order, asking.num_bytes))
            return json_response(response_body(kind, meta, results, model=asking.model, id=new_id()))
        samples = items[0]["sampling"].get("n") or 1
        chunks = Chunks(kind, meta, model=asking.model, id=new_id(), usage=usage, samples=samples)
        answers = asking.desk.stream(order, asking.num_bytes)
        events = events_of(answers, chunks, len(items), asking.site)
        await unless_gone(asking.request, events.__anext__())
        return EventStream(events, asking.request, asking.site.options)
    except InputError as wrong:
        raise wrong.renamed(found.name_of(wrong.field, meta)) from None


def check_template(body: dict[str, Any], asking: Asking) -> None:
    """Raises InputError for a chat template that is not the checkpoint's own, unless they are allowed."""
    template, tokenizer = body.get("chat_template"), asking.desk.llm.tokenizer
    if template is None or asking.site.options.allow_chat_template:
        return
    if tokenizer is None or template not in tokenizer.chat_templates.templates:
        message = "'chat_template' is not the name of one of the model's templates"
        remedy = "leave it out, or start the server with --allow-chat-template"
        raise InputError(message, field="chat_template", remedy=remedy, code="unsupported")


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
                elif len(event) == 4:
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


async def tokenize(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /tokenize: TEI's with `inputs`, else vLLM's, the ids of a prompt or of a conversation."""
    asking = await Asking.of(site, request, tenant)
    if "inputs" in asking.body:
        request.scope["face"] = tei.TEI
        return await tei.tokenize(asking)
    kind, special = ("chat" if "messages" in asking.body else "completion"), asking.body.get("add_special_tokens")
    with_texts = flag(asking.body, "return_token_strs")
    body = {k: v for k, v in asking.body.items() if k not in TOKENIZE_NAMES}
    if kind == "completion" and special is False:
        prompt = need(body, "prompt")
        body["prompt"] = asking.desk.llm.tokenizer.encode(prompt, special=False).tolist()
    items, _ = KINDS[kind].read({**body, "max_tokens": 1}, {})
    (ids,) = await unless_gone(request, asking.desk.tokens(asking.order("generate", items[:1])))
    found = {"count": len(ids), "max_model_len": asking.desk.llm.config.max_positions, "tokens": ids}
    strings = [asking.desk.llm.tokenizer.decode([i]) for i in ids] if with_texts else None
    return json_response(found | {"token_strs": strings})


async def detokenize(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /detokenize: the text of token ids."""
    asking = await Asking.of(site, request, tenant)
    checked(asking.body, *DETOKENIZE_NAMES)
    return json_response({"prompt": tei.decoded(asking.desk.llm, need(asking.body, "tokens"), "tokens", False)})
