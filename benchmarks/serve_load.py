"""Holds the cases of serve.py about requests that meet: in flight, of strangers, and more than there is room for.

The server is in this process; clients are processes of their own. `--model tiny` is a random checkpoint of three
layers, with which many requests can be asked in little time.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from common import table

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["channel", "inflight", "overload"]

# Seconds by which a request in flight is ahead of the one that is measured.
HEAD_START = 0.004
KEYS = '[[key]]\nkey = "a"\ntenant = "a"\n\n[[key]]\nkey = "b"\ntenant = "b"\n'


# ------------------------------------------------------------------------------------------------------- the client


class Asking(asyncio.Protocol):
    """One request on a connection of its own, read until the server closes it."""

    def __init__(self, data: bytes):
        self.data, self.status, self.started, self.first = data, 0, time.perf_counter(), 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        if not self.first:
            self.first, self.status = time.perf_counter() - self.started, int(data.split(None, 2)[1])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def post(port: int, body: bytes, headers: str, slow: float) -> tuple[int, float, float]:
    """Sends a request over a connection of its own; returns (status, seconds to the first byte, to the last).

    slow  bytes a second that are read of the answer; 0: all that comes
    """
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    asking = Asking(f"{head}{headers}\r\n".encode() + body)
    try:
        if slow:
            await read_slowly(port, asking.data, slow)
        else:
            await asyncio.get_running_loop().create_connection(lambda: asking, "127.0.0.1", port)
            await asking.done
    except OSError:
        pass
    return asking.status, asking.first, time.perf_counter() - asking.started


async def read_slowly(port: int, data: bytes, rate: float) -> None:
    """Sends a request, and reads so many bytes a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    try:
        writer.write(data)
        while await reader.read(1):
            await asyncio.sleep(1 / rate)
    finally:
        writer.close()


async def ask(order: dict[str, Any]) -> list[list[float]]:
    """Returns [when it was sent, status, seconds to the first byte, to the last] of each request of an order, and last
    [the client's processor time, -2, by how much it was late at most 99 of 100 times, 0].

    Requests come at random, `rate` a second, whatever becomes of them; or `at_once` of them are always there.
    """
    draw, bodies, found, number = random.Random(order["seed"]), order["bodies"], [], 0
    began, lags = time.perf_counter(), [0.0]
    end = began + order["seconds"]

    async def one() -> None:
        nonlocal number
        # A beginning of its own, so that nothing of it is in the cache.
        body = json.dumps(bodies[number % len(bodies)] | {"prompt": f"{order['seed']} {number} " + order["prompt"]})
        number += 1
        sent = time.perf_counter() - began
        found.append([sent, *await post(order["port"], body.encode(), order["headers"], order["slow"])])

    async def again() -> None:
        while time.perf_counter() < end:
            await one()

    async def watch() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - started - 0.005)

    watching = asyncio.ensure_future(watch())
    if order["at_once"]:
        await asyncio.gather(*(again() for _ in range(order["at_once"])))
    else:
        tasks, due = [], began
        while due < end:
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.ensure_future(one()))
            due += draw.expovariate(order["rate"])
        await asyncio.wait(tasks, timeout=60)
        found += [[0, -1, 0, 0] for task in tasks if not task.done()]  # they were never answered
    watching.cancel()
    return [*found, [time.process_time(), -2, float(np.percentile(lags, 99)), 0]]


class Client:
    """A client's process, which has one order."""

    def __init__(self, port: int, **order: Any):
        given = {"port": port, "seed": 0, "rate": 1.0, "at_once": 0, "headers": "", "slow": 0.0, **order}
        self._found = tempfile.NamedTemporaryFile("r+")  # noqa: SIM115  (it lives as long as this)
        command = [sys.executable, __file__, self._found.name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given))
        self._process.stdin.close()
        atexit.register(self._process.kill)

    def result(self) -> np.ndarray:
        """Returns what `ask` returned of the requests, [requests, 4].

        cpu, lag  the client's processor time in seconds, and by how many seconds it was late at most 99 of 100 times
        """
        if self._process.wait():
            raise RuntimeError(f"the client ended with status {self._process.returncode}")
        *rows, own = json.load(self._found)
        self.cpu, self.lag = own[0], own[2]
        return np.array(rows).reshape(-1, 4)

    def end(self) -> None:
        """Ends it where it is."""
        self._process.kill()
        self._process.wait()


# -------------------------------------------------------------------------------------------------------- the server


def check_books(llm: Any) -> None:
    """Raises AssertionError where the books of a model's scheduler do not agree."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import books

    books.check_books(llm.engine.generator.scheduler)


@contextmanager
def served(
    arguments: argparse.Namespace, *, keys: bool = False, rows: int | None = None, **options: Any
) -> Iterator[Any]:
    """Gives (LLM, its server, a client of it)."""
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "serve")]
    from serving import serving

    from prefold import LLM
    from prefold.cache import CacheOptions

    sys.setswitchinterval(1e-3)  # as `prefold serve` does
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model == "tiny":
            from tiny import tiny_checkpoint

            model = str(tiny_checkpoint(Path(folder), "llama", max_position_embeddings=4096))
        if keys:
            Path(folder, "keys.toml").write_text(KEYS)
            options["api_keys"] = f"{folder}/keys.toml"
        settings = {"dtype": arguments.dtype, "max_batch_rows": rows, "cache": CacheOptions()}
        with (
            LLM(model, kv_memory=arguments.kv_memory, **settings) as llm,
            serving(llm, **options) as server,
            httpx.Client(base_url=server.url, timeout=300) as client,
        ):
            gc.collect()
            gc.freeze()  # as `prefold serve` does
            yield llm, server, client


def prompts_like(llm: Any, tokens: int, seed: int) -> list[int]:
    """Returns a random prompt of so many tokens, as ids."""
    return np.random.default_rng(seed).integers(10, 250, tokens).tolist()


# --------------------------------------------------------------------------------------------------------- the cases


def inflight(arguments: argparse.Namespace) -> dict[str, Any]:
    """Counts the rows of requests that share 2,000 tokens, and come while the first of them is being computed."""
    rows, count = [], 64

    async def run(server: Any, llm: Any, shared: list[int], spread: float, leave: bool) -> None:
        async def one(client: httpx.AsyncClient, number: int) -> None:
            await asyncio.sleep(spread * number / count)
            body = {"prompt": [*shared, 5 + number, *range(100, 107)], "max_tokens": 1, "ignore_eos": True}
            if number == 0 and leave:
                task = asyncio.ensure_future(client.post("/v1/completions", json=body))
                before = llm.stats.rows_computed
                while llm.stats.rows_computed == before:
                    await asyncio.sleep(1e-3)
                await asyncio.sleep(0.02)  # by now the others have come
                task.cancel()
                return
            assert (await client.post("/v1/completions", json=body)).status_code == 200

        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(count)))

    with served(arguments, rows=256) as (llm, server, _):
        for case, (spread, leave) in {
            "within one step": (0.0, False), "over two seconds": (2.0, False), "the first one leaves": (0.0, True),
        }.items():  # fmt: skip
            for seed in range(arguments.rounds):
                shared = prompts_like(llm, 2000, hash((case, seed)) % 2**32)
                before = llm.stats.rows_computed
                asyncio.run(run(server, llm, shared, spread, leave))
                while llm.engine.generator.has_work:
                    time.sleep(1e-3)
                computed = llm.stats.rows_computed - before
                # Of the one that leaves its own 8 rows may have been computed, or not.
                unique = 2000 + 8 * count
                rows.append([case, computed, unique, unique - 8 if leave else unique])
                check_books(llm)
    print(table(["64 requests", "rows computed", "unique rows", "at least"], rows))
    assert all(least <= computed <= unique for _, computed, unique, least in rows)
    return {"rows": rows}


def auc(hits: list[float], misses: list[float]) -> float:
    """Returns how likely a hit was faster than a miss: 0.5 says that nothing can be told."""
    ours, theirs = np.array(hits)[:, None], np.array(misses)[None]
    return float(np.mean((ours < theirs) + 0.5 * (ours == theirs)))


def channel(arguments: argparse.Namespace) -> dict[str, Any]:
    """Guesses prompts of a stranger, and measures what a tenant that floods the cache costs another."""
    found, rows, draw = {}, [], random.Random(0)
    with served(arguments, keys=True) as (llm, server, client):

        def seconds(key: str, prompt: list[int]) -> float:
            body = {"prompt": prompt, "max_tokens": 1}
            started = time.perf_counter()
            response = client.post("/v1/completions", json=body, headers={"x-api-key": key})
            assert response.status_code == 200, response.text
            return time.perf_counter() - started

        for guesser in [{"within": "a", "across": "b"}[part] for part in arguments.parts if part != "flood"]:
            for when in ("cached", "in flight"):
                times: dict[bool, list[float]] = {True: [], False: []}
                for number in range(arguments.guesses):
                    guess, other = (prompts_like(llm, 1000, draw.getrandbits(32)) for _ in range(2))
                    is_right = number % 2 == 0
                    asked = guess if is_right else other
                    if when == "cached":
                        seconds("a", asked)
                        times[is_right].append(seconds(guesser, guess))
                    else:
                        flying = Flying(server, {"prompt": asked, "max_tokens": 1}, "a")
                        times[is_right].append(seconds(guesser, guess))
                        flying.join()
                found[f"{guesser} {when}"] = score = auc(times[True], times[False])
                p50 = [f"{statistics.median(times[kind]) * 1e3:.1f}" for kind in (True, False)]
                rows.append(["the same tenant" if guesser == "a" else "another", when, *p50, f"{score:.3f}"])
                print("  ", *rows[-1], flush=True)
        print(table(["who guesses", "the prompt is", "P50 right, ms", "P50 wrong, ms", "AUC"], rows), flush=True)
        if "flood" in arguments.parts:
            found["flood"] = flood(llm, server, client, arguments)
    return found


class Flying:
    """One request that is sent, and read later."""

    def __init__(self, server: Any, body: dict[str, Any], key: str):
        from serving import Raw

        self._raw = Raw(server).send("/v1/completions", body, headers=f"x-api-key: {key}\r\nconnection: close\r\n")
        time.sleep(HEAD_START)

    def join(self) -> None:
        self._raw.read_all()
        self._raw.close()


def flood(llm: Any, server: Any, client: httpx.Client, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the share of a tenant's tokens that it found in the cache, alone and beside one who floods it."""
    slots = llm.engine.generator.scheduler.pool.num_slots
    size = min(1000, slots // 24)
    work = [prompts_like(llm, size, seed) for seed in range(8)]  # a third of the store, in all

    def share(*, beside: bool) -> float:
        llm.cache.clear()
        cached = total = 0
        asked = Counter()
        for number in range(arguments.guesses // 2):
            if beside:  # four requests of the flood for one of the other's
                bodies = [
                    {"prompt": prompts_like(llm, size, 10_000 + 4 * number + i), "max_tokens": 1} for i in range(4)
                ]
                flying = [Flying(server, body, "b") for body in bodies]
            one = number % len(work)
            headers = {"x-api-key": "a"}
            body = {"prompt": work[one], "max_tokens": 1}
            usage = client.post("/v1/completions", json=body, headers=headers).json()["usage"]
            if asked[one]:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
            asked[one] += 1
            if beside:
                for each in flying:
                    each.join()
        return cached / total

    found = {"alone": share(beside=False), "beside": share(beside=True)}
    lost = 1 - found["beside"] / found["alone"]
    print(f"\nA tenant's tokens found in the cache: {found['alone']:.1%} alone, {found['beside']:.1%} beside one who"
          f" floods it ({lost:.1%} lost)")  # fmt: skip
    return found


def overload(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends four times as many requests as can be answered, and lets 100 clients read a byte a second."""
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "prompt": ""}
    more = {"bodies": [body], "prompt": "and the quick brown fox jumps over the lazy dog " * 4}
    seconds = arguments.seconds
    with served(arguments, max_waiting_requests=32, send_seconds=1e6) as (llm, server, _):
        port = server.bound_at[1]
        Client(port, at_once=64, seconds=3, seed=1, **more).result()
        answers = Client(port, at_once=64, seconds=min(30, max(5, seconds / 5)), seed=2, **more).result()
        ended = answers[answers[:, 1] == 200]
        capacity = len(ended) / (ended[:, 0] + ended[:, 3]).max()
        client = Client(port, rate=4 * capacity, seconds=seconds, seed=3, **more)
        time.sleep(seconds / 10)  # until as many run at once as ever will
        memory = resource_mb()
        found = client.result()
        after = resource_mb()
        good, refused = found[found[:, 1] == 200], found[found[:, 1] == 429]
        within = (good[:, 0] + good[:, 3] <= seconds).sum()
        lost = len(found) - len(good) - len(refused)
        cut = np.percentile(refused[:, 3], [50, 99]) * 1e3
        rows = [
            ["capacity, 64 at once", f"{capacity:.1f} a second"],
            ["sent, at random", f"{len(found)} in {seconds:g} s, {len(found) / seconds / capacity:.1f} x capacity"],
            [
                "answered within the time",
                f"{within / seconds:.1f} a second, {within / seconds / capacity:.2f} of capacity",
            ],
            ["refused (429)", f"{len(refused)}, P50 {cut[0]:.1f} ms, P99 {cut[1]:.1f} ms"],
            ["anything else", f"{lost}"],
            [
                "the client",
                f"{client.cpu / len(found) * 1e3:.2f} ms of CPU a request, late by {client.lag * 1e3:.1f} ms (P99)",
            ],
            ["memory", f"{memory:.0f} MB after a tenth of the time, {after:.0f} MB at its end"],
        ]
        print(table(["overload", ""], rows))
        overloaded = {"capacity": capacity, "goodput": within / seconds, "refused_p99_ms": cut[1], "else": lost}
        overloaded |= {"mb_before": memory, "mb_after": after}
        slow = slow_readers(server, capacity, more, max(5, seconds / 8))
        check_books(llm)
    return {"overload": overloaded, "slow": slow}


def slow_readers(server: Any, capacity: float, more: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns the seconds of requests at half of the capacity, with 100 slow readers of streams and without."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    port = server.bound_at[1]
    for turn in range(4):
        name = ("without", "with", "with", "without")[turn]
        while server.state.handler.backpressure.replies:  # of the turn before
            time.sleep(0.1)
        slow = None
        if name == "with":
            stream = {**more, "bodies": [more["bodies"][0] | {"stream": True, "max_tokens": 64}]}
            slow = Client(port, at_once=100, slow=1.0, seconds=seconds, seed=100 + turn, **stream)
            time.sleep(10)  # until their texts have been computed
        found = Client(port, rate=capacity / 2, seconds=seconds, seed=10 + turn, **more).result()
        times[name] += found[found[:, 1] == 200][:, 3].tolist()
        if slow is not None:
            slow.end()
    cut = {name: np.percentile(values, [50, 99]) * 1e3 for name, values in times.items()}
    print(table(["at half of the capacity", "P50, ms", "P99, ms"],
                [[f"{name} 100 slow readers", *(f"{ms:.1f}" for ms in cut[name])] for name in cut]))  # fmt: skip
    return times


def resource_mb() -> float:
    """Returns how much memory this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    gc.disable()
    Path(sys.argv[1]).write_text(json.dumps(uvloop.run(ask(json.loads(sys.stdin.read())))))
