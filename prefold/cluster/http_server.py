"""One server: its client, how much it can take, and what is posted to it, again where that may help."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..checkpoint import served_name
from ..errors import InputError, JobError, MissingExtraError
from .http_bodies import RowError, contexts_of
from .replicas import ReplicaDown

try:
    import httpx
except ImportError:
    raise MissingExtraError("httpx", "http", "a server as a replica") from None

API_KEY = "PREFOLD_API_KEY"  # the environment variable that holds the key
_ATTEMPTS = 5  # of a request that times out, or whose connection is torn, or that a server fails on
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_FIRST_CAP = 8  # requests in flight to begin with
_LOOK = 10.0  # seconds that a connection, and what it says of itself, may take
_UNANSWERED = 15.0  # seconds for which servers are asked of which none has ever answered
_REFUSALS = {
    401: f"the key was refused ({API_KEY} holds it)",
    403: "the server refuses to answer",  # a key that may not, or a name that the server does not know itself by
    404: "there is no such model or path",
}


def check_url(url: str) -> None:
    """Raises InputError for what is not the URL of a server."""
    name: str | None = None
    try:
        parts = urlsplit(url)
        name = parts.hostname
        is_one = parts.scheme in ("http", "https") and name and not parts.username and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # such as a port that is none
        is_one = False
    if not is_one:
        remedy = f"write http://HOST:PORT; a key belongs into the environment, as {API_KEY}"
        raise InputError(f"{name or url!r} is not the URL of a server", field="url", remedy=remedy)


def check_key() -> None:
    """Raises InputError for a key that no header can hold; it does not say it."""
    key = os.environ.get(API_KEY, "")
    if not (key.isascii() and key.isprintable()):
        remedy = "set it to the key alone, without line ends"
        raise InputError(f"{API_KEY} holds letters that no key has", field=API_KEY, remedy=remedy)


@dataclass(eq=False)
class RemoteServer:
    """A server, and how much it can take.

    model      the name that its model has there
    context    of its model, in tokens; None: it does not say
    most       requests in flight, at most
    patience   seconds for which a request is sent again where it fails
    cap        requests in flight: one more after as many successes, half after it said that it is overloaded
    takes_ids  whether it takes token ids; None: it was not asked yet
    knows_all  whether it takes sampling options that OpenAI has no name for, as far as is known
    """

    url: str
    client: httpx.AsyncClient
    model: str
    context: int | None = None
    most: int = 256
    patience: float = 300.0
    takes_ids: bool | None = None
    knows_all: bool = True
    cap: float = 0.0
    paused_until: float = 0.0

    def __post_init__(self) -> None:
        self.cap = min(_FIRST_CAP, self.most)

    async def post(self, bodies: Sequence[tuple[str, Any]]) -> Any:
        """Returns the answer to the first of the bodies whose path the server has; asks again where that may help.

        Raises ReplicaDown where it cannot be reached, JobError where it refuses all requests, and InputError where it
        refuses this one.
        """
        attempts, pause, last = 0, _FIRST_PAUSE, ""
        deadline = time.monotonic() + self.patience
        while attempts < _ATTEMPTS and time.monotonic() < deadline:
            path, body = bodies[0]
            try:
                said = await self.client.post(path, json=body)
            except httpx.TransportError as error:
                attempts, last = attempts + 1, _why(error)
                is_down = isinstance(error, httpx.ConnectError) and attempts == _ATTEMPTS
                if is_down:
                    raise ReplicaDown(f"it cannot be reached ({last})") from None
                await asyncio.sleep(_jittered(pause))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except httpx.DecodingError as error:
                raise RowError(self.url, 0, f"an answer that cannot be unpacked: {error}") from None
            except ValueError as error:  # such as half of a surrogate pair, or a number that is none
                raise RowError(self.url, 0, f"the request cannot be written as JSON: {error}") from None
            if said.status_code < 300:
                self.cap = min(self.most, self.cap + 1 / self.cap)
                with reading(self.url):
                    return said.json()
            if said.status_code == 404 and len(bodies) > 1:
                bodies = bodies[1:]
                continue
            last = _said(said)
            if said.status_code in (429, 503):
                self.cap = max(1.0, self.cap / 2)
                wait = _retry_after(said) or _jittered(pause)
                self.paused_until = time.monotonic() + wait
                await asyncio.sleep(wait * random.uniform(1.0, 1.25))
            elif said.status_code >= 500 or said.status_code == 408:
                attempts += 1
                await asyncio.sleep(_jittered(pause))
            elif said.status_code in _REFUSALS:
                raise JobError(f"{self.url}: {_REFUSALS[said.status_code]}: {last}")
            else:
                raise RowError(self.url, said.status_code, last)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise RowError(self.url, 0, f"no answer after {attempts} attempts: {last}")

    async def counters(self) -> list[str]:
        """Returns what the server counts of tokens, as Prometheus is told of it; nothing where it does not tell."""
        try:
            said = await self.client.get("/metrics", timeout=_LOOK)
        except httpx.HTTPError:
            return []
        lines = said.text.splitlines() if said.status_code == 200 else []
        return [line for line in lines if "token" in line.partition("{")[0].partition(" ")[0]]


@dataclass
class FirstAnswer:
    """Whether any server of a job has ever answered, and what is called with what a person should know of those that do
    not."""

    notify: Callable[[str], None] = lambda line: None
    has_come: bool = False


async def meet(
    url: str, model: str, *, most: int, patience: float, timeout: float, first: FirstAnswer | None = None
) -> RemoteServer:
    """Returns a server that has the model; asks again for `patience` seconds where it cannot be reached, fewer where no
    server of the job has ever answered. timeout: seconds that an answer may take.

    Raises ReplicaDown, with the reason, where that does not help.
    """
    key = os.environ.get(API_KEY)
    client = httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout, connect=_LOOK),
        limits=httpx.Limits(max_connections=None),
    )
    try:
        contexts = contexts_of(await _first_answer(client, url, patience, first or FirstAnswer()))
        if model not in contexts and served_name(model) in contexts:
            model = served_name(model)
        if contexts and model not in contexts:
            raise ReplicaDown(f"it has no model {model!r}; those it has: {', '.join(contexts)}")
    except BaseException:
        await client.aclose()
        raise
    return RemoteServer(url, client, model, contexts.get(model), most, patience)


async def _first_answer(client: httpx.AsyncClient, url: str, patience: float, first: FirstAnswer) -> httpx.Response:
    started, pause, is_told = time.monotonic(), _FIRST_PAUSE, False
    while True:
        try:
            found = await client.get("/v1/models", timeout=_LOOK)
            first.has_come = True
            if found.status_code in (401, 403):
                raise ReplicaDown(f"{_REFUSALS[found.status_code]}: {_said(found)}")
            if found.status_code < 500 and found.status_code != 429:
                return found
            reason = f"it answers {found.status_code}"
        except httpx.HTTPError as error:
            reason = f"it cannot be reached ({_why(error)})"
        longest = patience if first.has_come else min(patience, _UNANSWERED)
        left = longest - (time.monotonic() - started)
        if left < 0:
            raise ReplicaDown(reason)
        if not is_told:
            first.notify(f"{url}: {reason}; it is asked again for {longest:.0f} s")
            is_told = True
        await asyncio.sleep(_jittered(pause))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _why(error: Exception) -> str:
    """Returns in words why a server was not reached: what the system says, such as "connection refused", is at the
    bottom of what the client makes of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Makes the error of the requests out of whatever an answer lacks: a gateway may say 200 and mean an error."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RowError(url, 200, f"nothing that can be read ({type(error).__name__}: {error})") from None


def _said(said: httpx.Response) -> str:
    """Returns the message of an error."""
    try:
        found = said.json()
        error = found.get("error", found)
        text = error.get("message", found) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = said.text
    return " ".join(str(text).split())[:300]


def _retry_after(said: httpx.Response) -> float | None:
    """Returns the seconds of Retry-After, None where there are none. (A date is not understood.)"""
    try:
        return min(_LONGEST_PAUSE * 4, max(0.0, float(said.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


def _jittered(pause: float) -> float:
    return pause * random.uniform(0.5, 1.5)
