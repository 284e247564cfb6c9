"""Replicas that are servers, of any kind that has OpenAI's API (vLLM, SGLang, prefold serve, ...) or TEI's API.

Text comes from /v1/completions or /v1/chat/completions, embeddings from /v1/embeddings or TEI's /embed, and
log-probabilities of targets from /v1/completions in vLLM's form. This module connects to a server, bounds its load, and
retries.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from itertools import islice, takewhile
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ..checkpoint import served_name
from ..errors import InputError, JobError, MissingExtraError
from ..spec.environment import API_KEY, api_key
from ..spec.job import JobSpec
from ..spec.requests import Request, Stats
from ..text import Tokenizer
from ..wire.body import Body
from .backends import Backend
from .http_bodies import (
    NOT_OPENAIS,
    RowError,
    context_of,
    contexts_of,
    embedding_bodies,
    embeddings_of,
    generated_of,
    generation_body,
    is_of_bytes,
    logprob_bodies,
    logprobs_of,
)
from .replicas import AsyncHost, ReplicaDown, ReplicaFacts, Replicas, RunCall

try:
    import httpx
except ImportError:
    raise MissingExtraError("httpx", "http", "a server as a replica") from None

_ATTEMPTS = 5  # tries of a request that times out, loses its connection, or makes the server fail
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_FIRST_CAP = 8  # requests in flight at the start
_LOOK = 10.0  # timeout in seconds for connecting, /v1/models and /metrics
_REFUSALS = {
    401: f"the API key was refused (it is read from {API_KEY})",
    403: "the server refuses to answer",  # the key lacks a permission, or the server does not accept its host name
    404: "there is no such model or path",
}
_LOGPROBS = ("logprobs", "logits")  # kinds of Readout
_BATCH = 16  # prompts in one request for embeddings
_LONGEST_ANSWER = 10  # default timeout of an answer, in multiples of the patience
_TICK = 0.1  # seconds between two checks whether a replica that is being connected is still needed

TextOf = Callable[[Any], str]


@dataclass(slots=True)
class ServedModel:
    """The options of a job's servers, and the facts that all of them share."""

    model: str  # the model's name on the servers
    tokenizer: Tokenizer | None  # converts token ids to text for a server that accepts no ids
    takes_ids: bool = True  # True if the token ids of requests are the model's ids
    # Context length in tokens according to the model's files; None: unknown. A server may report less.
    context: int | None = None
    most: int = 256  # maximum number of requests in flight per server
    patience: float = 300.0  # seconds for which an unreachable server, or a failing request, is tried again
    timeout: float | None = None  # seconds for an answer of a server that makes progress; None: ten times the patience
    unanswered: float = 15.0  # the patience while no server has ever answered
    looks: int = 4  # number of times that a server's counters are read within `patience`
    notify: Callable[[str], None] = lambda line: None  # receives messages for the user
    has_answered: bool = False  # True if any server has ever answered


class HttpHost(AsyncHost):
    """A host that sends requests to one server. Raises ReplicaDown with the reason if the server cannot be used.

    The server makes progress when it answers, and when its token counters at /metrics grow. An unreachable server is
    tried again for the patience, or for a shorter time if no server has ever answered.

    Args:
        stopping: returns whether the replica is no longer needed
    """

    def __init__(self, url: str, model: ServedModel, stopping: Callable[[], bool] = lambda: False):
        super().__init__("prefold-http")
        self._url, self._o = url, model
        self._takes_ids = (
            None if model.takes_ids else False
        )  # whether the server accepts token ids; None: not tried yet
        self._knows_all = True  # False after the server refused sampling options that OpenAI's API lacks
        self._cap = float(min(_FIRST_CAP, model.most))  # requests in flight; grows with successes, halves on overload
        self._paused_until = 0.0
        self.facts = ReplicaFacts(
            max_running=model.most,
            at_once=min(model.most, 32) * _BATCH,
            is_server=True,
            dies_of_requests=False,
            steps_overlap=True,
        )
        key = api_key()
        timeout = _LONGEST_ANSWER * model.patience if model.timeout is None else model.timeout
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=_LOOK),
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_loopback(url),  # use the environment's proxies
            verify=httpx.create_ssl_context(),  # use the environment's certificates in any case
        )
        proxy = proxy_of(url)
        self._way = f" through the proxy {proxy}" if proxy else ""
        meeting = self._spawn(self._meet())
        try:
            while not wait([meeting], _TICK).done:
                if stopping():
                    meeting.cancel()
            self._model, self._context = meeting.result()
        except BaseException:
            self.close()
            raise
        self._watching = self._spawn(self._watch())

    # ------------------------------------------------------------------------------------- in the thread

    async def _leave(self) -> None:
        await super()._leave()
        await self._client.aclose()

    async def _meet(self) -> tuple[str, int | None]:
        """Return (the model's name on the server, the length of its context in tokens or None if it is unknown)."""
        name, contexts = self._o.model, contexts_of(await self._first_answer())
        if name not in contexts and served_name(name) in contexts:
            name = served_name(name)
        if contexts and name not in contexts:
            raise ReplicaDown(f"it has no model {name!r}; use -m with one of: {', '.join(contexts)}", returns=False)
        lengths = [length for length in (self._o.context, contexts.get(name)) if length is not None]
        return name, min(lengths, default=None) if self._o.takes_ids else None

    async def _first_answer(self) -> httpx.Response:
        started, pause, is_told = time.monotonic(), _FIRST_PAUSE, False
        while True:
            try:
                response = await self._client.get("/v1/models", timeout=_LOOK)
                self._o.has_answered = True
                if response.status_code in (401, 403):
                    words = f"{_REFUSALS[response.status_code]}: {_message_of(response)}"
                    raise ReplicaDown(words, returns=False)
                if response.status_code < 500 and response.status_code != 429:
                    return response
                reason = f"it answers {response.status_code}"
            except httpx.HTTPError as error:
                reason = f"it cannot be reached{self._way} ({_why(error)})"
            longest = self._o.patience if self._o.has_answered else min(self._o.patience, self._o.unanswered)
            seconds_left = longest - (time.monotonic() - started)
            if seconds_left < 0:
                raise ReplicaDown(reason, returns=False)
            if not is_told:
                self._o.notify(f"{self._url}: {reason}; retrying for {longest:.0f} s")
                is_told = True
            await asyncio.sleep(_jittered(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _watch(self) -> None:
        """Report progress while the server's token counters grow.

        Otherwise a long output could exceed the fleet's patience.
        """
        before: list[str] = []
        while True:
            now = await self._counters() if self._tasks else []
            if before and now and now != before:
                with self._changed:
                    self._report.is_at_work = True
                    self._changed.notify()
            before = now
            await asyncio.sleep(self._o.patience / self._o.looks)

    async def _counters(self) -> list[str]:
        """Return the server's Prometheus lines with token counts; [] if it has none."""
        try:
            response = await self._client.get("/metrics", timeout=_LOOK)
        except httpx.HTTPError:
            return []
        lines = response.text.splitlines() if response.status_code == 200 else []
        return [line for line in lines if "token" in line.partition("{")[0].partition(" ")[0]]

    async def _post(self, bodies: Sequence[tuple[str, Body]]) -> Any:
        """Return the answer to the first body whose path the server has. Retry if that may help.

        Raise ReplicaDown if the server cannot be reached, JobError if it refuses all requests, and InputError if it
        refuses this request.
        """
        attempts, pause, last = 0, _FIRST_PAUSE, ""
        deadline = time.monotonic() + self._o.patience
        while attempts < _ATTEMPTS and time.monotonic() < deadline:
            path, body = bodies[0]
            try:
                response = await self._client.post(path, json=body.sent)
            except httpx.TransportError as error:
                attempts, last = attempts + 1, _why(error)
                is_down = isinstance(error, httpx.ConnectError) and attempts == _ATTEMPTS
                if is_down:
                    raise ReplicaDown(f"it cannot be reached{self._way} ({last})") from None
                await asyncio.sleep(_jittered(pause))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except httpx.DecodingError as error:
                raise RowError(self._url, 0, f"the answer cannot be decoded: {error}") from None
            except ValueError as error:  # such as a lone surrogate, or NaN
                raise RowError(self._url, 0, f"the request cannot be written as JSON: {error}") from None
            if response.status_code < 300:
                self._cap = min(self._o.most, self._cap + 1 / self._cap)
                with reading(self._url):
                    return response.json()
            if response.status_code == 404 and len(bodies) > 1:
                bodies = bodies[1:]
                continue
            last = _message_of(response)
            if response.status_code in (429, 503):
                self._cap = max(1.0, self._cap / 2)
                wait = _retry_after(response) or _jittered(pause)
                self._paused_until = time.monotonic() + wait
                await asyncio.sleep(wait * random.uniform(1.0, 1.25))
            elif response.status_code >= 500 or response.status_code == 408:
                attempts += 1
                await asyncio.sleep(_jittered(pause))
            elif response.status_code in _REFUSALS:
                raise JobError(f"{self._url}: {_REFUSALS[response.status_code]}: {last}")
            else:
                raise RowError(self._url, response.status_code, last)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise RowError(self._url, 0, f"no answer after {attempts} attempts: {last}")

    def _refusal(self, call: RunCall) -> str:
        if call.readout.kind == "head":
            message = "no server returns the exact outputs of a classification head over HTTP"
            return f"{message}; remove --url, or give labels or words that the model can generate"
        if call.readout.kind in _LOGPROBS and not self._o.takes_ids:
            return "log-probabilities need token ids; name the model's tokenizer with --tokenizer"
        return ""

    def _num_to_ask(self, call: RunCall) -> int:
        pause = self._paused_until - time.monotonic()
        if pause > 0:
            self._loop.call_later(pause, self._fill)
        if pause > 0 or len(self._tasks) >= int(self._cap):
            return 0
        if call.readout.kind == "tokens" or call.readout.kind in _LOGPROBS:
            return 1
        adapters = [request.namespace.adapter for _, _, request in islice(self._waiting, _BATCH)]
        return sum(1 for _ in takewhile(adapters[0].__eq__, adapters))  # one body is for one adapter

    async def _ask(self, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Return the answers to some requests. If the server refuses several at once, send each by itself."""
        try:
            return await self._ask_together(call, requests)
        except InputError as error:
            if len(requests) == 1:
                return [error], Stats(requests=1)
        answers, stats = [], Stats()
        for request in requests:
            (answer,), counted = await self._ask(call, [request])
            answers.append(answer)
            stats = stats + counted
        return answers, stats

    async def _ask_together(self, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Send token ids, or text if the server refuses ids."""
        try:
            if call.readout.kind in _LOGPROBS:
                return await self._logprobs(call, requests[0])
            ask = self._generated if call.readout.kind == "tokens" else self._embedded
            if self._takes_ids is not False:
                try:
                    answers = await ask(call, requests, None)
                    self._takes_ids = True
                    return answers
                except RowError as error:
                    if self._takes_ids or not error.is_about_form or len(requests) > 1:
                        raise
            answers = await ask(call, requests, self._text_of())
            self._takes_ids = self._takes_ids or False
            return answers
        except (InputError, JobError, ReplicaDown):
            raise
        except Exception as error:  # an unexpected error fails the request, not the server
            message = f"the request failed ({type(error).__name__}: {error})"
            raise RowError(self._url, 0, message) from error

    async def _logprobs(self, call: RunCall, request: Request) -> tuple[list[Any], Stats]:
        bodies = logprob_bodies(request, call.readout, self._model)
        answers = [await self._post([body]) for body in bodies]
        tokens = len(request.tokens)
        with reading(self._url):
            result = logprobs_of(answers, request, call.readout)
        return [result], Stats(tokens=tokens, rows_computed=len(bodies) * tokens, requests=1, steps=1)

    async def _embedded(
        self, call: RunCall, requests: list[Request], text_of: TextOf | None
    ) -> tuple[list[Any], Stats]:
        answer = await self._post(embedding_bodies(requests, call.readout, self._model, text_of))
        tokens = sum(len(request.tokens) for request in requests)
        with reading(self._url):
            results = embeddings_of(answer, len(requests))
        return results, Stats(tokens=tokens, rows_computed=tokens, requests=len(requests), steps=1)

    async def _generated(
        self, call: RunCall, requests: list[Request], text_of: TextOf | None
    ) -> tuple[list[Any], Stats]:
        """Return the samples of a request.

        Some servers refuse sampling options that OpenAI's API lacks, but accept the request without those at their
        defaults. Such a server is not sent defaults again.
        """
        (request,) = requests

        async def post(knows_all: bool) -> Any:
            facts: dict[str, Any] = {"context": self._context, "knows_all": knows_all}
            return await self._post([generation_body(request, self._model, text_of, call.text, **facts)])

        try:
            answer = await post(knows_all := self._knows_all)
        except RowError as error:
            if not (knows_all and error.is_about_form and any(name in str(error) for name in NOT_OPENAIS)):
                raise
            answer = await post(False)
            if self._knows_all:
                self._knows_all = False
                names = ", ".join(NOT_OPENAIS)
                self._o.notify(f"{self._url} does not accept {names}; they are sent only if a request sets them")
        with reading(self._url):
            samples, stats = generated_of(answer)
        return [samples], stats

    def _text_of(self) -> TextOf:
        """Return a function that converts token ids to text."""
        tokenizer = self._o.tokenizer
        if tokenizer is None:
            message = f"{self._url} accepts no token ids, and without a tokenizer there is no text to send"
            raise JobError(f"{message}; name one with --tokenizer")

        def text(tokens: Any) -> str:
            before, after = len(tokenizer.prefix_ids), len(tokenizer.suffix_ids)
            if before and tokens[:before].tolist() == tokenizer.prefix_ids.tolist():
                tokens = tokens[before:]  # the server adds them itself
            if after and tokens[-after:].tolist() == tokenizer.suffix_ids.tolist():
                tokens = tokens[:-after]
            return tokenizer.decode(tokens)

        return text


def is_loopback(url: str) -> bool:
    """Return whether a URL contains this machine's loopback address, which no proxy can reach."""
    host = (urlsplit(url).hostname or "").removesuffix(".")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def proxy_of(url: str) -> str:
    """Return the host and port of the environment's proxy for a URL, without its password; "" without a proxy."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if not proxy or is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return ""
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}").netloc.rpartition("@")[2]


def _why(error: Exception) -> str:
    """Return why a server was not reached.

    The system's message, such as "connection refused", is the innermost cause of the client's exception.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Return a context that turns errors of reading a response into a RowError.

    A gateway may answer 200 with an error.
    """
    try:
        yield
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RowError(url, 200, f"the response cannot be read ({type(error).__name__}: {error})") from None


def _message_of(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message", body) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300]


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After, or None. Dates are ignored."""
    try:
        return min(_LONGEST_PAUSE * 4, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


def _jittered(pause: float) -> float:
    return pause * random.uniform(0.5, 1.5)


_HUNG = "it sent no answer for too long; if answers take longer, increase --patience"


class HttpReplicas(Replicas):
    """One replica per server. Raises InputError for an invalid URL or API key.

    The API key is read from the environment variable PREFOLD_API_KEY and sent as a bearer token. A server that is lost
    repeatedly without an answer in between does not come back.

    Args:
        urls: URLs of the servers, with or without /v1
        options: further options of `ServedModel`
    """

    def __init__(self, urls: Sequence[str], model: str, tokenizer: Tokenizer | None, **options: Any):
        for url in urls:
            _check(url)
        self.served = served = ServedModel(model, tokenizer, **options)
        names = [url.rstrip("/").removesuffix("/v1") for url in urls]
        super().__init__(
            {name: partial(HttpHost, name, served, lambda: self.is_closed) for name in names}, killed=_HUNG
        )


def _check(url: str) -> None:
    """Raise InputError for an invalid URL of a server, and for a key that no header can contain.

    The message omits the key.
    """
    name: str | None = None
    try:
        parts = urlsplit(url)
        name = parts.hostname
        is_url = parts.scheme in ("http", "https") and name and not parts.username and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # such as an invalid port
        is_url = False
    if not is_url:
        remedy = f"write http://HOST:PORT, and set {API_KEY} if the server needs a key"
        raise InputError(f"{name or url!r} is not the URL of a server", field="url", remedy=remedy)
    key = api_key()
    if not (key.isascii() and key.isprintable()):
        remedy = "set it to the key alone, without line ends"
        raise InputError(f"{API_KEY} has characters that no key has", field=API_KEY, remedy=remedy)


class _Servers(Backend):
    """The backend of --url. Its replicas are servers."""

    where = "over HTTP"
    takes = frozenset({"tokenizer"})
    on_ray = False

    def refusal(self, spec: JobSpec) -> str:
        pooling = "--pooling does not work with --url, because the server chooses the pooling; remove it"
        return pooling if "pooling" in spec.given else ""

    def options(self, spec: JobSpec) -> dict[str, Any]:
        return {"most": spec.model.max_running}

    def replicas(
        self,
        spec: JobSpec,
        options: Mapping[str, Any],
        *,
        checkpoint: Any,
        tokenizer: Any,
        notify: Callable[[str], None],
    ) -> HttpReplicas:
        facts: dict[str, Any] = {"takes_ids": not is_of_bytes(tokenizer), "context": context_of(checkpoint)}
        facts |= {"patience": spec.fleet.patience, "notify": notify}
        return HttpReplicas(spec.fleet.urls, spec.model_name, tokenizer, **facts, **options)


SERVERS = _Servers()
