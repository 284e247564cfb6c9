"""The items of requests, through tasks and the engine, to the tasks' answers.

Requests are tokenised and responses are made in thread pools in which tenants take turns. The engine's thread computes.
The event loop waits, and does only short work itself. `limits.py` says what is short, and bounds the number of waiting
requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from .. import __version__
from ..api.streams import ResponseStream, events_of
from ..checkpoint import served_name
from ..engine.meter import StepInfo
from ..engine.pace import StepPolicy
from ..engine.protocol import Engine
from ..engine.samples import Sample, TextPiece
from ..engine.schedule.fair import FairAdmission
from ..errors import InputError
from ..spec.calibration import Calibration
from ..spec.requests import Generated, Owner, Readout, Request, Result, Sampling, TokenLogprobs
from ..spec.server import ServerSpec
from ..spec.task import GenerationOptions
from ..tasks import GenerateTask, Work
from ..tasks.base import attempt
from ..tasks.make import inputs_of
from ..tasks.results import Answer, Generation
from ..tasks.run import finish_items
from ..trie import MEDIA_BASE
from ..wire.answers import Events
from ..wire.body import TaskOrder
from ..wire.completions import Echo
from .http import json_of
from .kept import KnownAnswers, groups_of
from .keys import Keys
from .limits import (
    SHORT_BYTES,
    Backpressure,
    FairQueue,
    are_short,
    are_soon_ready,
    check_item,
    has_images,
    has_slow_grammar,
    has_template,
    num_samples,
)
from .metrics import Metrics, StepWatch, note
from .store import Store

T = TypeVar("T")


class RequestHandler:
    """The layer between the dialects and the engine of one LLM.

    Attributes:
        names: the model's names. Responses have the first. The name of a local model is the last part of its path.
        known_names: the names that requests may use: `names`, the model's path, and "dummy", which huggingface_hub
            sends if it knows only the server's address
    """

    def __init__(self, llm: Any, options: ServerSpec, metrics: Metrics, keys: Keys, store: Store | None = None):
        """Create the thread pools, and start to watch the engine.

        Args:
            store: contains clients' files, which may be images
        """
        self._store = store
        self.llm, self.options, self._metrics, self._keys = llm, options, metrics, keys
        self.engine: Engine = llm.engine
        self.admission = FairAdmission(keys.limits_of, tenant_of=keys.tenant_of, batch_share=options.batch_share)
        seconds = None if options.step_ms is None else options.step_ms / 1e3
        self.step_policy = StepPolicy(self.admission, step_seconds=seconds, batch_share=options.batch_share)
        self.watch, self._serving = StepWatch(), ExitStack()
        self._serving.enter_context(self.engine.watching(self._note_step, policy=self.step_policy))
        self._has_answered = False  # the first request creates the KV store, which is slow
        most_running = self.engine.facts.options.generation.max_running
        self.backpressure = Backpressure(options, keys, most_running=most_running)
        self._pool = FairQueue(4, "prefold-prepare")
        # Decoding images, and running chat templates and compiling long grammars of requests, is slow. These pools
        # keep other requests from waiting behind such work.
        self._pool_of_images = FairQueue(2, "prefold-images")
        self._pool_of_templates = FairQueue(1, "prefold-prepare-template")
        self._pool_of_grammars = FairQueue(1, "prefold-prepare-grammar")
        checkpoint = llm.checkpoint
        self.names = options.served_names or (served_name(checkpoint.name),)
        self.known_names = (*self.names, *(() if options.served_names else (checkpoint.name,)), "dummy")
        local = (path for path in (str(checkpoint.path), checkpoint.name) if served_name(path) != path)
        paths = dict.fromkeys(local, self.names[0]) | {str(options.data_dir): "the data folder"}
        self._paths = {path: paths[path] for path in sorted(paths, key=len, reverse=True) if os.sep in path}
        self.fingerprint = fingerprint(llm)
        names = ("max_n", "max_logprobs", "escape_special")
        self._of_task = {"generate": {name: getattr(options, name) for name in names}, "decide": {}}
        if options.calibration is not None:
            self._of_task["decide"] = {"calibration": Calibration.load(options.calibration)}
            llm.task("decide", **self._of_task["decide"])  # raises at the start for a calibration of another model

    def _note_step(self, step: StepInfo) -> None:
        self.watch.note(step)
        self._metrics.step_sizes.note(step.rows)

    async def answer(self, order: TaskOrder) -> tuple[list[Answer], bool]:
        """Return (the task's answer to each item, whether writing them is short work). Raise InputError or Refusal.

        If the order also scores prompts, each answer has the `prompt` of PromptTask.
        """
        if order.echo is None:
            return await self._results(order)
        # A unique salt prefix keeps the scores from being shared with other requests.
        salt_prefix = order.salt_prefix if order.share else order.salt_prefix + uuid4().hex
        prompts: list[Any] = (await self._results(replace(order, salt_prefix=salt_prefix)))[0]
        if all(prompt.choices for prompt in prompts):
            return prompts, False
        samples: list[Any] = (await self._results(replace(order, echo=None)))[0]
        return [replace(sample, prompt=p.prompt) for sample, p in zip(samples, prompts, strict=True)], False

    async def _results(self, order: TaskOrder) -> tuple[list[Answer], bool]:
        replies: list[ResponseStream]
        async with self._streams_of(order, text=False) as (task, works, replies, known):
            answers: dict[int, Any] = dict.fromkeys(range(len(replies)))
            async with aclosing(events_of(replies)) as events:
                async for number, answer in events:  # the first failure ends all
                    answers[number] = answer
        is_text = task.readout.kind == "tokens"
        if known is not None:
            every = [*answers.values()] if is_text else known.merged(answers[0])
            answers = answers if is_text else {0: every}
            if None in known.answers:
                await self.in_pool(order.owner, known.keep, every)
        if is_text:
            results = [[answer] for answer in answers.values()]
        else:
            numbers = iter(answers[0])
            results = [[next(numbers) for _ in work.requests] for work in works]
        finish = partial(finish_items, task, works, results)
        is_short = are_short(results) and order.echo is None
        answers_of_items = [
            result_or_raise(result) for result in (finish() if is_short else await self.in_pool(order.owner, finish))
        ]
        if task.readout.kind == "tokens":
            for reply, samples, result in zip(replies, answers.values(), answers_of_items, strict=True):
                self._metrics.continued(reply, samples, result)
        else:
            self._metrics.read([len(request.tokens) for work in works for request in work.requests])
        if order.task == "rerank":
            cached_tokens = [sum([result.cached_tokens or 0 for result in of_item]) for of_item in results]
            pairs = zip(answers_of_items, cached_tokens, strict=True)
            # A listwise prompt is read at several rows, and its answer already counts the cached tokens.
            answers_of_items = [
                answer if task.is_listwise else replace(answer, cached_tokens=count) for answer, count in pairs
            ]
        return answers_of_items, is_short

    async def stream(self, order: TaskOrder) -> AsyncGenerator[bytes]:
        """Yield b"" when the order has been accepted, then the events of its response as they are made.

        Errors of the request are raised before the b"".
        """
        writer = order.events
        async with self._streams_of(order, text=True) as (task, works, replies, _):

            def ended(number: int, answer: Any) -> tuple[Generation, bytes]:
                result = result_or_raise(*finish_items(task, [works[number]], [[answer]]))
                return result, event_bytes(writer, writer.end(number, result))

            yield b""
            yield event_bytes(writer, writer.begin([work.note for work in works]))
            async with aclosing(events_of(replies)) as events:
                async for number, event in events:
                    for gap in replies[number].take_gaps():
                        self._metrics.between.observe(gap)
                    if isinstance(event, TextPiece):
                        tokens = [
                            {"id": id} if logprobs is None else task.token_logprobs(id, logprobs)
                            for id, logprobs in event.tokens
                        ]
                        yield event_bytes(writer, writer.piece(number, event.sample, event.text, tokens, event.count))
                        continue
                    end = partial(ended, number, event)
                    result, body = end() if are_short([[event]]) else await self.in_pool(order.owner, end)
                    self._metrics.continued(replies[number], event, result)
                    yield body
        yield event_bytes(writer, writer.last())

    async def requests(self, order: TaskOrder) -> list[Request]:
        """Return the engine's requests for an order without running them. Raise InputError or Refusal."""
        with self.backpressure.preparing(order.num_bytes, order.owner, computes=False):
            _, works = await self._prepare_in_pool(replace(order, computes=False))
        return [request for work in works for request in work.requests]

    async def without_engine(self, owner: Owner, num_bytes: int, function: Callable[[], T]) -> T:
        """Return function(), which needs no engine. It runs in a thread pool unless the body is short.

        Raise Refusal if too many requests wait.
        """
        with self.backpressure.preparing(num_bytes, owner, computes=False):
            return function() if num_bytes <= SHORT_BYTES else await self.in_pool(owner, function)

    def task(self, order: TaskOrder) -> BoundedTask:
        """Return the task of an order, within the server's limits and the order's salt prefix.

        Its requests can read no files of this machine except the tenant's uploads. Their images have the salt prefix
        too. If the model has no logits, conversations can be tokenised but not continued.
        """
        options = {**self._of_task.get(order.task, {}), **order.options}
        if order.task == "generate" and not order.computes and not self.llm.config.lm_head:
            inputs = inputs_of(self.llm.config, self.llm.tokenizer, options.pop("max_length", None))
            task: Any = GenerateTask(inputs, GenerationOptions(**options))
        else:
            task = self.llm.task(order.task, **options)
            if order.task == "generate":
                task.reasoning_parser = self.options.reasoning_parser
            if (images := getattr(task.inputs, "images", None)) is not None:
                store, tenant = self._store, str(order.owner.tenant or "")
                path_of = None if store is None else lambda id: store.path_of(tenant, id)
                task = copy(task)
                task.inputs = replace(task.inputs, images=images.for_clients(path_of, order.salt_prefix))
        if order.echo is not None:
            task = PromptTask(task, order.echo, self.engine.facts.options.eos_ids)
        if order.readout is not None:
            task = copy(task)
            task.readout = order.readout
        return BoundedTask(task, self.options, order.salt_prefix)

    def public(self, text: str) -> str:
        """Return a text for clients: the model's name replaces its path on this machine."""
        for path, name in self._paths.items():
            text = text.replace(path, name)
        return text

    def _prepare(self, order: TaskOrder) -> tuple[Any, list[Work]]:
        task = self.task(order)
        works: list[Work] = [result_or_raise(work) for work in task.prepare(order.items)]
        if not any(work.requests for work in works):  # the engine would never answer
            raise InputError("the request has no text", remedy="give at least one", code="empty")
        return task, works

    async def _prepare_in_pool(self, order: TaskOrder) -> tuple[Any, list[Work]]:
        """Return the result of `_prepare`, called in a thread pool when it is the tenant's turn."""
        pool = self._pool
        if self.llm.images is not None and any(map(has_images, order.items)):
            pool = self._pool_of_images
        elif self.options.allow_chat_template and any(map(has_template, order.items)):
            pool = self._pool_of_templates
        elif any(map(has_slow_grammar, order.items)):
            pool = self._pool_of_grammars
        return await asyncio.wrap_future(pool.submit(order.owner.tenant, self._prepare, order))

    @asynccontextmanager
    async def _streams_of(
        self, order: TaskOrder, *, text: bool
    ) -> AsyncIterator[tuple[Any, list[Work], list[ResponseStream], KnownAnswers | None]]:
        """Yield (task, a Work per item, replies, known answers) while the engine works for an order.

        There is one reply per text to generate, or one for all read-out values that are not known. A known answer is
        put into its reply. If the context ends without an exception, the order is counted as answered.
        """
        started_at, loop = time.perf_counter(), asyncio.get_running_loop()
        makes_text = order.task == "generate" and order.echo is None
        samples = num_samples(order.items) if makes_text else 1  # read-out values are one request
        with self.backpressure.preparing(order.num_bytes, order.owner, samples=samples) as preparation:
            # Short work makes requests quickly, fetches no images, and needs a KV store that exists already.
            is_short = self._has_answered and self.llm.images is None
            is_short = is_short and are_soon_ready(order.items, order.num_bytes)
            task, works = self._prepare(order) if is_short else await self._prepare_in_pool(order)
            is_text = task.readout.kind == "tokens"
            known: KnownAnswers | None = None
            if self.llm.kept is not None and not text and order.share and order.echo is None:
                every = [request for work in works for request in work.requests]
                known = await self.in_pool(order.owner, KnownAnswers, self.llm.kept, task.readout, every, self.engine)
            sizes = [sum(len(request.tokens) for request in work.requests) for work in works]
            if is_text:
                counts = [work.requests[0].sampling.n for work in works]  # type: ignore[union-attr]
                replies = [ResponseStream(loop, *arguments) for arguments in zip(sizes, repeat(order.owner), counts)]
            else:
                replies = [ResponseStream(loop, sum(sizes), order.owner)]
            note(prompt=sum(sizes))
            with self.backpressure.computing(replies):
                preparation()
                try:
                    groups = groups_of(works, known, is_text=is_text)
                    for reply, (_, answer) in zip(replies, groups, strict=True):
                        if answer is not None:
                            reply.put([answer])
                    # Unshared read-out values have a namespace of their own, in which they share rows.
                    options = {"text": text, "share": None if order.share or not is_text else False}
                    begin = partial(self._submit, [group for group, _ in groups], task.readout, replies, **options)
                    begin() if is_short else await self.in_pool(order.owner, begin)
                    yield task, works, replies, known
                except (asyncio.CancelledError, GeneratorExit):
                    self._metrics.success.labels("abort").inc(len(replies))
                    raise
                except Exception:
                    self._metrics.success.labels("error").inc(len(replies))
                    raise
                finally:
                    for reply in replies:
                        self.engine.cancel(reply)
        self._has_answered = True
        self.backpressure.note_answered(replies)
        self._metrics.seconds.observe(time.perf_counter() - started_at)
        for reply in replies:
            if reply.begun_at is not None and reply.first_at is not None:
                self._metrics.queue.observe(reply.begun_at - started_at)
                self._metrics.prefill.observe(reply.first_at - reply.begun_at)
            if is_text and reply.first_at is not None:
                self._metrics.first.observe(reply.first_at - started_at)

    def _submit(
        self, groups: Sequence[Sequence[Request]], readout: Readout, replies: Sequence[ResponseStream], **options: Any
    ) -> None:
        for requests, reply in zip(groups, replies, strict=True):
            if requests and not reply.is_cancelled:
                self.engine.submit(requests, readout, reply, self.llm.tokenizer, **options)

    async def in_pool(self, owner: Owner, function: Any, *arguments: Any) -> Any:
        """Return function(*arguments), called in the thread pool when it is the owner's turn."""
        return await asyncio.wrap_future(self._pool.submit(owner.tenant, function, *arguments))

    def give_up(self, error: Exception) -> None:
        """Answer all running requests with an error."""
        for reply in list(self.backpressure.replies):
            reply.put([error])

    def read_shares(self) -> None:
        """Apply the shares of the file of keys before the next step."""
        self.step_policy.has_new_shares = True

    def close(self) -> None:
        """End the running requests without an answer, and the threads."""
        for reply in list(self.backpressure.replies):
            self.engine.cancel(reply)
        self._serving.close()
        for pool in (self._pool, self._pool_of_images, self._pool_of_templates, self._pool_of_grammars):
            pool.close()


def fingerprint(llm: Any) -> str:
    """Return a text that changes whenever answers may change: a digest of the version, the model and the settings."""
    generation = llm.engine.facts.options.generation
    shifted = getattr(generation.cache, "shifted", None)
    settings = [str(llm.device).partition(":")[0], llm.engine.facts.sharing, generation.looped.exits, shifted]
    identity = llm.identity
    identity = {**identity, "model": {**identity["model"], "name": ""}}  # the name may be a path
    content = json.dumps([__version__, identity, settings], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


class BoundedTask:
    """A task whose requests share rows only under one salt prefix. It checks items against the server's limits."""

    def __init__(self, task: Any, options: ServerSpec, salt_prefix: str):
        self._task, self._options, self._salt_prefix = task, options, salt_prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def prepare(self, items: Sequence[Any]) -> list[Work | InputError]:
        """Return the task's Work for each item, or the item's InputError."""
        items = list(items)
        errors = [attempt(check_item, item, self._options, self._task.inputs.tokenizer) for item in items]
        prepared = iter(self._task.prepare([item for item, error in zip(items, errors, strict=True) if error is None]))
        works = [next(prepared) if error is None else error for error in errors]
        for work in works:
            if self._salt_prefix and not isinstance(work, InputError):
                work.requests[:] = [
                    replace(request, namespace=request.namespace.within(self._salt_prefix)) for request in work.requests
                ]
        return works


def event_bytes(writer: Events, events: Iterable[dict[str, Any]]) -> bytes:
    """Return the bytes of server-sent events, named by their "type" if the API names events."""
    prefix = b"event: %b\n" if writer.is_named else b""
    return b"".join(
        (prefix % event["type"].encode() if prefix else b"") + b"data: %b\n\n" % json_of(event) for event in events
    )


def result_or_raise(value: Any) -> Any:
    """Return a value, or raise it if it is an InputError."""
    if isinstance(value, InputError):
        raise value
    return value


class PromptTask:
    """A task that scores the tokens of the prompts that a GenerateTask would continue.

    The answer is a Generation with `prompt`: an entry for each token. The "logprob" of the first token is None. The
    answer also has a choice if the request asks for no new token, or for only one and takes the most likely token.
    """

    name = "generate"

    def __init__(self, inner: GenerateTask, echo: Echo, eos_ids: Sequence[int]):
        assert echo.top is not None
        self._inner, self._echo, self._eos_ids = inner, echo, eos_ids
        self.inputs = inner.inputs
        self.readout = Readout("logprobs", top=echo.top)

    def prepare(self, items: Sequence[Any]) -> list[Work | InputError]:
        """Return a Work for each item, or the item's InputError."""
        works = self._inner.prepare(items)
        return [work if isinstance(work, InputError) else attempt(self._score, work) for work in works]

    def _score(self, work: Work) -> Work:
        (request,) = work.requests
        assert request.sampling is not None
        if request.media or (request.tokens >= MEDIA_BASE).any():
            message, remedy = "the prompt has images, whose rows have no probabilities", "leave it out"
            raise InputError(message, field="prompt_logprobs", remedy=remedy, code="unsupported")
        self.readout = replace(self.readout, exits=request.sampling.exits)  # all items have the same
        # Every row is read. The last row's read-out only serves for the most likely next token, so any target will do.
        targets = np.concatenate((request.tokens[1:], request.tokens[:1]))
        note = {"note": work.note, "request": request}
        return Work([replace(request, targets=targets, sampling=None)], note)

    def finish(self, note: Any, results: Sequence[Result]) -> Generation:
        """Return the answer to an item."""
        (result,), request = results, note["request"]
        names, values = self._inner.token_logprobs, result.values.tolist()
        rows = [TokenLogprobs(row[0], _top(row)) for row in values]
        before = [None, *zip(values, rows, strict=True)][:-1]
        prompt = []
        for token, entry in zip(request.tokens.tolist(), before, strict=True):
            if entry is None:
                prompt.append(names(token, TokenLogprobs(0.0)) | {"logprob": None, "rank": None})
            else:
                prompt.append(names(token, entry[1]) | {"rank": int(entry[0][1])})
        generated = self._generation(request, rows[-1])
        if generated is None:
            return Generation((), prompt=prompt)
        return replace(self._inner.finish(note["note"], [[generated]]), prompt=prompt)

    def _generation(self, request: Request, last: TokenLogprobs) -> Generated | None:
        """Return the generated output; None if it must be computed.

        Args:
            last: the log-probabilities after the prompt
        """
        sampling = request.sampling
        assert sampling is not None
        tokenizer = self.inputs.tokenizer
        if self._echo.is_all:
            text = None if tokenizer is None else ""
            return Generated((), text, "length", logprobs=None if sampling.logprobs is None else ())
        if replace(sampling, seed=None, logprobs=None) != Sampling(max_tokens=1):
            return None
        sample = Sample(request, 0, seed=0, limit=1, eos_ids=self._eos_ids, tokenizer=tokenizer, detokenizer=None)
        token, logprob = last.top[0]
        sample.take(token, TokenLogprobs(logprob, last.top[: sampling.logprobs or 0]))
        return sample.result(0)


def _top(row: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Return the most likely (id, log-probability) pairs of a row that was read with `Readout.top`."""
    count = len(row) // 2 - 1
    return tuple((int(id), value) for value, id in zip(row[2 : 2 + count], row[2 + count :], strict=True))
