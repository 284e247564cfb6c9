"""Check, sort and compare ragged token arrays.

A ragged array is `tokens` [N] and `offsets` [B + 1]: sequence s is tokens[offsets[s]:offsets[s + 1]]. `check_ragged`
checks arrays from callers; the other functions trust their arguments.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import InputError

_MAX_TOKEN = 2**31 - 1
_PRESORT = 1024  # with at least this many sequences, first sort all by a few tokens in one vectorised sort
_PRESORT_TOKENS = 3  # number of tokens that this first sort reads, if they fit into its 64-bit key
_FIRST_BLOCK = 1 << 15  # tokens that the first comparison of neighbours reads at once
_MAX_BLOCK = 1 << 18  # limit of later comparisons, so that a block stays in the CPU cache
_MIN_WIDTH = 8


def check_ragged(tokens: Any, offsets: Any, *, vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens int32 [N], offsets int64 [B + 1]), checked and contiguous.

    Arrays are copied only if their type must change. Raise InputError, naming the sequence and the position:

    - tokens or offsets are not one-dimensional integer arrays
    - offsets do not start at 0, decrease, or do not end at N
    - a sequence is empty
    - an id is negative, at least 2**31, or not below `vocab_size`
    """
    tokens, offsets = _integers(tokens, "tokens"), _integers(offsets, "offsets")
    offsets = _check_offsets(offsets, len(tokens))
    limit = _MAX_TOKEN + 1 if vocab_size is None else min(vocab_size, _MAX_TOKEN + 1)
    if tokens.dtype.itemsize < 4:
        tokens = tokens.astype(np.int32)
    # Read as unsigned, a negative id is huge: one comparison finds every bad id.
    unsigned = tokens.view(np.dtype(f"u{tokens.dtype.itemsize}"))
    if len(tokens) and int(unsigned.max()) >= limit:
        _raise_bad_token(tokens, offsets, int(np.argmax(unsigned >= limit)), vocab_size)
    return (tokens.view(np.int32) if tokens.dtype.itemsize == 4 else tokens.astype(np.int32)), offsets


def _integers(array: Any, name: str) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim == 1 and array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # NumPy's type for an empty list
    if array.ndim != 1:
        raise InputError(f"{name} has {array.ndim} dimensions", field=name, remedy="give a flat array")
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} has dtype {array.dtype}", field=name, remedy="give an integer array")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array)


def _check_offsets(offsets: np.ndarray, num_tokens: int) -> np.ndarray:
    offsets = offsets.astype(np.int64, copy=False)

    def fail(message: str, remedy: str) -> None:
        raise InputError(message, field="offsets", remedy=remedy)

    if not len(offsets):
        fail("offsets is empty", "offsets has one entry more than there are sequences, and starts with 0")
    if offsets[0] != 0:
        fail(f"offsets starts with {offsets[0]}", "the first entry is 0")
    lengths = offsets[1:] - offsets[:-1]
    if len(lengths) and int(lengths.min()) <= 0:
        s = int(np.argmax(lengths <= 0))
        if lengths[s] < 0:
            fail(f"offsets decreases at sequence {s}, from {offsets[s]} to {offsets[s + 1]}", "offsets must increase")
        raise InputError(f"sequence {s} is empty", field="tokens", remedy="a sequence has at least one token")
    if offsets[-1] != num_tokens:
        fail(f"offsets ends with {offsets[-1]}, but there are {num_tokens} tokens", "the last entry is their number")
    return offsets


def _raise_bad_token(tokens: np.ndarray, offsets: np.ndarray, index: int, vocab_size: int | None) -> None:
    token = int(tokens[index])
    s = int(np.searchsorted(offsets, index, side="right")) - 1
    place = f"sequence {s}, position {index - int(offsets[s])}: token id {token}"
    if token < 0:
        raise InputError(f"{place} is negative", field="tokens", remedy="token ids start at 0")
    if vocab_size is not None and token >= vocab_size:
        remedy = "was it encoded with the tokenizer of another model?"
        raise InputError(f"{place} is not below the vocabulary size {vocab_size}", field="tokens", remedy=remedy)
    raise InputError(f"{place} is too large", field="tokens", remedy=f"the largest id is {_MAX_TOKEN}")


def ragged_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the ranges starts[i], starts[i] + 1, ... of lengths[i] numbers each, joined: int64 [sum(lengths)]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def lexsort_sequences(tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the numbers of the sequences in lexicographic order of token ids, int64 [B].

    A prefix comes before its extensions; equal sequences stay in input order. The arguments are tokens int32 [N] >= 0
    and offsets int64 [B + 1], as returned by `check_ragged`.
    """
    num = len(offsets) - 1
    if num < 2:
        return np.arange(num)
    if num < _PRESORT:
        return np.array(sorted(range(num), key=_byte_keys(tokens, offsets).__getitem__), np.int64)
    order, first, stop = _sort_by_few_tokens(tokens, offsets)
    if len(first):
        numbers = order.tolist()
        keys = _byte_keys(tokens, offsets)
        for a, b in zip(first.tolist(), stop.tolist(), strict=True):
            numbers[a:b] = sorted(numbers[a:b], key=keys.__getitem__)
        order = np.array(numbers, np.int64)
    return order


def _byte_keys(tokens: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    # Ids are not negative, so their big-endian bytes have the same order, and Python compares bytes by memcmp.
    data = tokens.astype(">i4").tobytes()
    cuts = (offsets * 4).tolist()
    return [data[a:b] for a, b in pairwise(cuts)]


def _sort_by_few_tokens(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort by the first few tokens behind the prefix that all sequences share.

    Return (order, first, stop): `first` and `stop` bound the groups of sequences that this sort cannot separate.
    """
    num = len(offsets) - 1
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    depth = _shared_by_all(tokens, starts, int(lengths.min()))
    # One key contains the tokens and the sequence number. So an ordinary sort is stable, and far faster than argsort.
    bits, token_bits = num.bit_length(), (int(tokens.max()) + 1).bit_length()
    code, used = np.zeros(num, np.int64), 0
    while used == 0 or (used < _PRESORT_TOKENS and bits + (used + 1) * token_bits < 64):
        ended = lengths <= depth + used
        code <<= token_bits
        code += np.where(ended, 0, tokens[np.where(ended, 0, starts + (depth + used))] + np.int64(1))
        used += 1
    keys = np.sort(code << bits | np.arange(num))
    order, code = keys & ((1 << bits) - 1), keys >> bits
    bounds = np.flatnonzero(np.concatenate(([True], code[1:] != code[:-1], [True])))
    first, stop = bounds[:-1], bounds[1:]
    # Sequences that tie and have no more tokens are equal and need no further sort.
    open_ = (stop - first > 1) & (np.maximum.reduceat(lengths[order], first) > depth + used)
    return order, first[open_], stop[open_]


def _shared_by_all(tokens: np.ndarray, starts: np.ndarray, shortest: int) -> int:
    """Return the length of the prefix that all sequences share."""
    depth, width = 0, 1
    while depth < shortest:
        width = min(width, shortest - depth)
        block = windows(tokens, width)[starts + depth]
        same = (block == block[0]).all(0)
        if not same.all():
            return depth + int(same.argmin())
        depth += width
        width = max(1, min(4 * width, _MAX_BLOCK // len(starts)))
    return depth


def windows(array: np.ndarray, width: int, *, writeable: bool = False) -> np.ndarray:
    """Return a view [len(array) - width + 1, width] with the rows array[i : i + width]."""
    shape = len(array) - width + 1, width
    return np.lib.stride_tricks.as_strided(array, shape, array.strides * 2, writeable=writeable)


def common_prefix_lengths(tokens: np.ndarray, offsets: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return how many leading tokens sequence order[i] shares with sequence order[i - 1], int64 [B]; 0 for i = 0.

    All pairs are compared one block of tokens at a time. A pair drops out at its first difference, and the blocks grow.
    So the cost is a small multiple of the number of tokens compared.
    """
    lcp = np.zeros(len(order), np.int64)
    if len(order) < 2:
        return lcp
    starts = offsets[:-1][order]
    lengths = (offsets[1:] - offsets[:-1])[order]
    limit = np.minimum(lengths[1:], lengths[:-1])
    # Reading past the end of a sequence is harmless (`limit` cuts the result); reading past the buffer is not.
    over = int(starts.max()) + int(limit.max()) - len(tokens)
    padded = np.concatenate((tokens, np.zeros(over, tokens.dtype))) if over > 0 else tokens
    pairs, left, right, depth, width = None, starts[:-1], starts[1:], 0, 0
    while len(left):
        width = max(_MIN_WIDTH, min(2 * width, _MAX_BLOCK // len(left)), _FIRST_BLOCK // len(left))
        width = min(width, int(limit.max()) - depth)
        blocks = windows(padded, width)
        differ = blocks[left + depth] != blocks[right + depth]
        first = differ.argmax(1)
        first_difference = differ[np.arange(len(left)), first]
        depth += width
        length = np.minimum(np.where(first_difference, depth - width + first, depth), limit)
        if pairs is None:
            lcp[1:] = length
        else:
            lcp[pairs + 1] = length
        keep = np.flatnonzero(~first_difference & (limit > depth))
        pairs = keep if pairs is None else pairs[keep]
        left, right, limit = left[keep], right[keep], limit[keep]
    return lcp
