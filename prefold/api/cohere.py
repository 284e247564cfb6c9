"""Reads and writes the bodies of Cohere's embeddings, v1 and v2. Its reranking is read by `scores.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from ..errors import InputError
from .body import Asked, Body, Ignored, Model, Word, doc
from .numbers import DIMENSIONS, in_base64


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
) -> Asked:
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
    return Asked("embed", items, make, options, {"text": "texts", "dimensions": "output_dimension"})
