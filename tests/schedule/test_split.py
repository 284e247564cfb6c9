"""A step in two halves computes what the whole one does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import as_request, prompts

from prefold.schedule import PrefillScheduler, Step
from prefold.schedule.split import split
from prefold.stream import Spool
from prefold.types import Readout

LETTERS = {"last": {}, "mean": {}, "logits": {"ids": (1, 2)}, "logprobs": {}}


class Trace:
    """Runs steps on paper: what each row sees, by (position, token) of its path, and what is read of whom."""

    def __init__(self, sharing: str):
        self.sharing = sharing
        self.path: list[tuple] = []  # of every carried key, the path down to it
        self.read: dict[object, tuple] = {}
        self.sums: dict[int, tuple] = {}

    def run(self, step: Step) -> None:
        assert len(self.path) == step.path
        tokens, positions = step.tokens, step.positions
        if step.fold is not None:
            tokens, positions = tokens[step.fold.scatter], positions[step.fold.scatter]
        keys = list(self.path)
        for row, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            at = step.path + row
            above = [keys[j] for j in range(at) if step.end[j] > at]
            assert [len(seen) for seen in above] == list(range(1, position + 1)), (
                "a path without a row, or with one more"
            )
            keys.append((*(above[-1] if above else ()), token))
            assert step.key_positions[at] == position
        assert (step.end > np.arange(len(keys))).all() and (step.end <= len(keys)).all()
        self.path = [keys[j] for j in step.keep]
        if step.read_rows is None:
            for done, key in zip(step.done.tolist(), step.done_reads.tolist(), strict=True):
                self.sums[done] = keys[key]
            return
        stream = step.read_rows if step.fold is None else step.fold.gather[step.read_rows]
        rows = [keys[step.path + row] for row in stream]
        assert list(step.pair_reads) == sorted(step.pair_reads)
        for read, target in zip(step.pair_reads.tolist(), step.pair_targets.tolist(), strict=True):
            assert target not in self.read
            self.read[target] = rows[read]
        for done, read in zip(step.done.tolist(), step.done_reads.tolist(), strict=True):
            assert done not in self.sums
            self.sums[done] = rows[read] if rows and not self.read else ()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    sharing=st.sampled_from(["full", "mlp", "off"]),
    kind=st.sampled_from(sorted(LETTERS)),
    rows=st.sampled_from([5, 17, 1000]),
    every=st.integers(1, 3),
)
def test_halves_are_the_whole(seed, sharing, kind, rows, every):
    readout = Readout(kind, **LETTERS[kind])
    with Spool() as spool:
        for number, prompt in enumerate(prompts(seed)):
            targets = [3] * min(len(prompt), 1 + number % 3) if kind == "logprobs" else None
            spool.add(as_request(prompt, targets), str(number).encode())
        window = next(iter(spool.windows(max_tokens=1 << 20, share=sharing == "full", read=kind)))
    scheduler = PrefillScheduler(window, readout, sharing=sharing, max_batch_rows=rows)
    whole, halved = Trace(sharing), Trace(sharing)
    number = 0
    while (step := scheduler.plan()) is not None:
        scheduler.commit(step)
        whole.run(step)
        parts = [step]
        if number % every == 0 and step.stop - step.start > 1:
            parts = list(split(step))
            if parts[0].stop - parts[0].start > 1:
                parts[:1] = split(parts[0])
            assert parts[0].start == step.start and parts[-1].stop == step.stop
        for part in parts:
            halved.run(part)
        assert halved.path == whole.path
        number += 1
    assert halved.read == whole.read
    assert halved.sums.keys() == whole.sums.keys() == set(range(window.num_requests))
    if kind != "logprobs":
        assert halved.sums == whole.sums


def test_one_row_is_not_split():
    with Spool() as spool:
        spool.add(as_request([5]), b"0")
        window = next(iter(spool.windows(max_tokens=99, share=True, read="last")))
    step = PrefillScheduler(window, Readout("last"), sharing="full", max_batch_rows=9).plan()
    with pytest.raises(ValueError, match="one row"):
        split(step)
