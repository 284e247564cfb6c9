"""Cohere's face: embeddings and reranking, v1 and v2."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..api.body import Asked
from ..api.cohere import CohereEmbed, cohere_error, read_cohere_embed
from ..api.numbers import Rerank
from .asking import Asking, Handle, handle_of
from .desk import Desk
from .keys import Tenant
from .openai import answer_kind
from .site import Entry, Face, Site, new_id

COHERE = Face(
    "cohere",
    cohere_error,
    truncate='"truncate": "END", or "max_tokens_per_doc" of rerank',
    paths=re.compile(r"/v2/|/v1/(embed|chat|tokenize|detokenize|classify|summarize|generate)(-jobs)?$"),
)


def embed(types: list[str] | None) -> Handle:
    """Returns what answers /v1/embed or /v2/embed. types: the embedding_types of a body without."""

    def read(body: dict[str, Any], desk: Desk) -> Asked:
        return read_cohere_embed(body, new_id(), desk.llm.task("embed").settings.prompts, types)

    return handle_of(read)


async def rerank(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /v2/rerank, as vLLM does too."""
    return await answer_kind(await Asking.of(site, request, tenant), "rerank")


ENTRIES = [
    Entry(COHERE, "POST", "/v1/embed", embed(None), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/embed", embed(["float"]), (CohereEmbed,)),
    Entry(COHERE, "POST", "/v2/rerank", rerank, (Rerank,)),
]
