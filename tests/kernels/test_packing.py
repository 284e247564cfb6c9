"""Packing matrices into words: every dtype, rows from anywhere, gate and up in turn, experts."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import threads_in_use

from prefold import kernels
from prefold.kernels import BFLOAT16, COLUMNS, FLOAT32, LANES
from prefold.worker.torch.tensors import array_of

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
FLOAT16 = np.dtype(np.float16)
# The dtype of the weight, and of the words.
CASES = [(source, target) for source in (FLOAT32, BFLOAT16, FLOAT16) for target in (FLOAT32, BFLOAT16)]
# As PyTorch names them.
NAMES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


def numbers(dtype: np.dtype, *shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of every kind but NaN: random bits, so that most are not near 1."""
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    bits[np.isnan(bits.astype(np.float32))] = 3
    return bits


def unpacked(packed: np.ndarray, dtype: np.dtype, columns: int, inputs: int) -> np.ndarray:
    """The matrix [columns, inputs] of packed words. All other numbers must be zeros."""
    assert packed.dtype == np.int32 and packed.ctypes.data % 64 * packed.size == 0
    rows = np.ascontiguousarray(np.swapaxes(packed, -2, -1)).reshape(-1, packed.shape[-2]).view(dtype)
    assert not rows[columns:].view(np.uint8).any() and not rows[:, inputs:].view(np.uint8).any()
    return rows[:columns, :inputs]


def converted(weight: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As PyTorch converts."""
    bits = {2: np.int16, 4: np.int32}[weight.itemsize]
    tensor = torch.from_numpy(weight.view(bits)).view(NAMES[weight.dtype])
    return array_of(tensor.to(NAMES[dtype]))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    assert one.dtype == other.dtype
    return np.array_equal(one.view(np.uint8), np.ascontiguousarray(other).view(np.uint8))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("columns", "inputs"), [(1, 2), (31, 62), (32, 64), (33, 130), (70, 128), (300, 576), (0, 8)])
def test_every_dtype_has_the_bits_of_pytorch(case, threads, columns, inputs):
    source, target = case
    weight = numbers(source, columns, inputs)
    with threads_in_use(threads):
        packed = kernels.load().pack_words(weight, dtype=target)
    assert packed.shape == (-(-columns // COLUMNS), inputs * target.itemsize // 4, COLUMNS)
    assert same_bits(unpacked(packed, target, columns, inputs), converted(weight, target))


@pytest.mark.parametrize("target", [FLOAT32, BFLOAT16])
def test_every_number_of_float16(target):
    """Those below the normal numbers, both zeros and the infinities too; NaN stays NaN."""
    every = np.arange(1 << 16, dtype=np.uint16).view(FLOAT16).reshape(64, 1024)
    found = unpacked(kernels.load().pack_words(every, dtype=target), target, 64, 1024)
    nan = np.isnan(every)
    assert np.isnan(found[nan].astype(FLOAT32)).all()
    assert same_bits(found[~nan], converted(every[~nan], target))


def test_rounding_to_bfloat16():
    """To nearest even; a number below float32's normal ones is not zero, and the largest becomes infinite."""
    cases = {
        0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0xBF818000: 0xBF82, 0x00018000: 0x0002,
        0x7F7FFFFF: 0x7F80, 0xFF800000: 0xFF80, 0x80000000: 0x8000,
    }  # fmt: skip
    weight = np.array([list(cases)], np.uint32).view(FLOAT32)
    found = unpacked(kernels.load().pack_words(weight, dtype=BFLOAT16), BFLOAT16, 1, len(cases))
    assert found.view(np.uint16).tolist() == [list(cases.values())]
    nan = np.array([[0x7F800001, 0xFFFFFFFF]], np.uint32).view(FLOAT32)  # whose upper halves are infinite, and all ones
    assert np.isnan(unpacked(kernels.load().pack_words(nan, dtype=BFLOAT16), BFLOAT16, 1, 2).astype(FLOAT32)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_a_file_at_any_byte(case, tmp_path):
    """As weights of a checkpoint are mapped: read-only, not aligned, rows further apart than they are long."""
    source, target = case
    weight, path = numbers(source, 40, 70), tmp_path / "weights"
    path.write_bytes(b"x" + weight.tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    rows = np.frombuffer(mapped, np.uint8)[1:].view(source).reshape(40, 70)
    assert not rows.flags.aligned and not rows.flags.writeable
    expected = kernels.load().pack_words(weight, dtype=target)
    assert np.array_equal(kernels.load().pack_words(rows, dtype=target), expected)
    part = kernels.load().pack_words(rows[3::5, 2:66], dtype=target)
    assert same_bits(unpacked(part, target, 8, 64), converted(weight[3::5, 2:66], target))


def test_rows_that_are_not_contiguous_and_parts_one_below_the_other():
    """As q, k and v lie in one matrix."""
    weight = numbers(FLOAT32, 90, 64)
    expected = kernels.load().pack_words(weight)
    assert np.array_equal(kernels.load().pack_words(np.asfortranarray(weight)), expected)
    parts = [weight[:50], np.asfortranarray(weight[50:51]), weight[51:]]
    assert np.array_equal(kernels.load().pack_words(parts), expected)
    backwards = kernels.load().pack_words(weight[::-1])
    assert same_bits(unpacked(backwards, FLOAT32, 90, 64), weight[::-1])


def in_turn(weight: np.ndarray) -> np.ndarray:
    """The columns of gate and up as they are packed, by hand."""
    gate, up = (np.pad(half, ((0, -len(half) % LANES), (0, 0))) for half in np.split(weight, 2))
    return np.concatenate([rows for at in range(0, len(gate), LANES) for rows in (gate[at:][:LANES], up[at:][:LANES])])


@settings(max_examples=24)
@given(
    width=st.integers(1, 70), words=st.integers(1, 80), experts=st.integers(1, 4), case=st.sampled_from(CASES),
    threads=st.integers(1, 4),
)  # fmt: skip
def test_gate_and_up_and_experts(width, words, experts, case, threads):
    source, target = case
    inputs = words * 4 // target.itemsize
    weight = numbers(source, experts, 2 * width, inputs, seed=width)
    loaded = kernels.load()
    with threads_in_use(threads):
        packed = loaded.pack_experts(weight, dtype=target, gated=True)
        for matrix, found in zip(weight, packed, strict=True):
            expected = converted(in_turn(matrix), target)
            assert same_bits(unpacked(found, target, len(expected), inputs), expected)
            assert np.array_equal(loaded.pack_words(np.split(matrix, 2), dtype=target, gated=True), found)
        down = weight.swapaxes(1, 2)  # [experts, hidden, 2 * width]
        for matrix, found in zip(down, loaded.pack_experts(down, dtype=target, filled=True), strict=True):
            assert found.shape[1] * 4 == -(-2 * width // LANES) * LANES * target.itemsize
            assert same_bits(
                unpacked(found, target, inputs, 2 * width), converted(np.ascontiguousarray(matrix), target)
            )


def test_what_cannot_be_packed_is_refused():
    loaded, weight = kernels.load(), np.zeros((4, 6), FLOAT32)
    for given_dtype, parts in (
        (np.dtype(np.float64), weight), (FLOAT16, weight), (None, weight.astype(np.float64)),
        (None, weight.astype(FLOAT16)), (FLOAT32, [weight, weight.astype(FLOAT16)]), (BFLOAT16, weight[:, :5]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="cannot be packed as"):
            loaded.pack_words(parts, dtype=given_dtype)
    with pytest.raises(ValueError, match=r"matrices of \[4, 6\] inputs"):
        loaded.pack_words([weight, weight[:, :4]])
    with pytest.raises(ValueError, match="3 columns together, an odd number"):
        loaded.pack_words(weight[:3], gated=True)
