"""The faces of OpenAI, vLLM, Anthropic and Cohere, whose bodies are read and written by `api/`."""

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
from .context import Asking, Handle, answer_asked, handle_of, in_events, unnamed
from .handler import Desk
from .http import Refusal, json_response, unless_gone
from .keys import Tenant
from .state import Entry, Face, Site, new_id

OPENAI = Face("openai", openai_error, truncate='"truncate_prompt_tokens": -1')
COHERE = Face(
    "cohere",
    cohere_error,
    truncate='"truncate": "END", or "max_tokens_per_doc" of rerank',
    paths=re.compile(r"/v2/|/v1/(embed|chat|tokenize|detokenize|classify|summarize|generate)(-jobs)?$"),
)
ANTHROPIC = Face("anthropic", anthropic_error, paths=re.compile(r"/v1/(messages|complete)(/|$)"))


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


def handler(kind: str) -> Handle:
    """Returns what answers requests of one kind."""

    async def handle(site: Site, request: Request, tenant: Tenant) -> Response:
        return await answer_kind(await Asking.of(site, request, tenant), kind)

    return handle


async def rerank(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /rerank: TEI's with `texts`, else vLLM's, Cohere's and Jina's."""
    # Whose form a refusal has, only the body says; so it is read in any case.
    asking = await Asking.of(site, request, tenant, computes=False)
    if "texts" in asking.body:
        request.scope["face"] = tei.TEI
        return await tei.rerank(asking)
    return await answer_kind(asking, "rerank")


async def answer_kind(asking: Asking, kind: str) -> Response:
    """Returns the response to a body of one of the kinds that `api/endpoints.py` knows."""
    found, meta = KINDS[kind], {}
    try:
        is_text, body, echo, usage = found.task == "generate", found.body.of(asking.body), None, (False, False)
        if isinstance(body, Generating):
            echo = read_echo(body, most=asking.site.options.max_logprobs)
        if isinstance(body, Streamed):
            usage = body.usage
        items, meta = found.items(body, {})
        if is_text:
            meta["system_fingerprint"] = asking.desk.fingerprint
        order = asking.order(found.task, items, body.options(found.task), share=body.cache_prompt)
        if echo is not None:
            meta |= await _echoed(asking, echo, items)
        if not (is_text and body.stream):
            if echo is None or echo.top is None:
                answer = asking.desk.answer(order, asking.num_bytes)
            else:
                answer = asking.desk.answer_with_prompts(order, asking.num_bytes, echo)
            results = await unless_gone(asking.request, answer)
            write = partial(response_body, kind, meta, results, model=asking.model, id=new_id())
            return await asking.written(results, lambda: json_response(write()))
        if kind == "response":
            return await in_events(asking, order, ResponseEvents(meta, model=asking.model, id=new_id()))
        samples = items[0]["sampling"].get("n") or 1
        made = Chunks(kind, meta, model=asking.model, id=new_id(), usage=usage, items=len(items), samples=samples)
        return await in_events(asking, order, made, unnamed, mark=b"data: [DONE]\n\n")
    except InputError as wrong:
        raise wrong.renamed(found.name_of(wrong.field, meta)) from None


async def _echoed(asking: Asking, echo: Echo, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the response needs to write what a request wants of its prompts."""
    found: dict[str, Any] = {} if echo.listed is None else {"prompt_logprobs": echo.listed}
    if not echo.text:
        return found
    llm = asking.desk.llm

    def texts() -> list[str]:
        prompts = [item["prompt"] for item in items]
        return [one if isinstance(one, str) else tei.decoded(llm, [one], "prompt", False)[0] for one in prompts]

    return found | {"echo": await asking.without_engine(texts), "echo_logprobs": echo.logprobs}


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
        {"id": name, **head, "root": site.names[0], "parent": parent, "max_model_len": llm.config.max_positions}
        for names, parent in ((site.names, None), (llm.engine.adapters, site.names[0]))
        for name in names
    ]


async def classify(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /classify: the labels of a classification head."""
    asking = await Asking.of(site, request, tenant)
    body = Classify.of(asking.body)
    asked = tei.labels_of(read_classify(body, asking.model, new_id()), asking.desk.llm)
    return await answer_asked(asking, replace(asked, options=body.options("classify")), share=body.cache_prompt)


async def pooling(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /pooling: vectors, or what a classification head gives."""
    asking = await Asking.of(site, request, tenant)
    task = "embed" if asking.desk.llm.config.num_labels is None else "classify"
    body = Pooling.of(asking.body)
    asked = read_pooling(body, asking.model, new_id(), task)
    asked = replace(asked, options={**asked.options, **body.options(task)})
    return await answer_asked(asking, asked, share=body.cache_prompt)


async def tokenize(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /tokenize: TEI's with `inputs`, else vLLM's, the ids of a prompt or of a conversation."""
    asking = await Asking.of(site, request, tenant, computes=False)
    if "inputs" in asking.body:
        request.scope["face"] = tei.TEI
        return await tei.tokenize(asking)
    kind, llm = "chat" if "messages" in asking.body else "completion", asking.desk.llm
    body = (TokenizeChat if kind == "chat" else TokenizePrompt).of({**asking.body, "max_tokens": 1})
    items, _ = KINDS[kind].items(body, {})
    if isinstance(body, TokenizePrompt):
        prompt, options = valid_text(body.prompt, "prompt"), body.options("generate")
        ids = await asking.without_engine(lambda: prompt_ids(llm, prompt, body.add_special_tokens, options))
    elif body.add_special_tokens:
        message, remedy = "'add_special_tokens' is true", "leave it out, as the chat template has its own"
        raise InputError(message, field="add_special_tokens", remedy=remedy, code="unsupported")
    else:
        order = asking.order("generate", items, body.options("generate"))
        (ids,) = await unless_gone(request, asking.desk.tokens(order, asking.num_bytes))
    names = await asking.without_engine(lambda: llm.tokenizer.token_names(ids)) if body.return_token_strs else None
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


async def count_input(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers with how many tokens the prompt of a response's input has."""
    asking = await Asking.of(site, request, tenant, computes=False)
    try:
        body = Responses.of(asking.body)
        items, _ = read_responses(body, {})
        order = asking.order("generate", items, body.options("generate"))
        (ids,) = await unless_gone(request, asking.desk.tokens(order, asking.num_bytes))
    except InputError as wrong:
        raise wrong.renamed(KINDS["response"].name_of(wrong.field, {})) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def detokenize(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers vLLM's /detokenize: the text of token ids."""
    asking = await Asking.of(site, request, tenant, computes=False)
    ids, llm = Detokenize.of(asking.body).tokens, asking.desk.llm
    (text,) = await asking.without_engine(lambda: tei.decoded(llm, [ids], "tokens", False))
    return json_response({"prompt": text})


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


def embed(types: list[str] | None) -> Handle:
    """Returns what answers /v1/embed or /v2/embed. types: the embedding_types of a body without."""

    def read(body: dict[str, Any], desk: Desk) -> Asked:
        return read_cohere_embed(body, new_id(), desk.llm.task("embed").settings.prompts, types)

    return handle_of(read)


async def cohere_rerank(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /v2/rerank, as vLLM does too."""
    return await answer_kind(await Asking.of(site, request, tenant), "rerank")


# Of two entries of one path the first counts: /v2/rerank is vLLM's too, and its errors are Cohere's.
ENTRIES = [
    Entry(COHERE, "POST", "/v1/embed", embed(None), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/embed", embed(["float"]), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/rerank", cohere_rerank, (Rerank,)),
    Entry(OPENAI, "GET", "/v1/models", models),
    Entry(OPENAI, "GET", "/v1/models/{name:path}", model),
    Entry(OPENAI, "POST", "/rerank", rerank, (Rerank, TeiRerank)),
    *(Entry(OPENAI, "POST", path, handler(kind), (KINDS[kind].body,)) for path, kind in ENDPOINTS.items()),
    Entry(OPENAI, "POST", "/tokenize", tokenize, (TokenizePrompt, TokenizeChat, TeiTokenize)),
    Entry(OPENAI, "POST", "/detokenize", detokenize, (Detokenize,)),
    Entry(OPENAI, "POST", "/classify", classify, (Classify,)),
    Entry(OPENAI, "POST", "/pooling", pooling, (Pooling,)),
    Entry(OPENAI, "POST", "/v1/responses/input_tokens", count_input, (Responses,)),
    Entry(ANTHROPIC, "POST", "/v1/messages", message, (Message,)),
    Entry(ANTHROPIC, "POST", "/v1/messages/count_tokens", count_tokens, (CountTokens,)),
]
