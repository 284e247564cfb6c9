"""The GGUF reader against the `gguf` package's own, on files that package wrote."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from prefold.checkpoint import GGUFFile
from prefold.checkpoint.gguf import TYPES as USUAL
from prefold.errors import CheckpointError

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(10000.5)
    writer.add_token_list(["a", "", "é😀", "x" * 300])
    writer.add_token_types([1, 2, 3, 1])
    writer.add_array("test.floats", [0.5, -1.25])
    writer.add_array("test.bools", [True, False])
    for kind, value in {"uint8": 200, "int8": -7, "uint16": 60000, "int16": -300, "int32": -70000}.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_uint64("test.uint64", 2**63 + 1)
    writer.add_int64("test.int64", -(2**40))
    writer.add_float64("test.float64", 1e-300)
    writer.add_bool("test.bool", True)
    rng = np.random.default_rng(0)
    for i, name in enumerate(TYPES):
        kind = gguf.GGMLQuantizationType[name]
        values = rng.normal(size=(5 + i, 96)).astype(np.float32)
        writer.add_tensor(f"t.{name}", gguf.quantize(values, kind), raw_dtype=kind)
    large = gguf.quantize(rng.normal(size=(700, 96)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("large", large, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("one_dim", rng.normal(size=37).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_what_the_gguf_package_reads(path):
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert GGUFFile(path).metadata == theirs
    assert len(theirs) > 14


def test_tensors_are_what_the_gguf_package_reads(path):
    file, theirs = GGUFFile(path), gguf.GGUFReader(path).tensors
    assert list(file.tensors) == [t.name for t in theirs]
    for tensor in theirs:
        assert file.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert file.type_name(tensor.name) == tensor.tensor_type.name
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        ours = file.dequantize(tensor.name)
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, expected.reshape(ours.shape))


def test_a_file_that_ends_early_is_an_error_wherever_it_ends(path, tmp_path):
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for size in [4, 5, 23, 24, 40, 100, 500, len(data) // 4, len(data) // 2, len(data) - 100]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            file = GGUFFile(cut)
            for name in file.tensors:
                file.dequantize(name)


def test_damaged_headers_are_errors(path, tmp_path):
    data, bad = bytearray(path.read_bytes()), tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUFFile(bad)
    bad.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUFFile(bad)
    bad.write_bytes(data[:4] + b"\x09\0\0\0" + data[8:])
    with pytest.raises(CheckpointError, match="version 9"):
        GGUFFile(bad)
    # A string length beyond all memory must not be believed.
    bad.write_bytes(data[:24] + b"\xff" * 8 + data[32:])
    with pytest.raises(CheckpointError, match="damaged"):
        GGUFFile(bad)


def test_an_unknown_tensor_type_names_the_tensor(path):
    file = GGUFFile(path)
    tensor = file.tensors["t.F32"]
    file.tensors["t.F32"] = type(tensor)(tensor.name, tensor.shape, 999, tensor.offset)
    with pytest.raises(CheckpointError, match=r"t\.F32.*999"):
        file.dequantize("t.F32")


@pytest.mark.parametrize("length", [6, 2**62])
def test_a_string_that_goes_beyond_the_end_is_a_damaged_file(tmp_path, length):
    """The last thing of the file, so that nothing behind it is found missing."""
    path = tmp_path / "short.gguf"
    text = struct.pack("<Q", 1) + b"a" + struct.pack("<IQ", 8, length) + b"short"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        GGUFFile(path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of what is mapped")
def test_the_file_is_mapped_where_it_is_read_alone(path):
    """A process whose address space is limited has room for the file's matrices as they are packed, not for both."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    file = GGUFFile(path)
    assert mapped() == 0
    few = file.raw("t.Q8_0")
    assert mapped() == 0 and few.any()  # few bytes are read
    rows = file.raw("large")
    assert mapped() == 1
    del rows
    assert mapped() == 0


def test_a_tensor_without_numbers_at_the_end_of_a_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("empty", np.empty((0, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "a.gguf").raw("empty").shape == (0, 16)


def text_of(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_of(name: str, dims: list[int], offset: int, kind: int = 0) -> bytes:
    return text_of(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key_of(name: str, value: int) -> bytes:
    return text_of(name) + struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([key_of("a", 1), key_of("a", 2)], [], "the key 'a' twice"),
        ([], [tensor_of("w", [4], 0), tensor_of("w", [8], 32)], "the tensor 'w' twice"),
        ([], [tensor_of("w", [4], 0), tensor_of("v", [4], 8)], "'v' starts at 8, which is not a multiple of 32"),
        ([], [tensor_of("w", [4], 2**64 - 1)], "not a multiple of 32"),
        ([key_of("general.alignment", 64)], [tensor_of("w", [4], 32)], "not a multiple of 64"),
        ([], [tensor_of("w", [16], 0), tensor_of("v", [4], 32)], "'v' overlaps 'w'"),
        ([], [tensor_of("w", [16], 32), tensor_of("v", [4], 32)], "overlaps"),
        ([], [tensor_of("w", [256, 1], 0, 12), tensor_of("v", [4], 128)], "'v' overlaps 'w'"),  # Q4_K
        ([], [tensor_of("w", [2**63, 0], 0)], r"'w' has the sizes \[9223372036854775808, 0\]"),
        ([], [tensor_of("w", [2**32] * 3, 0)], "'w' has the sizes"),
        ([], [tensor_of("w", [1] * 70, 0)], "'w' has 70 dimensions; GGUF has at most 4"),
        ([], [text_of("w") + struct.pack("<I", 2**32 - 1)], "4294967295 dimensions"),
    ],
)
def test_what_repeats_or_overlaps_is_refused_by_name(tmp_path, keys, tensors, message):
    path = tmp_path / "a.gguf"
    header = struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    path.write_bytes(b"GGUF" + header + bytes(4096))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_tensors_side_by_side_and_without_numbers(tmp_path):
    path = tmp_path / "a.gguf"
    tensors = [tensor_of("w", [8], 0), tensor_of("none", [0], 32), tensor_of("v", [8], 32)]
    tensors.append(tensor_of("x", [4], 64, 999))  # a type that is not known
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 4, 0) + b"".join(tensors) + bytes(4096))
    file = GGUFFile(path)
    assert file.dequantize("v").shape == (8,) and file.dequantize("none").shape == (0,)
    with pytest.raises(CheckpointError, match="x has the unknown ggml type 999"):
        file.raw("x")


def test_the_table_of_usual_types_is_that_of_the_package():
    for number, (name, *sizes) in USUAL.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, *sizes)
