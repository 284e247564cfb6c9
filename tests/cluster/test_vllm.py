"""vLLM as a replica: with an engine that stands for it, and, where it is installed, with vLLM itself."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from fleet_books import check_blocks, rows_in
from tiny import tiny_checkpoint

from prefold.cli import main
from prefold.cluster.fleet import Fleet
from prefold.cluster.replicas import Replicas
from prefold.errors import FleetError, InputError, JobError
from prefold.spec.requests import Grammar, Namespace, Readout, Request, Sampling
from prefold.trie import Spool


def host(**options):
    from prefold.integrations.vllm import VllmHost

    return VllmHost("some/model", options, caching=False)


def filled(firsts, count=60, **sampling) -> Spool:
    rng = np.random.default_rng(0)
    spool = Spool()
    for number in range(count):
        tokens = np.concatenate(([firsts[number % len(firsts)]] * 4, rng.integers(10, 20, 1 + number % 7)))
        spool.add(Request(tokens.astype(np.int32), sampling=Sampling(max_tokens=5, **sampling)), b"%d" % number)
    return spool


def run(fleet, spool):
    return dict(fleet.run(spool.windows(max_tokens=500), Readout("tokens")))


def test_requests_come_in_order_and_a_bounded_number_at_a_time(engines):
    with closing(Fleet(Replicas({"this machine": host}))) as fleet, filled([40, 30, 50]) as spool:
        found = run(fleet, spool)
        again = run(fleet, spool)
    (engine,) = engines
    assert len(found) == 60 and {tag: one[0].tokens for tag, one in found.items()} == {
        tag: one[0].tokens for tag, one in again.items()
    }
    first = engine.prompts[:60]
    assert first == sorted(first) and engine.prompts[60:] == first
    assert 4 <= engine.most <= 12, "what runs, and a few that follow"
    (one,) = found[b"0"]
    assert one.finish_reason == "stop" and len(one.tokens) == 2 and one.cached_tokens == 3 and one.text is None
    assert fleet.stats.requests == 120 and fleet.stats.generation.first_admission_hits == 360


def test_what_is_left_is_taken_back(engines):
    with closing(Fleet(Replicas({"this machine": host}))) as fleet, filled([40]) as spool:
        answers = fleet.run(spool.windows(max_tokens=500), Readout("tokens"))
        next(answers)
        engines[0].release.clear()
        answers.close()
        engines[0].release.set()
        assert len(run(fleet, spool)) == 60


def test_nobody_waits_for_an_engine_that_is_shut_down(engines):
    """Whoever did would take its end for a crash."""
    with closing(Fleet(Replicas({"this machine": host}))) as fleet, filled([40]) as spool:
        answers = fleet.run(spool.windows(max_tokens=500), Readout("tokens"))
        next(answers)
        engines[0].release.clear()
        answers.close()
        # The run is over, and a new one has requests under way.
        deadline = time.monotonic() + 60
        again = fleet.run(spool.windows(max_tokens=500), Readout("tokens"))
        threading.Thread(target=lambda: next(again, None), daemon=True).start()
        while not engines[0].now and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engines[0].now
        fleet.replicas.kill("this machine")
        while not engines[0].errored and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engines[0].open_at_the_end == 0
        engines[-1].release.set()


def test_a_prompt_that_is_refused_is_an_error_of_that_record(engines):
    with closing(Fleet(Replicas({"this machine": host}))) as fleet, filled([40, 98]) as spool:
        found = run(fleet, spool)
    errors = [one for one in found.values() if isinstance(one, InputError)]
    assert len(found) == 60 and len(errors) == 30
    assert all(error.code == "vllm" and "not allowed" in str(error) and error.remedy for error in errors)


def test_sampling_that_is_refused_is_an_error_of_that_record(engines, monkeypatch):
    class Params(SimpleNamespace):
        def __init__(self, **given):
            super().__init__(**given)
            if self.n > 1 and not self.temperature:
                raise ValueError("n must be 1 when using greedy sampling")

    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", Params)
    with closing(Fleet(Replicas({"this machine": host}))) as fleet, filled([40], 9, temperature=0.0) as spool:
        spool.add(Request(np.array([40], np.int32), sampling=Sampling(temperature=0.0, n=2)), b"two")
        found = run(fleet, spool)
    assert len(engines) == 1 and not fleet.losses
    error = found.pop(b"two")
    assert (error.code, error.field) == ("vllm", "sampling") and "greedy" in str(error) and error.remedy
    assert len(found) == 9 and not any(isinstance(one, InputError) for one in found.values())


def test_an_engine_that_dies_is_made_anew_and_who_kills_two_is_given_up(engines):
    notes = []
    with closing(Fleet(Replicas({"this machine": host}), notify=notes.append)) as fleet, filled([40], 30) as spool:
        spool.add(Request(np.array([99, 1], np.int32), sampling=Sampling(max_tokens=5)), b"poison")
        found = run(fleet, spool)
    assert len(found) == 31 and len(engines) == 3
    assert found[b"poison"].code == "replicas_lost"
    assert not any(isinstance(one, InputError) for tag, one in found.items() if tag != b"poison")
    assert any("vLLM has died: the engine core is gone" in note for note in notes)


def test_what_cannot_start_says_why(engines, monkeypatch):
    with (
        closing(Fleet(Replicas({"this machine": lambda: host(block=3)}))) as fleet,
        filled([40]) as spool,
        pytest.raises(FleetError, match="has no option 'block'"),
    ):
        run(fleet, spool)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with (
        closing(Fleet(Replicas({"this machine": host}))) as fleet,
        filled([40]) as spool,
        pytest.raises(FleetError, match=r"pip install 'prefold\[vllm\]'"),
    ):
        run(fleet, spool)


def test_numbers_are_not_asked_of_it(engines):
    with (
        closing(Fleet(Replicas({"this machine": host}))) as fleet,
        filled([40]) as spool,
        pytest.raises(JobError, match="only generates text here, but was asked for 'last'"),
    ):
        list(fleet.run(spool.windows(max_tokens=500), Readout("last")))


@pytest.mark.parametrize(
    "given, field",
    [
        ({"exit_threshold": 0.5}, "exit_threshold"),
        ({"route": (0, 1)}, "route"),
        ({"exit_visits": (2, 1)}, "exit_visits"),
        ({"grammar": Grammar("lark", "start: 'a'")}, "grammar"),
        ({"grammar": Grammar("regex", "a")}, "a grammar for tokens without text"),
    ],
)
def test_what_it_lacks_is_an_error_of_that_record(engines, given, field):
    with closing(Fleet(Replicas({"this machine": host}))) as fleet, filled([40], 3, **given) as spool:
        spool.add(
            Request(np.array([40], np.int32), namespace=Namespace("mine"), sampling=Sampling(max_tokens=5)), b"adapter"
        )
        spool.add(Request(np.array([40, 1 << 30], np.int32), sampling=Sampling(max_tokens=5)), b"image")
        text = field == "grammar"
        found = dict(fleet.run(spool.windows(max_tokens=500), Readout("tokens"), object() if text else None))
    assert {one.field for tag, one in found.items() if tag.isdigit()} == {field}
    assert found[b"image"].field == "image"
    assert found[b"adapter"].field == "adapter" and found[b"adapter"].code == "unsupported"
    assert not engines[0].prompts


def test_how_sampling_is_asked_for(engines):
    from prefold.integrations.vllm import sampling_params

    asked = Sampling(temperature=0.5, top_k=3, seed=1 << 63, stop=("a",), stop_ids=(7,), logit_bias=((1, -2.0),),
                     grammar=Grammar("choice", '["a", "b"]'), n=2, logprobs=1)  # fmt: skip
    params = sampling_params(asked, True, 9)
    assert (params.max_tokens, params.temperature, params.top_k, params.n, params.logprobs) == (9, 0.5, 3, 2, 1)
    assert (params.seed, params.stop, params.stop_token_ids, params.logit_bias) == (0, ["a"], [7], {1: -2.0})
    assert params.structured_outputs.choice == ["a", "b"] and params.detokenize


def test_bad_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')

    def said(*more):
        given = ["run", "in.jsonl", "--task", "generate", "--prompt", "text", "-m", str(model), "-o", "out.jsonl"]
        return CliRunner().invoke(main, [*given, *more]).stderr

    model = tiny_checkpoint(tmp_path, "llama")
    assert "exclude each other" in said("--backend", "vllm", "--url", "http://localhost:1")
    assert "is for jobs with --backend vllm" in said("--backend-option", "block_size=32")
    assert "is not NAME=VALUE" in said("--backend", "vllm", "--backend-option", "block_size")
    assert "--sharing mlp" in said("--backend", "vllm", "--sharing", "mlp")
    assert "--tokenizer is for jobs on servers (--url) or with --backend vllm" in said("--tokenizer", "x")


# ------------------------------------------------------------------------------------------------ vLLM itself

OPTIONS = {
    "dtype": "float32", "block_size": 32, "max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 60,
    "max_num_batched_tokens": 512, "enforce_eager": True,
}  # fmt: skip
real = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return tiny_checkpoint(folder, "llama", **sizes)


@pytest.fixture(scope="module")
def expected(model):
    """What our own engine makes of the prompts, without text; and the prompts."""
    from prefold import LLM

    rng = np.random.default_rng(0)
    heads = rng.integers(10, 300, (5, 70))
    prompts = [np.concatenate((heads[i % 5], rng.integers(10, 300, 1 + i % 40))).astype(np.int32) for i in range(60)]
    llm = LLM(str(model), threads=1, dtype="float32")
    found = llm.generate([one.tolist() for one in prompts], max_tokens=6, ignore_eos=True)
    return prompts, [one.tokens for one in found]


def answers_of(fleet, prompts):
    with Spool() as spool:
        for number, tokens in enumerate(prompts):
            spool.add(Request(tokens, sampling=Sampling(max_tokens=6, ignore_eos=True)), b"%d" % number)
        return dict(fleet.run(spool.windows(max_tokens=1 << 14), Readout("tokens")))


@pytest.mark.parametrize("_", [pytest.param(0, marks=real)])
def test_vllm_itself_gives_what_our_engine_gives_and_tells_of_its_blocks(model, expected, _):
    from prefold.cluster.router import Prompt, Router
    from prefold.integrations.vllm import VllmHost

    made, told = [], []

    class Told(Replicas):
        def start(self, tell):
            def both(name, event):
                if getattr(event, "events", None) is not None:
                    told.append(event.events)
                tell(name, event)

            super().start(both)

    def make():
        made.append(VllmHost(str(model), OPTIONS))
        return made[-1]

    prompts, tokens = expected
    with closing(Fleet(Told({"this machine": make}))) as fleet:
        found = answers_of(fleet, prompts)
        same = sum(found[b"%d" % i][0].tokens == one for i, one in enumerate(tokens))
        assert same >= 58, "rounding may change a token of a random model"
        assert fleet.stats.generation.first_admission_hits > 50 * 64
        again = answers_of(fleet, prompts)  # a second run begins with a picture of what is held
        assert again.keys() == found.keys()
        blocks = made[0]._events.blocks
        while made[0]._events.drain() is not None:
            pass
        check_blocks(blocks)
        router = Router()
        router.join("vllm")
        blocks.tell_anew()
        assert router.take("vllm", blocks.drain())
        held = [router.matched_rows(Prompt(one, namespace=Namespace())).get("vllm", 0) for one in prompts]
        assert max(held) >= 64 and all(rows % 32 == 0 or rows > 64 for rows in held) and rows_in(blocks) <= 60 * 32
    assert told and all(events.first >= 0 for events in told)


@pytest.mark.parametrize("_", [pytest.param(0, marks=real)])
def test_a_job_in_vllm_that_is_killed_is_resumed(model, tmp_path, monkeypatch, _):
    """From the shell, in an environment without prefold[grammar]; a schema is vLLM's to enforce."""
    monkeypatch.chdir(tmp_path)
    with open("in.jsonl", "w") as file:
        for i in range(40):
            text = None if i == 7 else "no " * 600 if i == 9 else f"the instruction {i % 5} is shared {i}"
            file.write(json.dumps({"id": i, "text": text}) + "\n")
    given = ["run", "in.jsonl", "--task", "generate", "--prompt", "text", "--id", "id", "--raw", "-m", str(model)]
    given += ["-o", "out.jsonl", "--max-tokens", "8", "--backend", "vllm", "--dtype", "float32", "--max-running", "8"]
    for name, value in OPTIONS.items():
        if name not in ("dtype", "max_num_seqs"):
            given += ["--backend-option", f"{name}={json.dumps(value)}"]
    done = CliRunner().invoke(main, [*given, "--limit", "20"], catch_exceptions=False)
    assert done.exit_code == 3, done.stderr
    done = CliRunner().invoke(main, given, catch_exceptions=False)
    assert done.exit_code == 3 and "20 of them before" in done.stderr, done.stderr
    for wrong in ("random weights", " 0 unique tokens", " 0 steps", "0 bytes"):
        assert wrong not in done.stderr, "vLLM does not tell of it"
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == list(range(40))
    assert {line["id"] for line in lines if "error" in line} == {7, 9}
    without = [one for one in given[: given.index("--backend-option")] if one not in ("--backend", "vllm")]
    done = CliRunner().invoke(main, without)
    assert done.exit_code == 1 and "belongs to another job" in done.stderr, "a job of vLLM is no job of prefold"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=real), pytest.param(signal.SIGKILL, marks=real)])
def test_a_driver_that_ends_leaves_nothing_of_vllm_behind(model, tmp_path, number):
    import psutil

    with open(tmp_path / "in.jsonl", "w") as file:
        file.writelines(json.dumps({"id": i, "text": f"the instruction {i % 5} is {i}"}) + "\n" for i in range(2000))
    command = [sys.executable, "-m", "prefold", "run", "in.jsonl", "--task", "generate", "--prompt", "text", "--raw"]
    command += ["--id", "id", "-m", str(model), "-o", "out.jsonl", "--max-tokens", "60", "--ignore-eos"]
    command += ["--backend", "vllm", "--dtype", "float32", "--max-running", "8"]
    for name, value in OPTIONS.items():
        if name not in ("dtype", "max_num_seqs"):
            command += ["--backend-option", f"{name}={json.dumps(value)}"]
    out = tmp_path / "out.jsonl"
    # A test that runs in the background ignores SIGINT, and so would its children.
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [sys.executable, "-c", code, *command]
    with subprocess.Popen(started, cwd=tmp_path, env=environment, stderr=-1, start_new_session=True) as job:
        deadline = time.monotonic() + 200
        while not (out.exists() and out.read_bytes().count(b"\n") > 20) and time.monotonic() < deadline:
            time.sleep(0.05)
        everybody = psutil.Process(job.pid).children(recursive=True)
        assert everybody, "vLLM's processes are there"
        if number == signal.SIGINT:
            os.killpg(job.pid, number)  # as a terminal does it: everybody gets it
        else:
            job.kill()
        said = job.communicate(timeout=120)[1].decode()
    _, alive = psutil.wait_procs(everybody, timeout=60)
    assert not alive
    if number == signal.SIGINT:
        assert job.returncode == 130 and "interrupted; finished records are written" in said, said[-2000:]
    done = subprocess.run([*command, "--limit", "60"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and b"of them before" in done.stderr, done.stderr.decode()[-2000:]
