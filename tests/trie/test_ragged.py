from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_trie import ragged, random_sequences, sequence_lists

from prefold.errors import InputError
from prefold.trie import check_ragged, common_prefix_lengths, lexsort_sequences
from prefold.trie import ragged as module
from prefold.trie.ragged import ragged_ranges


def common(a, b) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(sequence_lists, st.sampled_from([2, 1024]), st.sampled_from([1, 3]), st.sampled_from([1, 8]))
def test_sort_and_compare(sequences, presort, presort_tokens, width):
    saved = module._PRESORT, module._PRESORT_TOKENS, module._MIN_WIDTH, module._FIRST_BLOCK
    module._PRESORT, module._PRESORT_TOKENS, module._MIN_WIDTH, module._FIRST_BLOCK = presort, presort_tokens, width, 1
    try:
        tokens, offsets = ragged(sequences, np.int32)
        order = lexsort_sequences(tokens, offsets)
        lengths = common_prefix_lengths(tokens, offsets, order)
    finally:
        module._PRESORT, module._PRESORT_TOKENS, module._MIN_WIDTH, module._FIRST_BLOCK = saved
    assert order.tolist() == sorted(range(len(sequences)), key=sequences.__getitem__)
    ordered = [sequences[s] for s in order]
    assert lengths.tolist() == [0, *map(common, ordered, ordered[1:])][: len(ordered)]


@pytest.mark.parametrize("num, length, vocab", [(3000, 4, 30), (1500, 40, 150_000), (300, 300, 2), (5, 5000, 2)])
def test_sort_and_compare_many(num, length, vocab):
    rng = np.random.default_rng(num)
    sequences = random_sequences(rng, num, length, vocab)
    tokens, offsets = ragged(sequences, np.int32)
    order = lexsort_sequences(tokens, offsets)
    assert order.tolist() == sorted(range(num), key=sequences.__getitem__)
    ordered = [sequences[s] for s in order]
    lengths = common_prefix_lengths(tokens, offsets, order)
    assert lengths.tolist() == [0, *map(common, ordered, ordered[1:])]


def test_largest_ids_sort_as_numbers():
    sequences = [(2**31 - 1,), (255, 256), (256, 0), (255, 1), (0,), (65536,), (2**31 - 1, 2**31 - 1)] * 200
    tokens, offsets = ragged(sequences)
    tokens, offsets = check_ragged(tokens, offsets)
    assert lexsort_sequences(tokens, offsets).tolist() == sorted(range(1400), key=sequences.__getitem__)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_type_is_read(dtype):
    tokens, offsets = check_ragged(np.array([1, 2, 100], dtype), np.array([0, 2, 3], np.uint32))
    assert tokens.dtype == np.int32 and tokens.tolist() == [1, 2, 100]
    assert offsets.dtype == np.int64 and offsets.tolist() == [0, 2, 3]


def test_other_layouts_are_read():
    tokens, _ = check_ragged(np.arange(10, dtype=">i4")[::2], [0, 5])
    assert tokens.tolist() == [0, 2, 4, 6, 8] and tokens.flags.c_contiguous
    tokens, offsets = check_ragged([], [0])
    assert tokens.dtype == np.int32 and len(tokens) == 0 and offsets.tolist() == [0]


@pytest.mark.parametrize(
    "tokens, offsets, field, words",
    [
        ([1, 2, -5, 4], [0, 1, 4], "tokens", ["sequence 1, position 1", "-5", "negative"]),
        (np.array([-1], np.int8), [0, 1], "tokens", ["sequence 0, position 0", "-1", "negative"]),
        ([1, 2**31], [0, 2], "tokens", ["sequence 0, position 1", str(2**31), "too large"]),
        (np.array([7, 2**63], np.uint64), [0, 1, 2], "tokens", ["sequence 1, position 0", "too large"]),
        ([1, 2, 1000], [0, 2, 3], "tokens", ["sequence 1, position 0", "1000", "vocabulary size 1000"]),
        ([1.0, 2.0], [0, 2], "tokens", ["float64", "integer"]),
        ([True, False], [0, 2], "tokens", ["bool"]),
        (["a"], [0, 1], "tokens", ["integer"]),
        ([[1, 2]], [0, 2], "tokens", ["2 dimensions"]),
        ([1, 2, 3], [0, 2, 1, 3], "offsets", ["decreases at sequence 1", "from 2 to 1"]),
        ([1, 2, 3], [0, 2, 2, 3], "tokens", ["sequence 1 is empty"]),
        ([], [0, 0], "tokens", ["sequence 0 is empty"]),
        ([1, 2, 3], [1, 3], "offsets", ["starts with 1"]),
        ([1, 2, 3], [0, 2], "offsets", ["ends with 2", "3 tokens"]),
        ([1, 2, 3], [0, 4], "offsets", ["ends with 4", "3 tokens"]),
        ([1, 2, 3], [0.0, 3.0], "offsets", ["float64"]),
        ([], [], "offsets", ["empty"]),
    ],
)
def test_bad_input_says_which(tokens, offsets, field, words):
    with pytest.raises(InputError) as error:
        check_ragged(tokens, offsets, vocab_size=1000 if 1000 in np.ravel(tokens) else None)
    assert error.value.field == field and error.value.remedy
    for word in words:
        assert word in str(error.value)


def test_vocabulary_bound_is_exclusive():
    check_ragged([999], [0, 1], vocab_size=1000)


def test_ragged_ranges():
    ranges = ragged_ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert ranges.tolist() == [5, 6, 9, 10, 11]
    assert ragged_ranges(np.zeros(0, int), np.zeros(0, int)).tolist() == []
