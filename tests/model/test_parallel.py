"""A model split over ranks: who holds what, the sum of the parts is the whole, and what goes between them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from looped_dense import LOOPS, looped_checkpoint
from tiny import EVERY, DenseAttend, tiny_checkpoint
from torch import distributed as dist

from prefold.checkpoint import resolve
from prefold.errors import InputError
from prefold.model import ModelConfig, Plane, RopeConfig
from prefold.model.shard import Shard
from prefold.worker.torch.load import load_model
from prefold.worker.torch.parallel import Ranks
from prefold.worker.torch.ranks import GroupRanks

CONFIG = ModelConfig(
    vocab_size=307,
    hidden=36,
    layers=1,
    heads=6,
    kv_heads=2,
    head_dim=6,
    intermediate=50,
    norm_eps=1e-6,
    rope=RopeConfig(),
    max_positions=64,
    planes=(Plane(),),
)


class Threads(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, table: list, barrier: threading.Barrier):
        self.rank, self.size = rank, size
        self.table, self.barrier = table, barrier

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.barrier.wait(60)
        self.table[self.rank] = x.clone()
        self.barrier.wait(60)
        return list(self.table)

    def sum(self, x):
        return torch.stack(self.exchange(x)).sum(0)

    def collect(self, piece):
        pieces = self.exchange(piece)
        return pieces if self.rank == 0 else None


def on_ranks(size: int, work) -> list:
    """work(ranks) of every rank, in threads."""
    table, barrier = [None] * size, threading.Barrier(size)

    def one(rank):
        try:
            with torch.inference_mode():
                return work(Threads(rank, size, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@given(
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 7),
    size=st.integers(1, 12),
    width=st.integers(1, 400),
    vocab=st.integers(1, 1000),
)
def test_every_part_is_held_by_somebody(kv_heads, group, size, width, vocab):
    assume(size <= min(kv_heads * group, width, vocab))
    config = replace(CONFIG, heads=kv_heads * group, kv_heads=kv_heads, intermediate=width, vocab_size=vocab)
    shards = [Shard.of(config, rank, size) for rank in range(size)]
    for total, parts in (
        (kv_heads * group, [s.heads for s in shards]),
        (width, [s.width for s in shards]),
        (vocab, [s.vocab for s in shards]),
    ):
        assert [i for part in parts for i in range(total)[part]] == list(range(total))
        assert all(part.start < part.stop for part in parts)
    for shard in shards:
        local = shard.local(config)
        assert local.heads == shard.heads.stop - shard.heads.start
        for number, head in enumerate(range(shard.heads.start, shard.heads.stop)):
            kv_head = shard.kv_heads.start + number // (local.heads // local.kv_heads)
            assert kv_head == head // group < shard.kv_heads.stop
    assert {h for s in shards for h in range(s.kv_heads.start, s.kv_heads.stop)} == set(range(kv_heads))


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(InputError, match="tensor_parallel is 7, but the model has 6 heads"):
        Shard.of(CONFIG, 0, 7)


def check_equal(folder, size, dtype=torch.float32, tolerance=1e-5):
    """Hidden states and logits of `size` ranks against those of one."""
    checkpoint = resolve(str(folder))
    place = {"dtype": dtype, "device": "cpu"}
    alone = load_model(checkpoint, **place)
    rows = torch.randint(0, alone.config.vocab_size, (17,))
    positions, reads = torch.arange(17), torch.tensor([0, 3, 9, 16])
    ids = [0, 5, alone.config.vocab_size - 1]

    def work(ranks):
        model = alone if ranks is None else load_model(checkpoint, **place, ranks=ranks)
        hidden = model(rows, positions, DenseAttend(model.local, reads), reads)
        return [hidden, *([model.logits(hidden), model.logits(hidden, ids)] if model.config.lm_head else [])]

    with torch.inference_mode():
        expected = work(None)
    found = on_ranks(size, work)
    for rank, tensors in enumerate(found):
        torch.testing.assert_close(tensors[0], expected[0], rtol=tolerance, atol=tolerance)
        if rank:
            assert [len(t) for t in tensors[1:2]] == [0] * len(tensors[1:2])
    for one, other in zip(found[0], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", EVERY)
def test_parts_make_the_whole(family, size, tmp_path):
    check_equal(tiny_checkpoint(tmp_path, family, tokenizer=False), size)


@pytest.mark.parametrize("family", ["olmo2", "phi3", "cohere2", "granite4", "starcoder2"])
def test_parts_of_other_layers_make_the_whole(family, tmp_path):
    """Three ranks, of which two have the same KV head; with parts of rotated heads, and tensors of several linears."""
    check_equal(tiny_checkpoint(tmp_path, family, tokenizer=False), 3)


@pytest.mark.parametrize("family", LOOPS)
def test_parts_of_looped_models(family, tmp_path):
    # Each visit adds rounding to what the one before gave.
    check_equal(looped_checkpoint(tmp_path, family, tokenizer=False), 2, tolerance=1e-4)
    if family == "ouro":  # read at exits
        check_equal(looped_checkpoint(tmp_path, family, tokenizer=False, early_exit_threshold=0.5), 2, tolerance=1e-4)


@settings(max_examples=15)
@given(data=st.data())
def test_odd_shapes(data, tmp_path_factory):
    kv_heads, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    assume(kv_heads * group > 1)
    family = data.draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("odd"),
        family,
        tokenizer=False,
        num_hidden_layers=data.draw(st.integers(1, 2)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * data.draw(st.integers(1, 5)),
        hidden_size=data.draw(st.integers(2, 20)) * kv_heads * group,
        intermediate_size=data.draw(st.integers(16, 70)),
        vocab_size=data.draw(st.integers(30, 80)),
        tie_word_embeddings=data.draw(st.booleans()),
        **({"attention_bias": True, "mlp_bias": True} if family == "llama" and data.draw(st.booleans()) else {}),
    )
    check_equal(folder, data.draw(st.integers(2, min(5, kv_heads * group))))


def test_classifier_and_bare_encoder(tmp_path):
    check_equal(tiny_checkpoint(tmp_path, "qwen3", head="bare", tokenizer=False), 2)
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=3, tokenizer=False)
    checkpoint = resolve(str(folder))
    hidden = torch.randn(4, 36)
    alone = load_model(checkpoint, dtype=torch.float32, device="cpu").head(hidden)

    def work(ranks):
        return load_model(checkpoint, dtype=torch.float32, device="cpu", ranks=ranks).head(hidden)

    assert all(torch.equal(found, alone) for found in on_ranks(2, work))


def test_each_rank_holds_its_share_only(tmp_path):
    checkpoint = resolve(str(tiny_checkpoint(tmp_path, "llama", tokenizer=False)))
    place = {"dtype": torch.float32, "device": "cpu", "pack": False}
    whole = sum(p.numel() for p in load_model(checkpoint, **place).parameters())
    parts = on_ranks(2, lambda ranks: sum(p.numel() for p in load_model(checkpoint, **place, ranks=ranks).parameters()))
    norms = (2 * 3 + 1) * 36
    assert sum(parts) == whole + norms  # the norms alone are on both
    assert max(parts) < 0.6 * whole


@pytest.fixture
def fake_group():
    """A process group of two ranks that exchange nothing: for counting."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", EVERY)
def test_two_sums_a_layer(family, tmp_path, fake_group):
    """Counted by torch's own debug mode: two a layer and one for each of two norms over all heads, one for the
    embedding, whatever the rows are."""
    from torch.distributed.tensor.debug import CommDebugMode

    checkpoint = resolve(str(tiny_checkpoint(tmp_path, family, tokenizer=False)))
    with torch.inference_mode():
        model = load_model(checkpoint, dtype=torch.float32, device="cpu", ranks=GroupRanks())
        for rows, reads in ((1, None), (40, None), (40, torch.tensor([9, 39]))):
            attend = DenseAttend(model.local, reads)
            with CommDebugMode() as comms:
                hidden = model(torch.zeros(rows, dtype=torch.int64), torch.arange(rows), attend, reads)
            counts = {str(op): count for op, count in comms.get_comm_counts().items()}
            assert counts == {"c10d.allreduce_": (2 + 2 * model.config.row_qk_norm) * model.config.layers + 1}
            with CommDebugMode() as comms:
                model.logits(hidden)
            assert {str(op): n for op, n in comms.get_comm_counts().items()} == {"c10d.gather_": 1}
