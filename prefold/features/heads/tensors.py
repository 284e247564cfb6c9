"""Read the tensors of a head from a safetensors file beside the weights of a model. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from ...checkpoint import Checkpoint
from ...errors import CheckpointError

_EPS = 1e-5
_erf = np.frompyfunc(math.erf, 1, 1)
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class HeadTensors(Mapping[str, np.ndarray]):
    """The tensors of a file, float32. Names and shapes are checked at once, and the numbers are read when asked for."""

    def __init__(self, checkpoint: Checkpoint, name: str, shapes: Mapping[str, tuple[int, ...]]):
        """Raise CheckpointError unless the file has just these tensors, of these shapes (-1: any size)."""
        path = checkpoint.file(name)
        if path is None:
            raise CheckpointError(f"{checkpoint.name} has no file {name}, which its decision head is in")
        self._path = path
        try:
            with safe_open(path, framework="np") as file:
                found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        for key in sorted(shapes.keys() | found.keys()):
            if not _fits(found.get(key), shapes.get(key)):
                has, needs = (f"the shape {list(of[key])}" if key in of else "no such tensor" for of in (found, shapes))
                raise CheckpointError(f"{path}: of {key!r} the file has {has}, and the head {needs}")
        self.shapes = found

    @cached_property
    def _values(self) -> dict[str, np.ndarray]:
        values = {}
        read: list[tuple[str, dict[str, Any]]] = deserialize(self._path.read_bytes())  # type: ignore[no-untyped-call]
        for name, part in read:
            if part["dtype"] not in _TYPES:
                raise CheckpointError(f"{self._path}: {name!r} is of type {part['dtype']}")
            flat = np.frombuffer(part["data"], _TYPES[part["dtype"]])
            if part["dtype"] == "BF16":
                flat = (flat.astype(np.uint32) << 16).view(np.float32)
            values[name] = flat.astype(np.float32).reshape(part["shape"])
        return values

    def __getitem__(self, name: str) -> np.ndarray:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _fits(found: tuple[int, ...] | None, shape: tuple[int, ...] | None) -> bool:
    if found is None or shape is None or len(found) != len(shape):
        return False
    return all(size in (-1, has) for has, size in zip(found, shape, strict=True))


def normed(rows: np.ndarray, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the LayerNorm of rows, float64 [rows, width]."""
    centred = rows - rows.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + _EPS)
    out: np.ndarray = scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    return out


def linear(rows: np.ndarray, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the product of rows with a linear, which may have a bias."""
    out: np.ndarray = rows @ tensors[f"{name}.weight"].T
    return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out


def gelu(rows: np.ndarray) -> np.ndarray:
    """Return the exact GELU."""
    out: np.ndarray = rows * 0.5 * (1.0 + np.asarray(_erf(rows / math.sqrt(2.0)), np.float64))
    return out
