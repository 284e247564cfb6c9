"""Replicas that are servers: any that speaks OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI.

Generated text comes from /v1/completions or /v1/chat/completions, embeddings from /v1/embeddings or TEI's /embed, and
log-probabilities of targets from /v1/completions as vLLM has it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from ..engine.meter import StepInfo
from ..errors import InputError, JobError
from ..stream import Window
from ..text import Tokenizer
from ..types import Request, Stats
from .backends import Backend
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
from .http_server import API_KEY, FirstAnswer, RemoteServer, ServerDown, check_key, check_url, meet, reading
from .remote_model import context_of, is_of_bytes
from .replicas import (
    RESTARTS,
    ReplicaEvent,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
    RunCall,
    requests_of,
)

__all__ = ["API_KEY", "SERVERS", "HttpReplicas"]

_LOGPROBS = ("logprobs", "logits")  # kinds of Readout
_BATCH = 16  # prompts of one request for embeddings
_LONGEST_ANSWER = 10  # times the patience
_LOOKS = 4  # at a server's counters within the patience


class HttpReplicas(Replicas):
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
        self.names = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.model, self._tokenizer, self._takes_ids = model, tokenizer, takes_ids
        self._context, self._most, self._patience = context, most, patience
        self._notify, self._first = notify, FirstAnswer(notify)
        self._timeout = _LONGEST_ANSWER * patience if timeout is None else timeout
        self._servers: dict[str, RemoteServer] = {}
        self._restarts = dict.fromkeys(self.names, RESTARTS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prefold-http", daemon=True)

    # -------------------------------------------------------------------------------- called by the fleet

    def start(self, tell: Callable[[str, ReplicaEvent], None]) -> None:
        self._tell = tell
        self._thread.start()
        for name in self.names:
            self._do(name, self._open(name))

    def begin(self, name: str, call: RunCall) -> None:
        if call.readout.kind == "head":
            message = "no server gives the exact outputs of a classification head over HTTP"
            raise JobError(f"{message}; leave out --url, or give labels or words that the model can say")
        if call.readout.kind in _LOGPROBS and not self._takes_ids:
            raise JobError("log-probabilities need token ids; name the model's tokenizer with --tokenizer")
        self._do(name, self._begin(name, call))

    def give(self, name: str, windows: list[Window]) -> None:
        self._do(name, self._give(name, windows))

    def end(self, name: str) -> None:
        self._do(name, self._begin(name, None))

    def kill(self, name: str) -> None:
        reason = "it has answered nothing for too long; where an answer takes longer, give more --patience"
        self._do(name, self._drop(name, reason))

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

    def _do(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(self._guarded(name, work), self._loop)

    # ------------------------------------------------------------------------------------- in the thread

    async def _guarded(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Does some work for a server. Where that fails the server is lost: nobody else would hear of it."""
        try:
            await work
        except Exception as error:
            self._servers.pop(name, None)
            said = str(error) if isinstance(error, ServerDown) else f"{type(error).__name__}: {error}"
            self._tell(name, ReplicaLost(said))

    async def _open(self, name: str) -> None:
        """Meets a server, and gives it work until it is given up."""
        how = {"patience": self._patience, "timeout": self._timeout}
        server = await meet(name, self.model, most=self._most, first=self._first, **how)
        server.takes_ids = None if self._takes_ids else False
        contexts = [context for context in (self._context, server.context) if context is not None]
        server.context = min(contexts, default=None) if self._takes_ids else None
        self._servers[name] = server
        at_once = min(self._most, 32) * _BATCH
        facts = ReplicaFacts(
            max_running=self._most, at_once=at_once, is_server=True, dies_of_requests=False, steps_overlap=True
        )
        self._tell(name, ReplicaReady(facts))
        server.watch = asyncio.create_task(self._watch(server))
        await self._work(server)

    async def _work(self, server: RemoteServer) -> None:
        """Starts requests as long as there are some and the server takes more."""
        while self._servers.get(server.url) is server:
            server.wake.clear()
            pause = server.paused_until - time.monotonic()
            if server.waiting and server.in_flight < int(server.cap) and pause <= 0:
                assert server.call is not None
                count = _num_together(server.waiting, server.call)
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

    async def _watch(self, server: RemoteServer) -> None:
        """Tells that a server makes progress while it answers nothing, as long outputs take their time."""
        before: list[str] = []
        while True:
            now = await server.counters() if server.in_flight else []
            if before and now and now != before:
                self._tell(server.url, ReplicaReport(is_at_work=True))
            before = now
            await asyncio.sleep(self._patience / _LOOKS)

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
        """Gives a server up, and meets it again when it is back; not where that has not helped before."""
        server = self._servers.pop(name, None)
        if server is None:
            return
        server.wake.set()
        for task in (*server.tasks, *([] if server.watch is None else [server.watch])):
            task.cancel()
        self._restarts[name] -= 1
        returns = self._restarts[name] >= 0
        self._tell(name, ReplicaLost(reason, returns))
        await server.client.aclose()
        if returns:
            await self._open(name)

    async def _answer(
        self, server: RemoteServer, call: RunCall, run: int, some: list[tuple[int, int, Request]]
    ) -> None:
        started = time.perf_counter()
        report = ReplicaReport()
        try:
            answers, report.stats = await self._ask(server, call, [request for _, _, request in some])
            report.answers = [(lease, place, a) for (lease, place, _), a in zip(some, answers, strict=True)]
        except JobError as error:
            report.failure = error
        except ServerDown as error:
            # The task that gives the server up cancels the others; this one must not be among them.
            self._do(server.url, self._drop(server.url, str(error)))
        except Exception as error:  # of what nobody thought of: without an answer the lease would never end
            problem = RowError(server.url, 0, f"it could not be asked ({type(error).__name__}: {error})")
            report.answers = [(lease, place, problem) for lease, place, _ in some]
        finally:
            server.in_flight -= 1
            server.wake.set()
        if run == server.run and (report.answers or report.failure):
            stats = report.stats or Stats()
            seconds = time.perf_counter() - started
            self._restarts[server.url] = RESTARTS
            report.steps = [StepInfo(stats.rows_computed, 0, len(some), stats.tokens, seconds, seconds, len(some))]
            self._tell(server.url, report)

    async def _ask(self, server: RemoteServer, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Returns the answers to some requests. Where a server refuses several at once, each is asked by itself."""
        has_text = call.readout.kind not in _LOGPROBS  # those need token ids
        text_of = self._text_of(server) if has_text and server.takes_ids is False else None
        try:
            found = await self._ask_once(server, call, requests, text_of)
            if has_text and text_of is None:
                server.takes_ids = True
            return found
        except InputError as error:
            is_about_form = isinstance(error, RowError) and error.is_about_form
            if has_text and text_of is None and server.takes_ids is not True and is_about_form:
                # As text, then, where that is what was wrong.
                found = await self._ask_each(server, call, requests, self._text_of(server))
                if server.takes_ids is None and not all(isinstance(answer, RowError) for answer in found[0]):
                    server.takes_ids = False
                return found
            if len(requests) == 1:
                return [error], Stats(requests=1)
        return await self._ask_each(server, call, requests, text_of)

    async def _ask_each(
        self, server: RemoteServer, call: RunCall, requests: list[Request], text_of: Callable[[Any], str] | None
    ) -> tuple[list[Any], Stats]:
        answers, stats = [], Stats()
        for request in requests:
            try:
                (answer,), counted = await self._ask_once(server, call, [request], text_of)
            except InputError as error:
                answer, counted = error, Stats(requests=1)
            answers.append(answer)
            stats = stats + counted
        return answers, stats

    async def _ask_once(
        self, server: RemoteServer, call: RunCall, requests: list[Request], text_of: Callable[[Any], str] | None
    ) -> tuple[list[Any], Stats]:
        if call.readout.kind == "tokens":
            said = await self._generate(server, call, requests[0], text_of)
            with reading(server.url):
                return [generated_of(said)], generation_stats(said)
        if call.readout.kind in _LOGPROBS:
            bodies = logprob_bodies(requests[0], call.readout, server.model)
            answers = [await server.post([body]) for body in bodies]
            tokens = len(requests[0].tokens)
            stats = Stats(tokens=tokens, rows_computed=len(bodies) * tokens, requests=1, steps=1)
            with reading(server.url):
                return [logprobs_of(answers, requests[0], call.readout)], stats
        said = await server.post(embedding_bodies(requests, call.readout, server.model, text_of))
        tokens = sum(len(request.tokens) for request in requests)
        stats = Stats(tokens=tokens, rows_computed=tokens, requests=len(requests), steps=1)
        with reading(server.url):
            return embeddings_of(said, len(requests)), stats

    async def _generate(
        self, server: RemoteServer, call: RunCall, request: Request, text_of: Callable[[Any], str] | None
    ) -> Any:
        """Returns what a server says of a request to be continued. Where it refuses a sampling option that OpenAI does
        not have, and takes the request without those that change nothing, they are not sent to it again."""

        async def post(knows_all: bool) -> Any:
            how = {"context": server.context, "knows_all": knows_all}
            return await server.post([generation_body(request, server.model, text_of, call.text, **how)])

        knows_all = server.knows_all
        try:
            return await post(knows_all)
        except RowError as error:
            if not (knows_all and error.is_about_form and any(name in str(error) for name in NOT_OPENAIS)):
                raise
        said = await post(False)
        if server.knows_all:
            server.knows_all = False
            self._notify(f"{server.url} knows no {', '.join(NOT_OPENAIS)}; they are sent only where they are asked for")
        return said

    def _text_of(self, server: RemoteServer) -> Callable[[Any], str]:
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


def _num_together(waiting: Sequence[tuple[int, int, Request]], call: RunCall) -> int:
    """Returns how many of the first requests that wait go into one body: embeddings of one model."""
    if call.readout.kind == "tokens" or call.readout.kind in _LOGPROBS:
        return 1
    adapter = waiting[0][2].adapter
    return sum(1 for _ in takewhile(lambda one: one[2].adapter == adapter, islice(waiting, _BATCH)))


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
