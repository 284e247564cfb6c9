"""Requests for numbers: OpenAI's embeddings, /rerank and /v1/score as Cohere and vLLM have them, and vLLM's /classify
and /pooling. They become items of tasks, and results become responses."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from ..errors import InputError
from ..tasks.embed import is_list_of_texts
from .body import IDS_OR_LISTS, TEXT_OR_TEXTS, Body, Ignored, Model, Settings, TaskOrder, Word, doc

Result = dict[str, Any]
Encoding = Word("Encoding", {"float": "float", "base64": "base64"})
_TEXTS_OR_IDS: Any = [*TEXT_OR_TEXTS["anyOf"], *IDS_OR_LISTS["anyOf"]]
Prompts = Annotated[Any, doc("A text, texts, token ids, or lists of token ids.", anyOf=_TEXTS_OR_IDS)]
DIMENSIONS = doc("The vectors' first so many numbers, scaled to length 1.", "integer", minimum=1)


class Embeddings(Settings):
    """Returns the vectors of texts."""

    input: Prompts
    dimensions: Annotated[Any, DIMENSIONS] = None
    encoding_format: Encoding = Encoding.float

    missing = ("{!r} is missing", "give {}")
    may_be_empty = True
    remedies: ClassVar = Settings.remedies | {"encoding_format": 'use "float" or "base64"'}


def in_base64(vectors: Any) -> list[str]:
    """Returns vectors as the text of their numbers in float32."""
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


def read_embeddings(body: Embeddings, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns one item, and what the response needs. defaults: of sampling, which there is none of."""
    return [{"text": body.input, "dimensions": body.dimensions}], {"format": body.encoding_format.value}


def embeddings_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: a vector for each text of the item."""
    result = results[0]
    vectors = result["embeddings"] if "embeddings" in result else [result["embedding"]]
    vectors = in_base64(vectors) if meta["format"] == "base64" else vectors
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data}


# ---------------------------------------------------------------------------------------------------------------- pairs


Texts = Annotated[Any, doc("A text, or texts.", **TEXT_OR_TEXTS)]
Instruction = Annotated[Any, doc("What the reranker is told to look for.", "string")]


class Rerank(Settings):
    """Scores documents by how well they answer a query, the best first."""

    query: Annotated[Any, doc("What the documents are to answer.", "string")]
    documents: Annotated[Any, doc("Texts, or objects with a text.", "array", items={"type": ["string", "object"]})]
    top_n: Annotated[Any, doc("How many of the best documents are answered.", "integer", minimum=1)] = None
    return_documents: Annotated[bool, doc("Whether each result holds its document.")] = True
    max_tokens_per_doc: Annotated[Any, doc("How many tokens are read of each document.", "integer", minimum=1)] = None
    instruction: Instruction = None

    missing = ("{!r} is missing", "give {}")
    may_be_empty = True


class Scoring(Settings):
    """Scores pairs of texts: of `text_1` and `text_2`, for which there are other names."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    instruction: Instruction = None


def read_rerank(body: Rerank, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns one item, and what the response needs. Raises InputError. defaults: of sampling, which there is none
    of."""
    if isinstance(body.query, list):
        raise InputError("'query' is a list", field="query", remedy="give one text", code="wrong_type")
    names = ("query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruction")
    found = {name: getattr(body, name) for name in names}
    return [{name: value for name, value in found.items() if value is not None}], {}


def rerank_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: the documents that were asked for, the best first."""
    result = results[0]
    entries: list[dict[str, Any]] = [{"index": i, "relevance_score": result["scores"][i]} for i in result["order"]]
    for entry, document in zip(entries, result.get("documents", []), strict=False):
        entry["document"] = {"text": document}
    return {"results": entries}


def read_score(body: Scoring, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns items, and what the response needs: one text against one or many, or as many against as many. Raises
    InputError. defaults: of sampling, which there is none of."""
    found = []
    for name, others in (("text_1", ("queries", "data_1")), ("text_2", ("documents", "items", "data_2"))):
        texts = next((value for one in (name, *others) if (value := getattr(body, one)) is not None), None)
        if texts is None:
            raise InputError(f"{name!r} is missing", field=name, remedy=f"give {name}", code="missing_field")
        if texts == []:
            raise InputError(f"{name!r} is empty", field=name, remedy="give at least one text", code="empty")
        found.append(texts if isinstance(texts, list) else [texts])
    (first, second), fixed = found, {"instruction": body.instruction}
    if len(first) == 1:
        return [{"query": first[0], "documents": second, **fixed}], {}
    if len(first) != len(second):
        message = f"'text_1' holds {len(first)} texts and 'text_2' {len(second)}, which are not pairs"
        raise InputError(message, field="text_1", remedy="give one text, or as many as in text_2", code="wrong_type")
    return [{"query": a, "document": b, **fixed} for a, b in zip(first, second, strict=True)], {}


def score_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: a score for each pair, in order."""
    scores = [score for result in results for score in result.get("scores", [result.get("score")])]
    return {"object": "list", "data": [{"object": "score", "index": i, "score": s} for i, s in enumerate(scores)]}


# -------------------------------------------------------------------------------------------------------------- pooling


class Classify(Settings):
    """Returns the labels of a classification head, with their scores."""

    input: Prompts
    use_activation: Annotated[bool | None, doc("false: logits, or vectors that are not scaled.")] = None


class Pooling(Classify, kw_only=True):
    """Returns vectors, or what a classification head gives."""

    task: Annotated[Any, doc("embed, or classify where the model has a classification head.", "string")] = None
    dimensions: Annotated[Any, DIMENSIONS] = None
    encoding_format: Encoding = Encoding.float


def read_classify(body: Classify, model: str, id: str) -> TaskOrder:
    """Returns what /classify asks: how likely the labels of the classification head are. model, id: of the response."""

    def entry(result: Result, values: np.ndarray) -> Result:
        return {"label": result["label"], "probs": values, "num_classes": len(values)}

    return _labels(body, entry, f"classify-{id}", model)


def read_pooling(body: Pooling, model: str, id: str, task: str) -> TaskOrder:
    """Returns what /pooling asks: the vectors of texts, or what a classification head gives. Raises InputError.

    model, id   of the response
    task        what the model does: "embed" or "classify"
    """
    if body.task is not None and str(body.task).lower() != task:
        message, remedy = f"'task' is {body.task!r:.100}", f"give one of {task}"
        raise InputError(message, field="task", remedy=remedy, code="wrong_type")

    def entry(result: Result, values: np.ndarray) -> Result:
        return {"object": "pooling", "data": in_base64([values])[0] if body.encoding_format == "base64" else values}

    if task == "embed":
        items = [{"text": text, "dimensions": body.dimensions} for text in _inputs(body)]
        options = {} if body.use_activation is None else {"normalize": body.use_activation}

        def make(results: list[Result]) -> Result:
            return _response([entry(one, one["embedding"]) for one in results], results, f"pool-{id}", model)

        options |= body.options("embed")
        return TaskOrder("embed", items, make, options, {"text": "input"}, body.cache_prompt)
    if body.dimensions is not None:
        message, remedy = "'dimensions' is for embeddings, and the model classifies", "leave it out"
        raise InputError(message, field="dimensions", remedy=remedy, code="unsupported")
    return _labels(body, entry, f"pool-{id}", model)


def _labels(body: Classify, entry: Callable[[Result, np.ndarray], Result], id: str, model: str) -> TaskOrder:
    """Returns what asks for labels. entry: (result of an input, value of each label) -> what the response has of it."""
    kind = "logits" if body.use_activation is False else "probabilities"

    def make(results: list[Result]) -> Result:
        data = [entry(result, np.array([*result[kind].values()])) for result in results]
        return _response(data, results, id, model)

    items, options = [{"text": text} for text in _inputs(body)], body.options("classify")
    return TaskOrder("classify", items, make, options, {"text": "input"}, body.cache_prompt)


def _inputs(body: Classify) -> list[Any]:
    return list(body.input) if is_list_of_texts(body.input) else [body.input]


def _response(data: list[Result], results: list[Result], id: str, model: str) -> Result:
    tokens = sum(result["num_tokens"] for result in results)
    head = {"id": id, "object": "list", "created": int(time.time()), "model": model}
    data = [{"index": index} | one for index, one in enumerate(data)]
    return head | {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _ubinary(vectors: np.ndarray) -> Any:
    return np.packbits(vectors > 0, axis=1)


_FORMS: dict[str, Any] = {
    "float": lambda vectors: vectors,
    "base64": in_base64,
    "ubinary": _ubinary,
    "binary": lambda vectors: (_ubinary(vectors).astype(np.int16) - 128).astype(np.int8),
}
# What texts are, and the name of the checkpoint's prompt that is put before such, where it has one.
_INPUTS = {
    "search_query": "query", "search_document": "document", "classification": "classification",
    "clustering": "clustering",
}  # fmt: skip
InputType = Word("InputType", {name: name for name in _INPUTS})
Truncate = Word("Truncate", {name: name for name in ("NONE", "START", "END")})


class CohereEmbed(Body, kw_only=True):
    """Returns the vectors of texts."""

    model: Model = None
    texts: list[str]
    input_type: InputType = InputType.search_document
    embedding_types: Annotated[list[str] | None, doc(f"The forms of the vectors: {', '.join(_FORMS)}.")] = None
    output_dimension: Annotated[Any, DIMENSIONS] = None
    truncate: Truncate = Truncate.END
    priority: Ignored = None

    remedies: ClassVar = {"texts": "give a list of texts", "embedding_types": f"give some of {', '.join(_FORMS)}"}


def cohere_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Returns (status, body) of an error in Cohere's form."""
    return status, {"message": message}


def read_cohere_embed(
    body: Mapping[str, Any], id: str, prompts: Collection[str], default: Sequence[str] | None = None
) -> TaskOrder:
    """Returns what /v1/embed and /v2/embed ask: a vector of each text, in one form or several. Raises InputError.

    id       of the response
    prompts  names of the checkpoint's prompts
    default  embedding_types of a body without; None: the vectors are a bare list, as those of /v1/embed are

    int8 and uint8 are refused, as their scale is that of a model which was made for them.
    """
    asked = CohereEmbed.of(body)
    types = default if asked.embedding_types is None else asked.embedding_types
    for one in types or ():
        if one not in _FORMS:
            message, remedy = f"the embedding type {one!r:.100} is not supported", f"use {', '.join(_FORMS)}"
            raise InputError(message, field="embedding_types", remedy=remedy, code="unsupported")
    side = asked.truncate
    options: dict[str, Any] = {} if side == "NONE" else {"truncate": "left" if side == "START" else "right"}
    prompt = _INPUTS[asked.input_type.value]
    if prompt in prompts:
        options["prompt_name"] = prompt

    def make(results: list[dict[str, Any]]) -> Any:
        (result,) = results
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": result["num_tokens"]}}
        head, vectors = {"id": id, "texts": asked.texts, "meta": meta}, result["embeddings"]
        if types is None:
            return head | {"response_type": "embeddings_floats", "embeddings": vectors}
        forms = {one: _FORMS[one](vectors) for one in types}
        return head | {"response_type": "embeddings_by_type", "embeddings": forms}

    items = [{"text": asked.texts, "dimensions": asked.output_dimension}]
    return TaskOrder("embed", items, make, options, {"text": "texts", "dimensions": "output_dimension"})
