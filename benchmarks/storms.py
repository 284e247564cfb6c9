"""Count right, refused and wrong answers under storms: interrupts, cancels, disconnects, floods and failing workers.

    python benchmarks/storms.py interrupts cancels disconnects floods --events 1250 --seed 1 --json FILE
    python benchmarks/storms.py failures

All models are tiny and random.

interrupts   Ctrl-C in generate, stream, embed, classify and score, while other threads run calls
cancels      cancelled agenerate and astream, abandoned streams, and cancelled handles
disconnects  clients that disconnect from a server within a request, before the first token, and in the middle of a
             stream
floods       more concurrent requests than a server lets wait
failures     each call of a worker fails in turn: for each kind of message and each of several errors, when the step
             starts or when its result is read, once or always. All failures run; `--events` does not apply

An answer is right (equal to an undisturbed model's answer), refused (an error that the storm causes, or no answer for a
disconnected client) or wrong. At the end no request may wait and no slot may be in use. The exit status is 1 if an
answer is wrong or something is left. Kills of jobs and servers are in tests/cli/test_kills.py and
tests/serve/test_batch_kills.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import httpx
import numpy as np
from harness import ROOT, benchmark, table, timed, write_json

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.engine.calls import TOKENS
from prefold.engine.handles import Handle
from prefold.errors import PrefoldError
from prefold.features.shifted.options import ShiftedReuse
from prefold.spec.requests import Request, Sampling

sys.path.insert(0, str(ROOT / "tests" / "support"))
from books import check_books
from looped_dense import LOOPED, looped_checkpoint
from serving import Raw, serving
from tiny import tiny_checkpoint
from tiny_vision import drawing, tiny_vision

SMALL = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
HOW: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": 1 << 18, "threads": 1}
TEXTS = [f"Question {i}: what is {i} and {i * i}? Answer:" for i in range(6)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
LONGEST = 60.0  # seconds that a call may wait


# ------------------------------------------------------------------------------------------------- calls


def generate(llm: LLM) -> Any:
    return [list(made.tokens) for made in llm.generate(TEXTS, **GREEDY)]


def stream(llm: LLM) -> Any:
    return "".join(piece.text for piece in llm.stream(TEXTS[0], **GREEDY))


def embed(llm: LLM) -> Any:
    return llm.embed(TEXTS)


def classify(llm: LLM) -> Any:
    return [answer.label for answer in llm.classify(TEXTS[:3], ["yes", "no"])]


def score(llm: LLM) -> Any:
    return np.array([one.logprob for one in llm.score(TEXTS, [" yes"] * len(TEXTS))])


CALLS = (generate, stream, embed, classify, score)


def alike(one: Any, other: Any) -> bool:
    """Return whether two answers are equal. Numbers may differ by the rounding in another batch."""
    return np.allclose(one, other, atol=1e-3) if isinstance(one, np.ndarray) else one == other


class Watch:
    """The counters. Answers are compared with the answers of an undisturbed model."""

    def __init__(self, llm: LLM, calls: tuple[Callable[[LLM], Any], ...] = CALLS):
        self.llm, self.counts = llm, Counter[str]()
        self.wanted = {call: call(llm) for call in calls}

    def see(self, call: Any, answer: Any) -> None:
        self.counts["right" if alike(answer, self.wanted[call]) else "wrong"] += 1

    def end(self) -> dict[str, int]:
        """Return the counts, and the waiting requests and used slots at the end."""
        engine = self.llm.engine
        until = time.monotonic() + LONGEST
        while (engine.generator.has_work or engine.handles) and time.monotonic() < until:
            time.sleep(0.01)
        waiting = len(engine.handles) + len(engine.call(lambda: engine.generator.open_keys))
        if not waiting:
            engine.call(partial(check_books, engine.generator.scheduler))
        self.llm.cache.clear()
        return dict(self.counts) | {"waiting": waiting, "slots": engine.snapshot().used_slots}


@contextmanager
def bystanders(watch: Watch, count: int = 2) -> Iterator[None]:
    """Run calls in other threads inside the context. Their answers must not change."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(number)
        while not is_over.is_set():
            call = rng.choice(list(watch.wanted))
            watch.see(call, call(watch.llm))

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(LONGEST)
            watch.counts["stuck"] += thread.is_alive()


def plain(folder: Path) -> LLM:
    return LLM(
        str(tiny_checkpoint(folder, "llama", intermediate_size=8, **SMALL)), **HOW, cache="lru", max_batch_rows=64
    )


# ----------------------------------------------------------------------------------------------------------- storms


def interrupts(folder: Path, events: int, rng: random.Random) -> dict[str, int]:
    """Send Ctrl-C at random moments. After every fifth, run an undisturbed call."""
    watch, seconds = Watch(plain(folder)), {}
    for call in CALLS:
        seconds[call] = timed(partial(call, watch.llm), 1)[0]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with bystanders(watch):
            while watch.counts["events"] < events:
                call = rng.choice(CALLS)
                answer = None
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 3 * seconds[call]))
                    try:
                        answer = call(watch.llm)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    watch.counts["events"] += 1
                    watch.counts["refused"] += answer is None
                if answer is not None:
                    watch.see(call, answer)
                if watch.counts["events"] % 5 == 0:
                    call = rng.choice(CALLS)
                    watch.see(call, call(watch.llm))
    finally:
        signal.signal(signal.SIGALRM, before)
    return watch.end()


class Kept(Handle):
    """A handle that records its events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def put(self, events: Any, at: float = 0.0) -> None:
        self.events += events


def cancels(folder: Path, events: int, rng: random.Random) -> dict[str, int]:
    """Cancel tasks of an event loop, streams and handles after a random time. Some end earlier."""
    watch = Watch(plain(folder))
    llm, counts = watch.llm, watch.counts
    prompt = llm.tokenizer.encode(TEXTS[0])
    wanted = watch.wanted[generate][0]

    async def one(number: int) -> None:
        async def text() -> Any:
            return "".join([piece.text async for piece in llm.astream(TEXTS[0], **GREEDY)])

        async def tokens() -> Any:
            return list((await llm.agenerate(TEXTS[0], **GREEDY)).tokens)

        ask, right = rng.choice([(text, watch.wanted[stream]), (tokens, wanted)])
        task = asyncio.ensure_future(ask())
        await asyncio.sleep(rng.uniform(0, 0.1))
        counts["events"] += task.cancel()
        try:
            counts["right" if await asyncio.wait_for(task, LONGEST) == right else "wrong"] += 1
        except asyncio.CancelledError:
            counts["refused"] += 1

    async def many(count: int) -> None:
        await asyncio.gather(*map(one, range(count)))

    with bystanders(watch):
        while counts["events"] < events:
            kind = rng.randrange(3)
            if kind == 0:
                asyncio.run(many(16))
            elif kind == 1:
                pieces = llm.stream(TEXTS[0], **GREEDY)
                for _ in range(rng.randrange(4)):
                    next(pieces)
                counts["events"] += 1
                counts["refused"] += 1
                del pieces
            else:
                handles = [Kept() for _ in range(4)]
                for handle in handles:
                    request = Request(prompt, sampling=Sampling(max_tokens=12, ignore_eos=True))
                    llm.engine.submit([request], TOKENS, handle)
                time.sleep(rng.uniform(0, 0.02))
                llm.engine.cancel(*handles)
                counts["events"] += len(handles)
                for handle in handles:
                    llm.engine.call(lambda: None)
                    counts["doubled"] += len(handle.events) > 1
                    right = bool(handle.events) and list(handle.events[0][0].tokens) == wanted
                    counts["right" if right else "wrong" if handle.events else "refused"] += 1
    return watch.end()


def disconnects(folder: Path, events: int, rng: random.Random) -> dict[str, int]:
    """Close connections of clients at random moments, while one client stays connected."""
    watch = Watch(plain(folder), (generate, embed))
    body = {"prompt": TEXTS[0], **GREEDY, "max_tokens": 100}
    chat = {"messages": [{"role": "user", "content": TEXTS[1]}], "max_tokens": 100, "ignore_eos": True}
    asked = [
        ("/v1/completions", body), ("/v1/completions", body | {"stream": True}),
        ("/v1/completions", body | {"prompt": TEXTS, "n": 2, "temperature": 1.0}),
        ("/v1/chat/completions", chat | {"stream": True}), ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/responses", {"input": TEXTS[2], "stream": True, "max_output_tokens": 60}),
        ("/v1/messages", chat | {"stream": True, "model": "tiny"}),
    ]  # fmt: skip
    with serving(watch.llm, served_names=("tiny",)) as server, bystanders(watch, 1):
        open_ones: list[Raw] = []
        while watch.counts["events"] < events:
            path, sent = rng.choice(asked)
            raw = Raw(server).send(path, sent, whole=rng.random() > 0.1)
            if sent.get("stream") and rng.random() < 0.2:
                raw.socket.settimeout(0.2)
                with suppress(TimeoutError, AssertionError):
                    raw.read_until(b"data: ")
            open_ones.append(raw)
            if len(open_ones) > 12 or rng.random() < 0.8:
                open_ones.pop(rng.randrange(len(open_ones))).close()
                watch.counts["events"] += 1
                watch.counts["refused"] += 1
        for raw in open_ones:
            raw.close()
        left = server_is_idle(server)
    return end_of_server(watch, left)


def floods(folder: Path, events: int, rng: random.Random) -> dict[str, int]:
    """Send bursts of more requests than may wait. Each gets an answer or status 429."""
    watch = Watch(plain(folder), (generate, embed))
    text = watch.llm.generate(TEXTS[0], **GREEDY).text

    async def burst(url: str, count: int) -> None:
        async with httpx.AsyncClient(timeout=LONGEST, limits=httpx.Limits(max_connections=count)) as client:
            body = {"prompt": TEXTS[0], **GREEDY}
            asked = [client.post(f"{url}/v1/completions", json=body) for _ in range(count)]
            for response in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(response, BaseException):
                    watch.counts["lost"] += 1
                elif response.status_code == 200:
                    watch.counts["right" if response.json()["choices"][0]["text"] == text else "wrong"] += 1
                else:
                    watch.counts["refused" if response.status_code == 429 else "wrong"] += 1
        watch.counts["events"] += count

    limits = {"max_waiting_requests": 8, "max_waiting_tokens": 400}
    with serving(watch.llm, served_names=("tiny",), **limits) as server, bystanders(watch, 1):
        while watch.counts["events"] < events:
            asyncio.run(burst(server.url, rng.randint(10, 100)))
        left = server_is_idle(server)
    return end_of_server(watch, left)


def server_is_idle(server: Any) -> int:
    """Return the number of requests that a server still has after a time to end them."""
    until = time.monotonic() + LONGEST
    left = lambda: len(server.state.handler.backpressure.replies) + server.state.open  # noqa: E731
    while left() and time.monotonic() < until:
        time.sleep(0.01)
    return left()


def end_of_server(watch: Watch, left: int) -> dict[str, int]:
    found = watch.end()
    return found | {"waiting": found["waiting"] + left}


# ------------------------------------------------------------------------------------------------ workers that fail


def looped(folder: Path) -> LLM:
    loop = LOOPED["loop"] | {"gate": True, "threshold": 0.6}
    return LLM(str(looped_checkpoint(folder, "looped", loop=loop)), **HOW, looped={"exits": "save"}, cache="lru")


def images(folder: Path) -> LLM:
    return LLM(str(tiny_vision(folder)), **HOW | {"kv_memory": 1 << 21}, images={"media_memory": 2000}, cache="lru")


def shifting(folder: Path) -> LLM:
    reuse = ShiftedReuse(min_tokens=8, recompute=2, min_share=0.0, trial=True)
    cache = CacheOptions(min_overlap=0, shifted=reuse)
    return LLM(str(tiny_checkpoint(folder, "llama", intermediate_size=8, **SMALL)), **HOW, cache=cache)


def see_images(llm: LLM, number: int) -> Any:
    picture = {"type": "image", "image": drawing(number, 30, 26)}
    content = [picture, {"type": "text", "text": f"what is it, {number}?"}]
    return list(llm.chat([{"role": "user", "content": content}], max_tokens=3, ignore_eos=True).tokens)


def shifted_text(llm: LLM, number: int) -> Any:
    chunk = "a chunk of text that stands in both prompts, behind other words"
    made = llm.generate([TEXTS[number] + chunk, TEXTS[number][3:] + chunk], max_tokens=3, ignore_eos=True)
    return [len(one.tokens) for one in made]  # copied rows are only approximately equal


def short(llm: LLM) -> Any:
    return [list(made.tokens) for made in llm.generate(TEXTS[:3], max_tokens=4, ignore_eos=True)]


MODELS: dict[str, tuple[Callable[[Path], LLM], tuple[Any, ...]]] = {
    "llama": (plain, (short, embed)),
    "looped": (looped, (short, embed)),
    "images": (images, tuple(partial(see_images, number=number) for number in range(3))),
    "shifting": (shifting, tuple(partial(shifted_text, number=number) for number in range(2))),
}
ERRORS = (MemoryError, ValueError, RuntimeError)
METHODS = ("prepare", "kv_slots")  # methods of a worker in addition to `start`


class Failing:
    """A worker that raises an error at the `number`-th call of a kind, or from that call on.

    Attributes:
        mode: "start": the call raises; "result": the result of its ticket raises; "lasting": all later calls raise.
        seen: Number of calls of each kind.
        struck: Whether an error was raised.
    """

    def __init__(self, llm: LLM, kind: str = "", number: int = 0, error: Any = None, mode: str = "start"):
        self.kind, self.number, self.error, self.mode = kind, number, error, mode
        self.seen, self.struck = Counter[str](), False
        worker = llm.engine.worker
        self._methods = {name: getattr(worker, name) for name in ("start", *METHODS)}
        worker.start = self.start
        for name in METHODS:
            setattr(worker, name, partial(self.call, name))

    def strikes(self, kind: str) -> bool:
        self.seen[kind] += 1
        strikes = kind == self.kind and self.seen[kind] >= self.number and (self.mode == "lasting" or not self.struck)
        self.struck |= strikes
        return strikes

    def call(self, name: str, *arguments: Any) -> Any:
        if self.strikes(name):
            raise self.error("made up")
        return self._methods[name](*arguments)

    def start(self, message: Any, prepared: Any = None) -> Any:
        strikes = self.strikes(type(message).__name__)
        if strikes and self.mode != "result":
            raise self.error("made up")
        ticket = self._methods["start"](message, prepared)
        return _Raising(self.error) if strikes else ticket


class _Raising:
    def __init__(self, error: Any):
        self.error = error

    def result(self) -> Any:
        raise self.error("made up")


def disturbed(llm: LLM, calls: Any, wanted: list[Any], counts: Counter[str]) -> None:
    """Call from two threads and an event loop at once. Each call gets a right answer or an error."""

    def ask(call: Any, right: Any) -> None:
        try:
            counts["right" if alike(call(llm), right) else "wrong"] += 1
        except (MemoryError, ValueError, RuntimeError, PrefoldError):
            counts["refused"] += 1
        except BaseException as error:
            counts["wrong"] += 1
            print(f"raised {error!r}", file=sys.stderr)

    def in_loop() -> None:
        async def two() -> list[Any]:
            return await asyncio.gather(
                *(llm.agenerate(TEXTS[4], max_tokens=3) for _ in range(2)), return_exceptions=True
            )

        for answer in asyncio.run(two()):
            good = (MemoryError, ValueError, RuntimeError, PrefoldError)
            counts[
                "refused" if isinstance(answer, good) else "wrong" if isinstance(answer, BaseException) else "right"
            ] += 1

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in zip(calls, wanted, strict=True)]
    threads.append(threading.Thread(target=in_loop, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
        counts["stuck"] += thread.is_alive()


def failures(folder: Path, events: int, rng: random.Random) -> dict[str, int]:
    """Make each call of each kind fail once with each error, in a new model."""
    total = Counter[str]()
    for name, (make, calls) in MODELS.items():
        llm = make(folder)
        kinds = Failing(llm)
        wanted = [call(llm) for call in calls]
        disturbed(llm, calls, wanted, Counter())
        for kind in sorted(kinds.seen):
            modes = ("start", "result", "lasting") if kind[0].isupper() else ("start", "lasting")
            for error, mode in itertools.product(ERRORS, modes):
                for number in range(1, 1000):
                    watch = Watch(LLM(llm.checkpoint, **given(llm)), ())
                    failing = Failing(watch.llm, kind, number, error, mode)
                    disturbed(watch.llm, calls, wanted, watch.counts)
                    failing.kind = ""
                    if failing.struck:
                        total[f"{name}: {kind}"] += 1
                        watch.counts["events"] += 1
                    for call, right in zip(calls, wanted, strict=True):
                        watch.wanted[call] = right
                        watch.see(call, call(watch.llm))
                    counts = watch.end()
                    if bad := {k: v for k, v in counts.items() if k in BAD and v}:
                        print(f"{name}: {kind} {number} {error.__name__} {mode}: {bad}", file=sys.stderr)
                    watch.llm.close()
                    total.update(counts)
                    if not failing.struck:
                        break
    print(", ".join(f"{number} {name}" for name, number in total.items() if ":" in name))
    return {name: number for name, number in total.items() if ":" not in name}


def given(llm: LLM) -> dict[str, Any]:
    """Return the options with which an LLM was made."""
    names = ("dtype", "device", "kv_memory", "threads", "cache", "max_batch_rows")
    options = {name: getattr(llm.options, name) for name in names}
    return options | {"looped": llm.options.looped, "images": llm.options.images}


STORMS = {
    "interrupts": interrupts,
    "cancels": cancels,
    "disconnects": disconnects,
    "floods": floods,
    "failures": failures,
}
BAD = ("wrong", "lost", "doubled", "stuck", "waiting", "slots")


@benchmark(limits=False)
@click.argument("storms", nargs=-1, required=True, type=click.Choice(list(STORMS)))
@click.option("--events", type=int, default=100, show_default=True, help="Number of events per storm.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random moments.")
def main(arguments: SimpleNamespace) -> None:
    names = ["events", "right", "refused", *BAD]
    rows = []
    for name in arguments.storms:
        with tempfile.TemporaryDirectory() as folder:
            counts = STORMS[name](Path(folder), arguments.events, random.Random(arguments.seed))
        rows.append([name, *(counts.get(column, 0) for column in names)])
        print(table(["storm", *names], rows[-1:]), flush=True)
    print(table(["storm", *names], rows))
    write_json(arguments.json, benchmark="storms", columns=["storm", *names], rows=rows)
    sys.exit(any(any(row[-len(BAD) :]) for row in rows))


if __name__ == "__main__":
    main()
