"""Rows that leave for good, and routes that requests give, against the rule a row at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from generating import generate, tokens_of
from looped_dense import LOOPED, Dense, looped_adapter, looped_checkpoint
from running import prompts
from tiny import tiny_checkpoint
from visit_checks import GATED, check, engine_of, request_of
from visit_dense import RowByRow

from prefold import LLM, InputError
from prefold.cache import CacheOptions
from prefold.cli.specs import job_spec
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.errors import UnsupportedModelError
from prefold.types import Exits

PARTS = {"blocks": 2, "order": [1, 0, 1], "prelude": 1, "coda": 1, "between": "inject", "noise": 0.5, "seed": 2**40}
MODELS = {
    "ouro": ("ouro", {"total_ut_steps": 5}),
    "looped": ("looped", {"loop": GATED}),
    "prelude": ("looped", {"num_hidden_layers": 5, "loop": GATED | {"prelude": 1}}),
    "normed": ("looped", {"loop": GATED | {"between": "norm"}}),
    "features": ("looped", {"loop": GATED | {"between": "norm", "gate_reads": "features"}}),
    "inject": ("looped", {"num_hidden_layers": 6, "loop": PARTS}),
    "fed": ("looped", {"loop": GATED | {"between": "inject", "noise": 0.5}}),
    "huginn": ("huginn", {"mean_recurrence": 4}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    family, overrides = MODELS[request.param]
    folder = looped_checkpoint(tmp_path_factory.mktemp("visits"), family, **overrides)
    return LLM(str(folder), dtype="float32", device="cpu"), Dense(folder)


def some_exits(dense: Dense) -> list[Exits]:
    gated = any("gate" in name and "mlp" not in name for name in dense.t)
    found = [Exits(max_visits=2), Exits(change=0.9), Exits(change=0.9, min_visits=2, prompts=True), Exits()]
    if gated:
        found += [Exits(0.4), Exits(0.4, prompts=True), Exits(0.7, 2, 3), Exits(0.6, 1, 3, prompts=True)]
    return found


@pytest.mark.parametrize(("keys", "rows"), [("save", 2), ("project", 1000)])
def test_rows_leave_as_the_rule_says(model, keys, rows):
    llm, dense = model
    token_lists = prompts(3, count=4)
    cases = [(token_lists[number % 4], exits) for number, exits in enumerate(some_exits(dense))]
    engine = engine_of(llm, rows=rows, exits=keys)
    found = tokens_of(generate(engine, [request_of(*case) for case in cases]))
    rule = "last" if keys == "save" else "project"
    visits: set[int] = set()
    for (tokens, exits), made in zip(cases, found, strict=True):
        visits.update(check(dense, rule, tokens, made, exits))
    assert len(visits) > 1
    assert engine.stats.generation.block_calls_saved > 0


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    folder = looped_checkpoint(tmp_path_factory.mktemp("gated"), "looped", loop=GATED)
    return LLM(str(folder), dtype="float32", device="cpu", looped={"exits": "save"}), Dense(folder)


def test_routes_of_requests(gated):
    """Requests with other routes share what their routes have in common, and nothing else."""
    _, dense = gated
    llm = gated[0]
    routes = [(0, 1, 1, 0, 1), (0, 1, 0), (0, 1, 0, 1), (1, 1, 0), (1,), None]
    engine, tokens = engine_of(llm), prompts(7, count=3)[2]
    found = tokens_of(generate(engine, [request_of(tokens, Exits(route=route)) for route in routes]))
    for route, made in zip(routes, found, strict=True):
        check(dense, "last", tokens, made, Exits(route=route))
    assert len({tuple(made) for made in found}) == 5  # the checkpoint's own order is the first
    prefixes = {route[: t + 1] for route in routes if route for t in range(len(route))}
    # Each sequence has four rows of its own at each of its visits.
    tails = 4 * sum(len(route or routes[0]) for route in routes)
    assert engine.stats.generation.block_calls == len(tokens) * len(prefixes) + tails


@pytest.mark.parametrize("family", ["looped", "normed", "inject", "fed"])
def test_routes_where_a_step_is_a_whole_pass(tmp_path, family):
    """Templates: rows of one route go together, those of another come next."""
    folder = looped_checkpoint(tmp_path, MODELS[family][0], **MODELS[family][1])
    llm, dense = LLM(str(folder), dtype="float32", device="cpu"), Dense(folder)
    routes = [(0, 1, 1), None, (0, 1), (1,), (0, 1, 1)]
    cases = [(tokens, Exits(route=route)) for tokens in prompts(7, count=3)[:2] for route in routes]
    engine = engine_of(llm, exits="read", rows=8, cache=CacheOptions(min_overlap=1))
    found = tokens_of(generate(engine, [request_of(*case) for case in cases]))
    for (tokens, exits), made in zip(cases, found, strict=True):
        check(dense, "last", tokens, made, exits)
    tokens = prompts(5)[0]
    for route in routes[:4]:
        oracle = RowByRow(dense).run(tokens, len(tokens), Exits(1.0), route)
        vector = llm.embed([tokens], normalize=False, route=route)[0]
        np.testing.assert_allclose(vector, oracle.hidden[-1], rtol=1e-4, atol=1e-4)
        mean = llm.embed([tokens], normalize=False, pooling="mean", route=route)[0]
        np.testing.assert_allclose(mean, torch.stack(oracle.hidden).mean(0), rtol=1e-4, atol=1e-4)


def test_exits_that_are_given(gated):
    """A request may say after which visit each of its generated rows leaves; behind its list the criteria decide."""
    llm, dense = gated
    tokens, exits = prompts(7, count=3)[2], Exits(1.0, visits=(3, 1, 5))
    ((made,),) = [tokens_of(generate(engine_of(llm), [request_of(tokens, exits)]))]
    assert check(dense, "last", tokens, made, exits)[len(tokens) :] == [3, 1, 5, 5]


def test_several_visits_a_step_change_nothing(gated):
    """Rows go on within a step as their rules say; only steps become fewer."""
    llm, dense = gated
    rules = (Exits(0.5), Exits(0.8, 2), Exits(change=0.9), Exits(), Exits(route=(0, 1, 0)))
    cases = [(tokens, exits) for tokens in prompts(5, count=4)[::2] for exits in rules]  # one twice, and a part of one
    asked = [request_of(*case, max_tokens=12) for case in cases]
    found, steps, calls = {}, {}, {}
    for most in (1, 2, 8):
        engine = engine_of(llm, step_visits=most)
        found[most] = tokens_of(generate(engine, asked))
        steps[most], calls[most] = (getattr(engine.stats.generation, name) for name in ("steps", "block_calls"))
    assert found[1] == found[2] == found[8]
    assert calls[1] == calls[2] == calls[8] and steps[8] <= steps[2] < steps[1]
    for (tokens, exits), made in zip(cases, found[8], strict=True):
        check(dense, "last", tokens, made, exits)


def test_few_rows_wait_for_others(gated):
    """A step ends where few would go on, if the places of the others can be taken."""
    llm, _ = gated
    rules = [Exits(1.0, visits=(2 if number < 4 else 5,) * 20) for number in range(6)]
    asked = [request_of([number, 5, 6], exits, max_tokens=20) for number, exits in enumerate(rules)]
    found, steps = {}, {}
    for refill in (True, False):
        engine = engine_of(llm, refill=refill, step_visits=8)
        found[refill] = tokens_of(generate(engine, asked))
        steps[refill] = engine.stats.generation.steps
    assert found[True] == found[False] and steps[True] > steps[False] + 5


def test_rows_that_stay_are_read_within_the_step(gated):
    engine = engine_of(gated[0], step_visits=8)
    generate(engine, [request_of([number, 5, 6], Exits(), max_tokens=20) for number in range(3)])
    assert engine.stats.generation.steps <= 5 + 19 + 1  # of the prompts, and one a token


def test_few_sequences_make_all_visits_in_a_step(gated):
    """Where more than a few run, a step has as many visits as it was told."""
    steps = {}
    for count in (3, 12):
        engine = engine_of(gated[0], step_visits=2)
        generate(engine, [request_of([number, 5, 6], Exits(), max_tokens=10) for number in range(count)])
        steps[count] = engine.stats.generation.steps
    assert steps[3] <= 5 + 9 + 1 and steps[12] >= 2 * 9


def test_a_second_call_finds_rows_of_the_first(gated):
    """Kept rows serve prompts that go on from them, with another route from where the routes part, and with the tokens
    of an answer; what is found gives the same as what is computed."""
    llm, dense = gated
    engine = engine_of(llm, cache=CacheOptions(min_overlap=1))
    tokens = prompts(7, count=3)[2]
    exits = Exits(0.5, prompts=True)
    (first,) = tokens_of(generate(engine, [request_of(tokens, exits)]))
    calls = engine.stats.generation.block_calls
    longer = [*tokens, *first[:3], 7, 8]
    (second,) = tokens_of(generate(engine, [request_of(longer, exits)]))
    check(dense, "last", longer, second, exits)
    assert engine.stats.generation.cross_window_hits >= len(tokens) + 2
    twin = engine.stats.generation.block_calls
    assert tokens_of(generate(engine, [request_of(tokens, exits, max_tokens=1)])) == [first[:1]]
    assert engine.stats.generation.block_calls == twin > calls  # its last row's state was there
    (other,) = tokens_of(generate(engine, [request_of(tokens, replace(exits, threshold=0.9))]))
    check(dense, "last", tokens, other, replace(exits, threshold=0.9))


@pytest.mark.parametrize("reserve", [True, False])
def test_little_memory(gated, reserve):
    """Sequences give up their rows and go on with the same tokens; no exit is decided twice."""
    llm, dense = gated
    token_lists, exits = prompts(9, count=3), Exits(0.6, prompts=True)
    slots = 5 * (max(map(len, token_lists)) + (24 if reserve else 12))
    engine = engine_of(llm, slots=slots, reserve_output=reserve)
    found = tokens_of(generate(engine, [request_of(tokens, exits, max_tokens=24) for tokens in token_lists]))
    for tokens, made in zip(token_lists, found, strict=True):
        check(dense, "last", tokens, made, exits)
    assert reserve or engine.stats.generation.preemptions > 0


def test_samples_and_penalties_and_logprobs(gated):
    """Reads that are not made take no part in how tokens are chosen at those that are."""
    llm, _ = gated
    options = {"n": 2, "temperature": 0.9, "seed": 5, "logprobs": 2, "repetition_penalty": 1.2, "min_tokens": 3}
    requests = [request_of(tokens, Exits(0.5), **options) for tokens in prompts(3, count=3)[:2]]
    requests += [request_of(tokens, Exits(0.8)) for tokens in prompts(4, count=3)[:2]]
    together = generate(engine_of(llm), requests)
    alone = [generate(engine_of(llm), [request])[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert [sample.tokens for sample in one] == [sample.tokens for sample in other]
        for a, b in zip(one, other, strict=True):
            if a.logprobs:
                assert [p.logprob for p in a.logprobs] == pytest.approx([p.logprob for p in b.logprobs], abs=1e-4)


def test_adapters(tmp_path):
    """Rows of several adapters and of none leave in one step, and those that left are projected with their own."""
    folder, place = looped_checkpoint(tmp_path, "looped", loop=GATED), tmp_path / "adapter"
    models = {None: Dense(folder), "one": Dense(folder, looped_adapter(folder, place))}
    llm = LLM(str(folder), dtype="float32", device="cpu", adapters={"one": str(place)})
    for keys in ("save", "project"):
        engine = ModelEngine(llm.engine.worker, EngineOptions(generation=GenerateOptions(looped={"exits": keys})))
        cases = [(tokens, name) for tokens in prompts(3, count=3)[:3] for name in models]
        for exits in (Exits(0.5), Exits(0.4, prompts=True), Exits(max_visits=1)):
            asked = [replace(request_of(tokens, exits), adapter=name) for tokens, name in cases]
            found = tokens_of(generate(engine, asked))
            for (tokens, name), made in zip(cases, found, strict=True):
                check(models[name], "last" if keys == "save" else "project", tokens, made, exits)


def test_numbers_are_read_at_last_rows(gated):
    llm, dense = gated
    tokens = prompts(5)[0]
    exits = Exits(0.5, prompts=True)
    oracle = RowByRow(dense).run(tokens, len(tokens), exits)
    (vector,) = llm.embed([tokens], normalize=False, exit_threshold=0.5, exit_prompts=True)
    np.testing.assert_allclose(vector, oracle.hidden[-1], rtol=1e-4, atol=1e-4)
    found = llm.score([tokens], [[17]], route=[1, 0])[0].logprobs[0]
    scores = dense.logits(RowByRow(dense).run(tokens, len(tokens), Exits(1.0), (1, 0)).hidden[-1])
    assert found == pytest.approx(float(scores.log_softmax(-1)[17]), abs=1e-3)
    with pytest.raises(InputError, match="several targets of a prompt"):
        llm.score([tokens], [[17, 18]])
    with pytest.raises(InputError, match="'mean'"):
        llm.embed([tokens], pooling="mean")


@pytest.mark.parametrize("kind", ["hard", "planned"])
def test_a_router_says_the_route(tmp_path, kind):
    loop = LOOPED["loop"] | {"router": {"kind": kind, "planner": kind == "planned", "threshold": 0.35}}
    folder = looped_checkpoint(tmp_path, "looped", loop=loop, seed=3)
    llm, dense = LLM(str(folder), dtype="float32", device="cpu"), Dense(folder)
    token_lists, routes = prompts(11, count=8), set()
    engine = engine_of(llm, exits="read", rows=5, cache=CacheOptions(min_overlap=1))
    found = tokens_of(generate(engine, [request_of(tokens, Exits()) for tokens in token_lists]))
    for tokens, made in zip(token_lists, found, strict=True):
        weights = [weight[0] for weight in dense.routed(tokens)[1]]
        route = tuple(int(weight.argmax()) for weight in weights if weight[-1] < 1)
        routes.add(route)
        check(dense, "last", tokens, made, Exits(route=route))
    assert len(routes) > 1
    calls = engine.stats.generation.block_calls
    again = tokens_of(generate(engine, [request_of(tokens, Exits(), max_tokens=1) for tokens in token_lists]))
    assert again == [made[:1] for made in found] and engine.stats.generation.block_calls == calls


def test_numbers_that_are_none_name_the_request(tmp_path):
    loop = LOOPED["loop"] | {"router": {"kind": "hard"}, "gate": True}
    llm = LLM(str(looped_checkpoint(tmp_path, "looped", loop=loop)), dtype="float32", device="cpu")
    with torch.no_grad():
        llm.model.gate.bias.fill_(torch.nan)
    good = generate(engine_of(llm), [request_of([5, 6], Exits()), request_of([5, 6], Exits(0.5))])
    assert len(good[0][0].tokens) == 5 and isinstance(good[1], InputError)
    with torch.no_grad():
        llm.model.router.outer.bias.fill_(torch.nan)
    (wrong, right) = generate(engine_of(llm), [request_of([5, 6], Exits()), request_of([5, 6], Exits(route=(1, 0)))])
    assert isinstance(wrong, InputError) and "the router's logits after 0 visits" in str(wrong)
    assert len(right[0].tokens) == 5


def test_what_cannot_be(gated, tmp_path):
    llm, _ = gated
    for options, message in (
        ({"route": ()}, "the route has 0 visits"),
        ({"route": (0, 1, 0, 1, 0, 1)}, "the route has 6 visits"),
        ({"route": (0, 2)}, "names the block 2"),
        ({"route": (0, 1), "max_visits": 3}, "max_visits is 3; give a number from 1 to 2"),
        ({"exit_change": 0}, "exit_change"),
    ):
        for call in (llm.embed, llm.generate):
            with pytest.raises(InputError, match=message):
                call([[5, 6]], **options)
    plain = LLM(str(looped_checkpoint(tmp_path, "looped", loop=GATED)), dtype="float32", device="cpu")
    for name, value in (("exit_change", 0.1), ("exit_prompts", True)):
        for call in (plain.embed, plain.generate):
            with pytest.raises(InputError, match=f"{name} is given, and rows make all visits"):
                call([[5, 6]], **{name: value})
    with pytest.raises(InputError, match="exits is 'save', which is for looped models"):
        LLM(str(tiny_checkpoint(tmp_path, "llama")), device="cpu", looped={"exits": "save"})
    with pytest.raises(InputError, match="exits is 'leave'"):
        LLM(str(tiny_checkpoint(tmp_path, "llama")), device="cpu", looped={"exits": "leave"})
    routed = {"blocks": 2, "order": [0, 1], "router": {"kind": "soft"}}
    with pytest.raises(UnsupportedModelError, match=r"loop\.router\.kind is 'soft'"):
        LLM(str(looped_checkpoint(tmp_path, "looped", loop=routed)), device="cpu")


def test_a_job_with_other_exits_is_another_job():
    given = {"exits": "save", "exit_change": 0.5, "exit_prompts": True, "route": (0, 1)}
    assert given.items() <= job_spec(given, task="embed").identity().items()
