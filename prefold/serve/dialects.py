"""The HTTP endpoints of OpenAI's, vLLM's, Anthropic's, Cohere's and TEI's APIs. `wire/` defines their bodies."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any

from starlette.responses import Response

from .. import __version__
from ..errors import InputError
from ..spec.requests import Readout
from ..tasks.make import is_reranker
from ..tasks.results import Embedding
from ..text.valid import valid_text
from ..wire import ENDPOINTS, KINDS
from ..wire.anthropic import CountTokens, Message, anthropic_error
from ..wire.body import IDS, Body, Model, doc
from ..wire.completions import Chat, Completion, Generating, openai_error
from ..wire.numbers import Classify, CohereEmbed, Pooling, Rerank, cohere_error
from ..wire.responses import Responses
from ..wire.tei import (  # fmt: skip
    TeiDecode,
    TeiEmbed,
    TeiEmbedAll,
    TeiPredict,
    TeiRerank,
    TeiSimilarity,
    TeiTokenize,
    tei_error,
)
from .context import Dialect, Entry, Handle, RequestContext
from .http import Refusal, json_response
from .limits import most_tokens, too_many_tokens

OPENAI = Dialect("openai", openai_error, truncate='"truncate_prompt_tokens": -1')
COHERE = Dialect(
    "cohere",
    cohere_error,
    truncate='"truncate": "END", or "max_tokens_per_doc" of rerank',
    paths=re.compile(r"/v2/|/v1/(embed|chat|tokenize|detokenize|classify|summarize|generate)(-jobs)?$"),
)
ANTHROPIC = Dialect("anthropic", anthropic_error, paths=re.compile(r"/v1/(messages|complete)(/|$)"))
TEI = Dialect(
    "tei", tei_error, truncate='"truncate": true', paths=re.compile(r"/(embed\w*|predict|similarity|decode)$")
)


_NOT_TOKENIZED = Generating.unsupported | {"stream": (False,), "echo": (False,), "prompt_logprobs": ()}


class TokenizePrompt(Completion, kw_only=True):
    """Return the ids of a prompt's tokens."""

    add_special_tokens: bool = True
    return_token_strs: bool = False

    unsupported = _NOT_TOKENIZED


class TokenizeChat(Chat, kw_only=True):
    """Return the ids of a conversation's tokens."""

    add_special_tokens: bool = False
    return_token_strs: bool = False

    unsupported = _NOT_TOKENIZED


class Detokenize(Body, kw_only=True):
    """Return the text of token ids."""

    model: Model = None
    tokens: Annotated[Any, doc("Token ids.", **IDS)]


def taking(kind: type[Body], **options: Any) -> Handle:
    """Return the handler of requests whose bodies are of one kind.

    Args:
        options: arguments of the body's `order`
    """

    async def handle(context: RequestContext) -> Response:
        return await context.answer(kind.of(context.body).order(context.served, **options))  # type: ignore[attr-defined]

    return handle


def post(dialect: Dialect, path: str, kind: type[Body], **options: Any) -> Entry:
    """Return the entry of a path whose bodies are of one kind."""
    return Entry(dialect, "POST", path, taking(kind, **options), (kind,))


async def rerank(context: RequestContext) -> Response:
    """Rerank texts: TEI's API if the body has `texts`, else the API of vLLM, Cohere and Jina."""
    if "texts" in context.body:  # the dialect of errors depends on the body
        context.request.scope["dialect"] = TEI
        return await taking(TeiRerank)(context)
    return await taking(Rerank)(context)


async def by_body(context: RequestContext) -> Response:
    """Answer a request to the root path /. Its body and the model determine the API."""
    kind: type[Body] = TeiEmbed
    if "texts" in context.body:
        kind = TeiRerank
    elif isinstance(context.body.get("inputs"), dict):
        kind = TeiSimilarity
    # huggingface_hub's text_classification sends parameters
    elif context.handler.llm.config.num_labels is not None or "parameters" in context.body:
        kind = TeiPredict
    return await taking(kind)(context)


async def models(context: RequestContext) -> Response:
    """Return the model's names and its adapters, in Anthropic's form if there is a header anthropic-version."""
    data = entries(context)
    if not is_for_anthropic(context):
        return json_response({"object": "list", "data": data})
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return json_response({"data": [model_info(entry) for entry in data]} | ends)


async def model(context: RequestContext) -> Response:
    """Return one of the served models. With the header anthropic-version, use Anthropic's form."""
    is_anthropic = is_for_anthropic(context)
    name = context.request.path_params["name"]
    entry = next((entry for entry in entries(context) if entry["id"] == name), None)
    if entry is None:
        raise Refusal(404, f"the model {name!r:.100} is not served here", param="model", code="model_not_found")
    return json_response(model_info(entry) if is_anthropic else entry)


def is_for_anthropic(context: RequestContext) -> bool:
    """Return whether a client of Anthropic's sent the request. If so, its errors get Anthropic's form."""
    if "anthropic-version" not in context.request.headers:
        return False
    context.request.scope["dialect"] = ANTHROPIC
    return True


def model_info(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the list of models in Anthropic's form."""
    created_at = datetime.fromtimestamp(entry["created"], UTC).isoformat().replace("+00:00", "Z")
    about = {"id": entry["id"], "display_name": entry["id"], "created_at": created_at}
    return {"type": "model", **about, "lifecycle": "active"}


def entries(context: RequestContext) -> list[dict[str, Any]]:
    """Return an entry of the list of models for each name."""
    llm, names = context.handler.llm, context.state.names
    head = {"object": "model", "created": int(time.time()), "owned_by": "prefold"}
    return [
        {"id": name, **head, "root": names[0], "parent": parent, "max_model_len": llm.config.max_positions}
        for group, parent in ((names, None), (llm.engine.facts.adapters, names[0]))
        for name in group
    ]


async def tokenize(context: RequestContext) -> Response:
    """Tokenise texts: TEI's API if the body has `inputs`, else vLLM's API for a prompt or a conversation."""
    if "inputs" in context.body:
        context.request.scope["dialect"] = TEI
        return await tokenize_inputs(context)
    kind, llm = TokenizeChat if "messages" in context.body else TokenizePrompt, context.handler.llm
    body = kind.of({**context.body, "max_tokens": 1})
    items, _ = body.read({})
    if isinstance(body, TokenizePrompt):
        prompt, options = valid_text(body.prompt, "prompt"), body.options("generate")
        ids = await context.without_engine(lambda: prompt_ids(llm, prompt, body.add_special_tokens, options))
    elif body.add_special_tokens:
        message, remedy = "'add_special_tokens' is true", "leave it out: the chat template adds special tokens"
        raise InputError(message, field="add_special_tokens", remedy=remedy, code="unsupported")
    else:
        (ids,) = await context.tokens(body.ordered(context.served, items, {}))
    names = await context.without_engine(lambda: llm.tokenizer.token_names(ids)) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": llm.config.max_positions, "tokens": ids}
    return json_response(answer | {"token_strs": names})


def prompt_ids(llm: Any, prompt: str, special: bool, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt. Raise InputError for too many.

    Args:
        special: whether to add the tokenizer's special tokens
        options: options of the task. `max_length` (truncate_prompt_tokens) keeps the last tokens and the special ones.
    """
    ids, _ = located(llm, prompt, "prompt")
    around = (llm.tokenizer.prefix_ids.tolist(), llm.tokenizer.suffix_ids.tolist()) if special else ([], [])
    if options:
        most = options.get("max_length", llm.config.max_positions) - sum(map(len, around))
        ids = ids[max(0, len(ids) - most) :]
    return [*around[0], *ids, *around[1]]


async def count_input(context: RequestContext) -> Response:
    """Return how many tokens the prompt of a response's input has."""
    body = Responses.of(context.body)
    (ids,) = await context.tokens(body.ordered(context.served, *body.read({})))
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def detokenize(context: RequestContext) -> Response:
    """Return the text of token ids, as vLLM does."""
    ids, llm = Detokenize.of(context.body).tokens, context.handler.llm
    (text,) = await context.without_engine(lambda: decoded(llm, [ids], "tokens", False))
    return json_response({"prompt": text})


async def count_tokens(context: RequestContext) -> Response:
    """Return how many tokens the prompt of a conversation has."""
    (ids,) = await context.tokens(CountTokens.of(context.body).order(context.served))
    return json_response({"input_tokens": len(ids)})


async def embed_all(context: RequestContext) -> Response:
    """Return the hidden state after the final norm at every token of each text, not normalised."""
    most = context.state.options.max_texts
    TeiEmbedAll.of(context.body)
    order = TeiEmbed.of({**context.body, "normalize": False}).order(context.served)
    texts = await context.tokens(order)
    if (count := sum(map(len, texts))) > most:
        message, remedy = f"'inputs' has {count} tokens", f"send at most {most} at once"
        raise InputError(message, field="inputs", remedy=remedy, code="too_many")
    items, options = [{"text": ids} for ids in texts], {"normalize": False}

    def make(answers: list[Embedding]) -> Any:
        return [answer.embedding for answer in answers]

    every = replace(order, items=items, options=options, make=make, readout=Readout("every"))
    return await context.answer(every)


async def tokenize_inputs(context: RequestContext) -> Response:
    """Return the tokens of each text of `inputs` with their positions in the text."""
    body, llm = TeiTokenize.of(context.body), context.handler.llm
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if body.prompt_name is not None:
        before = llm.task("embed", prompt_name=body.prompt_name).before
        texts = [before + valid_text(text, "inputs") for text in texts]
    return await context.without_engine(lambda: json_response(tokenized(llm, texts, body.add_special_tokens)))


def tokenized(llm: Any, texts: list[Any], special: bool) -> list[list[dict[str, Any]]]:
    """Return the tokens of each text in TEI's form.

    Added special tokens have no position in the text. Raise InputError.
    """
    tokenizer, count, lists = llm.tokenizer, 0, []
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
        lists.append([*before, *own, *behind])
    return lists


def located(llm: Any, text: Any, field: str, count: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """Return (the tokens of a text, their positions in it), without special tokens.

    Raise InputError that names `field` for a value that is not a text, and for too many tokens together with `count`
    earlier ones.
    """
    tokenizer, room = llm.tokenizer, most_tokens(llm) - count
    if tokenizer.is_longer(valid_text(text, field), room):
        raise too_many_tokens(llm, field)
    ids, spans = tokenizer.located(text)
    if len(ids) > room:
        raise too_many_tokens(llm, field)
    return ids, spans


async def decode(context: RequestContext) -> Response:
    """Return the text of each list of token ids."""
    body = TeiDecode.of(context.body)
    ids, skip = body.ids, body.skip_special_tokens
    lists = ids if isinstance(ids, list) and isinstance(ids[0], list) else [ids]
    return json_response(await context.without_engine(lambda: decoded(context.handler.llm, lists, "ids", skip)))


def decoded(llm: Any, lists: list[Any], field: str, skip: bool) -> list[str]:
    """Return the texts of lists of token ids.

    Raise InputError that names `field` for other values and for too many ids.
    """
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
    """Return the model's name, dtype and kind, and the server's limits."""
    llm, state = context.handler.llm, context.state
    labels = list(llm.config.labels)
    is_scored = is_reranker(llm.checkpoint, llm.config)
    if llm.config.num_labels is None and not is_scored:
        kind: dict[str, Any] = {"embedding": {"pooling": f"{llm.task('embed').settings.pooling}_token"}}
    else:
        names = {str(i): label for i, label in enumerate(labels)}
        ids = {"id2label": names, "label2id": {label: int(i) for i, label in names.items()}}
        kind = {"reranker" if is_scored else "classifier": ids}
    return json_response({
        "model_id": state.names[0], "served_model_name": state.names[0], "model_sha": None,
        "model_dtype": str(llm.dtype).removeprefix("torch."), "model_type": kind,
        "max_concurrent_requests": state.options.max_waiting_requests,
        "max_input_length": llm.config.max_positions, "max_batch_tokens": llm.engine.facts.max_rows,
        "max_batch_requests": None, "max_client_batch_size": state.options.max_texts, "auto_truncate": False,
        "tokenization_workers": 4, "version": __version__, "sha": None, "docker_label": None,
    })  # fmt: skip


# The first entry of a path wins: /v2/rerank is also vLLM's path, but its errors have Cohere's form.
ENTRIES = [
    post(COHERE, "/v1/embed", CohereEmbed),
    post(COHERE, "/v2/embed", CohereEmbed, default=["float"]),
    post(COHERE, "/v2/rerank", Rerank),
    Entry(OPENAI, "GET", "/v1/models", models),
    Entry(OPENAI, "GET", "/v1/models/{name:path}", model),
    Entry(OPENAI, "POST", "/rerank", rerank, (Rerank, TeiRerank), computes=False),
    *(post(OPENAI, path, KINDS[kind]) for path, kind in ENDPOINTS.items()),
    Entry(OPENAI, "POST", "/tokenize", tokenize, (TokenizePrompt, TokenizeChat, TeiTokenize), computes=False),
    Entry(OPENAI, "POST", "/detokenize", detokenize, (Detokenize,), computes=False),
    post(OPENAI, "/classify", Classify),
    post(OPENAI, "/pooling", Pooling),
    Entry(OPENAI, "POST", "/v1/responses/input_tokens", count_input, (Responses,), computes=False),
    post(ANTHROPIC, "/v1/messages", Message),
    Entry(ANTHROPIC, "POST", "/v1/messages/count_tokens", count_tokens, (CountTokens,), computes=False),
    post(TEI, "/embed", TeiEmbed),
    Entry(TEI, "POST", "/embed_all", embed_all, (TeiEmbedAll,)),
    post(TEI, "/predict", TeiPredict),
    post(TEI, "/similarity", TeiSimilarity),
    Entry(TEI, "POST", "/decode", decode, (TeiDecode,), computes=False),
    Entry(TEI, "POST", "/", by_body, (TeiEmbed, TeiPredict, TeiSimilarity, TeiRerank)),
    Entry(TEI, "GET", "/info", info),
]
