"""Jobs on a real Ray of this machine: two replicas of one thread, a tiny random model, and replicas that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.engine.sampling import gumbel, hash_ids, make_key, make_stream
from prefold.spec.requests import Readout, Request, Sampling
from prefold.tasks.run import with_seed

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
        command(folder, *arguments, **options), cwd=folder, env=environment(), capture_output=True, timeout=900
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
    """Both outputs are equal. A drawn text may leave the other where two tokens were as good as equally likely."""
    expected, found = lines(folder / one), lines(folder / other)
    rounded = 0
    for number, line in expected.items():
        line, twin = dict(line), dict(found[number])
        if line.get("text") != twin.get("text") and None not in (line.get("text"), twin.get("text")):
            rounded += 1
            certain = certain_text(folder, line)
            assert len(certain) > 4 and twin["text"].startswith(certain), (line, twin)
            continue
        for vector, again in [(line.pop("embedding", []), twin.pop("embedding", []))]:
            assert vector == pytest.approx(again, abs=1e-5)
        line.pop("cached_tokens", None), twin.pop("cached_tokens", None)
        assert line == twin
    assert rounded <= 3


def certain_text(folder, line):
    """The text of a record of the long job up to the first draw whose best two tokens are within 1e-4 of each other:
    computed in float64, and a rounding error of float32 is at most some 1e-5 here."""
    (given,) = (row for row in map(json.loads, (folder / "in.jsonl").open()) if row["id"] == line["id"])
    llm = LLM(str(folder / "model"), threads=1)
    prompt = llm.tokenizer.encode(given["text"])
    asked = Request(prompt, sampling=Sampling(max_tokens=120, temperature=1.0))
    seed = with_seed(asked, 5, line["record"], 0, 0).sampling.seed
    (made,) = llm.generate([given["text"]], max_tokens=120, temperature=1.0, seed=seed)
    assert made.text == line["text"]
    with torch.no_grad():
        model = reference(folder / "model").double()
        logits = model(torch.tensor([[*prompt, *made.tokens]])).logits[0, len(prompt) - 1 : -1].numpy()
    ids = np.arange(logits.shape[1])
    for place, row in enumerate(logits):
        key = np.array([make_key(make_stream(seed, 0), place)], np.uint64)
        best, second = np.sort(row + gumbel(hash_ids(ids, key)))[:-3:-1]
        if best - second < 1e-4:
            return llm.tokenizer.decode(list(made.tokens[:place])).rstrip("\ufffd")
    raise AssertionError("no two tokens came close to each other")


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


def name_of(process):
    """Its command line; "" where it has ended meanwhile."""
    try:
        return " ".join(process.cmdline() or [process.name()])
    except psutil.NoSuchProcess:
        return ""


def actors(process, least=1, seconds=600):
    """The processes of a job's replicas, `least` of which are waited for."""
    deadline = time.monotonic() + seconds  # of a machine that has much else to do
    while time.monotonic() < deadline:
        own = psutil.Process(process.pid).children(recursive=True)
        found = [child for child in own if "ray::_Actor" in name_of(child)]
        if len(found) >= least:
            return found
        time.sleep(0.05)
    raise AssertionError("the job has no replicas")


def wait_for_output(path, least=1, seconds=600):
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
    """Of a stream the last records come when the replica has been killed: it has work to lose until then."""
    out, records = long / f"killed{len(stream)}.jsonl", (long / "in.jsonl").read_bytes().splitlines(keepends=True)
    arguments = ["-" if a == "in.jsonl" else a for a in command(long, out.name, *LONG, *stream, "--overwrite")]
    before = 200 if stream else NUM
    with subprocess.Popen(arguments, cwd=long, env=environment(), stdin=-1, stderr=-1) as job:
        job.stdin.write(b"".join(records[:before]))
        job.stdin.flush()
        if not stream:  # nothing is cut before all is read
            job.stdin.close()
        replicas = actors(job, 2)
        wait_for_output(out, 30)
        replicas[0].kill()
        if stream:
            job.stdin.write(b"".join(records[before:]))
            job.stdin.close()
        said = job.stderr.read().decode()
        job.wait(300)
    assert job.returncode == 3, said
    assert "is lost" in said and "1 was lost" in said
    assert_same(long, "long.jsonl", out.name)


def test_a_report_that_is_torn_on_its_way_is_no_loss(long, monkeypatch):
    """What the reports said is computed again, by the same processes, however often these cannot be reached meanwhile;
    nothing is held against any request."""
    from ray.exceptions import ActorUnavailableError

    from prefold.cluster import ray_replicas
    from prefold.cluster.fleet import Fleet
    from prefold.trie import Spool

    class Torn(ray_replicas._ActorHost):
        def _get(self, what, reference):
            answer = super()._get(what, reference)
            if what == "load" and counts["told"] and counts["refused"] < 8:
                counts["refused"] += 1
                raise ActorUnavailableError("it is restarting", None)
            if what == "report" and answer.answers:
                counts["told"] += 1
                if counts["told"] in (2, 4, 9):
                    raise ActorUnavailableError("torn", None)
            return answer

    counts = {"told": 0, "refused": 0}
    monkeypatch.setattr(ray_replicas, "_ActorHost", Torn)

    prompts = [np.array([10 + i % 7] * 9 + [20 + i], np.int32) for i in range(200)]

    def spooled():
        spool = Spool()
        for i, tokens in enumerate(prompts):
            spool.add(Request(tokens, sampling=Sampling(max_tokens=20, ignore_eos=True)), b"%d" % i)
        return spool

    place, notes = {"threads": 1, "dtype": "float32", "max_running": 4}, []
    with closing(LLM(str(long / "model"), **place)) as llm, spooled() as spool:
        alone = {
            tag: one[0].tokens for tag, one in llm.engine.run(spool.windows(max_tokens=1 << 20), Readout("tokens"))
        }
    replicas = ray_replicas.RayReplicas(str(long / "model"), place, count=2)
    with closing(Fleet(replicas, notify=notes.append)) as fleet, spooled() as spool:
        found = dict(fleet.run(spool.windows(max_tokens=1 << 20), Readout("tokens")))
        assert fleet.losses == 0 and fleet.num_moved > 0 and counts["told"] >= 9 and counts["refused"] == 8
        assert fleet.num_ready == 2
        assert fleet.stats.requests == 200
    assert {tag: one[0].tokens for tag, one in found.items()} == alone
    assert sum("runs, but messages to or from it were lost" in note for note in notes) == 3, notes


def test_a_replica_that_stands_still_is_killed(long):
    options = (*LONG, "--patience", "5")
    with subprocess.Popen(command(long, "hung.jsonl", *options), cwd=long, env=environment(), stderr=-1) as job:
        wait_for_output(long / "hung.jsonl", 30)
        actors(job)[0].suspend()
        said = job.communicate(timeout=900)[1].decode()
    assert job.returncode == 3, said
    assert "made no progress for 5 s and is killed" in said
    assert_same(long, "long.jsonl", "hung.jsonl")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_driver_that_ends_leaves_no_replica_and_is_resumed(long, number):
    out = long / f"resumed-{number.name}.jsonl"
    shared = {name for name in os.listdir("/dev/shm") if "plasma" in name}
    with subprocess.Popen(command(long, out.name, *LONG), cwd=long, env=environment(), stderr=-1) as job:
        wait_for_output(out, 30)
        replicas = actors(job)
        assert len(replicas) == 2
        # Ray's own processes too, but for its agents: of a driver that was killed those end when they notice it.
        everybody = [one for one in psutil.Process(job.pid).children(recursive=True) if "Agent" not in name_of(one)]
        job.send_signal(number)
        _, errors = job.communicate(timeout=900)
    assert b"SIGTERM received" not in errors, "Ray's own handler was called"
    _, alive = psutil.wait_procs(everybody, timeout=300)
    assert not alive
    left = {name for name in os.listdir("/dev/shm") if "plasma" in name} - shared
    assert not left, "shared memory is left behind"
    # Whatever was computed is kept: the job goes on, on one process this time.
    said = run(long, out.name, *LONG, ray=False)
    assert "of them before" in said
    assert_same(long, "long.jsonl", out.name)


def test_what_there_is_no_room_for_is_said_at_once(alone):
    """More replicas than there is room for: what there is computes."""
    many = command(alone, "many.jsonl", *EMBED, "--replicas", "99")
    with subprocess.Popen(many, cwd=alone, env=environment(), stderr=-1, text=True) as job:
        lines_ = list(iter(job.stderr.readline, ""))
    at = next(number for number, line in enumerate(lines_) if "the job needs" in line)
    assert "the job needs 99 replicas with 1 CPU each, and the cluster has" in lines_[at] and "start now" in lines_[at]
    assert not any("rows" in line for line in lines_[:at]), "it is said before anything is computed"
    assert job.returncode == 3 and "of 99 at the end" in "".join(lines_[at:])
    assert_same(alone, "embed.jsonl", "many.jsonl")


def test_a_model_that_cannot_be_loaded_is_said(alone):
    """The files are found here and broken there: the weights are read by replicas only."""
    broken = alone / "broken"
    broken.mkdir()
    for file in (alone / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    arguments = [a if a != "model" else "broken" for a in command(alone, "broken.jsonl", *EMBED)]
    done = subprocess.run(arguments, cwd=alone, env=environment(), capture_output=True, timeout=900)
    said = done.stderr.decode()
    assert done.returncode == 1 and "no replica is left" in said and "model.safetensors" in said
    assert "To continue:" in said
