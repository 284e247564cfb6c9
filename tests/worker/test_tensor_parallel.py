"""A model split over processes: the same results, and an end that can be understood when one of them fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from looped_dense import looped_checkpoint
from machines import kernels_in_use
from running import as_request, prompts, run
from tiny import EVERY, tiny_checkpoint

from prefold import LLM, kernels
from prefold.errors import CheckpointError, InputError, RankError
from prefold.spec.requests import Readout
from prefold.worker import tensor_parallel

PLACE = {"dtype": "float32", "device": "cpu"}
needs_memory = pytest.mark.skipif(
    kernels.load() is None or not Path("/proc/self/maps").exists(), reason="there is no compiler, or another system"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Its MLP has a width that the kernels multiply with, of each of two ranks and of three.
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", intermediate_size=80))


def check_same(folder: str, ranks: int, **options):
    place = PLACE | {"executor": options.pop("executor", "native")}
    alone, split = LLM(folder, **place), LLM(folder, **place, tensor_parallel=ranks, **options)
    assert {*split.passes.split("; ")} - {*alone.passes.split("; ")} == {f"the model is split over {ranks} ranks"}
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
    assert all(process.returncode is not None for process in split.engine.worker.processes)


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_two_processes_are_one_model(folder, executor):
    check_same(folder, 2, kv_memory=200_000, executor=executor)


def test_ranks_that_share_no_memory(folder, monkeypatch):
    """Without a compiler they meet by torch.distributed, and one split model at a time."""
    monkeypatch.setenv("PREFOLD_KERNELS", "0")  # of the other rank
    with kernels_in_use(None), LLM(folder, **PLACE) as alone, LLM(folder, **PLACE, tensor_parallel=2) as split:
        assert split.model.ranks.view is None
        np.testing.assert_allclose(split.embed(["some text"]), alone.embed(["some text"]), rtol=1e-5, atol=1e-5)
        assert split.generate("some text", max_tokens=5).text == alone.generate("some text", max_tokens=5).text
        with pytest.raises(InputError, match=r"torch\.distributed is already in use"):
            LLM(folder, **PLACE, tensor_parallel=2)


def shared_memory() -> list[str]:
    """The names of the memory of ranks that this process maps, and of all files of shared memory."""
    own = [line for line in Path("/proc/self/maps").read_text().splitlines() if "prefold-ranks" in line]
    return own + sorted(os.listdir("/dev/shm"))


@needs_memory
def test_two_split_models_in_one_process_and_no_memory_is_left(folder):
    gc.collect()
    before = shared_memory()
    llms = [LLM(folder, **PLACE, tensor_parallel=ranks) for ranks in (2, 3)]
    texts = ["some text", "some other text", "another"]
    assert len(shared_memory()) == len(before) + 2

    def made(llm: LLM) -> list[str]:
        return [llm.generate(texts, max_tokens=12, ignore_eos=True) for _ in range(2)][-1]

    alone = [made(llm) for llm in llms]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(made, llms)) == alone
    assert alone[0] == alone[1]
    for llm in llms:
        llm.close()
    del llm, llms
    gc.collect()
    assert shared_memory() == before


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


def test_a_killed_rank_is_named(split):
    assert np.isfinite(split.embed(["at first it goes on"])).all()
    (victim,) = split.engine.worker.processes
    threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL)).start()
    error = embed_until_it_fails(split)
    assert "rank 1 was ended by SIGKILL" in str(error)
    with pytest.raises(RankError, match="have ended: rank 1 was ended"):
        split.generate("more", max_tokens=2)
    assert all(process.poll() is not None for process in split.engine.worker.processes)


@needs_memory
def test_a_hung_rank_is_not_waited_for_for_ever(split):
    """The ranks came up under a limit that a busy machine keeps; then rank 0 waits for the others for less."""
    worker = split.engine.worker
    worker.patience, worker.last_word_seconds = 1, 0.2
    split.model.ranks.view.patience = 1
    os.kill(split.engine.worker.processes[0].pid, signal.SIGSTOP)
    assert "rank 1 has not answered for 1 s" in str(embed_until_it_fails(split))


def test_what_a_rank_says_last_is_heard(split):
    """A step that this process could run and another cannot: the rank and its error are named."""
    split.engine.worker.pipes[0].send("nonsense")
    assert "rank 1 failed: TypeError: str is no message" in str(embed_until_it_fails(split))


def test_more_ranks_than_heads(folder):
    with pytest.raises(InputError, match="use at most 6"):
        LLM(folder, **PLACE, tensor_parallel=7)


def test_windows_is_refused(folder, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "sys", SimpleNamespace(platform="win32"))
    with pytest.raises(InputError, match="Windows cannot split a model over processes; leave it out"):
        LLM(folder, **PLACE, tensor_parallel=2)


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
