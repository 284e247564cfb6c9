"""The dialect of Hugging Face's Text Embeddings Inference (TEI)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..api.body import Asked, renamed
from ..api.tei import (
    TeiDecode,
    TeiEmbed,
    TeiEmbedAll,
    TeiPredict,
    TeiRerank,
    TeiSimilarity,
    TeiTokenize,
    read_embed,
    read_predict,
    read_rerank,
    read_similarity,
    tei_error,
)
from ..errors import InputError, UnsupportedModelError
from ..text.valid import valid_text
from ..types import Readout
from .context import RequestContext, answer_asked, handle_of
from .handler import RequestHandler
from .http import json_response, unless_gone
from .keys import Tenant
from .limits import most_tokens, too_many_tokens
from .state import AppState, Dialect, Entry

TEI = Dialect(
    "tei", tei_error, truncate='"truncate": true', paths=re.compile(r"/(embed\w*|predict|similarity|decode)$")
)
T = TypeVar("T")


def vectors_of(asked: T, llm: Any) -> T:
    """Returns what asks for vectors. Raises UnsupportedModelError for a model that by TEI's rule makes none."""
    if llm.config.num_labels is not None:
        raise UnsupportedModelError("the model has a classification head and is no embedding model; use /predict")
    return asked


def labels_of(asked: T, llm: Any) -> T:
    """Returns what asks for labels. Raises UnsupportedModelError for a model without a classification head."""
    if llm.config.num_labels is None:
        message = "the model has no classification head, and so no labels; serve one ...ForSequenceClassification"
        raise UnsupportedModelError(message)
    return asked


def similarity(body: dict[str, Any], handler: RequestHandler) -> Asked:
    """Returns what /similarity asks."""
    return vectors_of(read_similarity(body), handler.llm)


async def by_body(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers a request to the server's address itself, as its body and the model ask."""
    context = await RequestContext.of(state, request, tenant)
    body = context.body
    if "texts" in body:
        return await answer_asked(context, read_rerank(body))
    llm = context.handler.llm
    if isinstance(body.get("inputs"), dict):
        return await answer_asked(context, similarity(body, context.handler))
    if llm.config.num_labels is not None or "parameters" in body:  # huggingface_hub's text_classification sends them
        return await answer_asked(context, labels_of(read_predict(body), llm))
    return await answer_asked(context, read_embed(body))


async def rerank(context: RequestContext) -> Response:
    """Answers /rerank with `texts`."""
    return await answer_asked(context, read_rerank(context.body))


async def embed_all(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers with the hidden state after the final norm at every token of each text, not scaled."""
    context = await RequestContext.of(state, request, tenant)
    TeiEmbedAll.of(vectors_of(context.body, context.handler.llm))
    asked = read_embed({**context.body, "normalize": False})
    try:
        order = context.order("embed", asked.items, asked.options)
        texts = await unless_gone(request, context.handler.tokens(order, context.num_bytes))
        count = sum(map(len, texts))
        if count > state.options.max_texts:
            message, remedy = f"'inputs' has {count} tokens", f"send at most {state.options.max_texts} at once"
            raise InputError(message, field="inputs", remedy=remedy, code="too_many")
        order = context.order("embed", [{"text": ids} for ids in texts], {"normalize": False})
        every = replace(order, readout=Readout("every"))
        found = await unless_gone(request, context.handler.answer(every, context.num_bytes))
        results = [{"embeddings": result["embedding"]} for result in found]
    except InputError as wrong:
        raise wrong.renamed(renamed(wrong.field, asked.fields)) from None
    return await context.written(results, lambda: json_response([result["embeddings"] for result in results]))


async def tokenize(context: RequestContext) -> Response:
    """Answers /tokenize with `inputs`: the tokens of each text, with their place in it."""
    body, llm = TeiTokenize.of(context.body), context.handler.llm
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if body.prompt_name is not None:
        before = llm.task("embed", prompt_name=body.prompt_name).before
        texts = [before + valid_text(text, "inputs") for text in texts]
    return await context.without_engine(lambda: json_response(tokenized(llm, texts, body.add_special_tokens)))


def tokenized(llm: Any, texts: list[Any], special: bool) -> list[list[dict[str, Any]]]:
    """Returns the tokens of each text as TEI writes them; a special one that was added has no place in the text.
    Raises InputError."""
    tokenizer, count, found = llm.tokenizer, 0, []
    is_special = cache(lambda id: tokenizer.decode([id], skip_special=True) == "" != tokenizer.decode([id]))
    before, behind = (
        [{"id": id, "text": tokenizer.decode([id]), "special": True, "start": None, "stop": None} for id in ids]
        for ids in ((tokenizer.prefix_ids.tolist(), tokenizer.suffix_ids.tolist()) if special else ([], []))
    )
    for text in texts:
        ids, spans = located(llm, text, "inputs", count)
        count += len(ids)
        own = [
            {"id": id, "text": text[start:stop], "special": is_special(id), "start": start, "stop": stop}
            for id, (start, stop) in zip(ids, spans, strict=True)
        ]
        found.append([*before, *own, *behind])
    return found


def located(llm: Any, text: Any, field: str, count: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns (the tokens of a text, where each lies in it), without special ones. Raises InputError, naming `field`,
    for what is no text, and for too many tokens, with `count` that there are already."""
    tokenizer, left = llm.tokenizer, most_tokens(llm) - count
    if tokenizer.is_longer(valid_text(text, field), left):
        raise too_many_tokens(llm, field)
    ids, spans = tokenizer.located(text)
    if len(ids) > left:
        raise too_many_tokens(llm, field)
    return ids, spans


async def decode(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers /decode: the text of each list of ids."""
    context = await RequestContext.of(state, request, tenant, computes=False)
    body = TeiDecode.of(context.body)
    ids, skip = body.ids, body.skip_special_tokens
    lists = ids if isinstance(ids, list) and isinstance(ids[0], list) else [ids]
    return json_response(await context.without_engine(lambda: decoded(context.handler.llm, lists, "ids", skip)))


def decoded(llm: Any, lists: list[Any], field: str, skip: bool) -> list[str]:
    """Returns the texts of lists of token ids. Raises InputError, naming `field`, for what is no list of them, and for
    too many."""
    most = llm.config.vocab_size
    if sum(len(ids) for ids in lists if isinstance(ids, list)) > most_tokens(llm):
        raise too_many_tokens(llm, field)
    for ids in lists:
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < most for i in ids):
            message, remedy = f"{field!r} is not a list of token ids", f"give whole numbers from 0 below {most}"
            raise InputError(message, field=field, remedy=remedy, code="wrong_type")
    texts: list[str] = llm.tokenizer.decode_batch(lists, skip_special=skip)
    return texts


async def info(state: AppState, request: Request, tenant: Tenant) -> Response:
    """Answers with what the server runs, and its limits."""
    llm = state.handler_for(request).llm
    labels = list(llm.config.labels)
    if llm.config.num_labels is None:
        kind: dict[str, Any] = {"embedding": {"pooling": f"{llm.task('embed').settings.pooling}_token"}}
    else:
        names = {str(i): label for i, label in enumerate(labels)}
        ids = {"id2label": names, "label2id": {label: int(i) for i, label in names.items()}}
        kind = {"reranker" if llm.config.num_labels == 1 else "classifier": ids}
    return json_response({
        "model_id": state.names[0], "served_model_name": state.names[0], "model_sha": None,
        "model_dtype": str(llm.dtype).removeprefix("torch."), "model_type": kind,
        "max_concurrent_requests": state.options.max_waiting_requests,
        "max_input_length": llm.config.max_positions, "max_batch_tokens": llm.engine.max_batch_rows,
        "max_batch_requests": None, "max_client_batch_size": state.options.max_texts, "auto_truncate": False,
        "tokenization_workers": 4, "version": __version__, "sha": None, "docker_label": None,
    })  # fmt: skip


ENTRIES = [
    Entry(
        TEI, "POST", "/embed", handle_of(lambda body, handler: vectors_of(read_embed(body), handler.llm)), [TeiEmbed]
    ),
    Entry(TEI, "POST", "/embed_all", embed_all, [TeiEmbedAll]),
    Entry(
        TEI,
        "POST",
        "/predict",
        handle_of(lambda body, handler: labels_of(read_predict(body), handler.llm)),
        [TeiPredict],
    ),
    Entry(TEI, "POST", "/similarity", handle_of(similarity), [TeiSimilarity]),
    Entry(TEI, "POST", "/decode", decode, [TeiDecode]),
    Entry(TEI, "POST", "/", by_body, [TeiEmbed, TeiPredict, TeiSimilarity, TeiRerank]),
    Entry(TEI, "GET", "/info", info),
]
