"""One step as two, for when it does not fit into memory: a step is a range of rows, and may be cut anywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .prefill import Step

__all__ = ["split"]


def split(step: Step) -> tuple[Step, Step]:
    """The first and the second half of a step's stream rows, to be run one after the other; ValueError for one row.

    A folded step (sharing "mlp") is unfolded: its halves run every row.
    """
    if step.stop - step.start < 2:
        raise ValueError("a step of one row cannot be split")
    step = _unfolded(step)
    return _part(step, first=True), _part(step, first=False)


def _unfolded(step: Step) -> Step:
    fold = step.fold
    if fold is None:
        return step
    tokens, positions = step.tokens[fold.scatter], step.positions[fold.scatter]
    if step.read_rows is None:
        return replace(step, tokens=tokens, positions=positions, fold=None)
    # Each row that is read by a stream row that stands for it; in the order of the stream.
    rows = fold.gather[step.read_rows]
    order = np.argsort(rows)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    pairs = place[step.pair_reads] if len(step.pair_reads) else step.pair_reads
    by_row = np.argsort(pairs, kind="stable")
    return replace(
        step,
        tokens=tokens,
        positions=positions,
        fold=None,
        read_rows=rows[order],
        done_reads=place[step.done_reads] if len(step.done_reads) else step.done_reads,
        pair_reads=pairs[by_row],
        pair_targets=step.pair_targets[by_row],
    )


def _part(step: Step, *, first: bool) -> Step:
    rows = step.stop - step.start
    half = rows // 2
    cut = step.path + half  # the first key of the second half
    path = np.flatnonzero(step.end[:cut] > cut)  # above the second half
    if first:
        keys, begin, stop, path_rows, shift = np.arange(cut), 0, half, step.path, 0
        keep = path
    else:
        keys, begin, stop, path_rows = np.concatenate((path, np.arange(cut, len(step.end)))), half, rows, len(path)
        keep, shift = np.searchsorted(keys, step.keep), cut - len(path)
    part = replace(
        step,
        start=step.start + begin,
        stop=step.start + stop,
        tokens=step.tokens[begin:stop],
        positions=step.positions[begin:stop],
        path=path_rows,
        end=(np.minimum(step.end[keys], cut) if first else step.end[keys]) - shift,
        key_positions=step.key_positions[keys],
        keep=keep,
    )
    if step.read_rows is None:  # what ends is known by its key
        here = (step.done_reads < cut) == first
        return replace(part, done=step.done[here], done_reads=step.done_reads[here] - shift)
    low, high = np.searchsorted(step.read_rows, (begin, stop))
    pairs = (step.pair_reads >= low) & (step.pair_reads < high)
    if len(step.pair_reads) or not len(step.read_rows):
        # Sequences whose targets are read: where they end is not known, and by the second half all targets are.
        here = np.full(len(step.done), not first)
        done_reads = step.done_reads[here]
    else:
        here = (step.done_reads >= low) & (step.done_reads < high)
        done_reads = step.done_reads[here] - low
    return replace(
        part,
        read_rows=step.read_rows[low:high] - begin,
        done=step.done[here],
        done_reads=done_reads,
        pair_reads=step.pair_reads[pairs] - low,
        pair_targets=step.pair_targets[pairs],
    )
