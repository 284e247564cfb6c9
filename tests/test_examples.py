"""Short examples of examples/ run as their first lines say; those that train have tests of their own."""

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


@pytest.mark.slow
def test_a_client_of_openai_asks_a_server():
    pytest.importorskip("openai")
    pytest.importorskip("starlette")
    from tests.cluster.servers import serving

    with serving("smollm2-135m") as url:
        command = [sys.executable, str(EXAMPLES / "rag_server.py"), f"{url}/v1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("?") >= 2
