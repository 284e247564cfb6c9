"""Takes items of tasks from requests, sees to it that not too many wait, and gives back what the tasks make of them.

Tokenising and making responses happen in a pool of threads, computing in the engine's; the event loop only waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..engine.samples import TextPiece
from ..errors import InputError
from ..tasks import Work
from ..tasks.run import finish_items
from ..types import Request
from .http import Refusal
from .metrics import Metrics
from .options import ServeOptions
from .thread import EngineThread, Reply
from .watch import StepWatch

__all__ = ["Desk", "Order", "apart"]

T = TypeVar("T")

# What a token is guessed to take of a request's body, before it is known.
BYTES_A_TOKEN = 4
# Answers by which the rate is measured, and the longest a client is told to wait, in seconds.
MEASURED, LONGEST_WAIT = 128, 120


@dataclass
class Order:
    """An Order is what one HTTP request asks of a task.

    task       the task's name
    items      its items
    options    of the task, for this request
    namespace  a prefix is shared only within it (see `keys.py`)
    share      whether prompts may be shared with others', now or later
    """

    task: str
    items: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    share: bool = True


class Desk:
    """Stands between the faces and the engine of one LLM."""

    def __init__(self, llm: Any, options: ServeOptions, metrics: Metrics):
        self.llm, self.options, self._metrics = llm, options, metrics
        self.thread, self.watch = EngineThread(llm.engine), StepWatch(llm.engine)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="prefold-prepare")
        self._limits = {"max_n": options.max_n, "max_logprobs": options.max_logprobs}
        self._ended: deque[tuple[float, int]] = deque(maxlen=MEASURED)  # (when, tokens)
        self._preparing: dict[object, int] = {}  # {request: its tokens, as guessed}

    # --------------------------------------------------------------------------------------------- who is let in

    @property
    def waiting(self) -> tuple[int, int]:
        """Returns how many requests wait to be computed, and the tokens of their prompts."""
        waiting = [reply.tokens for reply in self.thread.replies if reply.begun_at is None]
        return len(waiting) + len(self._preparing), sum(waiting) + sum(self._preparing.values())

    @property
    def running(self) -> int:
        """Returns how many requests are being computed."""
        return sum(reply.begun_at is not None for reply in self.thread.replies)

    @contextmanager
    def admitted(self, num_bytes: int) -> Any:
        """Counts a request of so many bytes while it is prepared. Raises Refusal (429) where too many wait."""
        requests, tokens = self.waiting
        for count, most, what in (
            (requests, self.options.max_waiting_requests, "requests"),
            (tokens, self.options.max_waiting_tokens, "tokens"),
        ):
            if count >= most:
                raise Refusal(
                    429,
                    f"{count} {what} are waiting",
                    remedy="send the request again after the seconds in Retry-After",
                    code="rate_limit_exceeded",
                    headers={"retry-after": str(self._seconds_for(requests, tokens))},
                )
        key = object()
        self._preparing[key] = num_bytes // BYTES_A_TOKEN
        try:
            yield lambda: self._preparing.pop(key, None)
        finally:
            self._preparing.pop(key, None)

    def _seconds_for(self, requests: int, tokens: int) -> int:
        """Returns in how many seconds the half of what waits is done, by the rate of the last answers."""
        if len(self._ended) < 2:
            return 1
        spent = max(1e-3, time.perf_counter() - self._ended[0][0])
        rates = (len(self._ended) / spent, sum(tokens for _, tokens in self._ended) / spent)
        seconds = max(requests / 2 / rates[0], tokens / 2 / max(rates[1], 1e-9))
        return max(1, min(LONGEST_WAIT, math.ceil(seconds)))

    # ------------------------------------------------------------------------------------------------ what is asked

    async def answer(self, order: Order, num_bytes: int) -> list[dict[str, Any]]:
        """Returns the task's result of each item. Raises InputError or Refusal."""
        started = time.perf_counter()
        with self.admitted(num_bytes) as prepared:
            task, works = await self.in_pool(self._prepare, order)
            replies = self._replies(task, works)
            keys: list[tuple[Reply, int]] = []
            try:
                await self._enter(task, works, replies, order, keys)
                prepared()
                answers = [await reply.answer() for reply in replies]
            finally:
                self._leave(replies, keys)
        if task.readout.kind == "tokens":
            results = [[answer] for answer in answers]
        else:
            left = iter(answers[0])
            results = [[next(left) for _ in work.requests] for work in works]
        found = await self.in_pool(finish_items, task, works, results)
        self._count(works, replies, started)
        return [raised(one) for one in found]

    async def requests(self, order: Order) -> list[Request]:
        """Returns the requests that an order makes; computes nothing. Raises InputError."""
        _, works = await self.in_pool(self._prepare, order)
        return [request for work in works for request in work.requests]

    async def tokens(self, order: Order) -> list[list[int]]:
        """Returns the token ids of every prompt that an order makes; computes nothing. Raises InputError."""
        return [request.tokens.tolist() for request in await self.requests(order)]

    async def with_engine(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, called between two steps."""

        def call() -> T:
            with self.llm.engine.generator.turn:
                return function()

        return await self.in_pool(call)

    async def stream(
        self, order: Order, num_bytes: int
    ) -> AsyncGenerator[tuple[int] | tuple[int, int, str, list[dict[str, Any]]] | tuple[int, dict[str, Any]]]:
        """Yields (item, sample, piece of its text, log-probabilities of its tokens) as they come, and (item, its
        result) as items end.

        (tokens of the prompts,) is yielded before, once the request has been taken: what is wrong with it is raised by
        then.
        """
        started = last = time.perf_counter()
        with self.admitted(num_bytes) as prepared:
            task, works = await self.in_pool(self._prepare, order)
            replies = self._replies(task, works)
            keys: list[tuple[Reply, int]] = []
            events: asyncio.Queue[Any] = asyncio.Queue(2 * len(replies))
            readers: list[asyncio.Task[None]] = []
            try:
                await self._enter(task, works, replies, order, keys, text=True)
                prepared()
                readers = [
                    asyncio.create_task(self._forward(number, reply, events)) for number, reply in enumerate(replies)
                ]
                yield (sum(reply.tokens for reply in replies),)
                left = len(readers)
                while left:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise event
                    now = time.perf_counter()
                    (self._metrics.first if last is started else self._metrics.between).observe(now - last)
                    last = now
                    number, what = event
                    if isinstance(what, TextPiece):
                        tokens = [task.token_logprobs(*pair) for pair in what.tokens]
                        yield number, what.sample, what.text, tokens
                    else:
                        (result,) = finish_items(task, [works[number]], [[what]])
                        left -= 1
                        yield number, raised(result)
            finally:
                for reader in readers:
                    reader.cancel()
                self._leave(replies, keys)
        self._count(works, replies, started)

    async def _forward(self, number: int, reply: Reply, events: asyncio.Queue[Any]) -> None:
        try:
            async for piece in reply.pieces():
                await events.put((number, piece))
            await events.put((number, await reply.answer()))
        except Exception as error:
            await events.put(error)

    def task(self, name: str, options: Mapping[str, Any]) -> Any:
        """Returns a task within the server's limits."""
        return self.llm.task(name, **(self._limits if name == "generate" else {}), **options)

    def _prepare(self, order: Order) -> tuple[Any, list[Work]]:
        task = self.task(order.task, order.options)
        works: list[Work] = [raised(work) for work in task.prepare(order.items)]
        for work in works:
            apart(work, order.namespace)
        return task, works

    def _replies(self, task: Any, works: Sequence[Work]) -> list[Reply]:
        """Returns a reply for each text to generate, or one for all numbers of the request."""
        loop = asyncio.get_running_loop()
        sizes = [sum(len(request.tokens) for request in work.requests) for work in works]
        return [Reply(loop, size) for size in (sizes if task.readout.kind == "tokens" else [sum(sizes)])]

    async def _enter(
        self,
        task: Any,
        works: Sequence[Work],
        replies: Sequence[Reply],
        order: Order,
        keys: list[tuple[Reply, int]],
        *,
        text: bool = False,
    ) -> None:
        """Hands the requests to the engine, and notes their keys in `keys`."""
        if task.readout.kind != "tokens":
            requests: list[Any] = [request for work in works for request in work.requests]
            keys.append((replies[0], self.thread.read(replies[0], requests, task.readout)))
            return

        def enter() -> None:
            for reply, work in zip(replies, works, strict=True):
                if reply.is_cancelled:
                    return
                (request,) = work.requests
                key = self.thread.generate(reply, request, self.llm.tokenizer, text=text, share=order.share)  # type: ignore[arg-type]
                keys.append((reply, key))

        await self.in_pool(enter)

    def _leave(self, replies: Sequence[Reply], keys: Sequence[tuple[Reply, int]]) -> None:
        """Cancels what the engine still works for."""
        for reply in replies:
            reply.is_cancelled = True  # what is being entered in this moment is cancelled by the one who enters it
        for reply, key in list(keys):
            self.thread.cancel(reply, key)

    def _count(self, works: Sequence[Work], replies: Sequence[Reply], started: float) -> None:
        """Counts a request that has been answered."""
        now = time.perf_counter()
        self._ended.append((now, sum(len(request.tokens) for work in works for request in work.requests)))
        self._metrics.seconds.observe(now - started)
        for reply in replies:
            if reply.begun_at is not None:
                self._metrics.queue.observe(reply.begun_at - started)

    async def in_pool(self, function: Any, *arguments: Any) -> Any:
        """Returns what a function returns, called in the pool of threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def give_up(self, error: Exception) -> None:
        """Answers all that runs with an error."""
        for reply in self.thread.replies:
            reply.put([error])

    def close(self) -> None:
        """Ends the threads. What runs has no answer then."""
        self.watch.close()
        self.thread.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def apart(work: Work, namespace: str) -> None:
    """Puts the requests of an item into a namespace, outside of which they share nothing."""
    if namespace:
        work.requests[:] = [replace(request, salt=f"{namespace}/{request.salt}") for request in work.requests]


def raised(value: Any) -> Any:
    """Returns a value; raises it where it is an InputError."""
    if isinstance(value, InputError):
        raise value
    return value
