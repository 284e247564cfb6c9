"""Wire formats: bodies of requests become items of tasks, and the answers of tasks become responses.

Each body is a struct (see `body.py`). It makes an order for its task, and a response from the answers. This file lists
the URLs of batch lines with their bodies. Nothing here imports torch, or uses files or sockets.
"""

from __future__ import annotations

from .body import Batchable
from .completions import Chat, Completion, openai_error
from .decisions import Decisions, SystemOne
from .numbers import Embeddings, Rerank, Scoring
from .responses import Responses

__all__ = ["ENDPOINTS", "KINDS", "TASKS", "openai_error"]

# {kind of request, stored with each line of a job: its body}
KINDS: dict[str, type[Batchable]] = {
    "embeddings": Embeddings, "rerank": Rerank, "score": Scoring, "chat": Chat, "completion": Completion,
    "response": Responses, "decisions": Decisions, "systemone": SystemOne,
}  # fmt: skip
# {URL: kind of request}
ENDPOINTS = {
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
    "/v1/decisions": "decisions",
    "/v1/systemone": "systemone",
}
TASKS = tuple(dict.fromkeys(KINDS[kind].task for kind in ENDPOINTS.values()))
