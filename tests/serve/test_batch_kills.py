"""A server that is killed at random moments, again and again: nothing it confirmed is lost, each line is there once.

The servers are forks of one process that has imported everything, so that one starts within a second. The long tests
run in pieces, such as `pytest -m slow tests/serve/test_batch_kills.py --rounds 25 --seed 3`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import numpy as np
import openai
import pytest
from tiny import tiny_checkpoint

fork = pytest.importorskip("posix").fork

MAKER = """
import json, os, sys
import torch, numpy, uvicorn, uvloop, prefold.llm, prefold.cli, prefold.serve.run, prefold.jobs
import prefold.jobs.output as output
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
        self.maker.wait(60)
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


class Live:
    """A client that asks for the same texts again and again, while there is a server; all its answers are alike."""

    def __init__(self, server):
        self.server, self.answers, self.texts = server, 0, {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self):
        number = 0
        with httpx.Client(timeout=5) as client:
            while not self._is_over.is_set():
                number += 1
                body = {"prompt": f"no the yes {number % 5}", "max_tokens": 5 + number % 7, "temperature": 0}
                try:
                    found = client.post(f"{self.server.url}/v1/completions", json=body)
                except (httpx.TransportError, httpx.UnsupportedProtocol):
                    time.sleep(0.01)
                    continue
                if found.status_code == 200:
                    self.answers += 1
                    text = self.texts.setdefault(number % 35, found.json()["choices"][0]["text"])
                    assert found.json()["choices"][0]["text"] == text
                else:
                    assert found.status_code == 503, found.text

    def close(self):
        self._is_over.set()
        self._thread.join(60)


def torment(server, kills, seed, lines=LINES, start_batch=None, mean_life=0.5):
    """Asks and kills; returns what was confirmed: ({file: its content}, {batch: its kind}).

    start_batch  (generator of random numbers, batches so far, how many of them have not ended) -> whether another is
                 started in a round
    mean_life    of a server, in seconds
    """
    rng = np.random.default_rng(seed)
    start_batch = start_batch or (lambda rng, batches, _: rng.random() < 0.6 and len(batches) < 2 + kills // 8)
    files, batches, ended = {}, {}, {}
    for _ in range(kills):
        server.start()
        late = time.monotonic() + float(rng.exponential(mean_life))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            for id in batches:
                found = client.batches.retrieve(id)
                assert id not in ended or (found.status, found.output_file_id) == ended[id]
                if found.status in ("completed", "cancelled"):
                    ended[id] = found.status, found.output_file_id
            if start_batch(rng, batches, len(batches) - len(ended)):
                kind = ["/v1/completions", "/v1/embeddings"][rng.integers(2)]
                content = "".join(line(i, kind, rng) + "\n" for i in range(lines))
                file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch").id
                files[file] = content
                batch = client.batches.create(input_file_id=file, endpoint=kind, completion_window="24h")
                batches[batch.id] = kind
                if rng.random() < 0.15:
                    client.batches.cancel(batch.id)
            time.sleep(max(0.0, late - time.monotonic()))
        server.kill()
    return files, batches


def check(server, files, batches, lines=LINES):
    """Lets all batches end, and looks whether everything is there, once."""
    server.start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        for id, content in files.items():
            assert client.files.content(id).text == content
        end = time.monotonic() + 60 + len(batches) * (10 + lines / 10)
        for id in batches:
            while (found := client.batches.retrieve(id)).status not in ("completed", "cancelled"):
                assert time.monotonic() < end and found.status in (
                    "validating",
                    "in_progress",
                    "finalizing",
                    "cancelling",
                )
                time.sleep(0.05)
            asked = [json.loads(text) for text in files[found.input_file_id].splitlines() if text != "no JSON"]
            parts = [client.files.content(file).text for file in (found.output_file_id, found.error_file_id) if file]
            answers = [json.loads(text) for part in parts for text in part.splitlines()]
            ids = Counter(one["custom_id"] for one in answers)
            assert len(answers) == lines and set(ids) == {*(one["custom_id"] for one in asked), None}
            assert ids.pop(None) == len(range(3, lines, 17)) and set(ids.values()) == {1}
            by_id = {one["custom_id"]: one["response"] for one in answers}
            for one in asked:
                response, body = by_id[one["custom_id"]], one["body"]
                is_good = response is not None and response["status_code"] == 200
                assert not (is_good and body["model"] == "none")
                assert is_good or body["model"] == "none" or found.status == "cancelled", (one, response)
                if is_good and "max_tokens" in body:
                    assert response["body"]["usage"]["completion_tokens"] == body["max_tokens"]
            counts = found.request_counts
            assert counts.total == lines == counts.completed + counts.failed
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
def test_nothing_confirmed_is_lost(server, kills, seed, rounds):
    kills = rounds or kills
    files, batches = torment(server, kills, kills if seed is None else seed, mean_life=0.3)
    assert batches
    check(server, files, batches)


@pytest.mark.slow
def test_a_long_batch_under_live_load(server, seed, rounds):
    """There is always one batch of 5,000 lines that has not ended, and a client that asks for texts beside it."""
    live = Live(server)
    try:
        unless_open = lambda rng, batches, num_open: not num_open  # noqa: E731
        files, batches = torment(server, rounds or 200, seed or 0, 5000, unless_open, mean_life=2.0)
    finally:
        live.close()
    assert live.answers and batches
    check(server, files, batches, 5000)
    print(f"{len(batches)} batches, {live.answers} live answers")
