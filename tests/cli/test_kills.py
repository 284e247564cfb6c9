"""Jobs that are killed at random moments, by any signal, again and again: each ends whole with the same command.

The jobs run in forks of one process that has imported everything, so that a job takes a second and not ten.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prefold.tasks.kept_file import AnswersFile

fork = pytest.importorskip("posix").fork

SERVER = """
import json, os, signal, sys
import torch, numpy, prefold.llm, prefold.jobs.run, prefold.jobs.report, prefold.cli
import prefold.jobs.output as output
try:
    import pyarrow.parquet
except ImportError:
    pass
output.COMMIT_SECONDS = 0.01
signal.signal(signal.SIGINT, signal.SIG_DFL)  # or one that comes before the command runs would print where it was
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    arguments = json.loads(line)
    pid = os.fork()
    if pid == 0:
        sys.stdin.close()
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        code, sys.argv = 99, ["prefold", *arguments]
        try:
            prefold.cli.main()
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

EMBED = ["embed", "--dimensions", "3", "--max-batch-rows", "64"]
GENERATE = ["generate", "--prompt", "text", "--max-tokens", "6", "--temperature", "1", "--seed", "7"]
QUESTIONS = json.dumps({"q": {"type": "choice", "criteria": {"a": None, "b": None}}})
TEMPLATE = "{{ state }} {{ question.labels|join }}"
DECIDE = ["decide", "--state", "text", "--questions", QUESTIONS, "--template", TEMPLATE, "--gold", "label",
          "--max-batch-rows", "64"]  # fmt: skip
JOBS = {
    "plain.jsonl": EMBED,
    "ordered.jsonl": [*EMBED, "--keep-order"],
    "table.csv": [*EMBED, "--keep-order"],
    "table.tsv.gz": EMBED,
    "table.parquet": EMBED,
    "stream.jsonl": [*EMBED, "--stream", "--window", "1500"],
    "texts.jsonl.gz": GENERATE,
    "samples.parquet": [*GENERATE, "--n", "2", "--kv-memory", "300KB", "--keep-order"],
    "kept.jsonl": [*EMBED, "--answers", "answers"],
    "kept.csv": [*GENERATE, "--answers", "answers", "--keep-order"],
    "decided.csv": [*DECIDE, "--review-below", "1", "--save-calibration", "fitted.json", "--keep-order"],
    "windows.csv": [*GENERATE, "--stream", "--window", "1500", "--keep-order"],
}
SIGNALS = [signal.SIGKILL] * 3 + [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


class Killed:
    """Runs jobs in `folder` and kills them."""

    def __init__(self, folder, model, environment, seed):
        self.folder, self.model = folder, model
        self.rng = np.random.default_rng(seed)
        self.kills = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=folder, env=environment | {"OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def run(self, name, seconds=None):
        """Run the job once, and after so many seconds kill it; its exit status (negative: the signal)."""
        options = ["-m", self.model, "--id", "id", "--quiet", "--dtype", "float32", "-o", name]
        arguments = [*JOBS[name], "in.jsonl", *options]
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            number = SIGNALS[self.rng.integers(len(SIGNALS))]
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, number)
                if number != signal.SIGKILL and self.rng.random() < 0.3:
                    time.sleep(float(self.rng.choice([0, 0.001, 0.02])))
                    os.kill(pid, SIGNALS[self.rng.integers(3, len(SIGNALS))])
        status = int(self.process.stdout.readline())
        said = (self.folder / "stderr").read_text() if (self.folder / "stderr").exists() else ""
        assert "Traceback" not in said and status in (3, 129, 130, 143, -1, -2, -9, -15), (status, said)
        return status

    def torment(self, name, kills):
        """Run the job until it was killed so often and has ended; as often as it takes."""
        started = time.monotonic()
        assert self.run(name) == 3
        whole, want = time.monotonic() - started, self.read(name)
        assert sorted(line["record"] for line in want) == list(range(1, RECORDS + 1))
        self.clear(name)
        goal, patience = self.kills + kills, 0
        while True:
            # Later and later, so that a job that is killed all the time gets to its end.
            late = whole * min(1.1, float(self.rng.uniform(0, 1)) + 0.02 * patience)
            status = self.run(name, late if self.kills < goal else None)
            self.kills += status != 3
            patience += 1
            if status == 3:
                self.check(name, want)
                if self.kills >= goal:
                    return
                self.clear(name)
                patience = 0

    def check(self, name, want):
        assert self.read(name) == want
        left = sorted(path.name for path in self.folder.glob(f"{name}*"))
        assert left == [name, f"{name}.journal"]
        if "--answers" in JOBS[name]:
            file = AnswersFile(self.folder / "answers", 1 << 30, pytest.fail)
            (model,) = file.models()
            assert file.check() == [] and model.answers == sum(not line.get("error") for line in want)
            file.close()
        if name == "decided.csv":
            self.check_review(want)
        if self.rng.random() < 0.3:
            before = (self.folder / name).read_bytes()
            assert self.run(name) == 3 and (self.folder / name).read_bytes() == before

    def clear(self, name):
        for path in (*self.folder.glob(f"{name}*"), *self.folder.glob("*.review.*"), *self.folder.glob("fitted.json")):
            path.unlink()
        if self.rng.random() < 0.8:  # else the next job knows the answers
            shutil.rmtree(self.folder / "answers", ignore_errors=True)

    def check_review(self, want):
        """Each record that was decided is there once, for a person, and counted once."""
        decided = [line["record"] for line in want if not line.get("error")]
        assert [int(row["record"]) for row in _read_table(self.folder / "decided.review.csv")] == decided
        halves = json.loads((self.folder / "fitted.json").read_text())["questions"]["q"]["figures"]
        assert sum(half["before"]["rows"] for half in halves.values()) == len(decided)

    def read(self, name):
        """The records, in input order; embeddings as nearly as another batch leaves them."""
        path = self.folder / name
        lines = _READ[[s for s in Path(name).suffixes if s != ".gz"][-1]](path)
        for line in lines:
            line["record"] = int(line["record"])
            line.pop("cached_tokens", None)
            line |= {"q_p": round(float(line["q_p"]), 3)} if line.get("q_p") else {}
            for choice in line.get("choices") or ():
                if isinstance(choice, dict):
                    choice.pop("cached_tokens", None)
            vector = line.get("embedding")
            if vector:
                numbers = json.loads(vector) if isinstance(vector, str) else vector
                line["embedding"] = [round(float(x), 3) + 0.0 for x in numbers]
        ordered = "--keep-order" in JOBS[name]
        assert not ordered or [line["record"] for line in lines] == sorted(line["record"] for line in lines)
        return sorted(lines, key=lambda line: line["record"])


def _open(path):
    return gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")


def _read_table(path):
    with _open(path) as file:
        return list(csv.DictReader(file, delimiter="\t" if ".tsv" in path.name else ","))


def _read_lines(path):
    with _open(path) as file:
        return [json.loads(line) for line in file]


def _read_parquet(path):
    return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()


_READ = {".jsonl": _read_lines, ".csv": _read_table, ".tsv": _read_table, ".parquet": _read_parquet}
RECORDS = 150


@pytest.fixture
def killed(model, tmp_path, environment):
    rng = np.random.default_rng(5)
    with (tmp_path / "in.jsonl").open("w") as file:
        for i in range(RECORDS):
            words = rng.choice(["yes", "no", "the", "abc", "q"], int(rng.integers(5, 40)))
            record = {"id": f"r{i}", "text": " ".join(words), "label": "ab"[i % 2]}
            file.write("{bad\n" if i % 41 == 5 else json.dumps(record) + "\n")
    killed = Killed(tmp_path, model, environment, seed=11)
    yield killed
    killed.close()


def test_a_few_kills(killed):
    for name in ("plain.jsonl", "table.csv", "samples.parquet", "kept.jsonl"):
        killed.torment(name, 1)
    assert killed.kills >= 3


@pytest.mark.slow
def test_two_hundred_kills_over_all_formats(killed):
    for name in JOBS:
        killed.torment(name, -(-200 // len(JOBS)))
    assert killed.kills >= 200


@pytest.mark.parametrize("code", [0, 3, 143])
def test_a_process_ends_while_another_thread_is_in_cpp(tmp_path, code, environment):
    """Python would end the thread after the interpreter, in C++, which aborts the process. This thread is not in C++:
    the test looks whether the interpreter is taken down."""
    program = """
import os, sys, threading, time
import click
from prefold import cli

class Last:
    def __del__(self, write=os.write):
        write(1, b"the interpreter was taken down")

last = Last()

@cli.main.command()
@click.argument("code", type=int)
def end(code):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    print("ends", flush=True)
    sys.exit(code)

cli.main()
"""
    command = [sys.executable, "-c", program, "end", str(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "ends\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kept.jsonl", "kept.csv"])
def test_twenty_kills_lose_double_or_damage_no_kept_answer(killed, name):
    killed.torment(name, 20)
    assert killed.kills >= 20
