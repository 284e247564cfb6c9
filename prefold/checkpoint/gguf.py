"""Read GGUF files (versions 2 and 3, little-endian): metadata, and tensors in their stored form.

The reader of the `gguf` package creates several NumPy views for every string of the vocabulary. This takes 2 s for
49,152 tokens; this reader needs at most a tenth of that. The `gguf` package still does the dequantization. Nothing here
depends on models or imports torch.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .mapped import Extent, MappedFile

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# GGML's limit on dimensions, and a limit on the weights of a tensor that no real file reaches.
MOST_DIMS, MOST_WEIGHTS = 4, 2**60
# struct codes of the format's value types, by type number.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# {ggml type number: (name, weights per block, bytes per block)} of the usual types. The `gguf` package has all types,
# but its import takes a tenth of the load time of a small model.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The place and shape of a tensor in the file."""

    name: str
    shape: tuple[int, ...]  # outermost size first, as in NumPy; the file has the innermost size first
    type: int  # ggml type number
    offset: int  # bytes from the start of the tensor data


class GGUFFile:
    """One GGUF file.

    A tensor is mapped into memory only while an array over it exists. So under a memory limit (`ulimit -v`) the whole
    file does not count on top of the arrays made from it. Raise CheckpointError if the file is damaged or not GGUF.

    Attributes:
        metadata: {key: bool, int, float, str or list}.
        tensors: {name: GGUFTensor}.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._mapped = MappedFile(self.path)
        if self._mapped.file.read(4) != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file")
        self._bytes = mmap.mmap(self._mapped.file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size, self._at = len(self._bytes), 4
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is damaged or incomplete: {error}") from error
        finally:
            self._bytes.close()

    def __reduce__(self) -> tuple[type[GGUFFile], tuple[Path]]:
        """Pickle only the path: the copy in another process maps the file again."""
        return GGUFFile, (self.path,)

    def _read_header(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version} is not supported; 2 and 3 are")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_pairs):
            key = self._string()
            if key in self.metadata:
                raise CheckpointError(f"{self.path} is damaged: it has the key {key!r:.200} twice")
            self.metadata[key] = self._value(self._scalar("I"))
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._scalar("I")
            if name in self.tensors:
                raise CheckpointError(f"{self.path} is damaged: it has the tensor {name!r:.200} twice")
            if num_dims > MOST_DIMS:
                message = f"{name!r:.200} has {num_dims} dimensions; GGUF has at most {MOST_DIMS}"
                raise CheckpointError(f"{self.path} is damaged: {message}")
            dims = struct.unpack_from(f"<{num_dims}Q", self._bytes, self._at)
            if math.prod(max(1, size) for size in dims) > MOST_WEIGHTS:
                raise CheckpointError(f"{self.path} is damaged: {name!r:.200} has the sizes {list(dims)}")
            self._at += 8 * num_dims
            self.tensors[name] = GGUFTensor(name, dims[::-1], self._scalar("I"), self._scalar("Q"))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}; it must be a whole number of at least 1"
            )
        self._data_start = -(-self._at // alignment) * alignment
        self._check_places(alignment)

    def _check_places(self, alignment: int) -> None:
        """Raise CheckpointError if a tensor's place is not aligned or overlaps another tensor."""
        end, before = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset % alignment:
                message = f"{tensor.name!r:.200} starts at {tensor.offset}, which is not a multiple of {alignment}"
                raise CheckpointError(f"{self.path} is damaged: {message} (general.alignment)")
            size = self._size_of(tensor)
            if size and tensor.offset < end:
                raise CheckpointError(f"{self.path} is damaged: {tensor.name!r:.200} overlaps {before!r:.200}")
            end, before = max(end, tensor.offset + size), tensor.name

    def _size_of(self, tensor: GGUFTensor) -> int:
        """Return the bytes of a tensor; 0 for an unknown type, which `raw` refuses."""
        try:
            _, block_size, type_size = _type_of(self.path, tensor)
        except CheckpointError:
            return 0
        return math.prod(tensor.shape) // block_size * type_size

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Return the next strings, in a loop with few calls: a vocabulary and its merges have hundreds of thousands."""
        data, at, end = self._bytes, self._at, len(self._bytes)
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > end:
                raise CheckpointError(f"{self.path} is damaged or incomplete")
            texts.append(data[start:at].decode())
        self._at = at
        return texts

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise CheckpointError(f"{self.path}: a value of the metadata has the unknown GGUF type {kind}")
        item, length = self._scalar("I"), self._scalar("Q")
        if item in SCALARS:
            layout = f"<{length}{SCALARS[item]}"
            values = struct.unpack_from(layout, self._bytes, self._at)
            self._at += struct.calcsize(layout)
            return list(values)
        if item == STRING:
            return self._strings(length)
        return [self._value(item) for _ in range(length)]

    def raw(self, name: str) -> np.ndarray:
        """Return the tensor's bytes as stored, uint8 [..., bytes of a row], as a read-only view.

        Raise CheckpointError if the file is damaged or the type is unknown.
        """
        tensor = self.tensors[name]
        shape = (*tensor.shape[:-1], self.row_bytes(name))
        start, size = self._data_start + tensor.offset, math.prod(shape)
        if start + size > self._size:
            raise CheckpointError(f"{self.path} is damaged or incomplete: {name} extends beyond the end of the file")
        return self._mapped.bytes(start, size).reshape(shape)

    def row_bytes(self, name: str) -> int:
        """Return the bytes of a row of a tensor. Raises the errors of `raw`."""
        tensor = self.tensors[name]
        _, block_size, type_size = _type_of(self.path, tensor)
        row = tensor.shape[-1] if tensor.shape else 1
        if row % block_size:
            raise CheckpointError(
                f"{self.path}: {name} has rows of {row} weights; their type needs multiples of {block_size}"
            )
        return row // block_size * type_size

    def extent(self, name: str, first: int, count: int) -> Extent:
        """Return the place in the file of `count` elements of a tensor, from element number `first` on."""
        tensor = self.tensors[name]
        _, block_size, type_size = _type_of(self.path, tensor)
        start = self._data_start + tensor.offset + first // block_size * type_size
        return Extent(self._mapped.file, start, count // block_size * type_size)

    def dequantize(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """Return the tensor as float32 in its NumPy shape, or its selected rows as [rows, numbers].

        The result is read-only if the tensor is stored as float32. `rows` selects rows along the last dimension. Raises
        the errors of `raw`.
        """
        from gguf.quants import GGMLQuantizationType, dequantize

        tensor, raw = self.tensors[name], self.raw(name)
        kind = GGMLQuantizationType(tensor.type)  # `raw` has checked the type
        if rows is not None:
            assert len(tensor.shape) > 1, f"{name} has no rows to choose from"
            raw = raw.reshape(-1, raw.shape[-1])[rows]
        if not raw.size:
            return np.empty((*raw.shape[:-1], tensor.shape[-1]), np.float32)
        try:
            return dequantize(raw, kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {name} has the quantization {kind.name}, which is not supported"
            ) from error

    def type_name(self, name: str) -> str:
        """Return the name of the tensor's ggml type: "F32", "Q4_K", ..."""
        return _type_of(self.path, self.tensors[name])[0]


def _type_of(path: Path, tensor: GGUFTensor) -> tuple[str, int, int]:
    """Return the name of the tensor's ggml type, its weights per block, and its bytes per block."""
    if (usual := TYPES.get(tensor.type)) is not None:
        return usual
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        type_ = GGMLQuantizationType(tensor.type)
        return type_.name, *GGML_QUANT_SIZES[type_]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: {tensor.name} has the unknown ggml type {tensor.type}") from error
