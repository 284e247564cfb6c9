"""Clients that leave: what they asked for is ended, and nobody else notices."""

from __future__ import annotations

import random
import threading

import httpx
import pytest
from books import check_books
from running import no_steps
from serving import Raw, until

LONG = {"prompt": "the yes no", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def is_idle(server, llm):
    scheduler = llm.engine.generator.scheduler
    idle = not server.state.handler.backpressure.replies and not scheduler.has_work and not server.state.open
    return idle and not llm.engine.generator.open


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_leaves(server, llm, stream):
    before = 0 if llm.stats.generation is None else llm.stats.generation.generated_tokens
    raw = Raw(server).send("/v1/completions", LONG | {"stream": stream})
    until(lambda: server.state.handler.backpressure.running)
    if stream:
        raw.read_until(b"data: ")
    raw.close()
    until(lambda: is_idle(server, llm))
    assert llm.stats.generation.generated_tokens - before < 480
    check_books(llm.engine.generator.scheduler)


def test_half_a_body_and_waiting(server, llm):
    Raw(server).send("/v1/completions", LONG, whole=False).close()
    Raw(server).send("/v1/embeddings", {"input": "yes"}, whole=False).close()
    backpressure = server.state.handler.backpressure
    before, backpressure.most_running = backpressure.most_running, 0
    with no_steps(llm.engine):
        raw = Raw(server).send("/v1/completions", LONG)
        until(lambda: server.state.handler.backpressure.waiting[0] == 1)
        raw.close()
        until(lambda: not server.state.handler.backpressure.replies)
    backpressure.most_running = before
    until(lambda: is_idle(server, llm))


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_that_leave(server, llm, count):
    """At any moment, in any way; others get what they would get alone."""
    draw = random.Random(0)
    expected = llm.generate(["no yes the", "yes"], max_tokens=100, ignore_eos=True)
    found: list[str] = []

    def ask(prompt):
        body = LONG | {"prompt": prompt, "max_tokens": 100}
        found.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("no yes the", "yes") * 3]
    for thread in threads:
        thread.start()
    open_ones: list[Raw] = []
    for _ in range(count):
        kind = draw.choice(["text", "stream", "chat", "numbers"])
        texts = ["yes no the " * draw.randint(1, 20) for _ in range(draw.randint(1, 4))]
        path, body = {
            "text": ("/v1/completions", LONG | {"prompt": texts, "n": 2, "temperature": 1.0}),
            "stream": ("/v1/completions", LONG | {"prompt": texts, "stream": True}),
            "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": texts[0]}], "stream": True,
                                              "max_tokens": 200}),
            "numbers": ("/v1/embeddings", {"input": texts}),
        }[kind]  # fmt: skip
        open_ones.append(Raw(server).send(path, body, whole=draw.random() > 0.1))
        if draw.random() < 0.8:
            open_ones.pop(draw.randrange(len(open_ones))).close()
    for one in open_ones:
        one.close()
    for thread in threads:
        thread.join()
    until(lambda: is_idle(server, llm))
    assert sorted(found) == sorted([one.text for one in expected] * 3)
    scheduler = llm.engine.generator.scheduler
    check_books(scheduler)
    llm.cache.clear()
    assert scheduler.pool.used_slots == 0
