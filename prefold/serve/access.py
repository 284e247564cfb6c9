"""The access log: one line for each request once its answer has been sent, without prompts, answers and keys."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

LONGEST_PATH = 200
LEFT = 499  # nginx' status for a client that left before its answer had been sent wholly
_log = logging.getLogger("prefold.access")
_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


def note(**counts: int) -> None:
    """Adds tokens to those of the request that is being answered, where there is an access log."""
    if (noted := _noted.get()) is not None:
        for name, count in counts.items():
            noted[name] = noted.get(name, 0) + count


def log_refusal(status: int) -> None:
    """Writes the line of a request that was refused before its path was read."""
    _log.info("access method=- path=- status=%d tenant=- ms=- prompt_tokens=- completion_tokens=-", status)


class AccessLog:
    """An ASGI application that has another answer, and writes a line about each request when its answer has ended."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, is_whole, started, noted = 0, False, time.perf_counter(), dict[str, Any]()

        async def sent(message: Any) -> None:
            nonlocal status, is_whole
            await send(message)
            status = message.get("status", status)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        token = _noted.set(noted)
        try:
            await self._app(scope, receive, sent)
        finally:
            _noted.reset(token)
            tenant = scope.get("tenant")
            _log.info(
                "access method=%s path=%s status=%d tenant=%s ms=%.0f prompt_tokens=%s completion_tokens=%s",
                scope["method"],
                quote(scope["raw_path"], safe="/%:@!$&'()*+,;=~")[:LONGEST_PATH],  # no line of the client's making
                status if is_whole else LEFT,
                "-" if tenant is None else json.dumps(tenant),
                1e3 * (time.perf_counter() - started),
                noted.get("prompt", "-"),
                noted.get("completion", "-"),
            )
