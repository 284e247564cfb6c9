"""Reads the numbers of several replies together, in a row stream outside of the KV store."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from ..errors import InputError
from ..stream import Spool
from .meter import StepInfo
from .replies import Reading, Reply

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Part", "read_numbers"]

Part = tuple[Reading, Sequence[int]]  # with those of its requests that are to be read
_TAG = struct.Struct("<qq")  # number of the reading, part of it


def read_numbers(
    engine: Engine,
    parts: Sequence[Part],
    *,
    done: Callable[[Reading], None],
    fail: Callable[[Reply, Exception], None],
    on_step: Callable[[StepInfo], None],
    again: bool = True,
) -> None:
    """Reads numbers of one kind. Where a step fails, in halves, until the one at fault is found.

    done     called with a reading when it has all its results
    fail     called with the reply of the reading that is at fault, and the error
    on_step  called after every step
    again    whether a reading that fails alone is tried once more
    """
    how = {"done": done, "fail": fail, "on_step": on_step}
    try:
        _read_together(engine, parts, **how)  # type: ignore[arg-type]
    except Exception as error:
        left = [(r, [p for p in numbers if r.results[p] is None]) for r, numbers in parts]
        left = [(r, numbers) for r, numbers in left if numbers and not r.reply.is_cancelled]
        if len(left) > 1:
            read_numbers(engine, left[: len(left) // 2], **how)  # type: ignore[arg-type]
            read_numbers(engine, left[len(left) // 2 :], **how)  # type: ignore[arg-type]
        elif left and again:
            read_numbers(engine, left, **how, again=False)  # type: ignore[arg-type]
        elif left:
            fail(left[0][0].reply, error)


def _read_together(
    engine: Engine,
    parts: Sequence[Part],
    done: Callable[[Reading], None],
    fail: Callable[[Reply, Exception], None],
    on_step: Callable[[StepInfo], None],
) -> None:
    with Spool() as spool:
        for number, (reading, numbers) in enumerate(parts):
            for part in numbers:
                spool.add(reading.requests[part], _TAG.pack(number, part))
        windows = spool.windows(max_tokens=1 << 20, share=engine.sharing == "full")
        readout = parts[0][0].readout
        stopping = partial(_are_done, parts)
        run = engine.run(windows, readout, cache_prefill=False, on_step=on_step, stopping=stopping)
        with closing(run) as results:  # type: ignore[type-var]
            for tag, result in results:
                number, part = _TAG.unpack(tag)
                reading = parts[number][0]
                if isinstance(result, InputError):
                    fail(reading.reply, result)
                elif reading.book(part, result):
                    done(reading)


def _are_done(parts: Sequence[Part]) -> bool:
    return all(reading.reply.is_cancelled or not reading.left for reading, _ in parts)
