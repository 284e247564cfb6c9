"""The code of the README's first screen and of the pages of docs/start runs as it is printed, on the built-in model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/start/{path.name}" for path in sorted((ROOT / "docs" / "start").glob("*.md")))]
# Blocks that cannot run here, by what they contain, and why.
CANNOT = {
    "scripts/demo": "makes a new environment; tests/test_setup.py has these commands",
    "prefold.integrations.lm_eval": "the harness downloads the data of its task; tests/integrations run the model",
}


def blocks_of(page: str) -> list[tuple[str, str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.M | re.S)


def reason(block: str) -> str | None:
    return next((why for part, why in CANNOT.items() if part in block), None)


def test_every_page_has_a_block_and_every_reason_is_needed():
    blocks = [block for page in PAGES for _, block in blocks_of(page)]
    assert all(blocks_of(page) for page in PAGES)
    assert all(any(part in block for block in blocks) for part in CANNOT)
    languages = {language for page in PAGES for language, _ in blocks_of(page)}
    assert languages <= {"sh", "python"}, "a block of another language would not run"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path):
    for package in {"docs/start/server.md": ("openai", "starlette")}.get(page, ()):
        pytest.importorskip(package)
    os.symlink(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    server = None
    try:
        for language, block in blocks_of(page):
            if reason(block):
                continue
            block = block.replace("8000", port)
            command = ["bash", "-euc", block] if language == "sh" else [sys.executable, "-c", block]
            if block.startswith("prefold serve"):
                server = subprocess.Popen(["bash", "-c", f"exec {block}"], cwd=tmp_path, env=environment)
                wait_for(f"http://localhost:{port}/health", server)
                continue
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            assert done.stdout.strip(), f"nothing is printed by\n{block}"
    finally:
        if server:
            server.terminate()
            server.wait(60)


def wait_for(url: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server ended with status {server.returncode}")
