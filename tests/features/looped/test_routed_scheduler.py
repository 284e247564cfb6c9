"""Random traces of routed prompts: what each row of a step sees, and the books, while prompts move to their routes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from books import check_books
from traces import CheckedStore, expected, next_token, prompts_of

from prefold.engine import GenerateOptions
from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.schedule.fair import FairAdmission
from prefold.features.looped.engine import LoopedPart
from prefold.features.looped.scheduler import LoopedScheduler
from prefold.features.looped.steps import MODEL_ORDER, LoopedFacts, PassResult, Way
from prefold.spec.requests import Exits, Namespace, Owner, Readout

FACTS = LoopedFacts((0, 1, 0), gate=True, threshold=1.0, routed=True, is_whole=True)
ROUTES = ((0,), (0, 1), (1, 1, 0))


def route_of(prompt) -> tuple[int, ...]:
    return ROUTES[sum(int(token) * (at + 1) for at, token in enumerate(prompt)) % 3]


def scheduler_of(part: LoopedPart, rng: np.random.Generator) -> LoopedScheduler:
    hooks = {"namespace_of": part.ways.namespace_of, "on_route": part.ways.remember}
    cache = CacheOptions(min_overlap=int(rng.integers(0, 4))) if rng.random() < 0.7 else None
    limits = {"max_batch_rows": int(rng.integers(4, 30)), "max_running": int(rng.integers(1, 6)), "cache": cache}
    scheduler = LoopedScheduler(SlotPool(int(rng.integers(20, 60))), routed=True, **hooks, **limits)
    if rng.random() < 0.5:
        scheduler.admit_by(FairAdmission())
    return scheduler


def with_exits(exits: Exits | None) -> Readout:
    return Readout("last", exits=exits)


def submit(scheduler, part, key, prompt, exits, **options) -> None:
    request = SimpleNamespace(
        namespace=Namespace(), readers=[SimpleNamespace(asked=with_exits(exits))], rows=prompt, key=key
    )
    scheduler.submit(key, prompt, **{"limit": 3, **part.submit(request), **options})


def land(scheduler, store: CheckedStore, step, tokens) -> list:
    asked = [namespace for namespace, _, _ in step.namespaces if namespace.part(Way, MODEL_ORDER).asker is not None]
    prompts = {namespace: tuple(path) for namespace, path in store.content.values() if namespace in asked}
    for namespace, path in store.content.values():
        if namespace in asked and len(path) > len(prompts[namespace]):
            prompts[namespace] = path
    moves = {namespace: route_of(prompts[namespace]) for namespace in asked}
    visits = np.ones(step.num_rows, np.int64)
    result = PassResult(np.array(tokens), visits=visits, routes=[moves[namespace] for namespace in asked])
    done = scheduler.commit(step, tokens, [False] * len(tokens), result)
    for slot, (namespace, path) in store.content.items():
        if namespace in moves:
            way = namespace.part(Way, MODEL_ORDER)
            moved = namespace.with_part(Way(moves[namespace], way.exits))
            store.content[slot] = (moved, path)
    check_books(scheduler)
    return done


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_routed_prompts_are_shared_by_route_alone(seed):
    rng = np.random.default_rng(seed)
    part = LoopedPart(None, GenerateOptions(), FACTS)
    scheduler, store, flight = scheduler_of(part, rng), CheckedStore(), None
    prompts, asked, ended, cancelled, failed = prompts_of(rng, 6), {}, {}, set(), set()
    for turn in range(400):
        if turn < 60 and rng.random() < 0.4:
            key, prompt = turn, prompts[rng.integers(6)]
            exits = [None, Exits(route=route_of(prompt)), Exits(max_visits=2)][rng.integers(3)]
            options = {"samples": int(rng.integers(1, 3)), "reserve": bool(rng.random() < 0.5)}
            options |= {"owner": Owner(is_batch=bool(rng.random() < 0.5))}
            asked[key] = prompt, options["samples"]
            submit(scheduler, part, key, prompt, exits, limit=4, **options)
        if asked and rng.random() < 0.1:
            key = int(rng.choice(list(asked)))
            prompt, samples = asked[key]
            is_open = not any((key, sample) in ended for sample in range(samples)) and key not in cancelled | failed
            scheduler.cancel(key)
            check_books(scheduler)
            if is_open and rng.random() < 0.7:  # it was on hold, and goes on
                submit(scheduler, part, key, prompt, None, limit=4, samples=samples)
            else:
                cancelled.add(key)
        failed |= {key for key, _ in scheduler.admit()}
        step = scheduler.plan()
        if flight is not None and (step is None or rng.random() < 0.5):
            for done in land(scheduler, store, *flight):
                ended[done.key, done.sample] = list(done.tokens)
            flight = None
            continue
        if step is None:
            if turn >= 60:
                break
            continue
        store.run(step, [] if flight is None else flight[1])
        tokens = [next_token(path, one.sample) for path, one in zip(store.paths, step.consumers, strict=True)]
        for namespace, first, stop in step.namespaces:
            if (asker := namespace.part(Way, MODEL_ORDER).asker) is not None:  # the router is asked about whole prompts
                assert step.message.tokens[first:stop].tolist() == asked[asker.key][0].tolist()
        before, flight = flight, (step, tokens)
        scheduler.begin(step)
        check_books(scheduler)
        for done in land(scheduler, store, *before) if before is not None else ():
            ended[done.key, done.sample] = list(done.tokens)
    assert not scheduler.has_work
    for key, (prompt, samples) in asked.items():
        for sample in range(samples) if key not in cancelled | failed else ():
            assert ended[key, sample] == expected(prompt, sample, 4, lambda path, sample: False)


def test_a_prompt_is_asked_about_once():
    """A twin of a prompt takes its route, and finds its rows; another prompt is asked about anew."""
    part = LoopedPart(None, GenerateOptions(), FACTS)
    prompt = np.array([1, 2, 0, 1], np.int32)
    first = part.submit(
        SimpleNamespace(namespace=Namespace(), readers=[SimpleNamespace(asked=with_exits(None))], rows=prompt, key=1)
    )
    assert first["namespace"].part(Way, MODEL_ORDER).asker.key == 1
    part.ways.remember(first["namespace"], prompt, (0, 1))
    for exits, tokens, route in ((None, prompt, (0, 1)), (Exits(min_visits=2), prompt, None), (None, prompt[:3], None)):
        assert part.ways.namespace_of(Namespace(), with_exits(exits), tokens, 2).part(Way, MODEL_ORDER).route == route


def test_a_request_that_was_on_hold_is_asked_about_with_all_of_its_rows():
    """Its rows are computed anew: the router reads the states of all of them."""
    part, prompt = LoopedPart(None, GenerateOptions(), FACTS), np.array([1, 2, 0, 1], np.int32)
    hooks = {"namespace_of": part.ways.namespace_of, "on_route": part.ways.remember, "routed": True}
    options = {"max_batch_rows": 20, "max_running": 4, "cache": CacheOptions(min_overlap=1)}
    scheduler = LoopedScheduler(SlotPool(30), **hooks, **options)
    for _ in range(2):
        submit(scheduler, part, 1, prompt, None)
        scheduler.admit()
        step = scheduler.plan()
        assert step.message.tokens.tolist() == prompt.tolist()
        scheduler.begin(step)
        scheduler.cancel(1)
        scheduler.commit(step, [0], [False], PassResult(np.zeros(1), visits=np.ones(4, np.int64), routes=[(0, 1)]))
        check_books(scheduler)
