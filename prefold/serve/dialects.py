"""The dialects of OpenAI, vLLM, Anthropic and Cohere, whose bodies are read and written by `api/`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from ..api import ENDPOINTS, KINDS, openai_error, response_body
from ..api.anthropic import CountTokens, Message, MessageEvents, anthropic_error, message_body, read_message
from ..api.body import IDS, Asked, Body, Model, doc
from ..api.completions import Chat, Completion, Echo, Generating, Streamed, read_echo
from ..api.endpoints import Chunks
from ..api.numbers import (
    Classify,
    CohereEmbed,
    Pooling,
    Rerank,
    cohere_error,
    read_classify,
    read_cohere_embed,
    read_pooling,
)
from ..api.responses import ResponseEvents, Responses, read_responses
from ..api.tei import TeiRerank, TeiTokenize
from ..errors import InputError
from ..text.valid import valid_text
from . import tei
from .context import Handle, RequestContext, answer_asked, handle_of, in_events, unnamed
from .handler import RequestHandler
from .http import Refusal, json_response, unless_gone
from .keys import Tenant
from .state import AppState, Dialect, Entry, new_id

OPENAI = Dialect("openai", openai_error, truncate='"truncate_prompt_tokens": -1')
COHERE = Dialect(
    "cohere",
    cohere_error,
    truncate='"truncate": "END", or "max_tokens_per_doc" of rerank',
    paths=re.compile(r"/v2/|/v1/(embed|chat|tokenize|detokenize|classify|summarize|generate)(-jobs)?$"),
)
ANTHROPIC = Dialect("anthropic", anthropic_error, paths=re.compile(r"/v1/(messages|complete)(/|$)"))


_NOT_TOKENIZED = Generating.unsupported | {"stream": (False,), "echo": (False,), "prompt_logprobs": ()}


class TokenizePrompt(Completion, kw_only=True):
    """Returns the ids of a prompt's tokens."""

    add_special_tokens: bool = True
    return_token_strs: bool = False

    unsupported = _NOT_TOKENIZED


class TokenizeChat(Chat, kw_only=True):
    """Returns the ids of a conversation's tokens."""

    add_special_tokens: bool = False
    return_token_strs: bool = False

    unsupported = _NOT_TOKENIZED


class Detokenize(Body, kw_only=True):
    """Returns the text of token ids."""

    model: Model = None
    tokens: Annotated[Any, doc("Token ids.", **IDS)]


def handle_kind(kind: str) -> Handle:
    """Returns what answers requests of one kind."""

    async def handle(state: AppState, request: Request, tenant: Tenant) -> Response:
        return await answer_kind(await RequestContext.of(state, request, tenant), kind)

    return handle


async def rerank(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers /rerank: TEI's with `texts`, else vLLM's, Cohere's and Jina's."""
    # Whose form a refusal has, only the body says; so it is read in any case.
    context = await RequestContext.of(state, request, tenant, computes=False)
    if "texts" in context.body:
        request.scope["dialect"] = tei.TEI
        return await tei.rerank(context)
    return await answer_kind(context, "rerank")


async def answer_kind(context: RequestContext, kind: str) -> Response:
    """Returns the response to a body of one of the kinds that `api/endpoints.py` knows."""
    found, meta = KINDS[kind], {}
    try:
        is_text, body, echo, usage = found.task == "generate", found.body.of(context.body), None, (False, False)
        if isinstance(body, Generating):
            echo = read_echo(body, most=context.state.options.max_logprobs)
        if isinstance(body, Streamed):
            usage = body.usage
        items, meta = found.items(body, {})
        if is_text:
            meta["system_fingerprint"] = context.handler.fingerprint
        order = context.order(found.task, items, body.options(found.task), share=body.cache_prompt)
        if echo is not None:
            meta |= await _echoed(context, echo, items)
        if not (is_text and body.stream):
            if echo is None or echo.top is None:
                answer = context.handler.answer(order, context.num_bytes)
            else:
                answer = context.handler.answer_with_prompts(order, context.num_bytes, echo)
            results = await unless_gone(context.request, answer)
            write = partial(response_body, kind, meta, results, model=context.model, id=new_id())
            return await context.written(results, lambda: json_response(write()))
        if kind == "response":
            return await in_events(context, order, ResponseEvents(meta, model=context.model, id=new_id()))
        samples = items[0]["sampling"].get("n") or 1
        made = Chunks(kind, meta, model=context.model, id=new_id(), usage=usage, items=len(items), samples=samples)
        return await in_events(context, order, made, unnamed, mark=b"data: [DONE]\n\n")
    except InputError as wrong:
        raise wrong.renamed(found.name_of(wrong.field, meta)) from None


async def _echoed(context: RequestContext, echo: Echo, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the response needs to write what a request wants of its prompts."""
    found: dict[str, Any] = {} if echo.listed is None else {"prompt_logprobs": echo.listed}
    if not echo.text:
        return found
    llm = context.handler.llm

    def texts() -> list[str]:
        prompts = [item["prompt"] for item in items]
        return [one if isinstance(one, str) else tei.decoded(llm, [one], "prompt", False)[0] for one in prompts]

    return found | {"echo": await context.without_engine(texts), "echo_logprobs": echo.logprobs}


async def models(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers with the models that are served: the one, its further names, and its adapters."""
    return json_response({"object": "list", "data": entries(state, request)})


async def model(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers with one of the models that are served."""
    name = request.path_params["name"]
    found = next((entry for entry in entries(state, request) if entry["id"] == name), None)
    if found is None:
        raise Refusal(404, f"the model {name!r:.100} is not served here", param="model", code="model_not_found")
    return json_response(found)


def entries(state: AppState, request: Request) -> list[dict[str, Any]]:
    """Returns an entry of the list of models for each name."""
    llm = state.handler_for(request).llm
    head = {"object": "model", "created": int(time.time()), "owned_by": "prefold"}
    return [
        {"id": name, **head, "root": state.names[0], "parent": parent, "max_model_len": llm.config.max_positions}
        for names, parent in ((state.names, None), (llm.engine.adapters, state.names[0]))
        for name in names
    ]


async def classify(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /classify: the labels of a classification head."""
    context = await RequestContext.of(state, request, tenant)
    body = Classify.of(context.body)
    asked = tei.labels_of(read_classify(body, context.model, new_id()), context.handler.llm)
    return await answer_asked(context, replace(asked, options=body.options("classify")), share=body.cache_prompt)


async def pooling(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /pooling: vectors, or what a classification head gives."""
    context = await RequestContext.of(state, request, tenant)
    task = "embed" if context.handler.llm.config.num_labels is None else "classify"
    body = Pooling.of(context.body)
    asked = read_pooling(body, context.model, new_id(), task)
    asked = replace(asked, options={**asked.options, **body.options(task)})
    return await answer_asked(context, asked, share=body.cache_prompt)


async def tokenize(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers /tokenize: TEI's with `inputs`, else vLLM's, the ids of a prompt or of a conversation."""
    context = await RequestContext.of(state, request, tenant, computes=False)
    if "inputs" in context.body:
        request.scope["dialect"] = tei.TEI
        return await tei.tokenize(context)
    kind, llm = "chat" if "messages" in context.body else "completion", context.handler.llm
    body = (TokenizeChat if kind == "chat" else TokenizePrompt).of({**context.body, "max_tokens": 1})
    items, _ = KINDS[kind].items(body, {})
    if isinstance(body, TokenizePrompt):
        prompt, options = valid_text(body.prompt, "prompt"), body.options("generate")
        ids = await context.without_engine(lambda: prompt_ids(llm, prompt, body.add_special_tokens, options))
    elif body.add_special_tokens:
        message, remedy = "'add_special_tokens' is true", "leave it out, as the chat template has its own"
        raise InputError(message, field="add_special_tokens", remedy=remedy, code="unsupported")
    else:
        order = context.order("generate", items, body.options("generate"))
        (ids,) = await unless_gone(request, context.handler.tokens(order, context.num_bytes))
    names = await context.without_engine(lambda: llm.tokenizer.token_names(ids)) if body.return_token_strs else None
    found = {"count": len(ids), "max_model_len": llm.config.max_positions, "tokens": ids}
    return json_response(found | {"token_strs": names})


def prompt_ids(llm: Any, prompt: str, special: bool, options: Mapping[str, Any]) -> list[int]:
    """Returns the tokens of a prompt. Raises InputError for too many.

    special  whether to add what the tokenizer puts around a text
    options  of the task that truncate_prompt_tokens asks for: the last tokens are kept, and the special ones
    """
    ids, _ = tei.located(llm, prompt, "prompt")
    around = (llm.tokenizer.prefix_ids.tolist(), llm.tokenizer.suffix_ids.tolist()) if special else ([], [])
    if options:
        most = options.get("max_length", llm.config.max_positions) - sum(map(len, around))
        ids = ids[max(0, len(ids) - most) :]
    return [*around[0], *ids, *around[1]]


async def count_input(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers with how many tokens the prompt of a response's input has."""
    context = await RequestContext.of(state, request, tenant, computes=False)
    try:
        body = Responses.of(context.body)
        items, _ = read_responses(body, {})
        order = context.order("generate", items, body.options("generate"))
        (ids,) = await unless_gone(request, context.handler.tokens(order, context.num_bytes))
    except InputError as wrong:
        raise wrong.renamed(KINDS["response"].name_of(wrong.field, {})) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def detokenize(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /detokenize: the text of token ids."""
    context = await RequestContext.of(state, request, tenant, computes=False)
    ids, llm = Detokenize.of(context.body).tokens, context.handler.llm
    (text,) = await context.without_engine(lambda: tei.decoded(llm, [ids], "tokens", False))
    return json_response({"prompt": text})


# {field of the task's items: what a request calls it}
_NAMES = {"stop": "stop_sequences", "grammar": "tools"}


async def message(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers a conversation."""
    context = await RequestContext.of(state, request, tenant)
    meta: dict[str, Any] = {}
    try:
        items, meta = read_message(context.body)
        order = context.order("generate", items)
        if not context.body.get("stream"):
            (result,) = await unless_gone(request, context.handler.answer(order, context.num_bytes))
            write = partial(message_body, meta, result, model=context.model, id=new_id())
            return await context.written([result], lambda: json_response(write()))
        return await in_events(context, order, MessageEvents(meta, model=context.model, id=new_id()))
    except InputError as wrong:
        names = _NAMES | ({"grammar": "output_config.format"} if meta.get("format") == "response_format" else {})
        raise wrong.renamed(names.get((wrong.field or "").partition(".")[0], wrong.field)) from None


async def count_tokens(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers with how many tokens the prompt of a conversation has."""
    context = await RequestContext.of(state, request, tenant, computes=False)
    items, _ = read_message(context.body, answered=False)
    (ids,) = await unless_gone(request, context.handler.tokens(context.order("generate", items), context.num_bytes))
    return json_response({"input_tokens": len(ids)})


def embed(types: list[str] | None) -> Handle:
    """Returns what answers /v1/embed or /v2/embed. types: the embedding_types of a body without."""

    def read(body: dict[str, Any], handler: RequestHandler) -> Asked:
        return read_cohere_embed(body, new_id(), handler.llm.task("embed").settings.prompts, types)

    return handle_of(read)


async def cohere_rerank(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers /v2/rerank, as vLLM does too."""
    return await answer_kind(await RequestContext.of(state, request, tenant), "rerank")


# Of two entries of one path the first counts: /v2/rerank is vLLM's too, and its errors are Cohere's.
ENTRIES = [
    Entry(COHERE, "POST", "/v1/embed", embed(None), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/embed", embed(["float"]), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/rerank", cohere_rerank, (Rerank,)),
    Entry(OPENAI, "GET", "/v1/models", models),
    Entry(OPENAI, "GET", "/v1/models/{name:path}", model),
    Entry(OPENAI, "POST", "/rerank", rerank, (Rerank, TeiRerank)),
    *(Entry(OPENAI, "POST", path, handle_kind(kind), (KINDS[kind].body,)) for path, kind in ENDPOINTS.items()),
    Entry(OPENAI, "POST", "/tokenize", tokenize, (TokenizePrompt, TokenizeChat, TeiTokenize)),
    Entry(OPENAI, "POST", "/detokenize", detokenize, (Detokenize,)),
    Entry(OPENAI, "POST", "/classify", classify, (Classify,)),
    Entry(OPENAI, "POST", "/pooling", pooling, (Pooling,)),
    Entry(OPENAI, "POST", "/v1/responses/input_tokens", count_input, (Responses,)),
    Entry(ANTHROPIC, "POST", "/v1/messages", message, (Message,)),
    Entry(ANTHROPIC, "POST", "/v1/messages/count_tokens", count_tokens, (CountTokens,)),
]
