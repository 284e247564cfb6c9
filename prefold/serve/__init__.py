"""A model behind the HTTP APIs of OpenAI, vLLM and others. One engine answers all requests.

run           bind the address, load the model, serve, drain; limits on connections and headers
app           the ASGI application: routes, probes, metrics, the OpenAPI description
state         the server's state: model, keys, failures, batches
context       one request: from its body to a whole response or to events; dialects and their entries
dialects      the paths of OpenAI, vLLM, Anthropic, Cohere and TEI
files         the paths of OpenAI's files and batches
handler       items of a request through a task and the engine to the answers
limits        limits on items, limits on waiting requests, fair thread pools
http          error responses, bodies, events, clients that disconnect, allowed hosts
keys          API keys and tenants
kept          stored answers
batches       the open batches and the threads that run them
batch         one batch, from validation to its output files
store         files and batches on disk
admin         the page and the paths of the cache
metrics       Prometheus metrics and the access log

No module here imports torch. The HTTP libraries are imported when a server starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MissingExtraError
from ..spec.server import ServerSpec

__all__ = ["ServerSpec", "serve"]


def serve(load: Callable[[], Any], options: ServerSpec) -> None:
    """Serve the LLM that `load` returns, until a signal ends the process and the server has drained.

    Args:
        load: runs in a thread of its own while the address is already bound

    Raises:
        JobError: the options contradict each other, or the address cannot be bound
        MissingExtraError: a library of `prefold[serve]` is not installed
        Exception: any error of `load`
    """
    try:
        from .run import run
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "starlette", "serve", "prefold serve") from None
    run(load, options)
