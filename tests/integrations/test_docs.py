"""The examples of docs/scale.md, as they are written there, on a tiny model, real Ray and Daft, and our servers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_servers import serving
from tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
# Those that run on other people's engines; tests/cluster/test_backends.py runs the example of a backend.
BLOCKS = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "import BACKENDS" not in block]
OURS = re.findall(r"^<!-- run by tests/integrations/test_docs.py -->\n```sh\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for block in OURS for line in block.splitlines()]
NEEDED = {"daft": ("daft",), "ray.data": ("ray", "pyarrow")}


def test_these_are_the_examples():
    first = [block.splitlines()[0] for block in BLOCKS]
    assert first == ["import daft", "import ray", "from ray.data.checkpoint import CheckpointConfig"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["daft", "ray.data"])
def test_an_example_runs_as_it_is_written(name, tmp_path):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = str(tiny_checkpoint(tmp_path, "llama"))
    (tmp_path / "reviews").mkdir()
    for part in range(2):
        rows = range(part * 20, part * 20 + 20)
        table = pa.table({"id": list(rows), "body": [f"the review {i % 3} of {i}" for i in rows]})
        pq.write_table(table, tmp_path / "reviews" / f"{part}.parquet")
    if name == "daft":
        code = BLOCKS[0] + "\nfound = df.to_pydict()\nassert len(found['summary']) == 40\n"
        code += "assert all(vector is not None for vector in found['vector'])\n"
    else:
        code = "import ray\nray.init(num_cpus=4, include_dashboard=False)\n" + BLOCKS[2] + BLOCKS[1]
        code = code.replace("/shared/checkpoint", str(tmp_path / "checkpoint"))
        code += "\nfound = ray.data.read_parquet('summaries/').take_all()\nassert len(found) == 40, len(found)\n"
    # Of the models that the page names, the tiny one stands for all.
    code = re.sub(r'"(Qwen/Qwen3-Embedding-0.6B|smollm2-135m)"', repr(model), code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_these_are_the_commands():
    words = [re.findall(r"prefold (\w+)|--(stream|url|backend|ray)\b", command) for command in COMMANDS]
    assert [["".join(word) for word in found] for found in words] == [
        ["run", "ray"], ["plan"], ["generate", "stream", "ray"], ["run", "url", "url"], ["run", "backend"],
        ["run", "backend", "ray"],
    ]  # fmt: skip


def shell(command, folder):
    """Runs a command as a shell does, in a folder where `prefold` is this one; returns what it says."""
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "prefold"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m prefold "$@"\n')
    script.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_chats(folder, model, count=12):
    with open(folder / "chats.jsonl", "w") as file:
        for i in range(count):
            messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": f"the question {i}"}]
            body = {"model": model, "messages": messages, "max_tokens": 6}
            line = {"custom_id": f"chat {i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_on_a_table(number, tmp_path):
    if number == 0:
        pytest.importorskip("ray")
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = str(tiny_checkpoint(tmp_path, "llama"))
    table = pa.table({"body": [f"the review {i % 3} of {i}" for i in range(40)]})
    pq.write_table(table, tmp_path / "reviews.parquet")
    said = shell(COMMANDS[number].replace("Qwen/Qwen3-Embedding-0.6B", model), tmp_path)
    if number == 0:
        assert "of 4 at the end" in said and pq.read_table(tmp_path / "vectors.parquet").num_rows == 40
    else:
        assert "segments" in said.lower() and "4" in said and not (tmp_path / "vectors.parquet").exists()


@pytest.mark.slow
def test_the_command_on_a_stream(tmp_path):
    pytest.importorskip("ray")
    model = str(tiny_checkpoint(tmp_path, "llama"))
    with open(tmp_path / "requests.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"the request {i % 3} of {i}"}) + "\n" for i in range(40))
    # A file that grows has no end.
    command = COMMANDS[2].replace("tail -f", "cat").replace("smollm2-135m", model)
    said = shell(command.replace("--prompt", "--raw --max-tokens 6 --prompt"), tmp_path)
    found = lines(tmp_path / "out.jsonl")
    assert len(found) == 40 and all("text" in line for line in found) and "of 4 at the end" in said


def test_the_command_on_servers(tmp_path):
    name = "Qwen/Qwen3-8B"
    write_chats(tmp_path, name)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(models=(name,))) for _ in range(2)]
        command = COMMANDS[3]
        for there, server in zip(("http://a:8000", "http://b:8000"), servers, strict=True):
            assert there in command
            command = command.replace(there, server.url)
        shell(command, tmp_path)
        assert all(server.requests for server in servers)
    assert sorted(line["custom_id"] for line in lines(tmp_path / "out.jsonl")) == sorted(f"chat {i}" for i in range(12))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("number", [4, 5])
def test_the_commands_in_vllm(number, tmp_path):
    if number == 5:
        pytest.importorskip("ray")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = str(tiny_checkpoint(tmp_path, "llama", **sizes))
    write_chats(tmp_path, model)
    shell(COMMANDS[number].replace("Qwen/Qwen3-8B", model) + " --dtype float32", tmp_path)
    found = lines(tmp_path / "out.jsonl")
    assert len(found) == 12 and not any(line.get("error") for line in found)
