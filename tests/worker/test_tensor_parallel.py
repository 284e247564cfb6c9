"""A model split over processes: the same results, and an end that can be understood when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import numpy as np
import pytest
from looped_dense import looped_checkpoint
from running import as_request, prompts, run
from tiny import EVERY, tiny_checkpoint
from torch.distributed import distributed_c10d

from prefold import LLM
from prefold.errors import CheckpointError, InputError, RankError
from prefold.types import Readout
from prefold.worker import tensor_parallel

PLACE = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


def check_same(folder: str, ranks: int, **options):
    alone, split = LLM(folder, **PLACE), LLM(folder, **PLACE, tensor_parallel=ranks, **options)
    token_lists = prompts(7)
    rng = np.random.default_rng(0)
    try:
        for sharing, rows in (("full", 5), ("full", 1000), ("mlp", 5), ("off", 1000)):
            for kind in ("last", "mean", "logits"):
                readout = Readout(kind, (3, 200, 17) if kind == "logits" else ())
                requests = [as_request(tokens) for tokens in token_lists]
                found, expected = (run(llm, requests, readout, sharing=sharing, rows=rows) for llm in (split, alone))
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one.values, other.values, rtol=1e-5, atol=1e-5)
            requests = [as_request(t, rng.integers(0, 300, min(len(t), 3)).tolist()) for t in token_lists]
            found, expected = (
                run(llm, requests, Readout("logprobs"), sharing=sharing, rows=rows) for llm in (split, alone)
            )
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.values, other.values, rtol=1e-5, atol=1e-5)
                assert np.array_equal(one.greedy, other.greedy)
        texts = ["a common start, and one", "a common start, and two", "another"]
        found, expected = (llm.generate(texts, max_tokens=12, logprobs=2) for llm in (split, alone))
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert split.stats.rows_computed == alone.stats.rows_computed
        assert [one.tokens for one in split.generate(texts, max_tokens=12)] == [one.tokens for one in expected]
    finally:
        split.close()
    assert all(process.returncode is not None for process in split._team._processes)


def test_two_processes_are_one_model(folder):
    check_same(folder, 2, kv_memory=200_000)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", EVERY)
def test_every_family(family, ranks, tmp_path):
    check_same(str(tiny_checkpoint(tmp_path, family)), ranks)


@pytest.fixture
def split(folder, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "TIMEOUT_SECONDS", 60)
    llm = LLM(folder, **PLACE, tensor_parallel=2)
    yield llm
    llm.close()


def embed_until_it_fails(llm) -> RankError:
    with pytest.raises(RankError) as error:
        for _ in range(10_000):
            llm.embed(["some text", "some more text"])
    return error.value


def test_one_split_model_at_a_time_and_a_killed_rank_is_named(split, folder):
    with pytest.raises(InputError, match=r"torch\.distributed is in use"):
        LLM(folder, **PLACE, tensor_parallel=2)
    assert np.isfinite(split.embed(["the first one goes on"])).all()
    (victim,) = split._team._processes
    threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL)).start()
    error = embed_until_it_fails(split)
    assert "rank 1 was ended by SIGKILL" in str(error)
    with pytest.raises(RankError, match="have ended: rank 1 was ended"):
        split.generate("more", max_tokens=2)
    assert all(process.poll() is not None for process in split._team._processes)


def test_a_hung_rank_is_not_waited_for_for_ever(split, monkeypatch):
    """The ranks came up under a limit that a busy machine keeps; then rank 0 waits for the others for less."""
    monkeypatch.setattr(tensor_parallel, "TIMEOUT_SECONDS", 2)
    monkeypatch.setattr(tensor_parallel, "LAST_WORD_SECONDS", 0.5)
    distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    os.kill(split._team._processes[0].pid, signal.SIGSTOP)
    assert "rank 1 has not answered for 2 s" in str(embed_until_it_fails(split))


def test_what_a_rank_says_last_is_heard(split):
    """A step that this process could run and another cannot: the rank and its error are named."""
    split._team._pipes[0].send("nonsense")
    assert "rank 1 failed: TypeError: str is no message" in str(embed_until_it_fails(split))


def test_more_ranks_than_heads(folder):
    with pytest.raises(InputError, match="use at most 6"):
        LLM(folder, **PLACE, tensor_parallel=7)


def test_a_checkpoint_that_does_not_load(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises((CheckpointError, RankError), match="cannot be read as safetensors"):
        LLM(str(folder), **PLACE, tensor_parallel=2)


HUNG_UP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from prefold import LLM
llm = LLM(sys.argv[1], dtype="float32", device="cpu", tensor_parallel=2)
assert len(llm.embed(["some text"]))
os.kill(os.getpid(), signal.SIGHUP)
"""


def test_nothing_stays_of_a_process_that_was_hung_up_on(folder, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", HUNG_UP, folder], env=environment, check=False)
    assert found.returncode == -signal.SIGHUP
    assert not list(tmp_path.iterdir())


def test_a_gate_that_reads_what_one_rank_alone_knows(tmp_path):
    loop = {"blocks": 2, "visits": 4, "gate": True, "gate_reads": "features", "threshold": 0.5}
    folder = looped_checkpoint(tmp_path, "looped", tokenizer=False, loop=loop)
    with pytest.raises((InputError, RankError), match='gate that reads "state"'):
        LLM(str(folder), **PLACE, tensor_parallel=2)
