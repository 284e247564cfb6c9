"""The state of a server: its model, the keys of its clients, and its failures."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError, PrefoldError, RankError, UnsupportedModelError
from .batches import Batches
from .handler import RequestHandler
from .http import Bodies, Refusal
from .keys import Keys, Tenant
from .metrics import Metrics, log
from .options import ServeOptions
from .store import Store

# For so long the server is said to fail after a step that failed, unless one does not.
FAILING_SECONDS = 10.0

Status = Literal["loading", "ready", "draining", "failed"]


class AppState:
    """An AppState is one served model, with the keys of its clients and what they keep here.

    handler  None until the model is loaded
    store    what clients leave here, and `batches` what is done with it; None without a folder for data
    """

    def __init__(self, options: ServeOptions):
        self.options = options
        self.keys = Keys(options.api_keys)
        self.metrics = Metrics(lambda: self.handler)
        self.status: Status = "loading"
        self.handler: RequestHandler | None = None
        self.open = 0  # requests whose answers have not been sent wholly
        self.bodies = Bodies(options)
        self.store = None if options.data_dir is None else Store(Path(options.data_dir), self.keys.most_stored)
        self.batches = None if self.store is None else Batches(self.store, self.metrics.log)

    def ready(self, llm: Any) -> None:
        """Begins to answer with this LLM."""
        self.handler = RequestHandler(llm, self.options, self.metrics, self.keys, self.store)
        if self.batches is not None:
            self.batches.start(self.handler, self.keys)
        if self.status == "loading":
            self.status = "ready"

    def reload_keys(self) -> None:
        """Reads the file of keys again. Raises JobError where it is wrong, and then all stays as it was."""
        self.keys.reload()
        if self.handler is not None:
            self.handler.read_shares()

    @property
    def failing(self) -> str | None:
        """Returns the present failure in words; None where there is none."""
        failure = None if self.handler is None else self.handler.engine.failure
        if isinstance(failure, RankError):
            return "a rank of the model is gone, and the server has to be started again"
        # Of anything else it may have recovered, which shows only when it is asked for something.
        if failure is not None and time.monotonic() - self.handler.engine.failed_at < FAILING_SECONDS:  # type: ignore[union-attr]
            what = "memory was too small for it" if isinstance(failure, MemoryError) else "see the log"
            return f"the last step failed: {what}"
        return None if self.store is None else next(iter(self.store.troubles.values()), None)

    def close(self) -> None:
        """Ends all threads; batches go on where they are when a server is started with the same folder."""
        if self.batches is not None:
            self.batches.stop()
        if self.handler is not None:
            self.handler.close()
        if self.store is not None:
            self.store.close()

    @property
    def busy(self) -> int:
        """Returns how many requests are being answered."""
        return max(self.open, 0 if self.handler is None else len(self.handler.backpressure.replies))

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names by which the model is served, the first of which stands in responses."""
        assert self.handler is not None
        return self.handler.names

    def model_of(self, name: Any) -> tuple[str, str | None]:
        """Returns (model's name in the response, LoRA adapter) for the name that a request gives; None: it gives none.

        Raises Refusal (404) for a model that is not served.
        """
        assert self.handler is not None
        if name is not None and not isinstance(name, str):
            message = f"'model' is {name!r:.100}, not a text"
            raise Refusal(400, message, param="model", remedy="give the name of a model", code="wrong_type")
        adapters = self.handler.llm.engine.adapters
        if name is not None and name in adapters:
            return name, name
        if name is None or name in self.handler.known_names:
            return self.names[0], None
        remedy = f"ask for one of {', '.join((*self.names, *adapters))}"
        message = f"the model {name!r:.100} is not served here"
        raise Refusal(404, message, param="model", remedy=remedy, code="model_not_found")

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Returns the tenant whose key the headers of a request hold. Raises Refusal (401) where there is none."""
        tenant = self.keys.tenant(headers)
        if tenant is None:
            message, remedy = "the key is missing or unknown", "send Authorization: Bearer KEY"
            wanted = {"www-authenticate": "Bearer"}
            raise Refusal(401, message, remedy=remedy, code="invalid_api_key", headers=wanted)
        return tenant

    def handler_for_requests(self) -> RequestHandler:
        """Returns the handler. Raises Refusal (503) while there is none, or no more requests are taken."""
        if self.status == "ready" and self.handler is not None:
            return self.handler
        what = {"loading": "is being loaded", "draining": "is being shut down", "failed": "could not be loaded"}
        message = f"the model {what.get(self.status, 'is not ready')}"
        headers = {"retry-after": "5"} | ({"connection": "close"} if self.status == "draining" else {})
        raise Refusal(503, message, remedy="send the request again later", code="unavailable", headers=headers)

    def refusal(self, error: Exception) -> tuple[Refusal, str]:
        """Returns the Refusal that stands for an error, and its message for clients. Errors of the server are written
        to the log, and the messages that name a path of this machine."""
        refusal = as_refusal(error)
        message = str(refusal) if self.handler is None else self.handler.public(str(refusal))
        if refusal.status >= 500 and refusal is not error:
            self.metrics.log(error)
        elif message != str(refusal):
            log.warning("a request was refused: %s", refusal)
        return refusal, message


def as_refusal(error: Exception) -> Refusal:
    """Returns the Refusal that stands for an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError):
        return Refusal(400, error.message, param=error.field, remedy=error.remedy, code=error.code)
    if isinstance(error, MemoryError):
        return Refusal(503, "memory is too small for the request", remedy="send less at once", code="out_of_memory")
    if isinstance(error, RankError):
        return Refusal(503, "a rank of the model is gone", remedy="ask another server", code="unavailable")
    if isinstance(error, PrefoldError):
        code = "unsupported_model" if isinstance(error, UnsupportedModelError) else "unsupported"
        return Refusal(400, str(error), code=code)
    return Refusal(500, "the server failed", remedy="see its log", code="internal_error")


def new_id() -> str:
    """Returns a text that makes a response's id different from all others."""
    return secrets.token_hex(12)
