"""What tails have, in arrays: room comes and goes with the longest."""

from __future__ import annotations

import numpy as np
from visit_books import check_tails

from prefold.looped.outputs import OutputRows


def test_room_is_given_back_when_the_longest_tail_ends():
    """One long output does not hold the memory of many for ever; what others have stays as it is."""
    tails = OutputRows(2)
    long, half, short = (tails.take() for _ in range(3))
    for place, rows in ((long, 5000), (half, 1800), (short, 3)):
        tails.room_for(rows)
        tails.row[place] = rows - 1
        tails.slots[place, 1, :rows] = np.arange(rows) * 2 + 1
        tails.owns_slot[place, 1, :rows] = True
        for row in range(0, rows, 100):
            at = np.array([place]), np.array([1])
            tails.add_runs(*at, tails.slots[place, 1, row : row + 1], 1, np.array([row]))
    assert tails.slots.shape[2] == 5000 and tails.run_start.shape[2] >= 50
    tails.release(long)
    assert tails.slots.shape[2] == 5000  # another needs more than a quarter of it
    check_tails(tails)
    tails.release(half)
    assert tails.slots.shape == (8, 2, 32) and tails.run_start.shape == (8, 2, 8)
    assert tails.slots[short, 1, :4].tolist() == [1, 3, 5, 0] and tails.owns_slot[short, 1].sum() == 3
    assert (tails.num_runs[short, 1], tails.run_start[short, 1, 0]) == (1, 1)
    check_tails(tails)
    again = tails.take()
    assert tails.row[again] == -1 and not tails.slots[again].any()
