"""Cohere's face: embeddings and reranking, v1 and v2."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..api.cohere import cohere_error, read_cohere_embed
from .faces import Asking, handle_of
from .keys import Tenant
from .openai import answer_kind
from .site import Face, Site, new_id

__all__ = ["COHERE", "routes"]

COHERE = Face("cohere", cohere_error)


def routes(site: Site) -> list[BaseRoute]:
    """Returns the paths of this face that no other has."""
    embed = handle_of(lambda body, desk: read_cohere_embed(body, new_id(), desk.llm.task("embed").settings.prompts))
    paths: dict[str, Any] = {"/v1/embed": embed, "/v2/embed": embed, "/v2/rerank": rerank}
    return [Route(path, COHERE.endpoint(site, handle), methods=["POST"]) for path, handle in paths.items()]


async def rerank(site: Site, request: Request, tenant: Tenant) -> Response:
    """Answers /v2/rerank, as vLLM does too."""
    return await answer_kind(await Asking.of(site, request, tenant), "rerank")
