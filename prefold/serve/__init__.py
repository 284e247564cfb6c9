"""Serves a model over HTTP: the faces of OpenAI, vLLM and others, answered by one engine.

desk      Desk: bodies become items of tasks, tasks' requests go to the thread, results become responses
turns     threads for which tenants take turns
room      who is let in; short: what the event loop does itself; limits: what a request may not bring
http      notices clients that leave, reads bodies within limits, writes events; hosts: refuses foreign pages
asking    what faces do alike; openai, anthropic, cohere, tei, files: which path is answered how
events    answers in events
batches   which batches there are, and who works for them; batch: one batch's way to its output;
          lane: its engine, and narrow: the line of it that steps fail for
access    a line of the log about each request
app       puts the faces together with health, keys and metrics
run       binds, loads, serves, drains

Nothing here imports torch. What speaks HTTP is imported when a server starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MissingExtraError
from .options import ServeOptions

__all__ = ["ServeOptions", "serve"]


def serve(load: Callable[[], Any], options: ServeOptions) -> None:
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
