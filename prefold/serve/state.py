"""What all dialects have in common: the server's state, its model's names, and the way from a request to an answer."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from ..api.body import Body
from ..errors import InputError, PrefoldError, RankError, UnsupportedModelError
from ..tasks.base import TRUNCATE
from .batches import Batches
from .handler import RequestHandler
from .http import Bodies, ClientGone, Refusal, json_response
from .keys import Keys, Tenant
from .metrics import Metrics
from .options import ServeOptions
from .store import Store

# For so long the server is said to fail after a step that failed, unless one does not.
FAILING_SECONDS = 10.0

# What an error's remedy says of cutting, in the words of Python and of the command line.
_CUT = re.compile(rf"(,? or have (?:it|documents) cut with ){re.escape(TRUNCATE)}")

Status = Literal["loading", "ready", "draining", "failed"]


class AppState:
    """An AppState is one served model, and who may ask it what.

    handler     None until the model is loaded
    store    what clients leave here, and `batches` what is done with it; None without a folder for data
    """

    def __init__(self, options: ServeOptions):
        self.options = options
        self.keys = Keys(options.api_keys)
        self.metrics = Metrics(self)
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
        """Returns what fails at present, in words; None where nothing does."""
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
        if name in adapters:
            return name, name
        if name is None or name in self.handler.known_names:
            return self.names[0], None
        remedy = f"ask for one of {', '.join((*self.names, *adapters))}"
        message = f"the model {name!r:.100} is not served here"
        raise Refusal(404, message, param="model", remedy=remedy, code="model_not_found")

    def handler_for(self, request: Request) -> RequestHandler:
        """Returns the handler. Raises Refusal (503) while there is none, or no more requests are taken."""
        if self.status == "ready" and self.handler is not None:
            return self.handler
        what = {"loading": "is being loaded", "draining": "is being shut down", "failed": "could not be loaded"}
        message = f"the model {what.get(self.status, 'is not ready')}"
        headers = {"retry-after": "5"} | ({"connection": "close"} if self.status == "draining" else {})
        raise Refusal(503, message, remedy="send the request again later", code="unavailable", headers=headers)


@dataclass(frozen=True)
class Dialect:
    """A Dialect is one API's way to speak: how its errors look.

    error     (status, message, code, param) -> (status, body) of an error's response
    truncate  what a request says to have a prompt cut that is too long; empty: nothing does
    paths     those of its API: what is not served of them is refused in its form
    """

    name: str
    error: Callable[[int, str, str, str | None], tuple[int, Any]]
    truncate: str = ""
    paths: re.Pattern[str] = re.compile("(?!)")

    def refuse(self, state: AppState, error: Exception) -> Response:
        """Returns the response that says what is wrong."""
        refusal, message = refusal_of(state, error)
        message = _CUT.sub(lambda found: found[1] + self.truncate if self.truncate else "", message)
        status, body = self.error(refusal.status, message, refusal.code, refusal.param)
        return json_response(body, status, refusal.headers)


@dataclass(frozen=True)
class Entry:
    """An Entry is a path of a dialect, and what answers it.

    handle  (state, request, tenant) -> response
    bodies  those that it takes
    query   what it takes of a query
    admin   whether only tenants that are admins are let in
    """

    dialect: Dialect
    method: str
    path: str
    handle: Callable[[AppState, Request, Tenant], Awaitable[Response]]
    bodies: Sequence[type[Body]] = ()
    query: type[Body] | None = None
    admin: bool = False

    def endpoint(self, state: AppState) -> Callable[[Request], Awaitable[Response]]:
        """Returns the endpoint that answers with `handle`, and with the dialect's error where that raises one."""

        async def respond(request: Request) -> Response:
            return state.metrics.answered(self.dialect.name, self.path, await answer(request))

        async def answer(request: Request) -> Response:
            try:
                tenant = state.keys.tenant(request.headers)
                if tenant is None:
                    message, remedy = "the key is missing or unknown", "send Authorization: Bearer KEY"
                    headers = {"www-authenticate": "Bearer"}
                    raise Refusal(401, message, remedy=remedy, code="invalid_api_key", headers=headers)
                request.scope["tenant"] = tenant.name  # for the access log
                if self.admin and not tenant.admin:
                    message, remedy = "this is for admins", "use the key of an admin"
                    raise Refusal(403, message, remedy=remedy, code="forbidden")
                return await self.handle(state, request, tenant)
            except ClientGone:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                # Of a path that several share, the body says whose it is.
                dialect: Dialect = request.scope.get("dialect", self.dialect)
                return dialect.refuse(state, error)

        return respond


def refusal_of(state: AppState, error: Exception) -> tuple[Refusal, str]:
    """Returns the Refusal that stands for an error, and its message for clients. Errors that are nobody's fault are
    written to the log, and those that name a path of this machine."""
    refusal = as_refusal(error)
    message = str(refusal) if state.handler is None else state.handler.public(str(refusal))
    if message != str(refusal) or (refusal.status >= 500 and refusal is not error):
        state.metrics.log(error)
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
    """Returns what makes a response's id different from all others."""
    return secrets.token_hex(12)
