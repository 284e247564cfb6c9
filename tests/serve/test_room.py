"""What waits is counted by samples, and who is refused is told a time that fits the rate of the answers."""

from __future__ import annotations

import pytest

from prefold.engine.replies import Reply
from prefold.schedule.generate_step import NOBODY
from prefold.serve.http import Refusal
from prefold.serve.keys import Keys
from prefold.serve.options import ServeOptions
from prefold.serve.room import Room


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def room(clock):
    return Room(ServeOptions(max_waiting_requests=8), Keys(None), clock)


def answer(room, clock, *, samples=1, seconds=1.0):
    """Answers one request after some seconds."""
    replies = [Reply(None, 10, NOBODY, samples)]
    with room.computing(replies):
        clock.now += seconds
        room.note_answered(replies)


def test_samples_are_counted(room):
    with room.computing([Reply(None, 10, NOBODY, 7)]):
        assert room.waiting == (7, 10)
        with room.preparing(40, NOBODY, samples=5) as prepared:
            assert room.waiting == (12, 20)
            with pytest.raises(Refusal, match="12 requests are waiting"):
                room.check(NOBODY)
            prepared()
        room.check(NOBODY)
    assert room.waiting == (0, 0)


def test_a_pause_before_does_not_lengthen_the_time_to_wait(room, clock):
    for _ in range(20):
        answer(room, clock)
    before = room.seconds_for(12, 0)
    clock.now += 36_000
    for _ in range(3):
        answer(room, clock)
    assert before == room.seconds_for(12, 0) == 6


def test_the_rate_is_that_of_what_is_counted_as_waiting(room, clock):
    for _ in range(20):
        answer(room, clock, samples=4)
    assert room.seconds_for(48, 0) == 6
