"""The benchmark of numbers runs over a worker that computes nothing, and all ways compute the same rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "numeric.py"


def test_the_ways_compute_the_same_rows(tmp_path):
    report = tmp_path / "numeric.json"
    command = [sys.executable, str(SCRIPT), "--host", "--counts", "40", "--rounds", "1", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(report.read_text())["results"]
    ways = {name: {row["way"]: row["rows"] for row in rows} for name, rows in results.items()}
    # Probes read last rows alone.
    assert {name for name, rows in ways.items() if set(rows) == {"stream"}} == {"mean:40", "score:40"}
    assert all(len(set(rows.values())) == 1 for rows in ways.values()), ways
    assert ways["unrelated:40"]["stream"] > ways["deep trie:40"]["stream"] > 0
