"""Reads and writes the bodies of Cohere's embeddings, v1 and v2. Its reranking is read by `scores.py`."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from .asked import Asked, checked, choice, need

__all__ = ["COHERE_EMBED_NAMES", "cohere_error", "read_cohere_embed"]

COHERE_EMBED_NAMES = (
    "model", "texts", "input_type", "embedding_types", "output_dimension", "truncate", "priority",
)  # fmt: skip
# {input_type: the checkpoint's prompt that is put before such texts, where it has one}
_PROMPTS = {"search_query": "query", "search_document": "document", "classification": "classification",
            "clustering": "clustering"}  # fmt: skip


def cohere_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Returns (status, body) of an error in Cohere's form."""
    return status, {"message": message}


def _base64(vectors: np.ndarray) -> Any:
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


def _ubinary(vectors: np.ndarray) -> Any:
    return np.packbits(vectors > 0, axis=1)


_FORMS: dict[str, Any] = {
    "float": lambda vectors: vectors,
    "base64": _base64,
    "ubinary": _ubinary,
    "binary": lambda vectors: (_ubinary(vectors).astype(np.int16) - 128).astype(np.int8),
}


def read_cohere_embed(
    body: Mapping[str, Any], id: str, prompts: Collection[str], default: Sequence[str] | None = None
) -> Asked:
    """Returns what /v1/embed and /v2/embed ask: a vector of each text, in one form or several. Raises InputError.

    id       of the response
    prompts  names of the checkpoint's prompts
    default  embedding_types of a body without; None: the vectors are a bare list, as those of /v1/embed are

    int8 and uint8 are refused, as their scale is that of a model which was made for them.
    """
    checked(body, *COHERE_EMBED_NAMES)
    texts, types = need(body, "texts"), body.get("embedding_types")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError("'texts' is not a list of texts", field="texts", remedy="give one", code="wrong_type")
    if types is not None and (not isinstance(types, list) or not all(isinstance(one, str) for one in types)):
        message, remedy = "'embedding_types' is not a list of texts", f"give some of {', '.join(_FORMS)}"
        raise InputError(message, field="embedding_types", remedy=remedy, code="wrong_type")
    types = default if types is None else types
    for one in types or ():
        if one not in _FORMS:
            message, remedy = f"the embedding type {one!r:.100} is not supported", f"use {', '.join(_FORMS)}"
            raise InputError(message, field="embedding_types", remedy=remedy, code="unsupported")
    side = choice(body, "truncate", ("NONE", "START", "END"), "END")
    options: dict[str, Any] = {} if side == "NONE" else {"truncate": "left" if side == "START" else "right"}
    prompt = _PROMPTS[choice(body, "input_type", tuple(_PROMPTS), "search_document")]
    if prompt in prompts:
        options["prompt_name"] = prompt

    def make(results: list[dict[str, Any]]) -> Any:
        (result,) = results
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": result["num_tokens"]}}
        head, vectors = {"id": id, "texts": texts, "meta": meta}, result["embeddings"]
        if types is None:
            return head | {"response_type": "embeddings_floats", "embeddings": vectors}
        forms = {one: _FORMS[one](vectors) for one in types}
        return head | {"response_type": "embeddings_by_type", "embeddings": forms}

    items = [{"text": texts, "dimensions": body.get("output_dimension")}]
    return Asked("embed", items, make, options, {"text": "texts", "dimensions": "output_dimension"})
