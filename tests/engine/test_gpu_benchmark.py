"""The GPU benchmark goes through all of its sections on any machine, at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_every_section_runs(tmp_path):
    report = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--device", "cpu", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())
    for section in (
        "correctness",
        "grid",
        "rerank",
        "decode",
        "decode_job",
        "kernels_rows",
        "kernels_slots",
        "kernels_ops",
        "kernels_draw",
    ):
        assert found[section][0]["rows"], section


def test_an_unknown_section_is_an_error():
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--sections", "grids"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no 'grids'" in done.stderr
