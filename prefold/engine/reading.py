"""Numbers that are read for replies, in a row stream outside of the KV store: in parts, those of several together."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from ..prefix import common_prefix_lengths, lexsort_sequences
from ..stream import Spool
from ..types import Readout, Request, Result
from .meter import StepInfo
from .replies import Reply

if TYPE_CHECKING:
    from .engine import Engine
    from .turns import Turns

__all__ = ["Part", "Reading", "parts_of", "read_next"]

# Numbers that wait are read together, as many as fill so many steps: what comes later waits for no more than these.
STEPS_A_WINDOW = 2
_TAG = struct.Struct("<qq")  # number of the part, and of the request in its reading


class Reading:
    """Numbers that are read for one reply."""

    def __init__(self, reply: Reply, requests: Sequence[Request], readout: Readout):
        self.reply, self.requests, self.readout = reply, requests, readout
        self.results: list[Result | None] = [None] * len(requests)
        self.left = len(requests)

    def book(self, number: int, result: Result) -> bool:
        """Takes the result of one of the requests; returns whether it was the last."""
        self.results[number] = result
        self.left -= 1
        return not self.left


@dataclass(eq=False, slots=True)
class Part:
    """A Part is those requests of a reading that are read in one stretch.

    numbers  of the requests; of several parts of a reading, in the order of their stream
    rows     that they take alone
    """

    reading: Reading
    numbers: Sequence[int]
    rows: int

    @property
    def left(self) -> list[int]:
        """Returns the requests without a result; none where nobody waits for it."""
        if self.reading.reply.is_cancelled:
            return []
        return [number for number in self.numbers if self.reading.results[number] is None]


def parts_of(reading: Reading, engine: Engine) -> list[Part]:
    """Returns a reading in parts of a few steps each, so that others can be read between two of them.

    The requests are sorted first, where they share rows: so no more than the path above a part is computed again. A
    part has at least as many rows as that path, which is half of what is computed at most.
    """
    most_rows, shares = STEPS_A_WINDOW * engine.max_batch_rows, engine.sharing == "full"
    sizes = np.array([len(request.tokens) for request in reading.requests], np.int64)
    order, new = np.arange(len(sizes)), sizes
    if sizes.sum() <= most_rows:
        return [Part(reading, range(len(sizes)), int(sizes.sum()))]
    if shares:
        tokens = np.concatenate([request.tokens for request in reading.requests])
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        order = lexsort_sequences(tokens, offsets)
        new = sizes[order] - common_prefix_lengths(tokens, offsets, order)
    parts: list[Part] = []
    room = 0
    for number, rows in zip(order.tolist(), new.tolist(), strict=True):
        if rows > room or not parts:
            path = int(sizes[number])
            room = max(most_rows, 2 * path if shares else 0) - path
            parts.append(Part(reading, [number], path))
        else:
            room -= rows
            parts[-1].numbers.append(number)  # type: ignore[attr-defined]
            parts[-1].rows += rows
    return parts


def read_next(
    engine: Engine,
    turns: Turns,
    *,
    begin: Callable[[Iterable[Reply]], None],
    done: Callable[[Reading], None],
    fail: Callable[[Reply, Exception], None],
    on_step: Callable[[StepInfo], None],
    is_due: Callable[[], bool],
) -> None:
    """Reads the numbers that are next. One reading that is alone is read on until another comes, or batches are due.

    begin   called with the replies that they are for
    is_due  returns whether batches go before them now
    For the others see `read_numbers`.
    """
    parts = turns.take(STEPS_A_WINDOW * engine.max_batch_rows)
    if not parts:
        return
    reading = parts[0].reading
    # What was taken while others waited is read to its end: it is no more than what they would wait for in any case.
    is_alone = all(part.reading is reading for part in parts) and not turns.has_others(reading)

    def stopping() -> bool:
        return is_alone and (turns.has_others(reading) or is_due()) and not parts[0].left

    begin(part.reading.reply for part in parts)
    read_numbers(engine, parts, done=done, fail=fail, on_step=on_step, stopping=stopping)
    turns.give_back([replace(part, numbers=left) for part in parts if (left := part.left)])


def read_numbers(
    engine: Engine,
    parts: Sequence[Part],
    *,
    done: Callable[[Reading], None],
    fail: Callable[[Reply, Exception], None],
    on_step: Callable[[StepInfo], None],
    stopping: Callable[[], bool],
    again: bool = True,
) -> None:
    """Reads numbers of one kind. Where a step fails, in halves, until the one at fault is found.

    done      called with a reading when it has all its results
    fail      called with the reply of the reading that is at fault, and the error
    on_step   called after every step
    stopping  called after every step: once it returns True, no more steps are begun, and some of the results are left
    again     whether a part that fails alone is tried once more
    """
    how = {"done": done, "fail": fail, "on_step": on_step, "stopping": stopping}
    try:
        _read_together(engine, parts, **how)  # type: ignore[arg-type]
    except Exception as error:
        left = [replace(part, numbers=numbers) for part in parts if (numbers := part.left)]
        if len(left) > 1:
            read_numbers(engine, left[: len(left) // 2], **how)  # type: ignore[arg-type]
            read_numbers(engine, left[len(left) // 2 :], **how)  # type: ignore[arg-type]
        elif left and again:
            read_numbers(engine, left, **how, again=False)  # type: ignore[arg-type]
        elif left:
            fail(left[0].reading.reply, error)


def _read_together(
    engine: Engine,
    parts: Sequence[Part],
    done: Callable[[Reading], None],
    fail: Callable[[Reply, Exception], None],
    on_step: Callable[[StepInfo], None],
    stopping: Callable[[], bool],
) -> None:
    with Spool() as spool:
        for number, part in enumerate(parts):
            for one in part.left:
                spool.add(part.reading.requests[one], _TAG.pack(number, one))
        if not spool.num_requests:
            return
        windows = spool.windows(max_tokens=1 << 20, share=engine.sharing == "full")
        readout = parts[0].reading.readout
        run = engine.run(
            windows,
            readout,
            cache_prefill=False,
            on_step=on_step,
            stopping=lambda: (
                stopping() or all(part.reading.reply.is_cancelled or not part.reading.left for part in parts)
            ),
        )
        with closing(run) as results:  # type: ignore[type-var]
            for tag, result in results:
                number, one = _TAG.unpack(tag)
                reading = parts[number].reading
                if isinstance(result, InputError):
                    fail(reading.reply, result)
                elif reading.book(one, result):
                    done(reading)
