"""The dialect of Hugging Face's Text Embeddings Inference (TEI)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

from starlette.responses import Response

from .. import __version__
from ..api.body import TaskOrder
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
    read_similarity,
    read_texts_rerank,
    tei_error,
)
from ..errors import InputError, UnsupportedModelError
from ..text.valid import valid_text
from ..types import Readout
from .context import Dialect, Entry, Handle, RequestContext
from .http import json_response
from .limits import most_tokens, too_many_tokens

_PATHS = re.compile(r"/(embed\w*|predict|similarity|decode)$")
TEI = Dialect("tei", tei_error, truncate='"truncate": true', paths=_PATHS)


def vectors_of(order: TaskOrder, llm: Any) -> TaskOrder:
    """Returns what asks for vectors. Raises UnsupportedModelError for a model that by TEI's rule makes none."""
    if llm.config.num_labels is not None:
        raise UnsupportedModelError("the model has a classification head and is no embedding model; use /predict")
    return order


def labels_of(order: TaskOrder, llm: Any) -> TaskOrder:
    """Returns what asks for labels. Raises UnsupportedModelError for a model without a classification head."""
    if llm.config.num_labels is None:
        message = "the model has no classification head, and so no labels; serve one ...ForSequenceClassification"
        raise UnsupportedModelError(message)
    return order


def by_body(body: dict[str, Any], llm: Any) -> TaskOrder:
    """Answers a request to the server's address itself, as its body and the model ask."""
    if "texts" in body:
        return read_texts_rerank(body)
    if isinstance(body.get("inputs"), dict):
        return vectors_of(read_similarity(body), llm)
    if llm.config.num_labels is not None or "parameters" in body:  # huggingface_hub's text_classification sends them
        return labels_of(read_predict(body), llm)
    return read_embed(body)


def answering(read: Callable[[dict[str, Any], Any], TaskOrder]) -> Handle:
    """Returns what answers requests whose bodies are read by `read`: (body, LLM) -> what it asks."""

    @wraps(read)
    async def handle(context: RequestContext) -> Response:
        return await context.answer(read(context.body, context.handler.llm))

    return handle


async def embed_all(context: RequestContext) -> Response:
    """Answers with the hidden state after the final norm at every token of each text, not scaled."""
    most = context.state.options.max_texts
    TeiEmbedAll.of(context.body)
    order = vectors_of(read_embed({**context.body, "normalize": False}), context.handler.llm)
    texts = await context.tokens(order)
    if (count := sum(map(len, texts))) > most:
        message, remedy = f"'inputs' has {count} tokens", f"send at most {most} at once"
        raise InputError(message, field="inputs", remedy=remedy, code="too_many")
    items, options = [{"text": ids} for ids in texts], {"normalize": False}

    def make(results: list[dict[str, Any]]) -> Any:
        return [result["embedding"] for result in results]

    every = replace(order, items=items, options=options, make=make, readout=Readout("every"))
    return await context.answer(every)


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


async def decode(context: RequestContext) -> Response:
    """Answers /decode: the text of each list of ids."""
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


async def info(context: RequestContext) -> Response:
    """Answers with what the server runs, and its limits."""
    llm, state = context.handler.llm, context.state
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
    Entry(TEI, "POST", "/embed", answering(lambda body, llm: vectors_of(read_embed(body), llm)), [TeiEmbed]),
    Entry(TEI, "POST", "/embed_all", embed_all, [TeiEmbedAll]),
    Entry(TEI, "POST", "/predict", answering(lambda body, llm: labels_of(read_predict(body), llm)), [TeiPredict]),
    Entry(
        TEI, "POST", "/similarity", answering(lambda body, llm: vectors_of(read_similarity(body), llm)), [TeiSimilarity]
    ),
    Entry(TEI, "POST", "/decode", decode, [TeiDecode], computes=False),
    Entry(TEI, "POST", "/", answering(by_body), [TeiEmbed, TeiPredict, TeiSimilarity, TeiRerank]),
    Entry(TEI, "GET", "/info", info),
]
