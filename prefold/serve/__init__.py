"""Serves a model over HTTP: the dialects of OpenAI, vLLM and others, answered by one engine.

run           binds, loads, serves, drains; protocol: limits on connections and headers
app           puts the dialects together with health, and describes them in OpenAPI
state         the server's state, what a dialect is, and the way from a request to its handler
context       what dialects do alike: one request, whole answers and answers in events
dialects      which path of OpenAI, vLLM, Anthropic, Cohere, TEI is answered how; files: of OpenAI's files and batches
handler       RequestHandler: bodies become items of tasks, tasks' requests go to the engine, results become responses
backpressure  how many requests may wait, and threads for which tenants take turns
limits        what a request may not bring, and what the event loop does itself
http          notices clients that leave, reads bodies within limits, writes events, refuses foreign pages
keys          keys and the tenants they stand for
batches       which batches there are, and the threads that run them; batch: one batch's way to its output
store         files and batches on disk
admin         the page, and the cache; metrics: Prometheus, and the access log

Nothing here imports torch. What speaks HTTP is imported when a server starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MissingExtraError
from ..spec.server import ServerSpec

__all__ = ["ServerSpec", "serve"]


def serve(load: Callable[[], Any], options: ServerSpec) -> None:
    """Serves the LLM that `load` returns until the process is told to end, and has drained.

    load  called in a thread of its own, while the address is bound already

    Raises JobError where the address cannot be bound, MissingExtraError without the libraries of `prefold[serve]`, and
    what `load` raises.
    """
    try:
        from .run import run
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "starlette", "serve", "prefold serve") from None
    run(load, options)
