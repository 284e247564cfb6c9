"""Limits of a server: on the items of requests, and on the requests that wait.

An item of a request or batch line must not contain programs, grammars that are slow to compile, or more work than one
step can do. If too many requests wait, a new one is refused with a time after which to retry.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..engine.handles import Handle
from ..errors import InputError
from ..spec.requests import Generated, Owner
from ..spec.server import ServerSpec
from ..text import Tokenizer
from ..text.grammar import is_quick
from ..text.media import chat_of
from .http import Refusal, json_of
from .keys import Keys

# Tokens of a request to tokenise or detokenise, unless the model's context is longer.
MOST_TOKENS = 1 << 18
# Maximum number of stop texts, and of their characters in total. The engine's thread searches for stop texts at each
# generated token.
MOST_STOPS, MOST_STOP_LETTERS = 64, 1024


def check_item(item: Any, options: ServerSpec, tokenizer: Tokenizer | None) -> None:
    """Raise InputError for an item that clients may not send.

    These items are refused:

    - too many or too long stop texts
    - a grammar that might need much time and memory to compile
    - a chat template that is not one of the checkpoint's own, unless --allow-chat-template is set

    Args:
        tokenizer: the tokenizer of the served model
    """
    if not isinstance(item, Mapping):
        return
    sampling = item.get("sampling") or {}
    grammar, stops, template = sampling.get("grammar"), sampling.get("stop"), item.get("chat_template")
    if isinstance(grammar, Mapping):
        size = sum(len(part.encode()) if isinstance(part, str) else len(json_of(part)) for part in grammar.values())
        if size > options.max_grammar_bytes:
            message, remedy = f"the grammar has {size} bytes", f"send at most {options.max_grammar_bytes}"
            raise InputError(message, field="grammar", remedy=remedy, code="too_large")
    if isinstance(stops, (str, list)):
        texts = [stops] if isinstance(stops, str) else stops
        letters = sum(len(text) for text in texts if isinstance(text, str))
        for count, most, unit in ((len(texts), MOST_STOPS, "texts"), (letters, MOST_STOP_LETTERS, "letters")):
            if count > most:
                message, remedy = f"'stop' holds {count} {unit}", f"give at most {most}"
                raise InputError(message, field="stop", remedy=remedy, code="too_large")
    if template is not None and not options.allow_chat_template:
        templates = () if tokenizer is None else tokenizer.chat_templates.templates
        if not (isinstance(template, str) and template in templates):
            message = "'chat_template' is not the name of one of the model's templates"
            remedy = "leave it out, or start the server with --allow-chat-template"
            raise InputError(message, field="chat_template", remedy=remedy, code="unsupported")


def check_texts(body: Mapping[str, Any], most: int) -> None:
    """Raise InputError for a request with more than `most` texts."""
    for name, value in body.items():
        value = value.get("sentences") if name == "inputs" and isinstance(value, dict) else value
        if isinstance(value, list) and len(value) > most and not all(isinstance(part, int) for part in value):
            message, remedy = f"{name!r} holds {len(value)} texts", f"send at most {most} at once"
            raise InputError(message, field=name, remedy=remedy, code="too_many")


def check_samples(items: Sequence[Any], most: int) -> None:
    """Raise InputError if the items of a request ask for more than `most` generated texts."""
    if (count := num_samples(items)) > most:
        message, remedy = f"the request asks for {count} texts, n for each prompt", f"ask for at most {most} at once"
        raise InputError(message, field="n", remedy=remedy, code="too_many")


def most_tokens(llm: Any) -> int:
    """Return the maximum number of tokens of a request to tokenise or detokenise."""
    return max(MOST_TOKENS, llm.config.max_positions)


def too_many_tokens(llm: Any, field: str) -> InputError:
    """Return the error of a request with more than `most_tokens` tokens."""
    message, remedy = f"{field!r} holds more than {most_tokens(llm)} tokens", "send it in several requests"
    return InputError(message, field=field, remedy=remedy, code="too_many")


# Limits within which `are_soon_ready` and `are_short` say that work takes little time: bytes of a body, texts to
# generate, results of an answer, tokens of an answer.
SHORT_BYTES, SHORT_SAMPLES, SHORT_RESULTS, SHORT_TOKENS = 4096, 16, 16, 1024
TOKENS_A_LOGPROB = 16  # a token with log-probabilities needs as much time as this many tokens without


def are_soon_ready(items: Sequence[Any], num_bytes: int) -> bool:
    """Return whether making requests from items takes little time.

    It does if the body is short, few texts are to be generated, no grammar must be compiled, and no item has a chat
    template. A template is a program that may use up its time limit.
    """
    if num_bytes > SHORT_BYTES or num_samples(items) > SHORT_SAMPLES:
        return False
    objects = [item for item in items if isinstance(item, Mapping)]
    return not any((item.get("sampling") or {}).get("grammar") or has_template(item) for item in objects)


def num_samples(items: Sequence[Any]) -> int:
    """Return how many texts are to be generated for items. An invalid item, or an item of another task, counts once."""
    counts = ((item.get("sampling") or {}).get("n") if isinstance(item, Mapping) else 1 for item in items)
    return sum(n if isinstance(n, int) and n > 1 else 1 for n in counts)


def has_images(item: Any) -> bool:
    """Return whether an item may have images. Decoding them may be slow."""
    return isinstance(item, Mapping) and (bool(item.get("images")) or chat_of(item.get("messages")) is not None)


def has_template(item: Any) -> bool:
    """Return whether an item names or contains a chat template."""
    return isinstance(item, Mapping) and item.get("chat_template") is not None


def are_short(results: Iterable[Sequence[Any]]) -> bool:
    """Return whether making and writing answers from the engine's results takes little time.

    Args:
        results: each result is a Result or a list of Generated
    """
    answers = [result for group in results for result in group]
    texts = [text for result in answers if isinstance(result, list) for text in result]
    return len(answers) <= SHORT_RESULTS and sum(map(_length, texts)) <= SHORT_TOKENS


def _length(text: Generated) -> int:
    return len(text.tokens) * (1 if text.logprobs is None else TOKENS_A_LOGPROB)


def has_slow_grammar(item: Any) -> bool:
    """Return whether an item's grammar may be slow to compile."""
    grammar = (item.get("sampling") or {}).get("grammar") if isinstance(item, Mapping) else None
    parts = grammar.items() if isinstance(grammar, Mapping) else ()
    return not all(
        is_quick(str(kind), part if isinstance(part, str) else json_of(part).decode()) for kind, part in parts
    )


BYTES_A_TOKEN = 4  # estimates the tokens of a body before it is tokenised
# How many of the last answers determine the rate, and the largest Retry-After in seconds.
MEASURED, LONGEST_WAIT = 128, 120


class Backpressure:
    """The requests that are being prepared, wait for the engine, or are being computed, and the limits on them.

    A request for text counts once for each sample. A request for embeddings or scores counts once. A request for which
    the engine has a free sequence is about to run, so it does not count as waiting.

    Attributes:
        replies: the handles without an answer, in order of arrival
        most_running: how many sequences the engine runs at once
    """

    def __init__(
        self,
        options: ServerSpec,
        keys: Keys,
        clock: Callable[[], float] = time.perf_counter,
        *,
        most_running: int = 0,
    ):
        self._options, self._keys, self._clock = options, keys, clock
        self.replies: dict[Handle, None] = {}
        self.most_running = most_running
        self._preparing: dict[object, tuple[Owner, int, int]] = {}  # {request: (owner, count, tokens)}
        # `_busy` advances only while there are replies, so pauses do not lower the rate of answers.
        self._busy_before, self._busy_since = 0.0, 0.0
        self._last_replies: deque[tuple[float, int, int]] = deque(maxlen=MEASURED)  # (time of `_busy`, replies, tokens)

    @property
    def waiting(self) -> tuple[int, int]:
        """Return the number of requests that wait to be computed, and the number of tokens of their prompts."""
        waiting = self._waiting()
        return sum(count for _, count, _ in waiting), sum(tokens for _, _, tokens in waiting)

    @property
    def running(self) -> int:
        """Return the number of requests that are being computed or about to be."""
        return len(self.replies) + len(self._preparing) - len(self._waiting())

    def _waiting(self) -> list[tuple[Owner, int, int]]:
        """Return (owner, count, tokens) of each request that waits."""
        entries = [(reply.owner, reply.samples, reply.tokens) for reply in self.replies if reply.begun_at is None]
        entries += self._preparing.values()
        running = Counter[str | None]()
        for reply in self.replies:
            if reply.begun_at is not None:
                running[reply.owner.tenant] += reply.samples
        free = self.most_running - running.total()
        if free <= 0:
            return entries
        waiting = []
        for entry in entries:
            owner, count, _ = entry
            most = self._keys.limits_of(owner.tenant).max_running
            if count <= (free if most is None else min(free, most - running[owner.tenant])):
                free -= count
                running[owner.tenant] += count
            else:
                waiting.append(entry)
        return waiting

    def check(self, owner: Owner, samples: int = 1, *, computes: bool = True) -> None:
        """Raise Refusal (429) if too many requests wait for another request of this owner.

        With several tenants, one tenant may have at most half of the waiting requests, and its fair part of the limit
        is always free for it. Requests of batches do not count against interactive ones. A request that exceeds a limit
        by itself counts as the limit, and is accepted when no others wait.

        Args:
            samples: number of requests that the new request counts as
            computes: whether the request will wait for the engine. If not, only requests that are being prepared count
        """
        waiting = self._waiting() if computes else list(self._preparing.values())
        if not waiting:
            return
        ahead = [entry for entry in waiting if owner.is_batch or not entry[0].is_batch]
        own_entries = [entry for entry in waiting if entry[0].tenant == owner.tenant]
        tenants = len({entry[0].tenant for entry in ahead} | {owner.tenant})
        limits, options, is_shared = self._keys.limits_of(owner.tenant), self._options, self._keys.num_tenants > 1
        for unit, place, more, most, own_most in (
            ("requests", 1, samples, options.max_waiting_requests, limits.max_waiting_requests),
            ("tokens", 2, 1, options.max_waiting_tokens, limits.max_waiting_tokens),
        ):
            count, own_count = sum(entry[place] for entry in ahead), sum(entry[place] for entry in own_entries)
            part = max(1, most // 2) if is_shared else most
            size = min(more, part)
            is_fair = own_count + size <= min(part, most // tenants)
            if own_most is not None and own_count + min(more, own_most) > own_most:
                self._refuse(own_entries, f"{own_count} of your {unit} are waiting; the limit is {own_most}", more)
            if not is_fair and count + size > most:
                self._refuse(ahead, f"{count} {unit} are waiting; the limit is {most}", more)
            if not is_fair and own_count + size > part:
                self._refuse(own_entries, f"{own_count} of your {unit} are waiting; the limit is {part}", more)

    def _refuse(self, waiting: list[tuple[Owner, int, int]], message: str, more: int) -> None:
        """Raise Refusal (429).

        Args:
            waiting: the requests that count
            more: number of requests that the new request counts as
        """
        message += f"; this request counts as {more}" if more > 1 else ""
        seconds = self.seconds_for(sum(count for _, count, _ in waiting), sum(tokens for _, _, tokens in waiting))
        remedy, headers = f"send the request again after {seconds} s (Retry-After)", {"retry-after": str(seconds)}
        raise Refusal(429, message, remedy=remedy, code="rate_limit_exceeded", headers=headers)

    @contextmanager
    def preparing(
        self, num_bytes: int, owner: Owner, *, samples: int = 1, computes: bool = True
    ) -> Iterator[Callable[[], object]]:
        """Count a request while the context is open, or until the function that the context yields is called.

        Raise Refusal (429) if too many requests wait (see `check`).

        Args:
            num_bytes: the size of the request's body
        """
        self.check(owner, samples, computes=computes)
        key = object()
        self._preparing[key] = owner, samples, num_bytes // BYTES_A_TOKEN
        try:
            yield lambda: self._preparing.pop(key, None)
        finally:
            self._preparing.pop(key, None)

    @contextmanager
    def computing(self, replies: Iterable[Handle]) -> Iterator[None]:
        """Count replies while the context is open."""
        if not self.replies:
            self._busy_since = self._clock()
        replies = dict.fromkeys(replies)
        self.replies |= replies
        try:
            yield
        finally:
            for reply in replies:
                self.replies.pop(reply, None)
            if not self.replies:
                self._busy_before += self._clock() - self._busy_since

    @property
    def _busy(self) -> float:
        return self._busy_before + (self._clock() - self._busy_since if self.replies else 0.0)

    def note_answered(self, replies: Iterable[Handle]) -> None:
        """Record that replies have been answered."""
        counts = [(reply.samples, reply.tokens) for reply in replies]
        self._last_replies.append((self._busy, sum(count for count, _ in counts), sum(tokens for _, tokens in counts)))

    def seconds_for(self, requests: int, tokens: int) -> int:
        """Return after how many seconds half of this much work is done, at the rate of the last answers."""
        if len(self._last_replies) < 2:
            return 1
        # The first entry only marks the start of the measured time.
        (began, *_), *replies = self._last_replies
        seconds = max(1e-3, self._busy - began)
        rates = [sum(entry[i] for entry in replies) / seconds for i in (1, 2)]
        seconds = max(count / 2 / max(rate, 1e-9) for count, rate in zip((requests, tokens), rates, strict=True))
        return max(1, min(LONGEST_WAIT, math.ceil(seconds)))


class FairQueue:
    """A thread pool in which tenants take turns. Each tenant has its own queue of functions."""

    def __init__(self, num_threads: int, name: str):
        """Create the thread pool.

        Args:
            name: the prefix of the threads' names
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._lines: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: Hashable, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return the Future of a function's result. The function runs when it is the tenant's turn."""
        future: Future[Any] = Future()
        with self._lock:
            self._lines.setdefault(tenant, deque()).append((future, partial(function, *arguments)))
        self._threads.submit(self._call_next)
        return future

    def _call_next(self) -> None:
        with self._lock:
            tenant, line = self._lines.popitem(last=False)
            future, function = line.popleft()
            if line:
                self._lines[tenant] = line
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """Cancel the waiting functions. Do not wait for running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            lines = [*self._lines.values()]
            self._lines.clear()
        for line in lines:
            for future, _ in line:
                future.cancel()
