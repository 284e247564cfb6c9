"""The dialects of OpenAI, vLLM, Anthropic and Cohere, whose bodies are read and written by `api/`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from starlette.responses import Response

from ..api import ENDPOINTS, KINDS, openai_error, response_body
from ..api.anthropic import CountTokens, Message, anthropic_error, read_message
from ..api.body import IDS, Body, Model, TaskOrder, doc
from ..api.completions import Chat, Completion, Generating, Streamed, read_echo
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
from ..api.tei import TeiRerank, TeiTokenize, read_texts_rerank
from ..errors import InputError
from ..text.valid import valid_text
from . import tei
from .context import Dialect, Entry, Handle, RequestContext
from .http import Refusal, json_response

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


async def answer_kind(context: RequestContext, kind: str) -> Response:
    """Returns the response to a body of one of the kinds that `api/endpoints.py` knows."""
    found, llm = KINDS[kind], context.handler.llm
    body = found.body.of(context.body)
    echo = read_echo(body, most=context.state.options.max_logprobs) if isinstance(body, Generating) else None
    usage = body.usage if isinstance(body, Streamed) else None
    items, meta = found.items(body, {})
    how: dict[str, Any] = {"model": context.model, "id": context.id}
    events = None
    if found.task == "generate":
        meta["system_fingerprint"] = context.handler.fingerprint
        if body.stream and kind == "response":
            events = ResponseEvents(meta, **how)
        elif body.stream:
            samples = items[0]["sampling"].get("n") or 1
            events = Chunks(kind, meta, **how, usage=usage, samples=samples)
    if echo is not None:
        meta |= {} if echo.listed is None else {"prompt_logprobs": echo.listed}
        if echo.text:

            def texts() -> list[str]:
                prompts = [item["prompt"] for item in items]
                return [one if isinstance(one, str) else tei.decoded(llm, [one], "prompt", False)[0] for one in prompts]

            meta |= {"echo": await context.without_engine(texts), "echo_logprobs": echo.logprobs}
        echo = None if echo.top is None else echo
    make, fields = partial(response_body, kind, meta, **how), found.names(meta)
    options = body.options(found.task)
    order = TaskOrder(found.task, items, make, options, fields, body.cache_prompt, echo, events=events)
    return await context.answer(order)


def handle_kind(kind: str) -> Handle:
    """Returns what answers requests of one kind."""
    return partial(answer_kind, kind=kind)


async def rerank(context: RequestContext) -> Response:
    """Answers /rerank: TEI's with `texts`, else vLLM's, Cohere's and Jina's."""
    if "texts" in context.body:  # whose form a refusal has, only the body says
        context.request.scope["dialect"] = tei.TEI
        return await context.answer(read_texts_rerank(context.body))
    return await answer_kind(context, "rerank")


async def models(context: RequestContext) -> Response:
    """Answers with the models that are served: the one, its further names, and its adapters."""
    return json_response({"object": "list", "data": entries(context)})


async def model(context: RequestContext) -> Response:
    """Answers with one of the models that are served."""
    name = context.request.path_params["name"]
    entry = next((entry for entry in entries(context) if entry["id"] == name), None)
    if entry is None:
        raise Refusal(404, f"the model {name!r:.100} is not served here", param="model", code="model_not_found")
    return json_response(entry)


def entries(context: RequestContext) -> list[dict[str, Any]]:
    """Returns an entry of the list of models for each name."""
    llm, names = context.handler.llm, context.state.names
    head = {"object": "model", "created": int(time.time()), "owned_by": "prefold"}
    return [
        {"id": name, **head, "root": names[0], "parent": parent, "max_model_len": llm.config.max_positions}
        for some, parent in ((names, None), (llm.engine.adapters, names[0]))
        for name in some
    ]


async def classify(context: RequestContext) -> Response:
    """Answers vLLM's /classify: the labels of a classification head."""
    order = read_classify(Classify.of(context.body), context.model, context.id)
    return await context.answer(tei.labels_of(order, context.handler.llm))


async def pooling(context: RequestContext) -> Response:
    """Answers vLLM's /pooling: vectors, or what a classification head gives."""
    task = "embed" if context.handler.llm.config.num_labels is None else "classify"
    return await context.answer(read_pooling(Pooling.of(context.body), context.model, context.id, task))


async def tokenize(context: RequestContext) -> Response:
    """Answers /tokenize: TEI's with `inputs`, else vLLM's, the ids of a prompt or of a conversation."""
    if "inputs" in context.body:
        context.request.scope["dialect"] = tei.TEI
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
        (ids,) = await context.tokens(TaskOrder("generate", items, options=body.options("generate")))
    names = await context.without_engine(lambda: llm.tokenizer.token_names(ids)) if body.return_token_strs else None
    counted = {"count": len(ids), "max_model_len": llm.config.max_positions, "tokens": ids}
    return json_response(counted | {"token_strs": names})


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


async def count_input(context: RequestContext) -> Response:
    """Answers with how many tokens the prompt of a response's input has."""
    body = Responses.of(context.body)
    items, _ = read_responses(body, {})
    fields = KINDS["response"].names({})
    (ids,) = await context.tokens(TaskOrder("generate", items, options=body.options("generate"), fields=fields))
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def detokenize(context: RequestContext) -> Response:
    """Answers vLLM's /detokenize: the text of token ids."""
    ids, llm = Detokenize.of(context.body).tokens, context.handler.llm
    (text,) = await context.without_engine(lambda: tei.decoded(llm, [ids], "tokens", False))
    return json_response({"prompt": text})


async def message(context: RequestContext) -> Response:
    """Answers Anthropic's messages: a conversation."""
    order = read_message(Message.of(context.body), context.model, context.id)
    return await context.answer(order)


async def count_tokens(context: RequestContext) -> Response:
    """Answers with how many tokens the prompt of a conversation has."""
    (ids,) = await context.tokens(read_message(CountTokens.of(context.body), context.model, context.id))
    return json_response({"input_tokens": len(ids)})


def embed(types: list[str] | None) -> Handle:
    """Returns what answers Cohere's /v1/embed or /v2/embed. types: the embedding_types of a body without."""

    async def handle(context: RequestContext) -> Response:
        prompts = context.handler.llm.task("embed").settings.prompts
        return await context.answer(read_cohere_embed(context.body, context.id, prompts, types))

    return handle


# Of two entries of one path the first counts: /v2/rerank is vLLM's too, and its errors are Cohere's.
ENTRIES = [
    Entry(COHERE, "POST", "/v1/embed", embed(None), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/embed", embed(["float"]), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/rerank", handle_kind("rerank"), (Rerank,)),
    Entry(OPENAI, "GET", "/v1/models", models),
    Entry(OPENAI, "GET", "/v1/models/{name:path}", model),
    Entry(OPENAI, "POST", "/rerank", rerank, (Rerank, TeiRerank), computes=False),
    *(Entry(OPENAI, "POST", path, handle_kind(kind), (KINDS[kind].body,)) for path, kind in ENDPOINTS.items()),
    Entry(OPENAI, "POST", "/tokenize", tokenize, (TokenizePrompt, TokenizeChat, TeiTokenize), computes=False),
    Entry(OPENAI, "POST", "/detokenize", detokenize, (Detokenize,), computes=False),
    Entry(OPENAI, "POST", "/classify", classify, (Classify,)),
    Entry(OPENAI, "POST", "/pooling", pooling, (Pooling,)),
    Entry(OPENAI, "POST", "/v1/responses/input_tokens", count_input, (Responses,), computes=False),
    Entry(ANTHROPIC, "POST", "/v1/messages", message, (Message,)),
    Entry(ANTHROPIC, "POST", "/v1/messages/count_tokens", count_tokens, (CountTokens,), computes=False),
]
