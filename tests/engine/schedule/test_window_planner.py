"""Steps of the stream: halves compute what the whole does, and the most is carried from window to window."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import as_request, prompts

from prefold.engine.schedule.windows import PlannedStep, WindowPlanner, reusable_rows
from prefold.spec.requests import Readout
from prefold.trie import Spool, Trie

LETTERS = {"last": {}, "mean": {}, "logits": {"ids": (1, 2)}, "logprobs": {}}


class Trace:
    """Runs steps on paper: what each row sees, by (position, token) of its path, and what is read of whom."""

    def __init__(self, sharing: str):
        self.sharing = sharing
        self.path: list[tuple] = []  # of every carried key, the path down to it
        self.read: dict[object, tuple] = {}
        self.sums: dict[int, tuple] = {}

    def run(self, planned: PlannedStep) -> None:
        step = planned.message
        assert len(self.path) >= step.path
        self.path = self.path[: step.path]
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
            assert list(step.read_out.rows) == sorted(set(step.read_out.rows))
            for done, read in zip(planned.requests.tolist(), planned.request_reads.tolist(), strict=True):
                self.sums[done] = keys[step.read_out.rows[read]]
            return
        stream = step.read_rows if step.fold is None else step.fold.gather[step.read_rows]
        assert step.fold is not None or list(step.read_out.rows) == sorted(step.read_out.rows)
        rows = [keys[step.path + row] for row in stream[step.read_out.rows]]
        if step.read_out.readout.kind == "logprobs":
            for row, target in zip(rows, planned.targets.tolist(), strict=True):
                assert target not in self.read
                self.read[target] = row
        assert not self.sums.keys() & set(planned.requests.tolist())
        if step.read_out.readout.kind == "logprobs":
            assert not len(planned.request_reads)
            self.sums |= dict.fromkeys(planned.requests.tolist(), ())
            return
        for done, read in zip(planned.requests.tolist(), planned.request_reads.tolist(), strict=True):
            self.sums[done] = rows[read]


@settings(max_examples=60)
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
        window = next(iter(spool.windows(max_tokens=1 << 20, share=sharing == "full")))
    scheduler = WindowPlanner(window, readout, sharing=sharing, max_batch_rows=rows)
    whole, halved = Trace(sharing), Trace(sharing)
    number = 0
    while (step := scheduler.plan()) is not None:
        scheduler.commit(step)
        whole.run(step)
        parts = [step]
        if number % every == 0 and step.stop - step.start > 1:
            parts = list(scheduler.halves(step))
            if parts[0].stop - parts[0].start > 1:
                parts[:1] = scheduler.halves(parts[0])
            assert parts[0].start == step.start and parts[-1].stop == step.stop
        for part in parts:
            halved.run(part)
        assert halved.path == whole.path
        number += 1
    assert halved.read == whole.read
    assert halved.sums.keys() == whole.sums.keys() == set(range(window.num_requests))
    assert halved.sums == whole.sums


def test_plan_changes_nothing():
    with Spool() as spool:
        for prompt in prompts(3):
            spool.add(as_request(prompt))
        window = next(iter(spool.windows(max_tokens=1 << 20)))
    scheduler = WindowPlanner(window, Readout("last"), sharing="full", max_batch_rows=5)
    first, again = scheduler.plan(), scheduler.plan()
    assert first.start == again.start == 0 < first.stop == again.stop <= 5
    scheduler.commit(first)
    assert scheduler.plan().start == first.stop
    with pytest.raises(ValueError, match=f"the stream is at row {first.stop}"):
        scheduler.commit(first)


# From window to window

jobs = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(0, 7)), min_size=1, max_size=25
)


def windows_of(job, max_tokens: int) -> list:
    with Spool() as spool:
        for tokens, num_targets in job:
            spool.add(as_request(tokens, [0] * min(num_targets, len(tokens))))
        return list(spool.windows(max_tokens=max_tokens))


def rows_read(window, read: str) -> set[int]:
    """The rows of the window's own trie that it reads and the engine keeps no other way."""
    trie = Trie.build(window.tokens, window.offsets, is_sorted=True)
    rows: set[int] = set()
    for s, num_targets in enumerate(np.diff(window.target_offsets).tolist()):
        if read in ("last", "head", "logits", "mean"):
            rows.add(int(trie.last_row[s]))
        elif read == "logprobs":  # a request is done with its last row, where it has no target too
            rows.update(trie.rows_of(s)[-max(1, num_targets) :].tolist())
    return rows


@settings(max_examples=300)
@given(jobs, st.integers(1, 40), st.sampled_from(["last", "mean", "head", "logits", "logprobs"]))
def test_the_most_that_may_be_is_carried(job, max_tokens, read):
    for window in windows_of(job, max_tokens):
        # The rows of the shared tokens are the first of the window's trie, so a row number is a count of them.
        # What the first row gave is not held from window to window.
        allowed = min([window.common, *rows_read(window, read)])
        assert reusable_rows(window, Readout(read)) == allowed
        for follows in (False, True):
            scheduler = WindowPlanner(window, Readout(read), sharing="full", max_batch_rows=99, follows=follows)
            done = []
            while (step := scheduler.plan()) is not None:
                if not done:
                    assert step.start == (allowed if follows else 0)
                scheduler.commit(step)
                done += step.requests.tolist()
            assert sorted(done) == list(range(window.num_requests)), "every request ends in one step"


def test_a_twin_across_windows_is_read_again():
    for read in ("last", "mean"):
        windows = windows_of([([1, 2, 3], 0)] * 3, 3)
        assert [(w.common, reusable_rows(w, Readout(read))) for w in windows] == [(0, 0), (3, 2), (3, 2)]


def test_a_scored_row_on_the_path_is_read_again():
    # Both score from the row of token 2 on; the second window must compute that row, and no other, once more.
    _, second = windows_of([([1, 2, 3, 3], 3), ([1, 2, 4, 4], 3)], 4)
    assert (second.common, reusable_rows(second, Readout("logprobs"))) == (2, 1)
