"""Read the tensors of a head from a safetensors file beside the weights of a model. No torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from ...checkpoint import Checkpoint
from ...checkpoint.identity import LARGEST_HEADER
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
            values[name] = _floats(part["data"], part["dtype"]).reshape(part["shape"])
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


class StoredRows:
    """The rows of the output embedding of a folder's model, read one by one from its safetensors files."""

    def __init__(self, checkpoint: Checkpoint):
        """Raise CheckpointError if the folder has no such matrix."""
        found = {
            name: (path, 8 + size, part)
            for path in _files(checkpoint)
            for size, header in [_header(path)]
            for name, part in header.items()
        }
        for wanted in ("lm_head.weight", "embed_tokens.weight"):  # a tied head is not stored twice
            for name, (path, start, part) in found.items():
                if name == wanted or name.endswith("." + wanted):
                    if part["dtype"] not in _TYPES or len(part["shape"]) != 2:
                        raise CheckpointError(f"{path}: {name} is a {part['dtype']} of the shape {part['shape']}")
                    self._path, self._type, self.width = path, part["dtype"], part["shape"][1]
                    self._start = start + part["data_offsets"][0]
                    return
        raise CheckpointError(
            f"{checkpoint.name} has no lm_head.weight in safetensors files, whose rows its head reads"
        )

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of token ids, float64 [ids, width]."""
        size = self.width * np.dtype(_TYPES[self._type]).itemsize
        rows = []
        with open(self._path, "rb") as file:
            for id in ids:
                file.seek(self._start + int(id) * size)
                rows.append(_floats(file.read(size), self._type).astype(np.float64))
        return np.stack(rows)


def _files(checkpoint: Checkpoint) -> list[Path]:
    single = checkpoint.weights("model.safetensors")
    if single is not None:
        return [single]
    folder = None if checkpoint.path is None or checkpoint.path.is_file() else checkpoint.path / checkpoint.inner
    return [] if folder is None else sorted(folder.glob("model*.safetensors"))


def _header(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Return (the bytes of a safetensors file's header, {name of a tensor: its type, shape and place})."""
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, LARGEST_HEADER)))
        return size, {name: part for name, part in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _floats(data: bytes, kind: str) -> np.ndarray:
    """Return the numbers in some bytes, float32."""
    flat = np.frombuffer(data, _TYPES[kind])
    return (flat.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else flat.astype(np.float32)
