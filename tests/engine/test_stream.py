"""The engine's numeric runs over a worker that needs no torch, in a process that has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRACES = Path(__file__).with_name("stream_traces.py")


def test_random_runs_without_torch():
    """Windows, read-outs, sizes of steps, too little memory, one or two steps in flight, runs that are left or fail."""
    found = subprocess.run([sys.executable, str(TRACES), "300"], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
