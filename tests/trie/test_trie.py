from __future__ import annotations

import numpy as np
import pytest
from books import check_books
from counts import lines_run, most_bytes
from hypothesis import given
from slow_trie import ragged, random_sequences, sequence_lists, slow_trie

from prefold.errors import InputError
from prefold.trie import Trie


def assert_equal(trie: Trie, sequences: list[tuple[int, ...]]) -> None:
    slow = slow_trie(sequences)
    assert trie.tokens.tolist() == slow.tokens
    assert trie.positions.tolist() == slow.positions
    assert trie.end.tolist() == slow.end
    assert trie.parent.tolist() == slow.parent
    assert trie.last_row.tolist() == [slow.row[s] for s in sequences]
    assert trie.order.tolist() == sorted(range(len(sequences)), key=sequences.__getitem__)
    assert trie.num_rows == len(slow.tokens)
    assert trie.num_sequences == len(sequences)
    assert trie.num_tokens == sum(map(len, sequences))


@given(sequence_lists)
def test_equals_the_slow_trie(sequences):
    trie = Trie.build(*ragged(sequences))
    check_books(trie)
    assert_equal(trie, sequences)
    slow = slow_trie(sequences)
    for prefix, row in slow.row.items():
        assert trie.path(row).tolist() == [slow.row[prefix[:n]] for n in range(1, len(prefix))]
    for s, sequence in enumerate(sequences):
        assert trie.rows_of(s).tolist() == [slow.row[sequence[:n]] for n in range(1, len(sequence) + 1)]
    assert len(trie.path(trie.num_rows)) == 0


@pytest.mark.parametrize("num, length, vocab", [(2000, 5, 20), (400, 60, 150_000), (150, 150, 2)])
def test_equals_the_slow_trie_when_larger(num, length, vocab):
    sequences = random_sequences(np.random.default_rng(num), num, length, vocab)
    trie = Trie.build(*ragged(sequences), vocab_size=vocab)
    check_books(trie)
    assert_equal(trie, sequences)


def test_the_picture_of_the_design():
    s, q1, q2, a, b, c, d, e, f = range(9)
    trie = Trie.build(*ragged([(s, q1, a, b), (s, q1, a, c), (s, q1, d), (s, q2, e, f)]))
    assert trie.tokens.tolist() == [s, q1, a, b, c, d, q2, e, f]
    assert trie.end.tolist() == [9, 6, 5, 4, 5, 6, 9, 9, 9]
    assert trie.path(4).tolist() == [0, 1, 2]
    assert trie.rows_of(3).tolist() == [0, 6, 7, 8]


def test_no_sequences():
    for share in (True, False):
        trie = Trie.build([], [0], share=share)
        check_books(trie)
        assert (trie.num_rows, trie.num_sequences, trie.num_tokens) == (0, 0, 0)
        assert len(trie.path(0)) == 0 and len(trie.parent) == 0


def test_duplicates_add_no_rows_and_keep_their_order():
    trie = Trie.build(*ragged([(5, 6), (1,), (5, 6), (5, 6)]))
    check_books(trie)
    assert trie.tokens.tolist() == [1, 5, 6]
    assert trie.last_row.tolist() == [2, 0, 2, 2]
    assert trie.order.tolist() == [1, 0, 2, 3]


@given(sequence_lists)
def test_without_sharing_every_sequence_is_a_branch(sequences):
    tokens, offsets = ragged(sequences)
    trie = Trie.build(tokens, offsets, share=False)
    check_books(trie)
    assert trie.tokens.tolist() == tokens.tolist()
    assert trie.end.tolist() == np.repeat(offsets[1:], np.diff(offsets)).tolist()
    assert trie.last_row.tolist() == (offsets[1:] - 1).tolist()
    assert trie.order.tolist() == list(range(len(sequences)))
    for s in range(len(sequences)):
        assert trie.rows_of(s).tolist() == list(range(offsets[s], offsets[s + 1]))


@given(sequence_lists)
def test_sorted_input(sequences):
    in_order = sorted(sequences)
    trie = Trie.build(*ragged(in_order), is_sorted=True)
    check_books(trie)
    assert_equal(trie, in_order)
    if sequences != in_order:
        with pytest.raises(InputError, match=r"sequence \d+ is not in lexicographic order"):
            Trie.build(*ragged(sequences), is_sorted=True)


def test_unsorted_input_is_named():
    with pytest.raises(InputError, match="sequence 2 is not in lexicographic order after sequence 1"):
        Trie.build(*ragged([(1,), (1, 2, 3), (1, 2)]), is_sorted=True)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="sequence 1, position 0: token id -1 is negative"):
        Trie.build([1, -1], [0, 1, 2])
    with pytest.raises(InputError, match="vocabulary size 10"):
        Trie.build([1, 10], [0, 1, 2], vocab_size=10)
    with pytest.raises(IndexError):
        Trie.build([1], [0, 1]).path(2)


def test_arrays_are_read_only():
    trie = Trie.build([1, 2], [0, 1, 2])
    for array in (trie.tokens, trie.positions, trie.end, trie.last_row, trie.order, trie.parent):
        with pytest.raises(ValueError):
            array[0] = 0


def test_input_is_neither_changed_nor_kept():
    tokens, offsets = ragged([(3, 1), (2,), (3, 1)], np.int32)
    trie = Trie.build(tokens, offsets, share=False)
    tokens[:] = 9
    assert trie.tokens.tolist() == [3, 1, 2, 3, 1]
    tokens[:] = 8  # still writeable


def test_check_sees_a_wrong_end():
    trie = Trie.build(*ragged([(1, 2), (1, 3)]))
    trie.end.flags.writeable = True
    trie.end[1] = 3
    with pytest.raises(AssertionError):
        check_books(trie)


def base(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1000, n)


SHAPES = {
    "20,000 prompts": lambda: list(np.sort(base(200_000).reshape(-1, 10), axis=1)),
    "one-token prompts": lambda: list(base(20_000)[:, None]),
    "prompts of 100,000 tokens": lambda: [np.append(base(99_999 - 7 * i), np.arange(7 * i + 1)) for i in range(10)],
    "a chain": lambda: [base(n) for n in range(1, 500)],
    "stairs": lambda: [np.append(base(500 - n), 1001) for n in range(500)],
    "one long, many short": lambda: [base(20_000), *base(30_000).reshape(-1, 3)],
    "the same over and over": lambda: [base(10)] * 20_000,
}


@pytest.mark.parametrize("name", SHAPES)
def test_large_shapes(name):
    sequences = SHAPES[name]()
    tokens, offsets = np.concatenate(sequences), np.cumsum([0, *map(len, sequences)])
    trie = Trie.build(tokens, offsets)
    check_books(trie)
    # No two rows are the same prefix: siblings have different tokens.
    assert len(np.unique(trie.parent * 2000 + trie.tokens)) == trie.num_rows
    lengths = np.diff(offsets)
    for s in np.random.default_rng(1).integers(0, len(lengths), 20):
        rows = trie.rows_of(s)
        assert np.array_equal(trie.tokens[rows], sequences[s])
        assert np.array_equal(trie.positions[rows], np.arange(len(rows)))
    # Python goes through no tokens one by one, and nothing quadratic is made.
    assert lines_run(lambda: Trie.build(tokens, offsets)) < len(tokens) / 2
    assert most_bytes(lambda: Trie.build(tokens, offsets)) < 120 * len(tokens)
