"""Takes items of tasks from requests, sees to it that not too many wait, and gives back what the tasks make of them.

Tokenising and making responses happen in a pool of threads, computing in the engine's; the event loop only waits. What
is short it does itself: to hand work to another thread, and to be woken by it, takes a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ..engine.pace import Pace
from ..engine.replies import Reply, events_of
from ..engine.samples import TextPiece
from ..errors import InputError
from ..schedule.fair import FairAdmission
from ..schedule.generate_step import NOBODY
from ..tasks import Work
from ..tasks.images import within
from ..tasks.run import finish_items
from ..types import Owner, Request
from .http import Refusal
from .keys import Keys
from .limits import check_item, has_images, takes_long
from .metrics import Metrics
from .options import ServeOptions
from .store import Store
from .watch import StepWatch

__all__ = ["Desk", "TaskOrder", "apart"]

T = TypeVar("T")

# What a token is guessed to take of a request's body, before it is known.
BYTES_A_TOKEN = 4
# The bytes of a body, and the results and tokens of an answer, that are short.
SHORT_BYTES, SHORT_RESULTS, SHORT_TOKENS = 4096, 16, 1024
# Answers by which the rate is measured, and the longest a client is told to wait, in seconds.
MEASURED, LONGEST_WAIT = 128, 120


@dataclass
class TaskOrder:
    """A TaskOrder is what one HTTP request asks of a task.

    task       the task's name
    items      its items
    options    of the task, for this request
    namespace  a prefix is shared only within it (see `keys.py`)
    share      whether prompts may be shared with others', now or later
    owner      for whom it is
    """

    task: str
    items: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    share: bool = True
    owner: Owner = NOBODY


class Desk:
    """Stands between the faces and the engine of one LLM."""

    def __init__(self, llm: Any, options: ServeOptions, metrics: Metrics, keys: Keys, store: Store | None = None):
        """store: where clients' files are, which may be images."""
        self._store = store
        self.llm, self.options, self._metrics, self._keys = llm, options, metrics, keys
        self.service, self.watch = llm.engine.service, StepWatch(llm.engine)
        self.admission = FairAdmission(keys.share_of, tenant_of=keys.tenant_of, batch_share=options.batch_share)
        seconds = None if options.step_ms is None else options.step_ms / 1e3
        self.pace = Pace(self.admission, step_seconds=seconds, batch_share=options.batch_share)
        self.service.set_pace(self.pace)
        self.replies: set[Reply] = set()  # those that have no answer yet
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="prefold-prepare")
        # To decode images takes long, and one waits for the other: what is text alone does not wait for them.
        self._pool_of_images = ThreadPoolExecutor(2, thread_name_prefix="prefold-images")
        names = ("max_n", "max_logprobs", "escape_special")
        self._of_texts = {name: getattr(options, name) for name in names}
        self._ended: deque[tuple[float, int]] = deque(maxlen=MEASURED)  # (when, tokens)
        self._preparing: dict[object, tuple[Owner, int]] = {}  # {request: for whom, and its tokens, as guessed}

    # --------------------------------------------------------------------------------------------- who is let in

    @property
    def waiting(self) -> tuple[int, int]:
        """Returns how many requests wait to be computed, and the tokens of their prompts."""
        sizes = [tokens for _, tokens in self._waiting()]
        return len(sizes), sum(sizes)

    def _waiting(self) -> list[tuple[Owner, int]]:
        """Returns (for whom, tokens) of each request that waits."""
        waiting = [(reply.owner, reply.tokens) for reply in self.replies if reply.begun_at is None]
        return waiting + list(self._preparing.values())

    @property
    def running(self) -> int:
        """Returns how many requests are being computed."""
        return sum(reply.begun_at is not None for reply in self.replies)

    def check_room(self, owner: Owner, *, computes: bool = True) -> None:
        """Raises Refusal (429) where too many wait for one more of this owner's to be taken.

        computes  whether it will wait for the engine; else only those are in its way that are being prepared
        """
        waiting = self._waiting() if computes else list(self._preparing.values())
        limits, options = self._keys.limits_of(owner.tenant), self.options
        is_limited = limits.max_waiting_requests is not None or limits.max_waiting_tokens is not None
        mine = [one for one in waiting if one[0].tenant == owner.tenant] if is_limited else []
        for found, who, most_requests, most_tokens in (
            (waiting, "", options.max_waiting_requests, options.max_waiting_tokens),
            (mine, " of yours", limits.max_waiting_requests, limits.max_waiting_tokens),
        ):
            tokens = sum(size for _, size in found)
            for count, most, what in ((len(found), most_requests, "requests"), (tokens, most_tokens, "tokens")):
                if most is not None and count >= most:
                    raise Refusal(
                        429,
                        f"{count} {what}{who} are waiting",
                        remedy="send the request again after the seconds in Retry-After",
                        code="rate_limit_exceeded",
                        headers={"retry-after": str(self._seconds_for(len(found), tokens))},
                    )

    @contextmanager
    def admitted(self, num_bytes: int, owner: Owner, *, computes: bool = True) -> Any:
        """Counts a request of so many bytes while it is prepared. Raises Refusal (429) where too many wait (see
        `check_room`)."""
        self.check_room(owner, computes=computes)
        key = object()
        self._preparing[key] = owner, num_bytes // BYTES_A_TOKEN
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

    async def answer(self, order: TaskOrder, num_bytes: int) -> list[dict[str, Any]]:
        """Returns the task's result of each item. Raises InputError or Refusal."""
        async with self._entered(order, num_bytes, text=False) as (task, works, replies):
            answers = [await reply.answer() for reply in replies]
        if task.readout.kind == "tokens":
            results = [[answer] for answer in answers]
        else:
            left = iter(answers[0])
            results = [[next(left) for _ in work.requests] for work in works]
        if _are_short(results):
            made = finish_items(task, works, results)
        else:
            made = await self.in_pool(finish_items, task, works, results)
        found = [raised(one) for one in made]
        if task.readout.kind == "tokens":
            for result in found:
                self._metrics.prompt(order.owner.tenant, result)
        return found

    async def requests(self, order: TaskOrder, num_bytes: int) -> list[Request]:
        """Returns the requests that an order makes; computes nothing. Raises InputError or Refusal."""
        with self.admitted(num_bytes, order.owner, computes=False):
            _, works = await self._prepared(order)
        return [request for work in works for request in work.requests]

    async def tokens(self, order: TaskOrder, num_bytes: int) -> list[list[int]]:
        """Returns the token ids of every prompt that an order makes; computes nothing. Raises InputError or Refusal."""
        return [request.tokens.tolist() for request in await self.requests(order, num_bytes)]

    async def without_engine(self, owner: Owner, num_bytes: int, function: Callable[[], T]) -> T:
        """Returns what `function` returns, which needs no engine: in the pool of threads, but for a short body.
        Raises Refusal where too many wait."""
        with self.admitted(num_bytes, owner, computes=False):
            if num_bytes <= SHORT_BYTES:
                return function()
            found: T = await self.in_pool(function)
        return found

    async def with_engine(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, called between two steps."""
        return await self.in_pool(self._between_steps, function)

    def _between_steps(self, function: Callable[[], T]) -> T:
        with self.service.generator.turn:
            return function()

    async def stream(
        self, order: TaskOrder, num_bytes: int
    ) -> AsyncGenerator[tuple[int] | tuple[int, int, str, list[dict[str, Any]]] | tuple[int, dict[str, Any]]]:
        """Yields (item, sample, piece of its text, log-probabilities of its tokens) as they come, and (item, its
        result) as items end.

        (tokens of the prompts,) is yielded before, once the request has been taken: what is wrong with it is raised by
        then.
        """
        last, is_first = time.perf_counter(), True
        async with self._entered(order, num_bytes, text=True) as (task, works, replies):
            yield (sum(reply.tokens for reply in replies),)
            async with aclosing(events_of(replies)) as events:
                async for number, what in events:
                    now = time.perf_counter()
                    (self._metrics.first if is_first else self._metrics.between).observe(now - last)
                    last, is_first = now, False
                    if isinstance(what, TextPiece):
                        tokens = [task.token_logprobs(*pair) for pair in what.tokens]
                        yield number, what.sample, what.text, tokens
                    else:
                        (result,) = finish_items(task, [works[number]], [[what]])
                        self._metrics.prompt(order.owner.tenant, raised(result))
                        yield number, result

    def task(self, name: str, options: Mapping[str, Any], tenant: Hashable = None, namespace: str = "") -> Any:
        """Returns a task within the server's limits. Its requests read no file of this machine, but those that the
        tenant has uploaded, and their images are in the namespace."""
        task = self.llm.task(name, **(self._of_texts if name == "generate" else {}), **options)
        images = getattr(task.inputs, "images", None)
        if images is None:
            return task
        found = copy(task)
        store = self._store
        uploaded = None if store is None else lambda id: store.path_of(str(tenant or ""), id)
        found.inputs = replace(task.inputs, images=images.for_strangers(uploaded, namespace))
        return found

    def check(self, item: Any) -> None:
        """Raises InputError for an item that strangers may not send."""
        check_item(item, self.options, self.llm.tokenizer)

    def _prepare(self, order: TaskOrder) -> tuple[Any, list[Work]]:
        for item in order.items:
            self.check(item)
        task = self.task(order.task, order.options, order.owner.tenant, order.namespace)
        works: list[Work] = [raised(work) for work in task.prepare(order.items)]
        if not any(work.requests for work in works):  # nobody would ever answer
            raise InputError("the request holds no text", remedy="give at least one", code="empty")
        for work in works:
            apart(work, order.namespace)
        return task, works

    async def _prepared(self, order: TaskOrder) -> tuple[Any, list[Work]]:
        """Returns what `_prepare` does, called in a pool of threads."""
        sees = self.llm.engine.images is not None and any(map(has_images, order.items))
        pool = self._pool_of_images if sees else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, self._prepare, order)

    @asynccontextmanager
    async def _entered(
        self, order: TaskOrder, num_bytes: int, *, text: bool
    ) -> AsyncIterator[tuple[Any, list[Work], list[Reply]]]:
        """Gives (task, a Work of each item, replies) of an order that the engine works for within the context, and
        counts it where the context ends well. There is a reply for each text to generate, or one for all numbers."""
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        with self.admitted(num_bytes, order.owner) as prepared:
            is_short = self._is_short(order, num_bytes)
            task, works = self._prepare(order) if is_short else await self._prepared(order)
            is_text = task.readout.kind == "tokens"
            sizes = [sum(len(request.tokens) for request in work.requests) for work in works]
            replies = [Reply(loop, size, order.owner) for size in (sizes if is_text else [sum(sizes)])]
            self.replies.update(replies)
            prepared()
            try:
                if is_text and is_short:
                    self._generate(works, replies, text, order.share)
                elif is_text:
                    await self.in_pool(self._generate, works, replies, text, order.share)
                else:
                    every = [one for work in works for one in work.requests]
                    read = partial(self.service.read, replies[0], every, task.readout)
                    read() if is_short else await self.in_pool(read)
                yield task, works, replies
            finally:
                for reply in replies:
                    self.service.cancel(reply)
                self.replies.difference_update(replies)
        self._count(sum(sizes), replies, started)

    def _is_short(self, order: TaskOrder, num_bytes: int) -> bool:
        """Returns whether a request is soon ready for the engine: its body is short, without images that might have to
        be fetched, a grammar to be compiled, or a chat template of its own, and the engine has generated before."""
        engine = self.llm.engine
        if num_bytes > SHORT_BYTES or engine.images is not None or not self.service.has_generator:
            return False
        return not any(isinstance(item, Mapping) and takes_long(item) for item in order.items)

    def _generate(self, works: Sequence[Work], replies: Sequence[Reply], text: bool, share: bool) -> None:
        for reply, work in zip(replies, works, strict=True):
            if not reply.is_cancelled:
                self.service.generate(reply, work.requests[0], self.llm.tokenizer, text=text, share=share)

    def _count(self, tokens: int, replies: Sequence[Reply], started: float) -> None:
        """Counts a request that has been answered, and the tokens of its prompts."""
        now = time.perf_counter()
        self._ended.append((now, tokens))
        self._metrics.seconds.observe(now - started)
        for reply in replies:
            if reply.begun_at is not None:
                self._metrics.queue.observe(reply.begun_at - started)

    async def in_pool(self, function: Any, *arguments: Any) -> Any:
        """Returns what a function returns, called in the pool of threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def give_up(self, error: Exception) -> None:
        """Answers all that runs with an error."""
        for reply in list(self.replies):
            reply.put([error])

    def read_shares(self) -> None:
        """Takes over what the file of keys says now."""
        cache = lambda: self.service.generator.scheduler.cache  # noqa: E731
        self._pool.submit(self._between_steps, lambda: self.admission.read_shares(cache()))

    def close(self) -> None:
        """Ends what runs, without an answer."""
        self.watch.close()
        for reply in list(self.replies):
            self.service.cancel(reply)
        if self.service.pace is self.pace:
            self.service.set_pace(None)
        for pool in (self._pool, self._pool_of_images):
            pool.shutdown(wait=False, cancel_futures=True)


def _are_short(results: Sequence[Sequence[Any]]) -> bool:
    """Returns whether it takes no time to make responses of results: each of a few Results, or lists of Generated."""
    found = [result for some in results for result in some]
    tokens = sum(len(one.tokens) for result in found if isinstance(result, list) for one in result)
    return len(found) <= SHORT_RESULTS and tokens <= SHORT_TOKENS


def apart(work: Work, namespace: str) -> None:
    """Puts the requests of an item into a namespace, outside of which they share nothing. Their images are made in it
    (see `Desk.task`)."""
    if namespace:
        work.requests[:] = [replace(request, salt=within(namespace, request.salt)) for request in work.requests]


def raised(value: Any) -> Any:
    """Returns a value; raises it where it is an InputError."""
    if isinstance(value, InputError):
        raise value
    return value
