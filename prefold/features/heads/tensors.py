"""Tensors of a head, read from safetensors files of the model's folder, and the few operations heads need. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from ...checkpoint import Checkpoint
from ...checkpoint.safetensors import DTYPES, FLOATING, SafetensorsFile
from ...errors import CheckpointError

_EPS = 1e-5
_erf = np.frompyfunc(math.erf, 1, 1)


class HeadTensors(Mapping[str, np.ndarray]):
    """The tensors of a head, float32. Names and shapes are checked at once; values are read at first use."""

    def __init__(self, checkpoint: Checkpoint, name: str | None, shapes: Mapping[str, tuple[int, ...]]):
        """Raise CheckpointError unless the file has exactly these tensors with these shapes (-1: any size).

        Args:
            name: The head's file; None if its tensors are among the model's weights, which may have others too.
        """
        path = None if name is None else checkpoint.file(name)
        if name is not None and path is None:
            raise CheckpointError(f"{checkpoint.name} has no file {name}, which has the weights of its head")
        self._files: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, _files(checkpoint) if path is None else [path]):
            self._files |= {key: file for key in file.tensors if path is not None or key in shapes}
        found = {key: file.tensors[key].shape for key, file in self._files.items()}
        for key in sorted(shapes.keys() | found.keys()):
            if not _fits(found.get(key), shapes.get(key)):
                has, needs = (f"the shape {list(of[key])}" if key in of else "no such tensor" for of in (found, shapes))
                raise CheckpointError(f"{path or checkpoint.name}: {key!r}: the file has {has}, the head needs {needs}")
        self.shapes = found

    @cached_property
    def _values(self) -> dict[str, np.ndarray]:
        return {name: _floats(file.array(name), file, name) for name, file in self._files.items()}

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
    """Return the LayerNorm of rows, float64 [rows, width].

    Args:
        name: Prefix of its weight and bias.
    """
    centred = rows - rows.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + _EPS)
    out: np.ndarray = scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    return out


def linear(rows: np.ndarray, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the output of a linear, [rows, outputs].

    Args:
        name: Prefix of its weight and, if it has one, its bias.
    """
    out: np.ndarray = rows @ tensors[f"{name}.weight"].T
    return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out


def gelu(rows: np.ndarray) -> np.ndarray:
    """Return the exact GELU (with erf, not tanh)."""
    out: np.ndarray = rows * 0.5 * (1.0 + np.asarray(_erf(rows / math.sqrt(2.0)), np.float64))
    return out


class StoredRows:
    """Rows of the model's output embedding, read by token id from its safetensors files."""

    def __init__(self, checkpoint: Checkpoint):
        """Raise CheckpointError if the folder has no output embedding in safetensors files."""
        found = {name: file for path in _files(checkpoint) for file in [SafetensorsFile(path)] for name in file.tensors}
        for wanted in ("lm_head.weight", "embed_tokens.weight"):  # a tied head is not stored twice
            for name, file in found.items():
                if name == wanted or name.endswith("." + wanted):
                    tensor = file.tensors[name]
                    if DTYPES.get(tensor.type) not in FLOATING or len(tensor.shape) != 2:
                        raise CheckpointError(f"{file.path}: {name} is a {tensor.type} of the shape {tensor.shape}")
                    self._file, self._name, self.width = file, name, tensor.shape[1]
                    return
        raise CheckpointError(
            f"{checkpoint.name} has no lm_head.weight in safetensors files, but its head reads rows of that matrix"
        )

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of token ids, float64 [ids, width]."""
        return self._file.array(self._name)[ids].astype(np.float64)


def _files(checkpoint: Checkpoint) -> list[Path]:
    single = checkpoint.weights("model.safetensors")
    if single is not None:
        return [single]
    folder = None if checkpoint.path is None or checkpoint.path.is_file() else checkpoint.path / checkpoint.inner
    return [] if folder is None else sorted(folder.glob("model*.safetensors"))


def _floats(values: np.ndarray, file: SafetensorsFile, name: str) -> np.ndarray:
    """Return a tensor as float32. Raise CheckpointError if it has no floating dtype."""
    if values.dtype not in FLOATING:
        raise CheckpointError(f"{file.path}: {name!r} is of type {file.tensors[name].type}")
    return values.astype(np.float32)
