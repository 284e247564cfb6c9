"""A server that is killed at random moments, again and again: nothing it confirmed is lost, each line is there once.

The servers are forks of one process that has imported everything, so that one starts within a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import openai
import pytest
from tiny import tiny_checkpoint

fork = pytest.importorskip("posix").fork

MAKER = """
import json, os, sys
import torch, numpy, uvicorn, uvloop, prefold.llm, prefold.cli, prefold.serve.run, prefold.job
import prefold.job.output as output
output.COMMIT_SECONDS = 0.02
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        sys.stdin.close()
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            prefold.cli.main(json.loads(line), prog_name="prefold")
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
LINES = 60


class Tormented:
    """Servers of one folder, one after the other."""

    def __init__(self, folder, model):
        self.folder, self.url = folder, ""
        self.maker = subprocess.Popen(
            [sys.executable, "-c", MAKER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip
        assert self.maker.stdout.readline() == "ready\n"
        self.arguments = ["serve", "-m", model, "--served-model-name", "tiny", "--port", "0", "--data-dir", "data"]
        self.arguments += ["--dtype", "float32", "--kv-memory", "8MiB", "--threads", "1"]

    def start(self):
        (self.folder / "stderr").unlink(missing_ok=True)
        self.maker.stdin.write(json.dumps(self.arguments) + "\n")
        self.maker.stdin.flush()
        self.pid = int(self.maker.stdout.readline())
        end = time.monotonic() + 60
        while "ready after" not in (said := self.said()):
            assert time.monotonic() < end and "Traceback" not in said, said
            time.sleep(0.01)
        self.url = re.search(r"http://\S+:\d+", said)[0]

    def said(self):
        path = self.folder / "stderr"
        return path.read_text() if path.exists() else ""

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        assert int(self.maker.stdout.readline()) == -signal.SIGKILL
        assert "Traceback" not in self.said(), self.said()

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.maker.stdin.close()
        self.maker.wait(30)
        self.maker.stdout.close()


def line(i, kind, rng):
    if i % 17 == 3:
        return "no JSON"
    body = {"model": "tiny"} if i % 11 else {"model": "none"}
    if kind == "/v1/completions":
        body |= {"prompt": f"yes the no {i}", "max_tokens": int(rng.integers(1, 30)), "ignore_eos": True}
    else:
        body |= {"input": ["the yes " * int(rng.integers(1, 40)) + str(i), "no"]}
    return json.dumps({"custom_id": str(i), "method": "POST", "url": kind, "body": body})


def torment(server, kills, seed):
    """Asks and kills; returns what was confirmed: ({file: its content}, {batch: its kind})."""
    rng = np.random.default_rng(seed)
    files, batches = {}, {}
    for _ in range(kills):
        server.start()
        late = time.monotonic() + float(rng.exponential(0.5))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=5) as client:
            if rng.random() < 0.6 and len(batches) < 2 + kills // 8:
                kind = ["/v1/completions", "/v1/embeddings"][rng.integers(2)]
                content = "".join(line(i, kind, rng) + "\n" for i in range(LINES))
                file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch").id
                files[file] = content
                batch = client.batches.create(input_file_id=file, endpoint=kind, completion_window="24h")
                batches[batch.id] = kind
                if rng.random() < 0.15:
                    client.batches.cancel(batch.id)
            time.sleep(max(0.0, late - time.monotonic()))
        server.kill()
    return files, batches


def check(server, files, batches):
    """Lets all batches end, and looks whether everything is there, once."""
    server.start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=20) as client:
        for id, content in files.items():
            assert client.files.content(id).text == content
        end = time.monotonic() + 60 + 10 * len(batches)
        for id in batches:
            while (found := client.batches.retrieve(id)).status not in ("completed", "cancelled"):
                assert time.monotonic() < end and found.status in (
                    "validating",
                    "in_progress",
                    "finalizing",
                    "cancelling",
                )
                time.sleep(0.05)
            parts = [client.files.content(file).text for file in (found.output_file_id, found.error_file_id) if file]
            lines = [json.loads(text) for part in parts for text in part.splitlines()]
            ids = Counter(one["custom_id"] for one in lines)
            assert len(lines) == LINES and set(ids) == {*(str(i) for i in range(LINES) if i % 17 != 3), None}
            assert ids.pop(None) == len(range(3, LINES, 17)) and set(ids.values()) == {1}
            counts = found.request_counts
            assert counts.total == LINES == counts.completed + counts.failed
        known = {file.id for file in client.files.list()}
        assert known == {path.name for path in (server.folder / "data" / "files").iterdir()}
        assert not list((server.folder / "data" / "batches").iterdir())


@pytest.fixture
def server(tmp_path):
    (tmp_path / "model").mkdir()
    made = Tormented(tmp_path, str(tiny_checkpoint(tmp_path / "model", "llama")))
    yield made
    made.close()


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_confirmed_is_lost(server, kills):
    files, batches = torment(server, kills, seed=kills)
    assert batches
    check(server, files, batches)
