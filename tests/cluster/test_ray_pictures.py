"""Jobs of pictures on a real Ray of this machine: two replicas give what one process gives, but for bad pictures."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tiny_vision import tiny_vision

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
NUM = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and a table of questions about pictures: ten of them, one that is cut off, and none at all."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    tiny_vision(folder, "gemma3").rename(folder / "model")
    rng = np.random.default_rng(0)
    pictures = []
    for k in range(10):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (30 + k, 40, 3), dtype=np.uint8)).save(file, "PNG")
        pictures.append(base64.b64encode(file.getvalue()).decode())
    with open(folder / "in.jsonl", "w") as file:
        for i in range(NUM):
            picture = pictures[i % 10][:400] if i == 33 else None if i == 44 else pictures[i % 10]
            file.write(json.dumps({"id": i, "text": f"yes no {i % 7} what", "picture": picture}) + "\n")
    return folder


def run(folder, out, *more):
    given = ("run", "in.jsonl", "--prompt", "{text}", "--image", "picture", "--id", "id", "-m", "model", "-o", out)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-m", "prefold", *given, "--threads", "1", "--dtype", "float32", *more]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": root}, capture_output=True, timeout=900)
    assert done.returncode == 3, done.stderr.decode()
    found = [json.loads(line) for line in (folder / out).read_text().splitlines()]
    by_id = {line["id"]: line for line in found}
    assert len(found) == len(by_id) == NUM
    assert {i for i, line in by_id.items() if "error" in line} >= {33}
    return by_id, done.stderr.decode()


@pytest.mark.parametrize("task", [("generate", "--max-tokens", "8", "--ignore-eos"), ("embed",)])
def test_two_replicas_give_what_one_process_gives(folder, task):
    alone, _ = run(folder, f"{task[0]}.jsonl", "--task", *task)
    for stream in ((), ("--stream",)):
        out = f"{task[0]}-two{len(stream)}.jsonl"
        found, said = run(folder, out, "--task", *task, "--ray", "--replicas", "2", *stream)
        assert "of 2 at the end" in said
        for i, line in alone.items():
            one, other = dict(line), dict(found[i])
            one.pop("cached_tokens", None), other.pop("cached_tokens", None)
            assert one.pop("embedding", []) == pytest.approx(other.pop("embedding", []), abs=1e-5)
            assert one == other


def test_servers_and_vllm_are_sent_text_alone(folder):
    """Said of each record, before a server is asked."""
    given = ("run", "in.jsonl", "--task", "generate", "--prompt", "{text}", "--image", "picture", "--id", "id")
    where = ("--url", "http://127.0.0.1:9", "--tokenizer", "model", "--patience", "1", "--limit", "5")
    command = [sys.executable, "-m", "prefold", *given, "-m", "model", "-o", "url.jsonl", *where]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": root}, capture_output=True, timeout=900)
    found = [json.loads(line) for line in (folder / "url.jsonl").read_text().splitlines()]
    assert len(found) == 5, done.stderr.decode()
    assert all("(--url)" in line["error"]["remedy"] for line in found), found[0]
