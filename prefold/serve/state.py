"""The state of a server: its model, the keys of its clients, and its failures."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError, PrefoldError, RankError, UnsupportedModelError
from ..spec.server import ServerSpec
from .batches import Batches
from .handler import RequestHandler
from .http import Bodies, Refusal
from .keys import Keys, Tenant
from .metrics import Metrics, log
from .store import Store

FAILING_SECONDS = 10.0  # health is "failing" for this long after a failed step, or until a step succeeds

Status = Literal["loading", "ready", "draining", "failed"]


class AppState:
    """All state of a running server.

    Attributes:
        handler: None until the model is loaded
        store: None without a data folder
        batches: None without a data folder
    """

    def __init__(self, options: ServerSpec):
        self.options = options
        self.keys = Keys(options.api_keys)
        self.metrics = Metrics(lambda: self.handler)
        self.status: Status = "loading"
        self.handler: RequestHandler | None = None
        self.open = 0  # requests whose response has not been sent completely
        self.bodies = Bodies(options)
        self.store = None if options.data_dir is None else Store(Path(options.data_dir), self.keys.most_stored)
        self.batches = None if self.store is None else Batches(self.store, self.metrics.log)

    def ready(self, llm: Any) -> None:
        """Start to answer requests with an LLM."""
        self.handler = RequestHandler(llm, self.options, self.metrics, self.keys, self.store)
        if self.batches is not None:
            self.batches.start(self.handler, self.keys)
        if self.status == "loading":
            self.status = "ready"

    def reload_keys(self) -> None:
        """Read the file of keys again. Raise JobError if it is invalid; the keys then stay as they were."""
        self.keys.reload()
        if self.handler is not None:
            self.handler.read_shares()

    @property
    def failing(self) -> str | None:
        """Return a description of the present failure, or None."""
        now = None if self.handler is None else self.handler.engine.snapshot()
        failure = None if now is None else now.failure
        if isinstance(failure, RankError):
            return "a rank of the model is gone, so the server must be restarted"
        # The engine may have recovered from another failure. Only the next step shows that.
        if now is not None and failure is not None and time.monotonic() - now.failed_at < FAILING_SECONDS:
            reason = "it ran out of memory" if isinstance(failure, MemoryError) else "see the log"
            return f"the last step failed: {reason}"
        return None if self.store is None else next(iter(self.store.troubles.values()), None)

    @property
    def is_alive(self) -> bool:
        """Return False if the process must be restarted: the model could not be loaded, or one of its ranks is gone."""
        failure = None if self.handler is None else self.handler.engine.snapshot().failure
        return self.status != "failed" and not isinstance(failure, RankError)

    def close(self) -> None:
        """End all threads. Open batches continue when a server starts with the same folder."""
        if self.batches is not None:
            self.batches.stop()
        if self.handler is not None:
            self.handler.close()
        if self.store is not None:
            self.store.close()

    @property
    def busy(self) -> int:
        """Return the number of requests that are being answered."""
        return max(self.open, 0 if self.handler is None else len(self.handler.backpressure.replies))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model. Responses have the first name."""
        assert self.handler is not None
        return self.handler.names

    def model_of(self, name: Any) -> tuple[str, str | None]:
        """Return (the model's name for the response, the LoRA adapter or None) for the model that a request names.

        None stands for the served model. Raise Refusal (404) for a model that is not served.
        """
        assert self.handler is not None
        if name is not None and not isinstance(name, str):
            message = f"'model' is {name!r:.100}, not a string"
            raise Refusal(400, message, param="model", remedy="give the name of a model", code="wrong_type")
        adapters = self.handler.engine.facts.adapters
        if name is not None and name in adapters:
            return name, name
        if name is None or name in self.handler.known_names:
            return self.names[0], None
        remedy = f"use one of {', '.join((*self.names, *adapters))}, or start the server with --served-model-name"
        message = f"the model {name!r:.100} is not served here"
        raise Refusal(404, message, param="model", remedy=remedy, code="model_not_found")

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant of the key in a request's headers. Raise Refusal (401) without a valid key."""
        tenant = self.keys.tenant(headers)
        if tenant is None:
            message, remedy = "the API key is missing or unknown", "send Authorization: Bearer KEY"
            challenge = {"www-authenticate": "Bearer"}
            raise Refusal(401, message, remedy=remedy, code="invalid_api_key", headers=challenge)
        return tenant

    def handler_for_requests(self) -> RequestHandler:
        """Return the handler. Raise Refusal (503) while the model is being loaded or the server drains."""
        if self.status == "ready" and self.handler is not None:
            return self.handler
        states = {"loading": "is being loaded", "draining": "is being shut down", "failed": "could not be loaded"}
        message = f"the model {states.get(self.status, 'is not ready')}"
        headers = {"retry-after": "5"} | ({"connection": "close"} if self.status == "draining" else {})
        raise Refusal(503, message, remedy="send the request again later", code="unavailable", headers=headers)

    def refusal(self, error: Exception) -> tuple[Refusal, str]:
        """Return (the Refusal for an error, its message for clients).

        The log gets errors of the server, and messages that name a path of this machine.
        """
        refusal = as_refusal(error)
        message = str(refusal) if self.handler is None else self.handler.public(str(refusal))
        if refusal.status >= 500 and refusal is not error:
            self.metrics.log(error)
        elif message != str(refusal):
            log.warning("a request was refused: %s", refusal)
        return refusal, message


def as_refusal(error: Exception) -> Refusal:
    """Return the Refusal for an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError):
        return Refusal(400, error.message, param=error.field, remedy=error.remedy, code=error.code)
    if isinstance(error, MemoryError):
        return Refusal(503, "the request needs too much memory", remedy="send less at once", code="out_of_memory")
    if isinstance(error, RankError):
        return Refusal(503, "a rank of the model is gone", remedy="use another server", code="unavailable")
    if isinstance(error, PrefoldError):
        code = "unsupported_model" if isinstance(error, UnsupportedModelError) else "unsupported"
        return Refusal(400, str(error), code=code)
    return Refusal(500, "the server failed", remedy="see its log", code="internal_error")


def new_id() -> str:
    """Return 24 random hexadecimal digits."""
    return secrets.token_hex(12)
