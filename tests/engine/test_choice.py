"""Windows that share little run as with "full" or "off", whichever takes less time."""

from __future__ import annotations

import numpy as np
import pytest

from prefold.engine.stream import SharingChoice


def run(full, off, share, *, windows=400, steps=4, tokens=10_000, noise=0.0, choice=None):
    """Returns (seconds of windows as they were chosen, over those of the better way; windows that ran as "off").

    full, off  seconds a row; share: unique tokens of all tokens
    """
    draw, choice = np.random.default_rng(0), choice or SharingChoice(0.85)
    unique, chosen, spent = int(share * tokens), [], 0.0
    for _ in range(windows):
        chosen.append(choice.choose(unique, tokens))
        rows, rate = (unique, full) if chosen[-1] == "full" else (tokens, off)
        spent += rows * rate
        for _ in range(steps):
            choice.note(chosen[-1], rows // steps, rows // steps * rate * (1 + noise * draw.random()))
    return spent / (windows * min(unique * full, tokens * off)), chosen.count("off")


@pytest.mark.parametrize("share", [0.86, 0.9, 0.94, 0.98, 1.0])
@pytest.mark.parametrize(("full", "off"), [(1.0, 1.0), (1.04, 1.0), (1.3, 1.0), (1.0, 1.3)])
def test_it_takes_hardly_more_than_the_better_way(share, full, off):
    assert run(full, off, share)[0] < 1.02
    assert run(full, off, share, noise=0.02)[0] < 1.02


def test_what_shares_more_is_always_shared():
    choice = SharingChoice(0.85)
    assert run(5.0, 1.0, 0.85, choice=choice)[1] == 0
    assert run(5.0, 1.0, 0.86, choice=choice)[1] > 300


def test_a_single_window_is_shared_and_tries_cost_little():
    assert run(1.0, 1.0, 0.86, windows=1) == (1.0, 0)
    assert 3 <= run(1.0, 1.0, 1.0)[1] <= 400 // 16 + 1  # they are alike, and the next window begins without a path
    for windows in (2, 5, 20):
        assert run(1.0, 1.0, 0.86, windows=windows)[0] <= 1.01


def test_it_notices_what_changes():
    choice = SharingChoice(0.85)
    assert run(1.3, 1.0, 0.98, choice=choice)[1] > 350
    assert run(1.0, 1.3, 0.98, choice=choice)[1] < 60
    assert run(1.3, 1.0, 0.98, choice=choice)[1] > 330
