"""Rows that leave for good, and routes that requests give, against the rule a row at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from generating import generate, tokens_of
from looped_dense import LOOPED, Dense, looped_adapter, looped_checkpoint
from running import prompts
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from visit_checks import GATED, check, engine_of, request_of
from visit_dense import RowByRow

from prefold import LLM, InputError
from prefold.cli.specs import job_spec
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.errors import UnsupportedModelError
from prefold.spec.requests import Exits, Namespace

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
    """Requests with other routes share nothing, and requests of one route share their rows."""
    _, dense = gated
    llm = gated[0]
    routes = [(0, 1, 1, 0, 1), (0, 1, 0), (0, 1, 0, 1), (1, 1, 0), (1,), None]
    engine, tokens = engine_of(llm), prompts(7, count=3)[2]
    found = tokens_of(generate(engine, [request_of(tokens, Exits(route=route)) for route in routes]))
    for route, made in zip(routes, found, strict=True):
        check(dense, "last", tokens, made, Exits(route=route))
    assert len({tuple(made) for made in found}) == 5  # the checkpoint's own order is the first
    # The prompt's rows once for each route, and four rows of each sequence's own; they take the same steps.
    once = sum(len(route) for route in set(filter(None, routes)))
    tails = 4 * sum(len(route or routes[0]) for route in routes)
    assert engine.stats.generation.block_calls == len(tokens) * once + tails
    assert engine.stats.generation.steps == 5


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


def test_company_changes_nothing(gated):
    """Rows of other rules and routes go through the same steps."""
    llm, dense = gated
    rules = (Exits(0.5), Exits(0.8, 2), Exits(change=0.9), Exits(), Exits(route=(0, 1, 0)), Exits(0.6, prompts=True))
    cases = [(tokens, exits) for tokens in prompts(5, count=4)[::2] for exits in rules]  # one twice, and a part of one
    asked = [request_of(*case, max_tokens=12) for case in cases]
    engine = engine_of(llm, cache=CacheOptions(min_overlap=1))
    together = tokens_of(generate(engine, asked))
    steps = engine.stats.generation.steps
    apart, calls = [], 0
    for request in asked:
        alone = engine_of(llm)
        apart += tokens_of(generate(alone, [request]))
        calls += alone.stats.generation.block_calls
    assert together == apart and engine.stats.generation.block_calls < calls
    assert steps == 12  # one with the prompts, and one for each further token
    for (tokens, exits), made in zip(cases, together, strict=True):
        check(dense, "last", tokens, made, exits)


def test_visits_are_counted(gated):
    engine, tokens = engine_of(gated[0]), prompts(7, count=3)[2]
    generate(engine, [request_of(tokens, Exits(1.0, visits=(3, 1, 5)), max_tokens=4)])
    stats = engine.stats.generation
    assert (stats.block_calls, stats.block_calls_saved) == (5 * len(tokens) + 3 + 1 + 5, 2 + 4)


def test_a_second_call_finds_rows_of_the_first(gated):
    """Kept rows serve prompts that go on from them, and from the tokens of an answer, by the same rule. What is found
    gives the same as what is computed."""
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
    assert twin < engine.stats.generation.block_calls <= twin + 5  # its last row once more, for its result
    assert twin > calls
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
    models = {"": Dense(folder), "one": Dense(folder, looped_adapter(folder, place))}
    llm = LLM(str(folder), dtype="float32", device="cpu", adapters={"one": str(place)})
    for keys in ("save", "project"):
        engine = ModelEngine(llm.engine.worker, EngineOptions(generation=GenerateOptions(looped={"exits": keys})))
        cases = [(tokens, name) for tokens in prompts(3, count=3)[:3] for name in models]
        for exits in (Exits(0.5), Exits(0.4, prompts=True), Exits(max_visits=1)):
            asked = [replace(request_of(tokens, exits), namespace=Namespace(name)) for tokens, name in cases]
            found = tokens_of(generate(engine, asked))
            for (tokens, name), made in zip(cases, found, strict=True):
                check(models[name], "last" if keys == "save" else "project", tokens, made, exits)


@pytest.mark.parametrize("given", [{"exit_threshold": 0.5, "exit_prompts": True}, {"exit_threshold": 0.5}, {}], ids=str)
def test_numbers_are_read_at_every_row(gated, given):
    """Of rows of prompts, which make all visits unless their request lets them leave."""
    llm, dense = gated
    tokens, targets, route = prompts(5)[0], [17, 18, 3], (1, 0)
    for some in (given, given | {"route": route}):
        exits = Exits(given.get("exit_threshold", 1.0), prompts="exit_prompts" in given)
        oracle = RowByRow(dense).run([*tokens, *targets[:-1]], len(tokens) + 2, exits, some.get("route"))
        rows = torch.stack(oracle.hidden[: len(tokens)])
        (last,) = llm.embed([tokens], normalize=False, **some)
        np.testing.assert_allclose(last, rows[-1], rtol=1e-4, atol=1e-4)
        (mean,) = llm.embed([tokens], normalize=False, pooling="mean", **some)
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-4, atol=1e-4)
        found = llm.score([tokens], [targets], **some)[0].logprobs
        for logprob, target, hidden in zip(found, targets, oracle.hidden[len(tokens) - 1 :], strict=True):
            assert logprob == pytest.approx(float(dense.logits(hidden).log_softmax(-1)[target]), abs=1e-3)


def test_rows_that_leave_share_all_or_nothing(tmp_path):
    folder = looped_checkpoint(tmp_path, "looped", loop=GATED)
    llm = LLM(str(folder), dtype="float32", device="cpu", sharing="mlp", looped={"exits": "save"})
    llm.embed([[5, 6]])  # rows make all visits
    with pytest.raises(InputError, match="rows that leave do not work with this sharing; use full or off"):
        llm.embed([[5, 6]], max_visits=2)


@pytest.fixture(scope="module", params=["hard", "planned"])
def routed(request, tmp_path_factory):
    router = {"kind": request.param, "planner": request.param == "planned", "threshold": 0.35}
    loop = LOOPED["loop"] | {"router": router, "gate": True}
    folder = looped_checkpoint(tmp_path_factory.mktemp("routed"), "looped", loop=loop, seed=3)
    return LLM(str(folder), dtype="float32", device="cpu"), Dense(folder)


def route_of(dense: Dense, tokens: list[int]) -> tuple[int, ...]:
    weights = [weight[0] for weight in dense.routed(tokens)[1]]
    return tuple(int(weight.argmax()) for weight in weights if weight[-1] < 1)


def test_a_router_says_the_route(routed):
    llm, dense = routed
    token_lists, routes = prompts(11, count=8), []
    engine = engine_of(llm, exits="read", rows=5, cache=CacheOptions(min_overlap=1))
    found = tokens_of(generate(engine, [request_of(tokens, Exits()) for tokens in token_lists]))
    for tokens, made in zip(token_lists, found, strict=True):
        routes.append(route_of(dense, tokens))
        check(dense, "last", tokens, made, Exits(route=routes[-1]))
    assert len(set(routes)) > 1
    # Each prompt was asked about once, with all of its rows, and each token has a row in it.
    calls = engine.stats.generation.block_calls
    assert calls == sum(len(route) * (len(tokens) + 4) for route, tokens in zip(routes, token_lists, strict=True))
    # What was computed is found again, and by requests that give the route.
    for given in ([None] * len(routes), routes):
        asked = [request_of(*one, max_tokens=1) for one in zip(token_lists, map(given_route, given), strict=True)]
        assert tokens_of(generate(engine, asked)) == [made[:1] for made in found]
        before, calls = calls, engine.stats.generation.block_calls
        assert calls - before <= sum(map(len, routes))  # the last row of each, for its result


def given_route(route: tuple[int, ...] | None) -> Exits:
    return Exits(route=route)


def test_numbers_of_routed_prompts(routed):
    """They run in the slots, where the rows of a prompt go by its route."""
    llm, dense = routed
    token_lists = prompts(11, count=6)
    vectors = llm.embed(token_lists, normalize=False, pooling="mean")
    found = llm.score(token_lists, [[17, 18]] * len(token_lists))
    for tokens, vector, score in zip(token_lists, vectors, found, strict=True):
        oracle = RowByRow(dense).run(tokens, len(tokens), Exits(1.0), route_of(dense, tokens))
        np.testing.assert_allclose(vector, torch.stack(oracle.hidden).mean(0), rtol=1e-4, atol=1e-4)
        # The router reads the prompt with its first target.
        route = route_of(dense, [*tokens, 17])
        oracle = RowByRow(dense).run([*tokens, 17], len(tokens) + 1, Exits(1.0), route)
        wanted = [float(dense.logits(oracle.hidden[at]).log_softmax(-1)[target]) for at, target in ((-2, 17), (-1, 18))]
        assert score.logprobs == pytest.approx(wanted, abs=1e-3)


def test_routed_prompts_with_little_memory(routed):
    """Samples of a prompt take one route, also after they were preempted; their rows may leave."""
    llm, dense = routed
    token_lists = prompts(9, count=4)
    slots = max(map(len, token_lists)) + 38
    engine = engine_of(llm, exits="read", slots=slots, reserve_output=False, rows=7, cache=CacheOptions(min_overlap=1))
    exits = Exits(0.8, max_visits=4)
    asked = [request_of(tokens, exits, max_tokens=24, n=2, temperature=0.5, seed=1) for tokens in token_lists]
    found = generate(engine, asked)
    assert engine.stats.generation.preemptions > 0
    plenty = generate(engine_of(llm, exits="read"), asked)
    for tokens, samples, others in zip(token_lists, found, plenty, strict=True):
        assert [one.tokens for one in samples] == [one.tokens for one in others]
        route = route_of(dense, tokens)[:4]
        for sample in samples:
            oracle = RowByRow(dense).run([*tokens, *sample.tokens[:-1]], len(tokens), exits, route)
            for step in range(24):  # drawn at a low temperature: each is among the likeliest
                scores = dense.logits(oracle.hidden[len(tokens) - 1 + step])
                assert scores[sample.tokens[step]] > scores.max() - 12


@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_numbers_that_are_none_name_the_request(tmp_path, executor):
    loop = LOOPED["loop"] | {"router": {"kind": "hard"}, "gate": True}
    folder = looped_checkpoint(tmp_path, "looped", loop=loop)
    llm = LLM(str(spoiled(folder, "model.gate.bias")), dtype="float32", device="cpu", executor=executor)
    good = generate(engine_of(llm), [request_of([5, 6], Exits()), request_of([5, 6], Exits(0.5))])
    assert len(good[0][0].tokens) == 5 and isinstance(good[1], InputError)
    llm = LLM(str(spoiled(folder, "model.router.outer.bias")), dtype="float32", device="cpu", executor=executor)
    (wrong, right) = generate(engine_of(llm), [request_of([5, 6], Exits()), request_of([5, 6], Exits(route=(1, 0)))])
    assert isinstance(wrong, InputError) and "the logits after 0 tokens are not finite" in str(wrong)
    assert len(right[0].tokens) == 5


def spoiled(folder: Path, name: str) -> Path:
    """The checkpoint, with numbers that are none in one more tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
            with pytest.raises(InputError, match=f"{name} is given, but rows make all visits"):
                call([[5, 6]], **{name: value})
    with pytest.raises(InputError, match="exits is 'save', which needs a looped model"):
        LLM(str(tiny_checkpoint(tmp_path, "llama")), device="cpu", looped={"exits": "save"})
    with pytest.raises(InputError, match="exits is 'leave'"):
        LLM(str(tiny_checkpoint(tmp_path, "llama")), device="cpu", looped={"exits": "leave"})
    routed = {"blocks": 2, "order": [0, 1], "router": {"kind": "soft"}}
    with pytest.raises(UnsupportedModelError, match=r"loop\.router\.kind is 'soft'"):
        LLM(str(looped_checkpoint(tmp_path, "looped", loop=routed)), device="cpu")


def test_a_job_with_other_exits_is_another_job():
    given = {"exits": "save", "exit_change": 0.5, "exit_prompts": True, "route": (0, 1)}
    assert given.items() <= job_spec(given, task="embed").identity().items()
