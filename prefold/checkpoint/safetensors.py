"""Read safetensors files: their list of tensors, and values as arrays over the file. Imports no torch.

The `safetensors` package checks the header. Its own arrays are copies, and it does not support bfloat16 in NumPy.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .mapped import Extent, MappedFile

DTYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?",
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
        "C64": "<c8",
    }.items()
}  # fmt: skip
FLOATING = frozenset(dtype for name, dtype in DTYPES.items() if "F" in name)


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """The place of a tensor in a file, with the format's name for its type, such as "BF16"."""

    type: str
    shape: tuple[int, ...]
    start: int  # in bytes from the start of the file
    size: int  # in bytes


class SafetensorsFile:
    """One safetensors file; a tensor is mapped into memory while an array over it exists.

    Raise CheckpointError if the file is damaged or is not a safetensors file. `tensors` is {name: SafetensorsTensor}.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="np"):  # checks types, shapes, places, and the size of the file
                pass
            self._mapped = MappedFile(self.path)
            (size,) = struct.unpack("<Q", self._mapped.file.read(8))
            header = json.loads(self._mapped.file.read(size))
            header.pop("__metadata__", None)
            self.tensors = {
                name: SafetensorsTensor(part["dtype"], tuple(part["shape"]), 8 + size + start, end - start)
                for name, part in header.items()
                for start, end in [part["data_offsets"]]
            }
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{self.path} cannot be read as safetensors: {error}") from error

    def __reduce__(self) -> tuple[type[SafetensorsFile], tuple[Path]]:
        """A copy in another process opens the file again."""
        return SafetensorsFile, (self.path,)

    def extent(self, name: str, first: int = 0, count: int | None = None) -> Extent:
        """Return the place of a tensor, or of `count` of its numbers starting with number `first`."""
        tensor = self.tensors[name]
        total = math.prod(tensor.shape)
        size = tensor.size // max(1, total)
        return Extent(self._mapped.file, tensor.start + first * size, size * (total if count is None else count))

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only array over the file, or as a copy if it is not aligned in the file.

        Raise CheckpointError for a type that NumPy lacks, and if the file has become shorter.
        """
        tensor = self.tensors[name]
        if (dtype := DTYPES.get(tensor.type)) is None:
            raise CheckpointError(f"{self.path}: {name} is of type {tensor.type}; convert it to bfloat16 or float32")
        data = self._mapped.bytes(tensor.start, tensor.size)
        values = data.view(dtype).reshape(tensor.shape)
        return values if values.flags.aligned else values.copy()
