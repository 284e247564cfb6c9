"""/v1/embeddings: requests become items of the task "embed", results become responses."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from .body import IDS_OR_LISTS, TEXT_OR_TEXTS, Settings, Word, doc

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
