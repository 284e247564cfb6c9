"""Reads and writes the bodies of vLLM's /classify and /pooling."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..tasks.embed import is_list_of_texts
from .asked import Asked, choice, flag, need
from .checks import check_names

__all__ = ["CLASSIFY_NAMES", "POOLING_NAMES", "read_classify", "read_pooling"]

CLASSIFY_NAMES = {"input", "use_activation"}
POOLING_NAMES = {*CLASSIFY_NAMES, "task", "dimensions", "encoding_format"}
Body = dict[str, Any]


def read_classify(body: Body, model: str, id: str) -> Asked:
    """Returns what /classify asks: how likely the labels of the classification head are. Raises InputError.

    model, id   of the response
    """
    check_names(body, CLASSIFY_NAMES)

    def entry(result: Mapping[str, Any], values: np.ndarray) -> Body:
        return {"label": result["label"], "probs": values, "num_classes": len(values)}

    return _labels(body, entry, f"classify-{id}", model)


def read_pooling(body: Body, model: str, id: str, task: str) -> Asked:
    """Returns what /pooling asks: the vectors of texts, or what a classification head gives. Raises InputError.

    model, id   of the response
    task        what the model does: "embed" or "classify"
    """
    check_names(body, POOLING_NAMES)
    choice(body, "task", (task,), task)
    plain = choice(body, "encoding_format", ("float", "base64"), "float") == "float"

    def entry(result: Mapping[str, Any], values: np.ndarray) -> Body:
        data = values if plain else base64.b64encode(values.astype("<f4").tobytes()).decode()
        return {"object": "pooling", "data": data}

    if task == "embed":
        items = [{"text": text, "dimensions": body.get("dimensions")} for text in _inputs(body)]
        options = {} if body.get("use_activation") is None else {"normalize": flag(body, "use_activation")}

        def make(results: list[Body]) -> Body:
            return _response([entry(one, one["embedding"]) for one in results], results, f"pool-{id}", model)

        return Asked("embed", items, make, options, {"text": "input"})
    if body.get("dimensions") is not None:
        message, remedy = "'dimensions' is for embeddings, and the model classifies", "leave it out"
        raise InputError(message, field="dimensions", remedy=remedy, code="unsupported")
    return _labels(body, entry, f"pool-{id}", model)


def _labels(body: Body, entry: Callable[[Mapping[str, Any], np.ndarray], Body], id: str, model: str) -> Asked:
    """Returns what asks for labels. entry: (result of an input, value of each label) -> what the response has of it."""
    kind = "probabilities" if flag(body, "use_activation", True) else "logits"

    def make(results: list[Body]) -> Body:
        data = [entry(result, np.array([*result[kind].values()])) for result in results]
        return _response(data, results, id, model)

    return Asked("classify", [{"text": text} for text in _inputs(body)], make, {}, {"text": "input"})


def _inputs(body: Body) -> list[Any]:
    value = need(body, "input")
    return list(value) if is_list_of_texts(value) else [value]


def _response(data: list[Body], results: list[Body], id: str, model: str) -> Body:
    tokens = sum(result["num_tokens"] for result in results)
    head = {"id": id, "object": "list", "created": int(time.time()), "model": model}
    data = [{"index": index} | one for index, one in enumerate(data)]
    return head | {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
