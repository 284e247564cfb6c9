from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_trie import ragged, random_sequences, sequence_lists, slow_trie

from prefold.errors import InputError
from prefold.trie import PrefixMap, Trie
from prefold.trie import fold as module


def assert_equal(maps: PrefixMap, sequences: list[tuple[int, ...]]) -> None:
    slow = slow_trie(sequences)
    scatter = [slow.row[s[: n + 1]] for s in sequences for n in range(len(s))]
    first: dict[int, int] = {}
    for token, row in enumerate(scatter):
        first.setdefault(row, token)
    assert maps.num_rows == len(slow.tokens)
    assert maps.scatter.tolist() == scatter
    assert maps.gather[: maps.num_rows].tolist() == [first[row] for row in range(maps.num_rows)]


@given(sequence_lists, st.sampled_from([0, 2, 24]), st.sampled_from([0, 1 / 128, 1]), st.sampled_from([1, 20, 1 << 17]))
def test_equals_the_slow_trie(sequences, pass_cost, token_cost, block):
    saved = module._PASS_COST, module._TOKEN_COST, module._BLOCK
    module._PASS_COST, module._TOKEN_COST, module._BLOCK = pass_cost, token_cost, block
    try:
        maps = PrefixMap.build(*ragged(sequences))
    finally:
        module._PASS_COST, module._TOKEN_COST, module._BLOCK = saved
    assert_equal(maps, sequences)


@pytest.mark.parametrize("num, length, vocab", [(2000, 5, 20), (400, 60, 150_000), (150, 150, 2), (1000, 1, 100)])
def test_equals_the_slow_trie_when_larger(num, length, vocab):
    sequences = random_sequences(np.random.default_rng(num), num, length + 1, vocab)
    maps = PrefixMap.build(*ragged(sequences), vocab_size=vocab)
    assert_equal(maps, sequences)
    trie = Trie.build(*ragged(sequences))
    tokens, offsets = ragged(sequences)
    assert np.array_equal(tokens[maps.gather], trie.tokens)
    for s in range(0, num, 17):
        assert np.array_equal(maps.scatter[offsets[s] : offsets[s + 1]], trie.rows_of(s))


def test_both_ways_of_filling_agree_on_a_mix():
    rng = np.random.default_rng(0)
    sequences = random_sequences(rng, 500, 4, 10) + random_sequences(rng, 6, 300, 10)
    rng.shuffle(sequences)
    assert_equal(PrefixMap.build(*ragged(sequences)), sequences)


@given(sequence_lists, st.integers(1, 20))
def test_padding(sequences, multiple):
    tokens, offsets = ragged(sequences)
    plain, padded = PrefixMap.build(tokens, offsets), PrefixMap.build(tokens, offsets, pad_to_multiple=multiple)
    assert len(padded.gather) % multiple == 0 and len(padded.gather) - plain.num_rows < multiple
    assert padded.num_rows == plain.num_rows
    assert np.array_equal(padded.gather[: plain.num_rows], plain.gather)
    assert not padded.gather[plain.num_rows :].any()
    assert np.array_equal(padded.scatter, plain.scatter)
    x = np.arange(len(tokens) * 2).reshape(-1, 2) % 7
    assert len(padded.fold(x)) == len(padded.gather)


@given(sequence_lists)
def test_fold_then_unfold_of_what_depends_on_the_prefix_alone(sequences):
    tokens, offsets = ragged(sequences)
    maps = PrefixMap.build(tokens, offsets)
    value = {p: float(i) for i, p in enumerate({s[:n] for s in sequences for n in range(1, len(s) + 1)})}
    x = np.array([[value[s[: n + 1]], 1.0] for s in sequences for n in range(len(s))]).reshape(-1, 2)
    assert np.array_equal(maps.unfold(maps.fold(x)), x)


def test_wrong_sizes_are_refused():
    maps = PrefixMap.build([1, 1], [0, 1, 2])
    with pytest.raises(InputError, match="x has 1 rows, not 2"):
        maps.fold(np.zeros(1))
    with pytest.raises(InputError, match="y has 2 rows, not 1"):
        maps.unfold(np.zeros(2))
    with pytest.raises(InputError, match="pad_to_multiple is 0"):
        PrefixMap.build([1], [0, 1], pad_to_multiple=0)
    with pytest.raises(InputError, match="sequence 0, position 0"):
        PrefixMap.build([-1], [0, 1])


def test_no_sequences():
    maps = PrefixMap.build([], [0], pad_to_multiple=8)
    assert len(maps.gather) == len(maps.scatter) == maps.num_rows == 0
    assert maps.fold(np.zeros((0, 3))).shape == (0, 3)


def test_equivalent_to_radix_mlp():
    radix_mlp = pytest.importorskip("radix_mlp")
    for seed in range(20):
        sequences = random_sequences(np.random.default_rng(seed), 60, 12, 5)
        tokens, offsets = ragged(sequences, np.uint32)
        positions = np.concatenate([np.arange(len(s), dtype=np.uint32) for s in sequences])
        theirs = radix_mlp.compute_fold_and_scatter(tokens, positions, offsets.astype(np.uint32), pad_multiple_of=None)
        scatter, gather = theirs[2].astype(np.int64), theirs[3].astype(np.int64)
        maps = PrefixMap.build(tokens, offsets)
        assert np.array_equal(np.sort(maps.gather), np.sort(gather))
        assert np.array_equal(maps.gather[maps.scatter], gather[scatter])
