"""Replicas that are servers: any that speaks OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI.

Generated text comes from /v1/completions or /v1/chat/completions, embeddings from /v1/embeddings or TEI's /embed, and
log-probabilities of targets from vLLM's /v1/completions.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..engine.meter import StepInfo
from ..errors import InputError, JobError, MissingExtraError
from ..stream import Window
from ..text import Tokenizer
from ..types import Request, Stats
from .http_bodies import (
    RowError,
    embedding_bodies,
    embeddings_of,
    generated_of,
    generation_body,
    generation_stats,
    logprob_bodies,
    logprobs_of,
    model_names,
)
from .replicas import (
    ReplicaEvent,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
    RunCall,
    requests_of,
)

__all__ = ["API_KEY", "HttpReplicas"]

try:
    import httpx
except ImportError:
    raise MissingExtraError("httpx", "http", "a server as a replica") from None

API_KEY = "PREFOLD_API_KEY"  # the environment variable that holds the key
_ATTEMPTS = 5  # of a request that times out, or whose connection is torn, or that a server fails on
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_FIRST_CAP = 8  # requests in flight to begin with
_LOGPROBS = ("logprobs", "logits")  # kinds of Readout
_BATCH = 16  # prompts of one request for embeddings
_REFUSALS = {401: "the key was refused", 403: "the key was refused", 404: "there is no such model or path"}


class _Down(Exception):
    """A server cannot be reached."""


@dataclass(eq=False)
class _RemoteServer:
    """A server, what it has to do, and how much it can take.

    cap        requests in flight: one more after as many successes, half after it said that it is overloaded
    takes_ids  whether it takes token ids; None: it was not asked yet
    """

    url: str
    client: httpx.AsyncClient
    cap: float = _FIRST_CAP
    in_flight: int = 0
    takes_ids: bool | None = None
    paused_until: float = 0.0
    call: RunCall | None = None
    run: int = 0  # number of the run: what belongs to an earlier one is dropped
    waiting: list[tuple[int, int, Request]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class HttpReplicas(Replicas):
    """Servers, each a replica.

    urls        of the servers, with or without /v1
    model       its name there
    tokenizer   turns token ids into text for a server that takes no ids
    takes_ids   whether the token ids of requests are those of the model
    most        requests in flight at a server
    patience    seconds for which a server that cannot be reached is asked again

    A key is taken from the environment variable PREFOLD_API_KEY, and sent as a bearer token.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        tokenizer: Tokenizer | None,
        *,
        takes_ids: bool = True,
        most: int = 256,
        patience: float = 300.0,
        timeout: float = 600.0,
    ):
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
                remedy = f"write http://HOST:PORT; a key belongs into the environment, as {API_KEY}"
                raise InputError(f"{parts.hostname or url!r} is not the URL of a server", field="url", remedy=remedy)
        self.names = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.model, self._tokenizer, self._takes_ids = model, tokenizer, takes_ids
        self._most, self._patience, self._timeout = most, patience, timeout
        self._servers: dict[str, _RemoteServer] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prefold-http", daemon=True)

    # -------------------------------------------------------------------------------- called by the fleet

    def start(self, tell: Callable[[str, ReplicaEvent], None]) -> None:
        self._tell = tell
        self._thread.start()
        for name in self.names:
            self._do(self._open(name))

    def begin(self, name: str, call: RunCall) -> None:
        if call.readout.kind == "head":
            message = "no server gives the exact outputs of a classification head over HTTP"
            raise JobError(f"{message}; leave out --url, or give labels or words that the model can say")
        if call.readout.kind in _LOGPROBS and not self._takes_ids:
            raise JobError("log-probabilities need token ids; name the model's tokenizer with --tokenizer")
        self._do(self._begin(name, call))

    def give(self, name: str, windows: list[Window]) -> None:
        self._do(self._give(name, windows))

    def end(self, name: str) -> None:
        self._do(self._begin(name, None))

    def kill(self, name: str) -> None:
        self._do(self._drop(name, "it has answered nothing for too long"))

    def close(self) -> None:
        async def stop() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for server in self._servers.values():
                await server.client.aclose()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    # ------------------------------------------------------------------------------------- in the thread

    async def _open(self, name: str) -> None:
        """Meets a server; asks again for a while where it cannot be reached."""
        key = os.environ.get(API_KEY)
        client = httpx.AsyncClient(
            base_url=name,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )
        deadline = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                found = await client.get("/v1/models")
                if found.status_code in (401, 403):
                    return self._tell(name, ReplicaLost(f"{_REFUSALS[found.status_code]}; {API_KEY} holds it"))
                if found.status_code < 500 and found.status_code != 429:
                    break
                reason = f"it answers {found.status_code}"
            except httpx.HTTPError as error:
                reason = f"it cannot be reached ({type(error).__name__}: {error})"
            if time.monotonic() > deadline:
                return self._tell(name, ReplicaLost(reason))
            await asyncio.sleep(_jittered(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)
        named = model_names(found)
        if named and self.model not in named:
            return self._tell(name, ReplicaLost(f"it has no model {self.model!r}; those it has: {', '.join(named)}"))
        server = _RemoteServer(
            name, client, cap=min(_FIRST_CAP, self._most), takes_ids=None if self._takes_ids else False
        )
        self._servers[name] = server
        at_once = min(self._most, 32) * _BATCH
        facts = ReplicaFacts(max_running=self._most, at_once=at_once, dies_of_requests=False, steps_overlap=True)
        self._tell(name, ReplicaReady(facts))
        await self._work(server)

    async def _work(self, server: _RemoteServer) -> None:
        """Starts requests as long as there are some and the server takes more."""
        while self._servers.get(server.url) is server:
            server.wake.clear()
            pause = server.paused_until - time.monotonic()
            if server.waiting and server.in_flight < int(server.cap) and pause <= 0:
                assert server.call is not None
                one = server.call.readout.kind == "tokens" or server.call.readout.kind in _LOGPROBS
                count = 1 if one else min(_BATCH, len(server.waiting))
                some, server.waiting = server.waiting[:count], server.waiting[count:]
                task = asyncio.create_task(self._answer(server, server.call, server.run, some))
                server.in_flight += 1
                server.tasks.add(task)
                task.add_done_callback(server.tasks.discard)
                continue
            try:
                await asyncio.wait_for(server.wake.wait(), pause if pause > 0 and server.waiting else None)
            except TimeoutError:
                continue

    async def _begin(self, name: str, call: RunCall | None) -> None:
        server = self._servers.get(name)
        if server is None:
            return
        server.call, server.run, server.waiting = call, server.run + 1, []
        for task in server.tasks:
            task.cancel()

    async def _give(self, name: str, windows: list[Window]) -> None:
        server = self._servers.get(name)
        if server is not None and server.call is not None:
            server.waiting += requests_of(windows)
            server.wake.set()

    async def _drop(self, name: str, reason: str) -> None:
        """Gives a server up, and meets it again when it is back."""
        server = self._servers.pop(name, None)
        if server is None:
            return
        server.wake.set()
        for task in server.tasks:
            task.cancel()
        self._tell(name, ReplicaLost(reason, returns=True))
        await server.client.aclose()
        await self._open(name)

    async def _answer(
        self, server: _RemoteServer, call: RunCall, run: int, some: list[tuple[int, int, Request]]
    ) -> None:
        started = time.perf_counter()
        report = ReplicaReport()
        try:
            answers, report.stats = await self._ask(server, call, [request for _, _, request in some])
            report.answers = [(lease, place, a) for (lease, place, _), a in zip(some, answers, strict=True)]
        except JobError as error:
            report.failure = error
        except _Down as error:
            # The task that gives the server up cancels the others; this one must not be among them.
            self._do(self._drop(server.url, str(error)))
        except InputError as error:
            report.answers = [(lease, place, error) for lease, place, _ in some]
        finally:
            server.in_flight -= 1
            server.wake.set()
        if run == server.run and (report.answers or report.failure):
            stats = report.stats or Stats()
            seconds = time.perf_counter() - started
            report.steps = [StepInfo(stats.rows_computed, 0, len(some), stats.tokens, seconds, seconds, len(some))]
            self._tell(server.url, report)

    async def _ask(self, server: _RemoteServer, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Returns the answers to some requests. Where a server refuses all, each is asked by itself."""
        if call.readout.kind in _LOGPROBS:
            return await self._ask_each(server, call, requests, None)
        if server.takes_ids is False:
            return await self._ask_each(server, call, requests, self._text_of(server))
        try:
            found = await self._ask_once(server, call, requests, None)
            server.takes_ids = True
            return found
        except InputError as error:
            if (
                server.takes_ids is not True and isinstance(error, RowError) and error.is_about_ids
            ):  # as text, then, where that is what was wrong
                found = await self._ask_each(server, call, requests, self._text_of(server))
                if server.takes_ids is None and not all(isinstance(answer, RowError) for answer in found[0]):
                    server.takes_ids = False
                return found
        return await self._ask_each(server, call, requests, None)

    async def _ask_each(
        self, server: _RemoteServer, call: RunCall, requests: list[Request], text_of: Callable[[Any], str] | None
    ) -> tuple[list[Any], Stats]:
        try:
            return await self._ask_once(server, call, requests, text_of)
        except InputError as error:
            if len(requests) == 1:
                return [error], Stats(requests=1)
        parts = [await self._ask_each(server, call, [request], text_of) for request in requests]
        return [answer for answers, _ in parts for answer in answers], sum((stats for _, stats in parts), Stats())

    async def _ask_once(
        self, server: _RemoteServer, call: RunCall, requests: list[Request], text_of: Callable[[Any], str] | None
    ) -> tuple[list[Any], Stats]:
        if call.readout.kind == "tokens":
            said = await self._post(server, [generation_body(requests[0], self.model, text_of, call.text)])
            with _reading(server):
                return [generated_of(said)], generation_stats(said)
        if call.readout.kind in _LOGPROBS:
            bodies = logprob_bodies(requests[0], call.readout, self.model)
            answers = [await self._post(server, [body]) for body in bodies]
            tokens = len(requests[0].tokens)
            stats = Stats(tokens=tokens, rows_computed=len(bodies) * tokens, requests=1, steps=1)
            with _reading(server):
                return [logprobs_of(answers, requests[0], call.readout)], stats
        said = await self._post(server, embedding_bodies(requests, call.readout, self.model, text_of))
        tokens = sum(len(request.tokens) for request in requests)
        stats = Stats(tokens=tokens, rows_computed=tokens, requests=len(requests), steps=1)
        with _reading(server):
            return embeddings_of(said, len(requests)), stats

    def _text_of(self, server: _RemoteServer) -> Callable[[Any], str]:
        """Returns what makes text of token ids."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            message = f"{server.url} takes no token ids, and without a tokenizer there is no text"
            raise JobError(f"{message}; name one with --tokenizer")

        def text(tokens: Any) -> str:
            before, after = len(tokenizer.prefix_ids), len(tokenizer.suffix_ids)
            if before and tokens[:before].tolist() == tokenizer.prefix_ids.tolist():
                tokens = tokens[before:]  # the server puts them there itself
            if after and tokens[-after:].tolist() == tokenizer.suffix_ids.tolist():
                tokens = tokens[:-after]
            return tokenizer.decode(tokens)

        return text

    async def _post(self, server: _RemoteServer, bodies: Sequence[tuple[str, Any]]) -> Any:
        """Returns the server's answer to the first of the bodies whose path it has; asks again where that may help."""
        attempts, pause, last = 0, _FIRST_PAUSE, ""
        deadline = time.monotonic() + self._patience
        while attempts < _ATTEMPTS and time.monotonic() < deadline:
            path, body = bodies[0]
            try:
                said = await server.client.post(path, json=body)
            except httpx.TransportError as error:
                attempts, last = attempts + 1, f"{type(error).__name__}: {error}"
                is_down = isinstance(error, httpx.ConnectError) and attempts == _ATTEMPTS
                if is_down:
                    raise _Down(f"it cannot be reached ({last})") from None
                await asyncio.sleep(_jittered(pause))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except httpx.DecodingError as error:
                raise RowError(server.url, 0, f"an answer that cannot be unpacked: {error}") from None
            if said.status_code < 300:
                server.cap = min(self._most, server.cap + 1 / server.cap)
                with _reading(server):
                    return said.json()
            if said.status_code == 404 and len(bodies) > 1:
                bodies = bodies[1:]
                continue
            last = _said(said)
            if said.status_code in (429, 503):
                server.cap = max(1.0, server.cap / 2)
                wait = _retry_after(said) or _jittered(pause)
                server.paused_until = time.monotonic() + wait
                await asyncio.sleep(wait * random.uniform(1.0, 1.25))
            elif said.status_code >= 500 or said.status_code == 408:
                attempts += 1
                await asyncio.sleep(_jittered(pause))
            elif said.status_code in _REFUSALS:
                raise JobError(f"{server.url}: {_REFUSALS[said.status_code]}: {last}")
            else:
                raise RowError(server.url, said.status_code, last)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise RowError(server.url, 0, f"no answer after {attempts} attempts: {last}")


@contextmanager
def _reading(server: _RemoteServer) -> Iterator[None]:
    """Makes the error of the requests out of whatever an answer lacks: a gateway may say 200 and mean an error."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RowError(server.url, 200, f"nothing that can be read ({type(error).__name__}: {error})") from None


def _said(said: httpx.Response) -> str:
    """Returns the message of an error."""
    try:
        found = said.json()
        error = found.get("error", found)
        text = error.get("message") if isinstance(error, dict) else error
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
