"""Ranks that exchange through memory, as threads of this process: what is exchanged, and a split model in both
executors."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapters import write_adapter
from blocks import write_model
from generating import ask, generate, tokens_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from running import as_request
from tiny import FAMILIES, MORE, tiny_checkpoint

from prefold.checkpoint import resolve
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.worker import Worker
from prefold.errors import InputError
from prefold.kernels import CollectiveError
from prefold.model.families import config_from
from prefold.model.shard import share
from prefold.spec.model import ModelSpec
from prefold.spec.requests import Namespace, Readout
from prefold.trie import Spool
from prefold.worker import tensor_parallel
from prefold.worker.loaded import Load
from prefold.worker.loading import load_part
from prefold.worker.tensor_parallel import MemoryRanks, memory_file
from prefold.worker.torch.ranks import MemoryTensors

EVERY = (*FAMILIES, *MORE)
WIDTH = {"intermediate_size": 80, "n_inner": 80, "shared_intermediate_size": 80}
SMALL = 4096  # bytes that a rank gives at once


pytestmark = pytest.mark.usefixtures("own_products")


def ranks_of(size: int, patience: float = 60.0, part: int = tensor_parallel.PART) -> list[MemoryRanks]:
    file = memory_file(size, part)
    ranks = [MemoryRanks(rank, size, file, [], patience, part) for rank in range(size)]
    os.close(file)
    return ranks


def with_tensors(ranks: list[MemoryRanks]) -> list[MemoryTensors]:
    return [MemoryTensors(rank) for rank in ranks]


def each(ranks: list, work) -> list:
    """work(rank) of every rank, in threads."""
    with ThreadPoolExecutor(len(ranks)) as pool, torch.inference_mode():
        return [one.result() for one in [pool.submit(torch.inference_mode()(work), rank) for rank in ranks]]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(2, 5), counts=st.lists(st.integers(1, 5000), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_every_rank_has_the_same_bits_of_a_sum_and_rank_0_all_pieces(size, counts, seed):
    """In float32, and rounded once; what needs several exchanges too."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    given_ = [
        [torch.randn(count, generator=generator).to(dtypes[i % 3]) for _ in range(size)]
        for i, count in enumerate(counts)
    ]

    def work(ranks):
        return [(ranks.sum(parts[ranks.rank].clone()), ranks.collect(parts[ranks.rank])) for parts in given_]

    found = each(with_tensors(ranks_of(size, part=SMALL)), work)
    for number, parts in enumerate(given_):
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for rank in range(size):
            assert torch.equal(found[rank][number][0], total.to(parts[0].dtype))
            assert found[rank][number][1] is None or rank == 0
        assert all(torch.equal(*pair) for pair in zip(found[0][number][1], parts, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_logits_of_the_whole_vocabulary_and_sums_of_arrays(size):
    """Rank 0 gets every rank's columns in their order, also if ranks have different numbers of them."""
    whole = np.arange(5 * 31, dtype=np.float32).reshape(5, 31)

    def work(rank):
        own = whole[:, share(31, rank.rank, size)]
        return rank.gather(own, 31), rank.sum(whole[:, ::2])

    (first, total), *others = each(ranks_of(size, part=SMALL), work)
    assert np.array_equal(first, whole) and np.array_equal(total, size * whole[:, ::2])
    assert all(one.shape == (0, 31) and np.array_equal(other, total) for one, other in others)


def test_a_rank_that_does_not_come_and_one_that_does_something_else():
    alone, *_ = ranks_of(2, patience=0.05, part=SMALL)
    with pytest.raises(CollectiveError, match="timed out"):
        alone.sum(np.ones(3, np.float32))
    ranks = ranks_of(2, part=SMALL)

    def differs(rank):
        with pytest.raises(CollectiveError, match="at different steps"):
            rank.sum(np.ones(3 + rank.rank, np.float32))

    each(ranks, differs)


def test_a_rank_that_ends_is_not_waited_for():
    ours, theirs = os.pipe()
    file = memory_file(2)
    rank = MemoryRanks(0, 2, file, [ours], 3600)
    os.close(file)
    threading.Timer(0.1, os.close, (theirs,)).start()
    with pytest.raises(CollectiveError, match="a rank has ended"):
        rank.sum(np.ones(3, np.float32))
    os.close(ours)


class Team(Worker):
    """A Team gives each message to the workers of all ranks, in threads, and returns the ticket of rank 0."""

    def __init__(self, workers: list[Worker]):
        self.workers, self.facts = workers, workers[0].facts

    def start(self, message, prepared=None):
        return each(self.workers, lambda worker: worker.start(message))[0]

    def kv_slots(self, kv_memory, slot_bytes):
        return self.workers[0].kv_slots(kv_memory, slot_bytes)


def worker_of(folder, executor, dtype, ranks, adapters=(), **options) -> Worker:
    checkpoint = resolve(str(folder))
    config = replace(config_from(checkpoint.config), invariant=options.get("invariant", False))
    spec = ModelSpec(adapters={path.name: str(path) for path in adapters}, **options)
    return load_part(Load(checkpoint, config, spec, executor, dtype, "cpu"), ranks).worker


def engines(
    folder, size: int, executor="native", dtype="float32", adapters=(), rows=7, slots=400, **options
) -> list[ModelEngine]:
    """Engines over one rank, and over `size`."""
    given = (folder, executor, dtype)
    ranks = ranks_of(size) if executor == "native" else with_tensors(ranks_of(size))
    alone = worker_of(*given, None, adapters, **options)
    team = Team(each(ranks, lambda one: worker_of(*given, one, adapters, **options)))
    found = []
    for worker in (alone, team):
        options = GenerateOptions(kv_memory=(slots + 1) * worker.facts.slot_bytes)
        found.append(ModelEngine(worker, EngineOptions(sharing="full", max_batch_rows=rows, generation=options)))
    return found


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    first = rng.integers(3, 29, 9).tolist()
    return [first + rng.integers(3, 29, n).tolist() for n in (1, 4, 7, 2)] + [first]


def read(engine: ModelEngine, requests, readout: Readout) -> list:
    results = [None] * len(requests)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, str(number).encode())
        for tag, result in engine.run(spool.windows(max_tokens=1 << 20), readout):
            results[int(tag)] = result
    return results


def check_equal(alone: ModelEngine, split: ModelEngine, seed: int = 0, adapters=("",)) -> None:
    """Hidden states, log-probabilities and tokens, greedy and drawn, of many ranks against those of one."""
    for kind in ("last", "mean"):
        found, expected = (read(e, [as_request(t) for t in prompts(seed)], Readout(kind)) for e in (split, alone))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-4)
    requests = [as_request(tokens, tokens[:3]) for tokens in prompts(seed)]
    found, expected = (read(engine, requests, Readout("logprobs")) for engine in (split, alone))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-4)
    for options in ({}, {"temperature": 1.0, "seed": 3, "logprobs": 2}):
        asked = [ask(tokens, max_tokens=5, ignore_eos=True, **options) for tokens in prompts(seed)]
        asked = [replace(request, namespace=Namespace(name)) for request in asked for name in adapters]
        assert tokens_of(generate(split, asked)) == tokens_of(generate(alone, asked))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", EVERY)
def test_a_split_model_gives_what_one_rank_gives(tmp_path, family, size):
    check_equal(*engines(tiny_checkpoint(tmp_path, family), size))


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2"])
def test_a_split_model_with_tensors_gives_what_one_rank_gives(tmp_path, family):
    check_equal(*engines(tiny_checkpoint(tmp_path, family), 2, "torch"))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_odd_shapes(data, tmp_path_factory):
    kv_heads, group, size = (data.draw(st.integers(*bounds)) for bounds in ((1, 4), (1, 4), (2, 4)))
    assume(kv_heads * group >= size)
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("odd"),
        data.draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        num_hidden_layers=data.draw(st.integers(1, 2)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * data.draw(st.integers(1, 5)),
        hidden_size=data.draw(st.integers(2, 20)) * kv_heads * group,
        intermediate_size=data.draw(st.integers(size, 150)),
        vocab_size=data.draw(st.integers(30, 80)),
        tie_word_embeddings=data.draw(st.booleans()),
    )
    check_equal(*engines(folder, size, rows=data.draw(st.integers(2, 60))), seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize(("executor", "size"), [("native", 2), ("native", 3), ("torch", 2)])
def test_adapters(tmp_path, executor, size):
    folder = tiny_checkpoint(tmp_path, "qwen3", **WIDTH)
    paths = [write_adapter(tmp_path / name, folder, seed=ord(name)) for name in "ab"]
    check_equal(*engines(folder, size, executor, adapters=paths, slots=900), adapters=("", "a", "b"))


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt-oss"])
def test_hidden_states_are_near_those_of_the_other_executor(tmp_path, family):
    """With the same parts on each rank."""
    folder = tiny_checkpoint(tmp_path, family, **WIDTH)
    requests = [as_request(tokens) for tokens in prompts(1)]
    native = read(engines(folder, 3)[1], requests, Readout("last"))
    checkpoint = resolve(str(folder))
    wanted = Load(checkpoint, config_from(checkpoint.config), ModelSpec(), "torch", "float32", "cpu")
    workers = each(with_tensors(ranks_of(3)), lambda ranks: load_part(wanted, ranks).worker)
    tensors = read(ModelEngine(Team(workers), EngineOptions(sharing="full")), requests, Readout("last"))
    for one, other in zip(native, tensors, strict=True):
        np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_an_invariant_split_model_gives_the_same_bits_in_every_batch(tmp_path, family, dtype):
    folder, requests = tiny_checkpoint(tmp_path, family), [as_request(tokens) for tokens in prompts(1)]
    few, many = (engines(folder, 2, dtype=dtype, rows=rows, invariant=True)[1] for rows in (3, 1000))
    for kind, ids in (("last", ()), ("logits", (3, 200, 17))):
        found, expected = (read(engine, requests, Readout(kind, ids)) for engine in (few, many))
        assert all(one.values.tobytes() == other.values.tobytes() for one, other in zip(found, expected, strict=True))


def test_each_rank_reads_its_share_only(tmp_path):
    """Of all tensors but norms."""
    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False, intermediate_size=80)

    def num_bytes(ranks) -> int:
        return worker_of(folder, "native", "float32", ranks).model.memory.num_bytes

    whole = num_bytes(None)
    taken = each(ranks_of(2), num_bytes)
    norms = (2 * 3 + 1) * 36 * 4
    assert max(taken) < 0.6 * whole
    # Panels of 32 columns are filled up with zeros on each rank: at most as much as a whole has.
    assert whole + norms <= sum(taken) < 1.2 * whole


def test_each_rank_widens_its_part_of_a_file_in_blocks(tmp_path):
    path = write_model(tmp_path / "m.gguf", lambda name: "Q6_K" if name.endswith("ffn_down") else "Q4_K")
    check_equal(*engines(path, 2, weights="dtype"))
    workers = each(ranks_of(2), lambda ranks: worker_of(path, "native", "float32", ranks, weights="auto"))
    assert worker_of(path, "native", "float32", None, weights="auto").model.stored_as
    assert not any(worker.model.stored_as for worker in workers)


def test_blocks_of_a_file_are_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(
        InputError,
        match="a model on several ranks cannot use weights as the checkpoint stores them; leave --weights out",
    ):
        worker_of(folder, "native", "float32", ranks_of(2)[0], weights="file")


def test_greedy_steps_make_no_logits(tmp_path, rows_of_logits):
    alone, split = engines(tiny_checkpoint(tmp_path, "llama"), 3)
    calls = rows_of_logits(split.worker.workers[0].model)
    asked = [ask(tokens, max_tokens=4, ignore_eos=True) for tokens in prompts(2)]
    assert tokens_of(generate(split, asked)) == tokens_of(generate(alone, asked))
    assert not calls


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("rows", [3, 1000])
def test_two_sums_a_layer(tmp_path, rows, executor):
    """And one for the embedding, whatever the rows are; of a step without a row that is read the last layer computes
    keys and values alone."""
    folder, steps = tiny_checkpoint(tmp_path, "llama", **WIDTH), []
    _, split = engines(folder, 2, executor, rows=rows)
    view, start = split.worker.workers[0].model.ranks.view, split.worker.start

    def counted(message, prepared=None):
        before = view.met
        ticket = start(message)
        steps.append(view.met - before)
        return ticket

    split.worker.start = counted
    read(split, [as_request(tokens) for tokens in prompts(0)], Readout("last"))
    assert set(steps) - {0, 5} == {2 * 3 + 1} and (len(steps) > 4 if rows == 3 else steps.count(7) == 1)
