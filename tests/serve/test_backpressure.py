"""What waits is counted by samples, and who is refused is told a time that fits the rate of the answers."""

from __future__ import annotations

import httpx
import pytest

from prefold.engine.handles import Handle
from prefold.engine.schedule.generate_step import NO_OWNER
from prefold.serve.http import Refusal
from prefold.serve.keys import Keys
from prefold.serve.limits import Backpressure
from prefold.spec.requests import Owner
from prefold.spec.server import ServerSpec


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def backpressure(clock):
    return Backpressure(ServerSpec(max_waiting_requests=8), Keys(None), clock)


def answer(backpressure, clock, *, samples=1, seconds=1.0):
    """Answers one request after some seconds."""
    replies = [Handle(10, NO_OWNER, samples)]
    with backpressure.computing(replies):
        clock.now += seconds
        backpressure.note_answered(replies)


def test_samples_are_counted(backpressure):
    with backpressure.computing([Handle(10, NO_OWNER, 5)]):
        assert backpressure.waiting == (5, 10)
        with backpressure.preparing(40, NO_OWNER, samples=3) as prepared:
            assert backpressure.waiting == (8, 20)
            with pytest.raises(Refusal, match="8 requests are waiting; the limit is 8"):
                backpressure.check(NO_OWNER)
            prepared()
        backpressure.check(NO_OWNER)
        with pytest.raises(Refusal, match="5 requests are waiting; the limit is 8; this request counts as 4"):
            backpressure.check(NO_OWNER, 4)
    assert backpressure.waiting == (0, 0)


@pytest.fixture
def shared(tmp_path, clock):
    """A Backpressure of 12 for tenants a to c; c may have 2."""
    path = tmp_path / "keys.toml"
    tables = (f'[[key]]\nkey = "{name}"\ntenant = "{name}"\n' for name in "abc")
    path.write_text("".join(tables) + "max_waiting_requests = 2\n")
    return Backpressure(ServerSpec(max_waiting_requests=12, api_keys=str(path)), Keys(str(path)), clock)


@pytest.mark.parametrize(("most_running", "taken"), [(256, 4), (3, 4), (1, 3), (0, 2)])
def test_requests_that_are_about_to_run_do_not_wait(tmp_path, most_running, taken):
    """A tenant has two sequences, and two requests of it may wait."""
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nkey = "a"\ntenant = "a"\nmax_running = 2\nmax_waiting_requests = 2\n')
    backpressure = Backpressure(ServerSpec(), Keys(str(path)), most_running=most_running)
    assert filled(backpressure, Owner("a")) == taken
    assert backpressure.waiting[0] == 2 and backpressure.running == taken - 2
    for reply in list(backpressure.replies)[: taken - 2]:
        reply.begun_at = 0.0
    assert filled(backpressure, Owner("a")) == 0


def filled(backpressure, owner, samples=1):
    """Returns how many requests of an owner are taken, one after the other; they stay."""
    for count in range(100):
        try:
            backpressure.check(owner, samples)
        except Refusal:
            return count
        backpressure.replies[Handle(1, owner, samples)] = None
    raise AssertionError("there is no end")


@pytest.mark.parametrize("samples", [1, 3, 4096])
def test_a_tenant_leaves_the_others_their_parts(shared, samples):
    """Whether it comes with many requests, or with one of many samples."""
    assert filled(shared, Owner("a"), samples) == max(1, 6 // samples)
    assert filled(shared, Owner("b")) == 6
    assert filled(shared, Owner("c")) == 2


def test_a_request_that_is_larger_than_a_limit_is_taken_alone(shared):
    assert filled(shared, Owner("c"), 5) == 1
    assert filled(shared, Owner("c")) == 0


def test_what_waits_of_batches_is_not_in_the_way_of_interactive_requests(shared):
    assert filled(shared, Owner("a", is_batch=True), 4096) == 1
    assert filled(shared, Owner("b", is_batch=True), 4096) == 1
    assert filled(shared, Owner("c")) == 2
    shared.replies = dict.fromkeys(Handle(1, Owner(name, is_batch=True), 500) for name in "bc")
    assert filled(shared, Owner("a")) == 6


def test_samples_that_are_too_many_are_never_counted(server, monkeypatch):
    seen, check = [], Backpressure.check
    monkeypatch.setattr(
        Backpressure, "check", lambda self, *args, **options: seen.append(args) or check(self, *args, **options)
    )
    body = {"prompt": "yes " * 2000, "n": 10**9}  # long enough to be prepared in a thread
    found = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert found.status_code == 400 and found.json()["error"]["code"] == "too_many", found.text
    assert seen and all(len(args) == 1 for args in seen)


def test_a_pause_before_does_not_lengthen_the_time_to_wait(backpressure, clock):
    for _ in range(20):
        answer(backpressure, clock)
    before = backpressure.seconds_for(12, 0)
    clock.now += 36_000
    for _ in range(3):
        answer(backpressure, clock)
    assert before == backpressure.seconds_for(12, 0) == 6


def test_the_rate_is_that_of_what_is_counted_as_waiting(backpressure, clock):
    for _ in range(20):
        answer(backpressure, clock, samples=4)
    assert backpressure.seconds_for(48, 0) == 6
