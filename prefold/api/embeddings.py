"""/v1/embeddings: requests become items of the task "embed", results become responses."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from .checks import check_names, required

__all__ = ["EMBEDDINGS_NAMES", "embeddings_body", "read_embeddings"]

EMBEDDINGS_NAMES = {"input", "dimensions", "encoding_format"}


def read_embeddings(body: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns one item, and what the response needs. Raises InputError.

    defaults: of sampling; they are not used, since nothing is sampled here.
    """
    check_names(body, EMBEDDINGS_NAMES)
    format = body.get("encoding_format") or "float"
    if format not in ("float", "base64"):
        remedy = 'use "float" or "base64"'
        message = f"'encoding_format' is {format!r:.100}"
        raise InputError(message, field="encoding_format", remedy=remedy, code="wrong_type")
    return [{"text": required(body, "input"), "dimensions": body.get("dimensions")}], {"format": format}


def embeddings_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: a vector for each text of the item."""
    result = results[0]
    vectors = result["embeddings"] if "embeddings" in result else [result["embedding"]]
    if meta["format"] == "base64":
        vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data}
