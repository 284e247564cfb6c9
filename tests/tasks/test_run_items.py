"""What a task makes of results, whoever ran them."""

from __future__ import annotations

import numpy as np

from prefold.tasks.results import all_finite


def test_what_is_not_finite_is_found():
    assert all_finite({"a": [1, "x", None, {"b": np.ones(3)}], "c": 1.5})
    assert not all_finite({"a": [np.array([1, np.nan])]})
    assert not all_finite([float("inf")]) and not all_finite((0.5, float("nan"))) and all_finite([])
    assert not all_finite([1, float("nan")]) and all_finite([1, 2.5, "x"])
