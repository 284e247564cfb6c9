"""Output lines are lines to every reader."""

import io
import json

import numpy as np
import pytest

from prefold.jobs.record import dumps


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"])
def test_text_with_line_ends_is_one_line_and_comes_back(end):
    value = {f"a{end}é": [f"b{end}", {"text": f"{end}\\u2028 日本"}], "v": np.float32(0.5)}
    line = dumps(value)
    assert line.splitlines() == [line]
    assert json.loads(line) == value
    assert list(io.StringIO(line + "\n")) == [line + "\n"]
    assert "é" in line and "日本" in line
