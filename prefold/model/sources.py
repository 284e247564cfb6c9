"""Sources of tensors by Hugging Face name: safetensors, GGUF, or random numbers. No torch.

Arrays in bfloat16 use the dtype of the package ml_dtypes.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..checkpoint import Checkpoint, read_json
from ..checkpoint.gguf import GGUFFile
from ..checkpoint.mapped import Extent
from ..checkpoint.safetensors import SafetensorsFile
from ..checkpoint.settings import Settings
from ..errors import CheckpointError
from ..kernels import BFLOAT16, StoredRows
from . import mxfp4
from .config import ModelConfig, head_order
from .names import GGUF, GGUF_OF, GGUF_OUT_NORMS, Names

BLOCK = 1 << 20  # elements decoded at once: 4 MiB of float32 fit in caches, and malloc returns them to the system
# GGUF types without compression: each row is an array of this NumPy dtype.
NUMBERS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}


class TensorSource(Protocol):
    """The tensors of a checkpoint under prefold's names: transformers' names for Llama, without "model."."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return {name: shape} of all tensors."""

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        """Return the tensor or a part of it, as float32 if the file stores it in compressed blocks.

        Otherwise the array has the file's dtype. It is a read-only view of the mapped file if the file stores the
        elements in the same order.
        """

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        """Copy the tensor or a part of it into `target`, an array of the same shape. Convert to its dtype, rounding."""

    def extent(self, name: str) -> Extent:
        """Return the place of the tensor's bytes in the file.

        If the bytes are not contiguous, the extent starts at the first byte, and its size is the number of bytes.
        """


class StoredSource(TensorSource, Protocol):
    """A source that can also return matrices undecoded, in the bytes of the file."""

    def stored_type(self, name: str) -> tuple[str, int]:
        """Return (storage type of a matrix, bytes per row). The type is a name of `kernels.BLOCK_TYPES`.

        Return ("", 0) if `stored` cannot return the matrix.
        """

    def stored(self, name: str) -> StoredRows | None:
        """Return the undecoded rows of a matrix, or None if its `stored_type` is ""."""


def open_source(
    checkpoint: Checkpoint,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    offsets: Mapping[str, float],
) -> StoredSource:
    """Return the source of a checkpoint's tensors.

    Args:
        checkpoint: The checkpoint. Its format selects the class of the source.
        config: The config of the model.
        shapes: {name: shape} of the tensors that the model needs.
        seed: The seed of random weights.
        offsets: {tensor name: constant that the model adds to the checkpoint's values}, such as 1 for Gemma's norms.
    """
    if checkpoint.format == "dummy":
        return RandomSource(shapes, seed, offsets)
    if checkpoint.gguf is not None:
        return GGUFSource(checkpoint.gguf, config, offsets, shapes)
    return SafetensorsSource(checkpoint, config)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a file."""

    file: SafetensorsFile
    name: str
    outputs: slice | np.ndarray | None  # rows of the stored tensor (columns if `transposed`); None: all
    transposed: bool  # stored as [inputs, outputs]
    flat: bool = False  # read as a vector, although the stored tensor has more dimensions
    order: Sequence[int] | None = None  # the order of the elements in each head, see `head_order`; None: unchanged
    matrix: int | None = None  # index of the matrix in a stack; None: not in a stack
    scales: tuple[SafetensorsFile, str] | None = None  # file and name of the scales of an MXFP4 stack
    below: tuple[TensorPlace, ...] = ()  # further stored tensors, whose rows follow the rows of this tensor

    def packed(self, rows: slice = slice(None)) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the blocks and the scales of rows of an MXFP4 tensor."""
        assert self.scales is not None
        file, name = self.scales
        both = self.file.array(self.name), file.array(name)
        blocks, scales = (values[self.matrix][self.outputs][rows] for values in both)
        return blocks, scales

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the tensor, and read only this part. If `order` is set, parts must be whole heads."""
        if self.below:
            every = [replace(self, below=()), *self.below]
            return np.concatenate([one.read(()) for one in every])[part]
        if self.scales is not None:
            values = mxfp4.numbers(*self.packed(part[0] if part else slice(None)))
            return values[:, *part[1:]]
        values = self.file.array(self.name)
        if self.matrix is not None:
            values = values[self.matrix]
        if self.flat:
            values = values.reshape(-1)
        if self.transposed:
            values = values.T
        if self.outputs is not None:
            values = values[self.outputs]
        return in_order(values[part] if part else values, self.order)

    def extent(self, numbers: int) -> Extent:
        """Return the bytes of the tensor, which has `numbers` elements."""
        shape = self.file.tensors[self.name].shape
        if self.scales is not None:  # two numbers per byte, and one scale per block
            numbers = numbers // 2 + numbers // mxfp4.BLOCK
        first, begin = 0, self.outputs.start if isinstance(self.outputs, slice) else 0
        if self.matrix is not None:
            first = self.matrix * math.prod(shape[1:])
        elif begin and not self.transposed and not self.flat:
            first = begin * math.prod(shape[1:])
        return self.file.extent(self.name, first, numbers)


def rows_of_parts(sizes: Sequence[int], groups: int = 1) -> Sequence[slice | np.ndarray]:
    """Return the rows of each part of a fused tensor.

    The parts follow each other, or alternate in groups (see `Names.grouped`).

    Args:
        sizes: The number of rows of each part.
    """
    ends = list(accumulate(size // groups for size in sizes))
    if groups == 1:
        return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    rows = np.arange(sum(sizes)).reshape(groups, -1)
    return [rows[:, end - size // groups : end].ravel() for size, end in zip(sizes, ends, strict=True)]


def in_order(values: np.ndarray, order: Sequence[int] | None) -> np.ndarray:
    """Return rows [heads * dim, ...] with the rows of each head reordered (see `head_order`; None: unchanged)."""
    if order is None:
        return values
    return values.reshape(-1, len(order), *values.shape[1:])[:, list(order)].reshape(values.shape)


def as_stored(values: np.ndarray, order: Sequence[int] | None) -> np.ndarray:
    """Return rows [heads * dim, ...] in the checkpoint's order: the inverse of `in_order`."""
    return values if order is None else in_order(values, np.argsort(order).tolist())


def put(target: np.ndarray, values: np.ndarray) -> None:
    """Copy `values` into an array of the same shape, converting them to its dtype."""
    if values.dtype == np.float16 != target.dtype and values.ndim == 2 and values.strides[1] == 2:
        step = max(1, BLOCK // max(1, values.shape[1]))
        for start in range(0, len(values), step):
            rows = values[start : start + step]
            decoded = decoded_rows("F16", rows.view(np.uint8), values.shape[1])
            target[start : start + step] = rows if decoded is None else decoded
        return
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values


def decoded_rows(kind: str, rows: NDArray[np.uint8], inputs: int) -> NDArray[np.float32] | None:
    """Decode rows with the kernels, to float32 [rows, inputs]. Return None if no kernel decodes this type.

    Kernels decode on all threads, about ten times as fast as NumPy on one thread.

    Args:
        kind: The storage type, a name of `kernels.BLOCK_TYPES`.
        rows: Undecoded rows [rows, bytes per row].
        inputs: The number of elements per row.
    """
    compiled = kernels.load()
    if compiled is None or not compiled.has_blocks(kind, inputs):
        return None
    # A pool of our own, because the shared pool allocates large pieces.
    blocks = compiled.pack_blocks([StoredRows(kind, rows)], inputs, kernels.PanelPool(piece=0))
    assert blocks is not None  # because all rows have one type
    return compiled.block_rows(blocks, np.arange(blocks.outputs), kernels.FLOAT32)


class SafetensorsSource:
    """The safetensors file, or files with an index, of a Hugging Face folder."""

    # Buffers that old versions of transformers saved beside the weights.
    IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias|causal_mask|freqs_cis)")

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig):
        """Open the files, and find the place of each tensor of the model."""
        self._places: dict[str, TensorPlace] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        names = config.names
        opened = list(self.opened(checkpoint))
        files = {stored: file for file in opened for stored in file.tensors}
        for file in opened:
            for stored, tensor in file.tensors.items():
                if self.IGNORED.fullmatch(stored):
                    continue
                if templates := names.of_stack(stored):
                    self._add_stack(checkpoint, files, stored, templates, names)
                    continue
                own_names = names.of_tensor(stored)
                if not own_names or config.is_unread(own_names[0]):
                    continue
                if own_names[0] in self._places:
                    raise CheckpointError(f"{checkpoint.path} has the tensor {stored!r} twice")
                shape = tensor.shape
                transposed = names.transposed and own_names[0].startswith("layers.") and len(shape) == 2
                shape = shape[::-1] if transposed else shape
                flat = self._is_flat(own_names, shape, names.single_rows)
                shape = (math.prod(shape),) if flat else shape
                orders = [config.row_order(name) for name in own_names]
                if len(own_names) == 1:
                    self._places[own_names[0]] = TensorPlace(file, stored, None, transposed, flat, orders[0])
                    self.shapes[own_names[0]] = shape
                    continue
                sizes = config.fused_sizes(own_names)
                if shape[0] != sum(sizes):
                    raise CheckpointError(f"{stored} of {checkpoint.name} has {shape[0]} outputs, not {sum(sizes)}")
                every = rows_of_parts(sizes, config.groups_of(stored))
                for name, size, rows, order in zip(own_names, sizes, every, orders, strict=True):
                    self._places[name] = TensorPlace(file, stored, rows, transposed, flat, order)
                    self.shapes[name] = (size, *shape[1:])
        for name, parts in names.joined.items():
            self._join(name, parts)

    def _join(self, name: str, parts: Sequence[str]) -> None:
        """Join several stored tensors to one tensor in each layer that has them. See `Names.joined`."""
        for first in [stored for stored in self._places if stored.endswith(f".{parts[0]}")]:
            layer = first.removesuffix(parts[0])
            every = [layer + part for part in parts if layer + part in self._places]
            shapes = [self.shapes.pop(one) for one in every]
            top, *below = [self._places.pop(one) for one in every]
            self._places[layer + name] = replace(top, below=tuple(below))
            self.shapes[layer + name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @staticmethod
    def _is_flat(own_names: Sequence[str], shape: Sequence[int], single_rows: Sequence[str] = ()) -> bool:
        """Return whether to read a tensor as a vector.

        These are fused convolutions, norms with weights per head, vectors that are stored as one row, and scalars.
        """
        is_norm = own_names[0].endswith(("_norm.weight", "_norm.bias", *single_rows))
        return not shape or (is_norm and len(shape) > 1) or (len(own_names) > 1 and len(shape) > 2)

    def _add_stack(
        self,
        checkpoint: Checkpoint,
        files: Mapping[str, SafetensorsFile],
        stored: str,
        templates: Sequence[str],
        names: Names,
    ) -> None:
        """Add the places of the tensors in a stack.

        Args:
            files: {name of a stored tensor: its file}.
            stored: The name of the stack in the checkpoint.
            templates: The result of `Names.of_stack`.
        """
        file = files[stored]
        scales: tuple[SafetensorsFile, str] | None = None
        whole = file.tensors[stored].shape
        turned = names.turned and len(whole) == 3
        if turned:
            whole = (whole[0], whole[2], whole[1])
        elif names.in_turn and len(whole) == 4:
            scales, whole = _scales(files, stored, whole), (*whole[:2], whole[2] * mxfp4.BLOCK)
        for name, number, rows, shape in in_stack(stored, whole, templates, names.in_turn):
            if name in self._places:
                raise CheckpointError(f"{checkpoint.path} has {name!r} twice, one of them in {stored!r}")
            self._places[name] = TensorPlace(file, stored, rows, turned, matrix=number, scales=scales)
            self.shapes[name] = shape

    @classmethod
    def opened(cls, checkpoint: Checkpoint) -> Iterator[SafetensorsFile]:
        """Open and yield the safetensors files of a folder, one after the other."""
        yield from map(SafetensorsFile, cls._files(checkpoint))

    @staticmethod
    def _files(checkpoint: Checkpoint) -> list[Path]:
        if (single := checkpoint.weights("model.safetensors")) is not None:
            return [single]
        listed = checkpoint.weights("model.safetensors.index.json")
        index = None if listed is None else read_json(listed)
        if isinstance(index, dict):
            files = Settings(index, str(listed)).settings("weight_map")
            names = sorted({files.text(name) for name in files})
            missing = [name for name in names if checkpoint.weights(name) is None]
            if missing or not names:
                raise CheckpointError(
                    f"{checkpoint.path} lacks {', '.join(missing)}"
                    if missing
                    else f"{checkpoint.path} has an index that names no files"
                )
            return [path for name in names if (path := checkpoint.weights(name)) is not None]
        folder = None if checkpoint.path is None else checkpoint.path / checkpoint.inner
        if folder is not None and [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]:
            raise CheckpointError(
                f"{folder} has only pickled weights, which can run code when opened; convert them to safetensors (in "
                "transformers: AutoModel.from_pretrained(folder).save_pretrained(new_folder))"
            )
        raise CheckpointError(f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json")

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        return self._places[name].read(part)

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        put(target, self.read(name, part))

    def extent(self, name: str) -> Extent:
        return self._places[name].extent(math.prod(self.shapes[name]))

    def stored_type(self, name: str) -> tuple[str, int]:
        place, shape = self._places[name], self.shapes[name]
        if place.scales is not None:
            return "MXFP4", shape[1] // mxfp4.BLOCK * mxfp4.BLOCK_BYTES
        kind = place.file.tensors[place.name].type
        return (kind, 2 * shape[1]) if kind in ("F16", "BF16") and len(shape) == 2 else ("", 0)

    def stored(self, name: str) -> StoredRows | None:
        kind, _ = self.stored_type(name)
        if kind == "MXFP4":
            return StoredRows(kind, mxfp4.as_blocks(*self._places[name].packed()))
        return StoredRows(kind, np.ascontiguousarray(self.read(name)).view(np.uint8)) if kind else None


def in_stack(
    stored: str, shape: Sequence[int], templates: Sequence[str], in_turn: bool = False
) -> Iterator[tuple[str, int, slice, tuple[int, ...]]]:
    """Yield (name, matrix number, rows in the matrix, shape) of each tensor in a stack [matrices, outputs, inputs].

    A stack of biases is [matrices, outputs]. Raise CheckpointError for any other shape.

    Args:
        stored: The name of the stack in the checkpoint.
        shape: The shape of the stack.
        templates: The result of `Names.of_stack`.
        in_turn: See `Names.in_turn`.
    """
    parts, is_bias = len(templates), templates[0].endswith(".bias")
    if len(shape) != (2 if is_bias else 3) or shape[1] % parts:
        form = "[experts, outputs]" if is_bias else "[experts, outputs, inputs]"
        raise CheckpointError(f"{stored} is {list(shape)}; it must be {form}")
    size = shape[1] // parts
    for number in range(shape[0]):
        for part, template in enumerate(templates):
            rows = slice(part, None, parts) if in_turn else slice(part * size, (part + 1) * size)
            yield template.format(number), number, rows, (size, *shape[2:])


def _scales(files: Mapping[str, SafetensorsFile], stored: str, shape: Sequence[int]) -> tuple[SafetensorsFile, str]:
    """Return the file and name of the scales of an MXFP4 stack [matrices, outputs, blocks, bytes]."""
    name = stored.removesuffix("_blocks") + "_scales"
    if name not in files:
        raise CheckpointError(f"{stored} has no scales: {name} is missing")
    scales = files[name].tensors[name].shape
    if list(scales) != list(shape[:3]) or 2 * shape[3] != mxfp4.BLOCK:
        raise CheckpointError(f"{stored} is {list(shape)} with scales {list(scales)}; blocks have 16 bytes and a scale")
    return files[name], name


class GGUFSource:
    """The tensors of a GGUF file under prefold's names. Tensors are dequantised one block of rows at a time.

    Loading a model therefore needs little more memory than the model's weights: neither a whole tensor as float32 nor a
    copy of the file is ever in memory.
    """

    BLOCK = BLOCK
    # Tensors that the config reader reads as settings.
    IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    # For these architectures, llama.cpp's converter interleaves the two halves of each q and k head.
    IN_TURN = (
        *("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "cohere2"),
        *("command-r", "glm4", "ernie4_5", "ernie4_5-moe", "arcee"),
    )

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        offsets: Mapping[str, float] = MappingProxyType({}),
        wanted: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ):
        """Map the file's tensors to prefold's names.

        Args:
            file: The GGUF file.
            config: The config of the model.
            offsets: As in `open_source`. The values in a GGUF file include these constants.
            wanted: {name: shape} of the model's tensors. Files may leave out dimensions of 1, or store vectors as
                matrices.
        """
        self.file, self.offsets = file, offsets
        arch = str(file.metadata.get("general.architecture"))
        names = GGUF_OF.get(f"{arch} mlp_norm") if config.mlp_norm else None
        names = names or GGUF_OF.get(arch) or (GGUF_OUT_NORMS if config.out_norms else GGUF)
        self.negative_exponentials = names.negative_exponentials
        self.order = head_order(config.head_dim, config.turned, arch in self.IN_TURN)
        # With latent attention, only the last elements of each head rotate. GGUF files store them as safetensors do.
        self._row_order = None if config.latent is None else config.row_order
        # {prefold's name: (name in the file, rows to read)}. If `_is_vector`, elements are counted instead of rows.
        self._stored: dict[str, tuple[str, slice | NDArray[np.int64]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for stored, tensor in file.tensors.items():
            if stored in self.IGNORED or self._predicts_further(stored, arch, config):
                continue
            if templates := names.of_stack(stored):
                for name, number, rows, shape in in_stack(stored, tensor.shape, templates):
                    first = number * tensor.shape[1]
                    self._stored[name] = (stored, slice(first + rows.start, first + rows.stop))
                    self.shapes[name] = shape
                continue
            own_names = names.of_tensor(stored)
            if config.is_unread(own_names[0]):
                continue
            sizes = config.fused_sizes(own_names) if len(own_names) > 1 else tensor.shape[:1]
            if len(own_names) > 1 and tensor.shape[0] != sum(sizes):
                raise CheckpointError(f"{stored} of {file.path} has {tensor.shape[0]} outputs, not {sum(sizes)}")
            every = rows_of_parts(sizes, config.groups_of(stored, names) if len(own_names) > 1 else 1)
            for name, size, part in zip(own_names, sizes, every, strict=True):
                shape = _wanted_shape((size, *tensor.shape[1:]), wanted.get(name, ()))
                is_vector = len(shape) < 2 < 1 + len(tensor.shape)
                self._stored[name] = (stored, slice(0, *shape) if is_vector else part)
                self.shapes[name] = shape
        # Latent attention: {name of the matrix for keys and values: (stack of keys, stack of values) in the file}.
        self._pairs: dict[str, tuple[str, str]] = {}
        for keys in [name for name in self.shapes if name.endswith(".k_b_proj.weight")]:
            self._pair(keys, keys.replace(".k_b_proj.", ".v_b_proj."), keys.replace(".k_b_proj.", ".kv_b_proj."))

    def _pair(self, keys: str, values: str, name: str) -> None:
        """Join the stack of keys [heads, rank, key dim] and the stack of values [heads, value dim, rank] to a matrix.

        Args:
            keys: prefold's name of the stack of keys.
            values: prefold's name of the stack of values.
            name: prefold's name of the matrix.
        """
        if values not in self.shapes:
            raise CheckpointError(f"{self.file.path} has {self._stored[keys][0]}, but no tensor of values to match it")
        of_keys, of_values = self.shapes.pop(keys), self.shapes.pop(values)
        if len(of_keys) != 3 or len(of_values) != 3 or (of_keys[0], of_keys[1]) != (of_values[0], of_values[2]):
            found = f"{self._stored[keys][0]} of {self.file.path} is {list(of_keys)}, its values {list(of_values)}"
            raise CheckpointError(f"{found}; they must be [heads, rank, key dim] and [heads, value dim, rank]")
        self._pairs[name] = self._stored.pop(keys)[0], self._stored.pop(values)[0]
        self.shapes[name] = (of_keys[0] * (of_keys[2] + of_values[1]), of_keys[1])

    def _paired(self, name: str) -> np.ndarray:
        """Return the matrix of `_pair`: for each head the rows of its key, then the rows of its value."""
        keys, values = (self.file.dequantize(stored) for stored in self._pairs[name])
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.shapes[name])

    def _predicts_further(self, stored: str, arch: str, config: ModelConfig) -> bool:
        """Return whether a tensor belongs to a multi-token prediction layer.

        These layers follow the model's layers. They are not loaded, because no other result depends on them.
        """
        if not self.file.metadata.get(f"{arch}.nextn_predict_layers"):
            return False
        in_layer = re.match(r"blk\.(\d+)\.", stored)
        return in_layer is not None and int(in_layer[1]) >= config.layers

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        shape = self.shapes[name]
        if name in self._pairs:
            return self._paired(name)[part or ...]
        if self._has_numbers(name):
            (stored, rows), order = self._stored[name], self._order_of(name)
            numbers = self._numbers(stored)
            numbers = numbers.reshape(-1) if self._is_vector(name) else numbers
            values = in_order(numbers[rows].reshape(shape), order)
            return values[part] if part else values
        sizes = [len(range(*cut.indices(size))) for size, cut in zip(shape, part, strict=False)]
        out = np.empty((*sizes, *shape[len(sizes) :]), np.float32)
        self.read_into(name, out, part)
        return out

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        if name in self._pairs:
            put(target, self._paired(name)[part or ...])
            return
        (stored, of_file), shape = self._stored[name], self.shapes[name]
        order = self._order_of(name)
        if self._is_vector(name):
            values = self.file.dequantize(stored).ravel()[of_file].reshape(shape)
            put(target, self._values(name, values, order)[part or ...])
            return
        begin, end, _ = (part[0] if part else slice(None)).indices(shape[0])
        # Heads are read whole if the file orders their rows differently.
        unit = 1 if order is None else len(order)
        step = unit * max(1, self.BLOCK // (unit * math.prod(shape[1:])))
        for start in range(begin // unit * unit, end, step):
            stop = min(start + step, -(-end // unit) * unit)
            if isinstance(of_file, slice):
                rows = self._rows(stored, slice(of_file.start + start, of_file.start + stop))
            else:
                rows = self._rows(stored, of_file[start:stop])
            block = self._values(name, rows, order).reshape(-1, *shape[1:])
            first, last = max(start, begin), min(stop, end)
            put(target[first - begin : last - begin], block[(slice(first - start, last - start), *part[1:])])

    def extent(self, name: str) -> Extent:
        if name in self._pairs:
            extents = [self.file.extent(one, 0, math.prod(self.file.tensors[one].shape)) for one in self._pairs[name]]
            return replace(extents[0], size=sum(extent.size for extent in extents))
        stored, part = self._stored[name]
        first = int(part.start if isinstance(part, slice) else part[0])
        numbers = 1 if self._is_vector(name) else self.file.tensors[stored].shape[-1]
        return self.file.extent(stored, first * numbers, math.prod(self.shapes[name]))

    def stored_type(self, name: str) -> tuple[str, int]:
        if name in self._pairs:
            return "", 0
        stored, shape = self._stored[name][0], self.shapes[name]
        return (self.file.type_name(stored), self.file.row_bytes(stored)) if len(shape) == 2 else ("", 0)

    def stored(self, name: str) -> StoredRows | None:
        kind, row = self.stored_type(name)
        if not kind:
            return None
        stored, of_file = self._stored[name]
        rows = self.file.raw(stored).reshape(-1, row)[of_file]
        if (order := self._order_of(name)) is not None:
            rows = rows.reshape(-1, len(order), row)[:, list(order)].reshape(-1, row)
        return StoredRows(kind, rows)

    def _is_vector(self, name: str) -> bool:
        """Return whether a tensor is a vector in the model or in the file."""
        return min(len(self.shapes[name]), len(self.file.tensors[self._stored[name][0]].shape)) < 2

    def _order_of(self, name: str) -> Sequence[int] | None:
        if self._row_order is not None:
            return self._row_order(name)
        return self.order if name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm") else None

    def _has_numbers(self, name: str) -> bool:
        """Return whether the file stores exactly the model's values, with a type in NUMBERS."""
        is_changed = bool(self.offsets.get(name)) or self._is_exponential(name)
        return not is_changed and self.file.type_name(self._stored[name][0]) in NUMBERS

    def _is_exponential(self, name: str) -> bool:
        return bool(self.negative_exponentials) and name.endswith(self.negative_exponentials)

    def _numbers(self, stored: str) -> np.ndarray:
        """Return a tensor with a type in NUMBERS as a matrix [rows, columns]. A vector becomes [elements, 1]."""
        raw, dtype = self.file.raw(stored), NUMBERS[self.file.type_name(stored)]
        values = raw.reshape(-1, dtype.itemsize if raw.ndim < 2 else raw.shape[-1]).view(dtype)
        return values if values.flags.aligned else values.copy()

    def _rows(self, stored: str, rows: slice | NDArray[np.int64]) -> np.ndarray:
        """Return rows of a stored tensor: in the file's dtype if its type is in NUMBERS, else as float32."""
        kind, inputs = self.file.type_name(stored), self.file.tensors[stored].shape[-1]
        if kind in NUMBERS:
            return self._numbers(stored)[rows]
        raw = self.file.raw(stored)
        decoded = decoded_rows(kind, raw.reshape(-1, raw.shape[-1])[rows], inputs)
        return self.file.dequantize(stored, rows) if decoded is None else decoded

    def _values(self, name: str, values: np.ndarray, order: Sequence[int] | None) -> np.ndarray:
        """Convert the stored values of a tensor, or of some of its rows, to the model's values.

        Args:
            order: The order of the rows in each head, as in `in_order`.
        """
        values = in_order(values, order)
        offset = self.offsets.get(name)
        if self._is_exponential(name):
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.log(-values.astype(np.float64)).astype(np.float32)
        return values.astype(np.float32) - np.float32(offset) if offset else values


def _wanted_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the model's shape for a tensor, if a reshape of the file's tensor is enough. Else return the file's shape.

    A reshape is enough if the shapes differ only by dimensions of 1, or if the model has a vector of the same size.

    Args:
        shape: The shape in the file.
        wanted: The model's shape; (): unknown.
    """
    thin, own = (tuple(size for size in sizes if size != 1) for sizes in (wanted, shape))
    is_flat = len(wanted) == 1 and math.prod(shape) == wanted[0]
    return wanted if wanted and (is_flat or thin == own) else shape


class RandomSource:
    """Random weights, reproducible by seed: normally distributed with standard deviation 0.02.

    Norm weights are 1 after the model has added its offset. All tensors repeat one sample of POOL numbers, each from
    another start, so filling a model of eight billion parameters is as fast as copying memory.
    """

    POOL = 1_000_003  # a prime, so that no two rows of a matrix start at the same place of the sample

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, offsets: Mapping[str, float] = MappingProxyType({})
    ):
        self.shapes, self.seed, self.offsets = shapes, seed, offsets

    def extent(self, name: str) -> Extent:
        return Extent(None, 0, 4 * math.prod(self.shapes[name]))

    def stored_type(self, name: str) -> tuple[str, int]:
        return "", 0

    def stored(self, name: str) -> StoredRows | None:
        return None

    @cached_property
    def _pool(self) -> NDArray[np.float32]:
        return np.random.default_rng(self.seed).standard_normal(self.POOL, np.float32) * np.float32(0.02)

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        whole = np.empty(self.shapes[name], np.float32)
        self.read_into(name, whole)
        return whole[part] if part else whole

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        if name.endswith("norm.weight"):
            target[...] = 1 - self.offsets.get(name, 0)
            return
        if part:
            whole = np.empty(self.shapes[name], target.dtype)
            self.read_into(name, whole)
            target[...] = whole[part]
            return
        pool = np.roll(self._pool, zlib.crc32(name.encode()) % self.POOL).astype(target.dtype)
        flat = target.reshape(-1)
        assert np.shares_memory(flat, target) or not flat.size, "the target must be contiguous"
        for start in range(0, flat.size, self.POOL):
            values = flat[start : start + self.POOL]
            values[...] = pool[: len(values)]
