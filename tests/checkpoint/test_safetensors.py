"""Safetensors files, which are mapped, against what the `safetensors` package reads of them."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from counts import most_bytes
from safetensors.torch import load_file, save_file

from prefold.checkpoint.safetensors import DTYPES, FLOATING, SafetensorsFile
from prefold.errors import CheckpointError

LARGE = (300, 400)


def written(path, tensors):
    save_file(tensors, path)
    return SafetensorsFile(path)


def raw_file(path, header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def entry(start, end, kind="F32", shape=None):
    return {"dtype": kind, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def test_numbers_are_what_the_package_reads(tmp_path):
    tensors = {
        str(dtype): torch.randint(0, 100, (5, 7)).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
        )
    }  # fmt: skip
    tensors |= {"number": torch.tensor(3.5), "empty": torch.empty(0, 4), "large": torch.randn(LARGE).bfloat16()}
    file = written(tmp_path / "a.safetensors", tensors)
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in load_file(file.path).items():
        array = file.array(name)
        assert array.shape == file.tensors[name].shape == tuple(tensor.shape)
        kind = torch.complex64 if tensor.is_complex() else torch.float64
        assert torch.equal(torch.from_numpy(array.astype(str(kind).removeprefix("torch."))), tensor.to(kind)), name
        assert (array.dtype in FLOATING) == tensor.is_floating_point(), name
        assert not array.flags.writeable


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of what is mapped")
def test_a_large_tensor_is_mapped_for_as_long_as_an_array_lives(tmp_path):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(file.path))

    small, large = torch.randn(8, 8), torch.randn(LARGE)
    file = written(tmp_path / "a.safetensors", {"small": small, "large": large})
    assert mapped() == 0
    assert most_bytes(lambda: file.array("large")) < 10_000 < large.nbytes
    part = file.array("large")[3:5]
    assert mapped() == 1 and np.array_equal(part, large[3:5].numpy())
    assert np.array_equal(file.array("small"), small.numpy()) and mapped() == 1
    del part
    assert mapped() == 0


def test_numbers_that_are_not_aligned_are_copied(tmp_path):
    values = np.random.default_rng(0).normal(size=LARGE).astype(np.float32)
    header = {"odd": entry(0, 1, "U8", [1]), "values": entry(1, 1 + values.nbytes, shape=list(LARGE))}
    text = json.dumps(header).encode()
    path = raw_file(tmp_path / "a.safetensors", text + b" " * (-len(text) % 8), b"\x07" + values.tobytes())
    array = SafetensorsFile(path).array("values")
    assert array.flags.aligned and np.array_equal(array, values)


@pytest.mark.parametrize(
    ("header", "data", "size"),
    [
        ({"a": entry(0, 400)}, bytes(399), None),  # ends early
        ({"a": entry(0, 400)}, bytes(401), None),
        ({"a": entry(0, 400)}, b"", None),
        ({"a": entry(0, 400), "b": entry(200, 600)}, bytes(600), None),  # overlap
        ({"a": entry(0, 400), "b": entry(0, 400)}, bytes(400), None),
        ({"a": entry(0, 400), "b": entry(404, 800)}, bytes(800), None),  # a hole
        ({"a": entry(0, 400, shape=[101])}, bytes(400), None),
        ({"a": entry(0, 400, shape=[2**40, 2**40])}, bytes(400), None),
        ({"a": entry(0, 400, "F33")}, bytes(400), None),
        ({"a": entry(400, 0)}, bytes(400), None),
        ({"a": {"dtype": "F32", "shape": [100]}}, bytes(400), None),
        ({"a": 7}, bytes(400), None),
        ([1, 2], b"", None),
        (b"{", b"", None),
        (b"\xff\xfe{}", b"", None),
        (b"{}", b"", 100),  # beyond the end
        (b"{}", b"", 100_000_001),
        (b"{}", b"", 2**64 - 1),
        (b"", b"", 0),
    ],
)
def test_damaged_files_are_errors(tmp_path, header, data, size):
    path = raw_file(tmp_path / "a.safetensors", header, data, size)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read as safetensors: "):
        SafetensorsFile(path)


def test_a_file_that_ends_early_is_an_error_wherever_it_ends(tmp_path):
    path = written(tmp_path / "a.safetensors", {"a": torch.randn(LARGE), "b": torch.ones(4)}).path
    data, cut = path.read_bytes(), tmp_path / "cut.safetensors"
    for size in (0, 1, 7, 8, 9, 40, 200, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors cannot be read"):
            SafetensorsFile(cut)


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(tmp_path):
    file = written(tmp_path / "a.safetensors", {"large": torch.randn(LARGE), "small": torch.ones(4)})
    with open(file.path, "r+b") as opened:
        opened.truncate(1000)
    for name in file.tensors:
        with pytest.raises(CheckpointError, match="damaged or incomplete"):
            file.array(name)


def test_bytes_of_a_header_that_are_others(tmp_path):
    """A damaged header is refused, or names places that can be read."""
    path = written(tmp_path / "a.safetensors", {"a": torch.randn(50, 60), "b": torch.ones(4)}).path
    data, rng, refused = bytearray(path.read_bytes()), np.random.default_rng(0), 0
    length = 8 + int.from_bytes(data[:8], "little")
    for _ in range(300):
        changed = data.copy()
        changed[rng.integers(length)] = rng.choice([*b'0123456789"{}[],:FIU '])
        path.write_bytes(changed)
        try:
            file = SafetensorsFile(path)
            for name in file.tensors:
                file.array(name)
        except CheckpointError:
            refused += 1
    assert 100 < refused < 300


def test_types_that_arrays_have_not_are_named(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"a": entry(0, 4, "F4", [8])}, bytes(4))
    file = SafetensorsFile(path)
    assert "F4" not in DTYPES
    with pytest.raises(CheckpointError, match=r"a is of type F4; convert it"):
        file.array("a")


def test_a_copy_in_another_process_opens_the_file(tmp_path):
    file = written(tmp_path / "a.safetensors", {"a": torch.arange(9.0)})
    assert np.array_equal(pickle.loads(pickle.dumps(file)).array("a"), np.arange(9.0))
