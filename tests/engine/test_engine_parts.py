"""What a feature adds to an engine: the hooks of its part are called, and nothing of a part that has none."""

from __future__ import annotations

import random

import numpy as np
import pytest
from books import check_books
from fake_worker import FakeWorker

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.schedule import parts
from prefold.engine.schedule.parts import EnginePart, hooks
from prefold.errors import InputError
from prefold.spec.requests import Request, Sampling


class Noting(EnginePart):
    """Notes when its hooks are called, and ends the request with the key `bad` once it runs."""

    def __init__(self):
        self.told, self.bad = [], None

    def check(self, exits, sharing="full"):
        self.told.append("check")

    def submit(self, request):
        self.told.append(("submit", request.key))
        return {"priority_of_parts": 1} if request.request.priority == 7 else {}

    def forget(self, key):
        self.told.append(("forget", key))

    def before_plan(self, scheduler, requests):
        running = {sequence.key for sequence in scheduler.running}
        return {self.bad: InputError("made up")} if self.bad in running else {}

    def after_plan(self, rows, seconds):
        self.told.append(("rows", rows))
        return {}


class Quiet(EnginePart):
    """Has no hook of its own."""


@pytest.fixture
def engine(keep):
    parts.load_plugins()  # before the table is replaced: features enter themselves only once in a process
    found = (Noting(), Quiet())
    keep(parts.MAKERS)
    parts.MAKERS[:] = [*(lambda *given, part=part: part for part in found), lambda *given: None]
    worker = FakeWorker(random.Random(0), depth=1, trouble=0.0)
    options = EngineOptions(max_batch_rows=24, generation=GenerateOptions(kv_memory=400))
    return ModelEngine(worker, options)


def ask(engine, told, key, priority=0):
    request = Request(np.array([1, 2, 0], np.int32), sampling=Sampling(max_tokens=3), priority=priority)
    return engine.generator.add(request, None, lambda answer: told.__setitem__(key, answer))


def test_an_engine_calls_the_hooks_that_a_part_has(engine):
    part, told = engine.part(Noting), {}
    assert part is not None and engine.part(Quiet) is not None and engine.part(FakeWorker) is None
    key = ask(engine, told, "good")
    while engine.generator.has_work:
        engine.generator.step()
    assert len(told["good"][0].tokens) == 3
    steps = [event for event in part.told if isinstance(event, tuple) and event[0] == "rows"]
    assert part.told[:2] == ["check", ("submit", key)] and part.told.count(("forget", key)) == 1
    assert steps[0] == ("rows", 3) and steps[1] == ("rows", 1)


def test_a_part_ends_requests_that_cannot_go_on(engine):
    told = {}
    ask(engine, told, "good")
    engine.part(Noting).bad = ask(engine, told, "bad")
    while engine.generator.has_work:
        engine.generator.step()
        check_books(engine.generator.scheduler)
    assert isinstance(told["bad"], InputError) and len(told["good"][0].tokens) == 3


def test_what_a_part_says_of_a_request_goes_to_the_scheduler(engine):
    ask(engine, {}, "good", priority=7)
    with pytest.raises(TypeError, match="priority_of_parts"):
        engine.generator.step()


def test_hooks_that_do_nothing_are_not_called(engine):
    assert hooks(engine.parts, "using") == () and len(hooks(engine.parts, "before_plan")) == 1
