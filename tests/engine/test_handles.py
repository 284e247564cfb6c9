"""What leaves for readers in event loops."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from prefold.api.streams import ResponseStream
from prefold.engine.handles import send


def test_a_loop_that_is_closed_just_now_keeps_answers_from_nobody_else():
    closing, loop = Mock(spec=asyncio.AbstractEventLoop), asyncio.new_event_loop()
    closing.is_closed.return_value = False
    closing.call_soon_threadsafe.side_effect = RuntimeError("Event loop is closed")
    gone, there = ResponseStream(closing, 1), ResponseStream(loop, 1)
    send({gone: [["one"]], there: [["two"]]})
    assert loop.run_until_complete(there.answer()) == ["two"]
    loop.close()
