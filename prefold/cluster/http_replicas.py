"""Replicas that are servers: any that speaks OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI.

Generated text comes from /v1/completions or /v1/chat/completions, embeddings from /v1/embeddings or TEI's /embed, and
log-probabilities of targets from /v1/completions as vLLM has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import islice, takewhile
from typing import Any

from ..errors import InputError, JobError
from ..text import Tokenizer
from ..types import Request, Stats
from .backends import Backend
from .hosts import AsyncHost
from .http_bodies import (
    NOT_OPENAIS,
    RowError,
    embedding_bodies,
    embeddings_of,
    generated_of,
    generation_body,
    generation_stats,
    logprob_bodies,
    logprobs_of,
)
from .http_server import FirstAnswer, check_key, check_url, meet, reading
from .local_replicas import LocalReplicas
from .remote_model import context_of, is_of_bytes
from .replicas import ReplicaDown, ReplicaFacts, RunCall

_LOGPROBS = ("logprobs", "logits")  # kinds of Readout
_BATCH = 16  # prompts of one request for embeddings
_LONGEST_ANSWER = 10  # times the patience
_LOOKS = 4  # at a server's counters within the patience
_TICK = 0.1  # seconds after which a host that is being made looks whether anybody waits for it
_HUNG = "it has answered nothing for too long; where an answer takes longer, give more --patience"

TextOf = Callable[[Any], str]


class HttpReplicas(LocalReplicas):
    """Servers, each a replica.

    urls        of the servers, with or without /v1
    model       its name there
    tokenizer   turns token ids into text for a server that takes no ids
    takes_ids   whether the token ids of requests are those of the model
    context     of the model as its files say, in tokens; None: not known. A server may say a smaller one
    most        requests in flight at a server
    patience    seconds for which a server that cannot be reached is asked again, and a request that fails is sent again
    timeout     seconds that an answer may take, of a server that makes progress; None: ten times the patience
    notify      called with what a person should know of a server

    A key is taken from the environment variable PREFOLD_API_KEY, and sent as a bearer token. A server makes progress
    when it answers, and while what it counts of tokens at /metrics changes; one that is given up again and again, and
    has answered nothing since, does not come back. Raises InputError for what is no URL, and no key.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        tokenizer: Tokenizer | None,
        *,
        takes_ids: bool = True,
        context: int | None = None,
        most: int = 256,
        patience: float = 300.0,
        timeout: float | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ):
        for url in urls:
            check_url(url)
        check_key()
        how: dict[str, Any] = {
            "tokenizer": tokenizer, "takes_ids": takes_ids, "context": context, "most": most, "patience": patience,
            "timeout": _LONGEST_ANSWER * patience if timeout is None else timeout, "notify": notify,
            "first": FirstAnswer(notify), "stopping": lambda: self.is_closed,
        }  # fmt: skip
        names = [url.rstrip("/").removesuffix("/v1") for url in urls]
        super().__init__({name: partial(HttpHost, name, model, **how) for name in names}, killed=_HUNG)


class HttpHost(AsyncHost):
    """Asks one server.

    first     of all servers of the job
    stopping  whether nobody waits for the server any more
    others    as of HttpReplicas

    Raises ReplicaDown, with the reason, where there is no such server.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        tokenizer: Tokenizer | None,
        takes_ids: bool,
        context: int | None,
        most: int,
        patience: float,
        timeout: float,
        notify: Callable[[str], None],
        first: FirstAnswer,
        stopping: Callable[[], bool],
    ):
        super().__init__("prefold-http")
        self._tokenizer, self._takes_ids = tokenizer, takes_ids
        self._patience, self._notify = patience, notify
        at_once = min(most, 32) * _BATCH
        self.facts = ReplicaFacts(
            max_running=most, at_once=at_once, is_server=True, dies_of_requests=False, steps_overlap=True
        )
        meeting = self._begun(meet(url, model, most=most, patience=patience, timeout=timeout, first=first))
        try:
            while not wait([meeting], _TICK).done:
                if stopping():
                    meeting.cancel()
            self._server = server = meeting.result()
        except BaseException:
            super().close()
            raise
        server.takes_ids = None if takes_ids else False
        contexts = [length for length in (context, server.context) if length is not None]
        server.context = min(contexts, default=None) if takes_ids else None
        self._watching = self._begun(self._watch())

    # ------------------------------------------------------------------------------------- in the thread

    async def _leave(self) -> None:
        await super()._leave()
        if hasattr(self, "_server"):
            await self._server.client.aclose()

    async def _watch(self) -> None:
        """Says that the server makes progress while it answers nothing, as long outputs take their time."""
        before: list[str] = []
        while True:
            now = await self._server.counters() if self._tasks else []
            if before and now and now != before:
                with self._changed:
                    self._report.is_at_work = True
                    self._changed.notify()
            before = now
            await asyncio.sleep(self._patience / _LOOKS)

    def _refusal(self, call: RunCall) -> str:
        if call.readout.kind == "head":
            message = "no server gives the exact outputs of a classification head over HTTP"
            return f"{message}; leave out --url, or give labels or words that the model can say"
        if call.readout.kind in _LOGPROBS and not self._takes_ids:
            return "log-probabilities need token ids; name the model's tokenizer with --tokenizer"
        return ""

    def _num_to_ask(self, call: RunCall) -> int:
        pause = self._server.paused_until - time.monotonic()
        if pause > 0:
            self._loop.call_later(pause, self._fill)
        if pause > 0 or len(self._tasks) >= int(self._server.cap):
            return 0
        if call.readout.kind == "tokens" or call.readout.kind in _LOGPROBS:
            return 1
        adapter = self._waiting[0][2].adapter  # embeddings of one model go into one body
        return sum(1 for _ in takewhile(lambda one: one[2].adapter == adapter, islice(self._waiting, _BATCH)))

    async def _ask(self, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Returns the answers to some requests. Where the server refuses several at once, each is asked by itself."""
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
        """Asks with token ids, or as text where the server refuses them."""
        server = self._server
        try:
            if call.readout.kind in _LOGPROBS:
                return await self._logprobs(call, requests[0])
            ask = self._generated if call.readout.kind == "tokens" else self._embedded
            if server.takes_ids is not False:
                try:
                    found = await ask(call, requests, None)
                    server.takes_ids = True
                    return found
                except RowError as error:
                    if server.takes_ids or not error.is_about_form or len(requests) > 1:
                        raise
            found = await ask(call, requests, self._text_of())
            server.takes_ids = server.takes_ids or False
            return found
        except (InputError, JobError, ReplicaDown):
            raise
        except Exception as error:  # of what nobody thought of: the server is not lost for it
            message = f"it could not be asked ({type(error).__name__}: {error})"
            raise RowError(server.url, 0, message) from error

    async def _logprobs(self, call: RunCall, request: Request) -> tuple[list[Any], Stats]:
        server = self._server
        bodies = logprob_bodies(request, call.readout, server.model)
        answers = [await server.post([body]) for body in bodies]
        tokens = len(request.tokens)
        with reading(server.url):
            found = logprobs_of(answers, request, call.readout)
        return [found], Stats(tokens=tokens, rows_computed=len(bodies) * tokens, requests=1, steps=1)

    async def _embedded(
        self, call: RunCall, requests: list[Request], text_of: TextOf | None
    ) -> tuple[list[Any], Stats]:
        server = self._server
        said = await server.post(embedding_bodies(requests, call.readout, server.model, text_of))
        tokens = sum(len(request.tokens) for request in requests)
        with reading(server.url):
            found = embeddings_of(said, len(requests))
        return found, Stats(tokens=tokens, rows_computed=tokens, requests=len(requests), steps=1)

    async def _generated(
        self, call: RunCall, requests: list[Request], text_of: TextOf | None
    ) -> tuple[list[Any], Stats]:
        """Where a server refuses a sampling option that OpenAI does not have, and takes the request without those that
        change nothing, they are not sent to it again."""
        server, (request,) = self._server, requests

        async def post(knows_all: bool) -> Any:
            how = {"context": server.context, "knows_all": knows_all}
            return await server.post([generation_body(request, server.model, text_of, call.text, **how)])

        try:
            said = await post(knows_all := server.knows_all)
        except RowError as error:
            if not (knows_all and error.is_about_form and any(name in str(error) for name in NOT_OPENAIS)):
                raise
            said = await post(False)
            if server.knows_all:
                server.knows_all = False
                names = ", ".join(NOT_OPENAIS)
                self._notify(f"{server.url} knows no {names}; they are sent only where they are asked for")
        with reading(server.url):
            return [generated_of(said)], generation_stats(said)

    def _text_of(self) -> TextOf:
        """Returns what makes text of token ids."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            message = f"{self._server.url} takes no token ids, and without a tokenizer there is no text"
            raise JobError(f"{message}; name one with --tokenizer")

        def text(tokens: Any) -> str:
            before, after = len(tokenizer.prefix_ids), len(tokenizer.suffix_ids)
            if before and tokens[:before].tolist() == tokenizer.prefix_ids.tolist():
                tokens = tokens[before:]  # the server puts them there itself
            if after and tokens[-after:].tolist() == tokenizer.suffix_ids.tolist():
                tokens = tokens[:-after]
            return tokenizer.decode(tokens)

        return text


class _Servers(Backend):
    """The backend whose replicas are the servers of --url."""

    where = "over HTTP"
    takes = frozenset({"tokenizer"})
    on_ray = False

    def refusal(self, o: Mapping[str, Any]) -> str:
        pooling = "--pooling cannot be asked of a server, which pools as its model does; leave it out"
        return pooling if o.get("pooling") else ""

    def options(self, o: Mapping[str, Any], llm: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        return {} if o.get("max_running") is None else {"most": o["max_running"]}

    def replicas(
        self,
        o: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        checkpoint: Any,
        tokenizer: Any,
        notify: Callable[[str], None],
    ) -> HttpReplicas:
        how = {"takes_ids": not is_of_bytes(tokenizer), "context": context_of(checkpoint), "patience": o["patience"]}
        return HttpReplicas(o["url"], o["model"], tokenizer, notify=notify, **how, **options)


SERVERS = _Servers()
