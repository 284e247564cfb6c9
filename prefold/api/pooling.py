"""Reads and writes the bodies of vLLM's /classify and /pooling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from ..errors import InputError
from ..tasks.embed import is_list_of_texts
from .asked import Asked
from .body import Settings, doc
from .embeddings import DIMENSIONS, Encoding, Prompts, in_base64

Result = dict[str, Any]


class Classify(Settings):
    """Returns the labels of a classification head, with their scores."""

    input: Prompts
    use_activation: Annotated[bool | None, doc("false: logits, or vectors that are not scaled.")] = None


class Pooling(Classify, kw_only=True):
    """Returns vectors, or what a classification head gives."""

    task: Annotated[
        Any, doc("What the model does: embed, or classify where it has a classification head.", "string")
    ] = None
    dimensions: Annotated[Any, DIMENSIONS] = None
    encoding_format: Encoding = Encoding.float


def read_classify(body: Classify, model: str, id: str) -> Asked:
    """Returns what /classify asks: how likely the labels of the classification head are. model, id: of the response."""

    def entry(result: Result, values: np.ndarray) -> Result:
        return {"label": result["label"], "probs": values, "num_classes": len(values)}

    return _labels(body, entry, f"classify-{id}", model)


def read_pooling(body: Pooling, model: str, id: str, task: str) -> Asked:
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

        return Asked("embed", items, make, options, {"text": "input"})
    if body.dimensions is not None:
        message, remedy = "'dimensions' is for embeddings, and the model classifies", "leave it out"
        raise InputError(message, field="dimensions", remedy=remedy, code="unsupported")
    return _labels(body, entry, f"pool-{id}", model)


def _labels(body: Classify, entry: Callable[[Result, np.ndarray], Result], id: str, model: str) -> Asked:
    """Returns what asks for labels. entry: (result of an input, value of each label) -> what the response has of it."""
    kind = "logits" if body.use_activation is False else "probabilities"

    def make(results: list[Result]) -> Result:
        data = [entry(result, np.array([*result[kind].values()])) for result in results]
        return _response(data, results, id, model)

    return Asked("classify", [{"text": text} for text in _inputs(body)], make, {}, {"text": "input"})


def _inputs(body: Classify) -> list[Any]:
    return list(body.input) if is_list_of_texts(body.input) else [body.input]


def _response(data: list[Result], results: list[Result], id: str, model: str) -> Result:
    tokens = sum(result["num_tokens"] for result in results)
    head = {"id": id, "object": "list", "created": int(time.time()), "model": model}
    data = [{"index": index} | one for index, one in enumerate(data)]
    return head | {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
