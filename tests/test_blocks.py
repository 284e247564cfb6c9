"""The code of the README's first screen, of the pages of docs/start and of the guides runs as it is printed, on the
built-in model. A block that another test runs, or that nothing here can run, says so in a comment before it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FIRST = ["README.md", *(f"docs/start/{path.name}" for path in sorted((ROOT / "docs" / "start").glob("*.md")))]
# The guides, and what each needs beside the package itself.
GUIDES = {
    "docs/jobs.md": (), "docs/python.md": ("llguidance", "pydantic"), "docs/serving.md": ("starlette", "openai"),
    "docs/decide.md": (), "docs/tables.md": ("duckdb", "narwhals", "pandas", "polars", "pyarrow"),
    "docs/scale.md": ("httpx", "starlette"), "docs/images.md": ("PIL", "transformers"), "docs/looped.md": (),
    "docs/hybrids.md": (), "docs/training.md": ("transformers",), "docs/cpus.md": (), "docs/gpus.md": (),
    "docs/simulate.md": (), "docs/deploy.md": ("starlette",),
}  # fmt: skip
PAGES = [*FIRST, *GUIDES]
NEEDED = {f"docs/start/{name}.md": ("openai", "starlette") for name in ("server", "decisions")} | GUIDES
# Pages whose blocks take a few seconds; the others' are slow.
QUICK = {"docs/hybrids.md", "docs/looped.md", "docs/simulate.md"}
NOT_RUN = 7  # blocks of guides that no test runs
CODE, DATA = {"sh", "python"}, {"json", "toml", "text", "yaml"}
# Blocks without a comment that cannot run here, by what they contain, and why.
CANNOT = {
    "scripts/demo": "makes a new environment; tests/test_setup.py has these commands",
    "prefold.integrations.lm_eval": "the harness downloads the data of its task; tests/integrations run the model",
}


class Block(NamedTuple):
    comment: str  # "not run: WHY" or "run by FILE"; empty for a block that runs here
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"(?:^<!-- ((?:not run:|run by) [^\n]*?) -->\n)?^```(\w+)\n(.*?)^```", text, flags=re.M | re.S)
    return [Block(*block) for block in found if block[1] in CODE]


def runs(block: Block) -> bool:
    return not block.comment and not any(part in block.text for part in CANNOT)


def test_every_page_has_a_block_and_every_reason_is_needed():
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert all(blocks_of(page) for page in PAGES)
    assert all(any(part in block.text for block in blocks) for part in CANNOT)
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    languages = {name for text in texts.values() for name in re.findall(r"^```(\w+)\n", text, re.M)}
    assert languages <= CODE | DATA, "a block of another language would not run"


def test_every_guide_begins_with_a_block_that_runs_and_few_blocks_do_not():
    blocks = {page: blocks_of(page) for page in GUIDES}
    assert all(runs(found[0]) for found in blocks.values())
    left = [block.comment for found in blocks.values() for block in found if block.comment]
    elsewhere = [comment.removeprefix("run by ") for comment in left if comment.startswith("run by ")]
    assert all((ROOT / file).exists() for file in elsewhere)
    assert len(left) - len(elsewhere) == NOT_RUN, "blocks that no test runs are few: each needs its reason"
    for page in GUIDES:  # an indented block would escape
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"<!-- figure .*?<!-- end -->", "", text, flags=re.S)  # which has the command of a benchmark
        assert not re.search(r"^    (prefold|python|pip|curl|from|import|llm)\b", text, flags=re.M), page


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow][page in QUICK :]) for page in PAGES])
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """Commands in a shell, Python of one page in one namespace, as a reader would type it."""
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package)
    for folder in ("examples", "benchmarks"):
        os.symlink(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    servers: list[subprocess.Popen] = []
    names: dict[str, object] = {}
    try:
        for block in filter(runs, blocks_of(page)):
            text = block.text.replace("8000", port)
            if block.language == "python":
                exec(compile(text, page, "exec"), names)
            elif text.startswith("prefold serve"):
                servers.append(subprocess.Popen(["bash", "-c", f"exec {text}"]))
                wait_for(f"http://localhost:{port}/health", servers[-1])
            else:
                done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, timeout=600, check=False)
                assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
                assert (done.stdout + done.stderr).strip(), f"nothing is printed by\n{text}"
    finally:
        for server in servers:
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
