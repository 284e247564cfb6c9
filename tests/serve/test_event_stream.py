"""Events of several replies in one order."""

from __future__ import annotations

import asyncio

import pytest

from prefold.api.streams import ResponseStream, events_of
from prefold.engine.samples import TextPiece
from prefold.errors import InputError


def test_events_of_several_replies_come_as_they_are_made_and_an_error_ends_them():
    async def run():
        loop, found = asyncio.get_running_loop(), []
        replies = [ResponseStream(loop, 1), ResponseStream(loop, 1)]
        replies[1].put([TextPiece(0, "b", ())])  # before anybody reads
        later = [
            (0, TextPiece(0, "a", ())),
            (1, ["answer"]),
            (0, TextPiece(0, "c", ())),
            (0, InputError("wrong", remedy="none")),
        ]
        with pytest.raises(InputError, match="wrong"):
            async for number, event in events_of(replies):
                found.append((number, event.text if isinstance(event, TextPiece) else event))
                number, event = later.pop(0)
                loop.call_soon(replies[number].put, [event])  # while the next one is waited for
        return found

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert found == [(1, "b"), (0, "a"), (1, ["answer"]), (0, "c")]


def test_times_between_pieces_are_those_of_one_sample_as_they_came():
    """However late the reader takes them."""

    async def run():
        reply = ResponseStream(asyncio.get_running_loop(), 1)
        for step in range(3):
            reply.put([TextPiece(sample, "a") for sample in range(4)], 5.0 + 0.25 * step)
        reply.put([["answer"]], 6.0)
        return reply.take_gaps(), reply.take_gaps()

    assert asyncio.run(run()) == ([0.25] * 8, [])
