"""Requests whose rows leave or take routes, in an engine: what is refused, read, pinned, told and interrupted."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from generating import generate, tokens_of, until_idle
from looped_dense import LOOPED, Dense, looped_checkpoint
from running import as_request, prompts, run
from visit_checks import GATED, check, engine_of, request_of

from prefold import LLM, InputError, PrefoldError
from prefold.engine.cache import CacheOptions
from prefold.spec.requests import Exits, Readout


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    folder = looped_checkpoint(tmp_path_factory.mktemp("gated"), "looped", loop=GATED)
    return LLM(str(folder), dtype="float32", device="cpu", looped={"exits": "save"})


def test_visits_without_a_gate(tmp_path):
    """Where rows make all visits, a gate alone says after which they are read; where they leave, everybody may."""
    folder = looped_checkpoint(tmp_path, "looped")
    llm, dense = LLM(str(folder), dtype="float32", device="cpu"), Dense(folder)
    tokens, exits = prompts(5)[0], Exits(route=(0, 1), max_visits=1)
    engine = engine_of(llm, exits="read")
    before, wrong, behind = generate(engine, [request_of(tokens, one) for one in (Exits(), exits, Exits())])
    assert before[0].tokens == behind[0].tokens and len(before[0].tokens) == 5
    assert isinstance(wrong, InputError) and "max_visits is given, but the model has no gate" in str(wrong)
    for given in ({"route": (0, 1), "min_visits": 2}, {"max_visits": 1}):
        with pytest.raises(InputError, match="the model has no gate"):
            llm.embed([tokens], **given)
    leaving = LLM(str(folder), dtype="float32", device="cpu", looped={"exits": "save"})
    (made,) = leaving.generate([tokens], max_tokens=5, ignore_eos=True, max_visits=1)
    check(dense, "last", tokens, list(made.tokens), Exits(max_visits=1))


def test_one_prompt_that_is_too_long_leaves_the_others(gated):
    """A request for numbers that cannot be read has an error of its own."""
    engine = engine_of(gated, slots=48)
    requests = [as_request(list(range(3, 3 + size))) for size in (4, 59, 5)]
    llm = SimpleNamespace(engine=engine)
    readout = Readout("last", exits=Exits(0.5, prompts=True))
    short, long, other = run(llm, requests, readout, sharing=None, rows=None)
    assert isinstance(long, InputError) and "the K/V of 59 rows, but the KV store has only 48" in str(long)
    assert short.values.shape == other.values.shape == (36,)
    assert engine.stats.requests == 3


@pytest.mark.parametrize("exits", ["save", "read"])
def test_pins_of_rows_that_leave_or_take_a_route(tmp_path, exits):
    """A pin holds the rows of the requests that it names, and they are asked for by the same name."""
    folder = looped_checkpoint(tmp_path, "looped", loop=GATED | {"threshold": 0.5})
    llm, tokens = LLM(str(folder), dtype="float32", device="cpu", looped={"exits": exits}), list(range(3, 30))
    for given in ({}, {"route": (0, 1)}, {"exit_threshold": 0.7}):
        llm.generate([tokens], max_tokens=1, **given)
        assert llm.pin(tokens, **given) == len(tokens) == llm.unpin(tokens, **given)
        held = Exits(given.get("exit_threshold"), route=given.get("route"))
        assert llm.engine.held_rows(np.array(tokens, np.int32), asked=Readout("last", exits=held)) == len(tokens)


def test_progress_counts_a_row_once(gated):
    """A row counts once, however many visits it makes, in what listeners are told as in the statistics."""
    engine, told = engine_of(gated), []
    generate(engine, [request_of(tokens, Exits(0.5)) for tokens in prompts(5, count=4)], on_step=told.append)
    assert sum(step.rows for step in told) == engine.stats.rows_computed


def test_interrupts_of_steps_whose_rows_leave(gated, start_by):
    """Whichever step of them is broken off while it is waited for, the next call gives what it would have given."""
    engine = engine_of(gated, rows=24, cache=CacheOptions(min_overlap=1))
    asked = [request_of(tokens, Exits(0.6), max_tokens=3) for tokens in prompts(5, count=3)]
    wanted, worker, results = tokens_of(generate(engine, asked)), engine.worker, count()

    class Interrupted:
        def __init__(self, ticket):
            self.ticket = ticket

        def result(self):
            if next(results) == at:
                raise KeyboardInterrupt
            return self.ticket.result()

    start_by(worker, lambda start, *given: Interrupted(start(*given)))
    for at in count():
        results = count()
        engine.generator.scheduler.cache.clear()
        try:
            generate(engine, asked)
        except PrefoldError:
            assert tokens_of(generate(engine, asked[::-1])) == wanted[::-1], at
            until_idle(engine)
        else:
            break
    assert at > 2


def test_rows_that_a_routed_prompt_finds_are_counted(tmp_path):
    """Where a router says the route, what is there of a prompt is known once it has said all of it."""
    loop = LOOPED["loop"] | {"router": {"kind": "hard", "threshold": 0.35}}
    llm = LLM(str(looped_checkpoint(tmp_path, "looped", loop=loop, seed=3)), dtype="float32", device="cpu")
    engine, tokens = engine_of(llm, exits="read", cache=CacheOptions(min_overlap=1)), list(range(3, 30))
    for prompt, cached in ((tokens, 0), (tokens, 27), ([*tokens[:9], 7], None)):
        before = engine.stats.generation.cross_window_hits if engine.stats.generation else 0
        ((made,),) = generate(engine, [request_of(prompt, Exits(), max_tokens=2)])
        assert cached is None or made.cached_tokens == cached
        assert made.cached_tokens == engine.stats.generation.cross_window_hits - before <= len(prompt)
