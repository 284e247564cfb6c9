"""Jobs on a real Ray of this machine: two replicas of one thread, a tiny random model, and replicas that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tiny import tiny_checkpoint

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
NUM = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and a table with nulls, a text that is too long, and many prefixes."""
    folder = tmp_path_factory.mktemp("ray")
    tiny_checkpoint(folder, "llama").rename(folder / "model")
    rng = random.Random(0)
    with open(folder / "in.jsonl", "w") as file:
        for i in range(NUM):
            text = f"the instruction {i % 20} is shared by many " + "yes no " * rng.randint(1, 8) + str(i)
            text = None if i % 50 == 7 else "no " * 600 if i == 100 else text
            file.write(json.dumps({"id": i, "text": text}) + "\n")
    return folder


def command(folder, out, *more, ray=True):
    fleet = ("--ray", "--replicas", "2") if ray else ()
    arguments = ("run", "in.jsonl", "--prompt", "text", "--id", "id", "-m", "model", "--threads", "1", "-o", out)
    return [sys.executable, "-m", "prefold", *arguments, *fleet, *more]


def environment():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.environ | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false", "RAY_DISABLE_IMPORT_WARNING": "1"}


def run(folder, *arguments, **options):
    done = subprocess.run(
        command(folder, *arguments, **options), cwd=folder, env=environment(), capture_output=True, timeout=300
    )
    assert done.returncode == 3, done.stderr.decode()  # some records are bad
    return done.stderr.decode()


EMBED = ("--task", "embed")
GENERATE = ("--task", "generate", "--raw", "--max-tokens", "12", "--temperature", "1", "--seed", "5")


def lines(path):
    """The output by id; every id is there once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["id"]: line for line in found}
    assert len(found) == len(by_id) == NUM
    return by_id


def assert_same(folder, one, other):
    expected, found = lines(folder / one), lines(folder / other)
    for number, line in expected.items():
        line, twin = dict(line), dict(found[number])
        for vector, again in [(line.pop("embedding", []), twin.pop("embedding", []))]:
            assert vector == pytest.approx(again, abs=1e-5)
        line.pop("cached_tokens", None), twin.pop("cached_tokens", None)
        assert line == twin


@pytest.fixture(scope="module")
def alone(folder):
    """The outputs of one process."""
    run(folder, "embed.jsonl", *EMBED, ray=False)
    run(folder, "generate.jsonl", *GENERATE, ray=False)
    return folder


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize("task, options", [("embed", EMBED), ("generate", GENERATE)])
def test_two_replicas_give_what_one_process_gives(alone, task, options, stream):
    said = run(alone, f"two-{task}.jsonl", *options, *stream, "--overwrite")
    assert "of 2 at the end" in said and "were missing" not in said
    assert_same(alone, f"{task}.jsonl", f"two-{task}.jsonl")


def actors(process):
    """The processes of a job's replicas."""
    own = psutil.Process(process.pid).children(recursive=True)
    return [child for child in own if "ray::_Actor" in " ".join(child.cmdline() or [child.name()])]


def wait_for_output(path, least=1, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= least:
            return
        time.sleep(0.02)
    raise AssertionError("the job writes nothing")


LONG = (*GENERATE[:4], "120", *GENERATE[5:], "--max-running", "8")


@pytest.fixture(scope="module")
def long(alone):
    run(alone, "long.jsonl", *LONG, "--threads", "2", ray=False)
    return alone


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_replica_that_is_killed_loses_nothing_and_comes_back(long, stream):
    options = (*LONG, *stream, "--overwrite")
    with subprocess.Popen(command(long, "killed.jsonl", *options), cwd=long, env=environment(), stderr=-1) as job:
        wait_for_output(long / "killed.jsonl", 30)
        actors(job)[0].kill()
        said = job.communicate(timeout=400)[1].decode()
    assert job.returncode == 3, said
    assert "is lost" in said and "1 were lost" in said
    assert_same(long, "long.jsonl", "killed.jsonl")


def test_a_replica_that_stands_still_is_killed(long):
    options = (*LONG, "--patience", "5")
    with subprocess.Popen(command(long, "hung.jsonl", *options), cwd=long, env=environment(), stderr=-1) as job:
        wait_for_output(long / "hung.jsonl", 30)
        actors(job)[0].suspend()
        said = job.communicate(timeout=400)[1].decode()
    assert job.returncode == 3, said
    assert "has done nothing for 5 s and is killed" in said
    assert_same(long, "long.jsonl", "hung.jsonl")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_leaves_no_replica_and_is_resumed(long, number):
    out = long / f"resumed-{number.name}.jsonl"
    shared = {name for name in os.listdir("/dev/shm") if "plasma" in name}
    with subprocess.Popen(command(long, out.name, *LONG), cwd=long, env=environment(), stderr=-1) as job:
        wait_for_output(out, 30)
        replicas = actors(job)
        assert len(replicas) == 2
        # Ray's own processes too, but for its agents: of a driver that was killed those end when they notice it.
        everybody = [one for one in psutil.Process(job.pid).children(recursive=True) if "Agent" not in one.name()]
        job.send_signal(number)
        job.communicate(timeout=60)
    _, alive = psutil.wait_procs(everybody, timeout=60)
    assert not alive
    left = {name for name in os.listdir("/dev/shm") if "plasma" in name} - shared
    assert not left, "shared memory is left behind"
    # Whatever was computed is kept: the job goes on, on one process this time.
    said = run(long, out.name, *LONG, ray=False)
    assert "of them before" in said
    assert_same(long, "long.jsonl", out.name)


def test_what_there_is_no_room_for_is_said_at_once(alone):
    """More replicas than there is room for: what there is computes."""
    started = time.monotonic()
    many = command(alone, "many.jsonl", *EMBED, "--replicas", "99")
    with subprocess.Popen(many, cwd=alone, env=environment(), stderr=-1, text=True) as job:
        lines_ = iter(job.stderr.readline, "")
        said = next(line for line in lines_ if "were asked for" in line)
        seconds = time.monotonic() - started
        rest = "".join(lines_)
    assert "99 replicas of 1 CPU each were asked for, and the cluster has" in said and "start now" in said
    assert seconds < 30, "10 s on a machine that has nothing else to do"
    assert job.returncode == 3 and "of 99 at the end" in rest
    assert_same(alone, "embed.jsonl", "many.jsonl")


def test_a_model_that_cannot_be_loaded_is_said(alone):
    """The files are found here and broken there: the weights are read by replicas only."""
    broken = alone / "broken"
    broken.mkdir()
    for file in (alone / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    arguments = [a if a != "model" else "broken" for a in command(alone, "broken.jsonl", *EMBED)]
    done = subprocess.run(arguments, cwd=alone, env=environment(), capture_output=True, timeout=200)
    said = done.stderr.decode()
    assert done.returncode == 1 and "no replica is left" in said and "model.safetensors" in said
    assert "To go on:" in said
