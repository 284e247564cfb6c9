"""Short examples of examples/ run as their first lines say; those that train, and tests/test_blocks.py,
have the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDED = {"search_index": ("faiss",), "extract": ("llguidance", "pandas")}
SAID = {"search_index": "3. ", "extract": "Cleo wants one table."}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_an_example_runs(name):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert SAID[name] in done.stdout
