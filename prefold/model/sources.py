"""Where tensors are read from, by Hugging Face name: safetensors, GGUF, or a generator of random numbers."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import kernels
from ..checkpoint import Checkpoint, read_json
from ..checkpoint.gguf import GGUFFile
from ..checkpoint.settings import Settings
from ..errors import CheckpointError
from ..kernels import StoredRows
from . import mxfp4
from .arrays import tensor_of
from .config import ModelConfig, head_order
from .names import GGUF, GGUF_OF, GGUF_OUT_NORMS


class TensorSource(Protocol):
    """A TensorSource has tensors by name. Names are those of Llama in transformers, without the prefix "model."."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each tensor by its name."""

    def read_into(self, name: str, target: Tensor, part: tuple[slice, ...] = ()) -> None:
        """Copies the tensor, or that part of it, into `target` (of its shape, contiguous, any dtype and device)."""


class StoredSource(TensorSource, Protocol):
    """A StoredSource has a model's tensors, and its matrices as they are stored."""

    def stored_type(self, name: str) -> tuple[str, int]:
        """Returns the type that a matrix is stored in, as `kernels.BLOCK_TYPES` names it, and the bytes of a row; "", 0
        where its rows cannot be had as they are stored."""

    def stored(self, name: str) -> StoredRows | None:
        """Returns the rows of a matrix as they are stored; None where `stored_type` has no type."""


def open_source(
    checkpoint: Checkpoint,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    offsets: Mapping[str, float],
) -> StoredSource:
    """Returns the source of a checkpoint's tensors. shapes: what the model wants, for random weights. offsets: what the
    model adds to tensors, by their names."""
    if checkpoint.format == "dummy":
        return RandomSource(shapes, seed, offsets)
    if checkpoint.gguf is not None:
        return GGUFSource(checkpoint.gguf, config, offsets, shapes)
    return SafetensorsSource(checkpoint, config)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A TensorPlace says where a tensor lies in a file.

    outputs      which rows of the stored tensor (columns of a transposed one) it is; None: the whole
    transposed   whether it is stored as [inputs, outputs]
    flat         whether it is stored with more dimensions, all of them outputs
    order        of the numbers of each head, as of `head_order`; None: as they are stored
    matrix       which matrix of a stack it is in; None: it is in no stack
    scales       the file and the name of the scales of a stack of MXFP4; None: it is none
    """

    file: Any
    name: str
    outputs: slice | None
    transposed: bool
    flat: bool = False
    order: Sequence[int] | None = None
    matrix: int | None = None
    scales: tuple[Any, str] | None = None

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Returns a part of the tensor; no more of the file is read. Of heads with an order whole ones."""
        return in_order(self._read(part), self.order)

    def _read(self, part: tuple[slice, ...]) -> Tensor:
        if self.flat:
            return self.file.get_tensor(self.name).flatten()[_within(self.outputs, part[0] if part else slice(None))]
        if self.outputs is not None and self.outputs.step is not None:
            return self._in_turn(*(part or (slice(None),)))
        if self.matrix is not None:
            index = (self.matrix, _within(self.outputs, part[0] if part else slice(None)), *part[1:])
            return self.file.get_slice(self.name)[index]
        if self.outputs is None and not part:
            values = self.file.get_tensor(self.name)
        else:
            index = (_within(self.outputs, part[0] if part else slice(None)), *part[1:])
            if self.transposed:
                index = (index[1] if len(index) > 1 else slice(None), index[0])
            values = self.file.get_slice(self.name)[index]
        return values.T if self.transposed else values

    def _in_turn(self, rows: slice, *inputs: slice) -> Tensor:
        """Returns rows of a matrix, or numbers of a bias, whose outputs are some of those of a stack's matrix."""
        if self.scales is not None:
            stacks = ((self.file, self.name), self.scales)
            blocks, scales = (file.get_slice(name)[self.matrix][self.outputs][rows] for file, name in stacks)
            values = mxfp4.numbers(blocks, scales)
        else:
            matrix = self.file.get_slice(self.name)[self.matrix]
            values = (matrix.T if self.transposed else matrix)[self.outputs][rows]
        return values[(slice(None), *inputs)]


def in_order(values: Tensor, order: Sequence[int] | None) -> Tensor:
    """Returns rows [heads * dim, ...] with those of each head in an order, as of `head_order`; None: as they are."""
    return values if order is None else values.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)


def as_stored(values: Tensor, order: Sequence[int] | None) -> Tensor:
    """Returns rows [heads * dim, ...] in the order of a checkpoint: the inverse of `in_order`."""
    return values if order is None else in_order(values, np.argsort(order).tolist())


class SafetensorsSource:
    """A SafetensorsSource reads the safetensors file, or files with an index, of a Hugging Face folder."""

    IN_HEADS = re.compile(r"\.[qk]_(proj|norm)\.")  # tensors whose outputs are rotated, head by head
    # Not weights: buffers that old versions of transformers saved.
    IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias|freqs_cis)")

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig):
        """Opens the files. config: of the whole model; where several linears are stored as one it says which rows are
        whose."""
        self._places: dict[str, TensorPlace] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        names = config.names
        opened = [file for _, file in self.opened(checkpoint)]
        files = {stored: file for file in opened for stored in file.keys()}  # noqa: SIM118 (not a dict)
        for file in opened:
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                if self.IGNORED.fullmatch(stored):
                    continue
                if templates := names.of_stack(stored):
                    self._add_stack(checkpoint, files, stored, templates, names.in_turn)
                    continue
                own_names = names.of_tensor(stored)
                if not own_names:
                    continue
                if own_names[0] in self._places:
                    raise CheckpointError(f"{checkpoint.path} has the tensor {stored!r} twice")
                shape = tuple(file.get_slice(stored).get_shape())
                transposed = names.transposed and own_names[0].startswith("layers.") and len(shape) == 2
                shape = shape[::-1] if transposed else shape
                flat = len(own_names) > 1 and len(shape) > 2
                shape = (math.prod(shape),) if flat else shape
                orders = [config.head_order if self.IN_HEADS.search(name) else None for name in own_names]
                if len(own_names) == 1:
                    self._places[own_names[0]] = TensorPlace(file, stored, None, transposed, False, orders[0])
                    self.shapes[own_names[0]] = shape
                    continue
                sizes = config.fused_sizes(own_names)
                if shape[0] != sum(sizes):
                    raise CheckpointError(f"{stored} of {checkpoint.name} has {shape[0]} outputs, not {sum(sizes)}")
                for name, size, end, order in zip(own_names, sizes, accumulate(sizes), orders, strict=True):
                    self._places[name] = TensorPlace(file, stored, slice(end - size, end), transposed, flat, order)
                    self.shapes[name] = (size, *shape[1:])

    def _add_stack(
        self, checkpoint: Checkpoint, files: Mapping[str, Any], stored: str, templates: Sequence[str], in_turn: bool
    ) -> None:
        """Adds the tensors of a stack. files: by their tensors; templates: as of `Names.of_stack`; in_turn: as of
        Names"""
        file = files[stored]
        scales: tuple[Any, str] | None = None
        whole = tuple(file.get_slice(stored).get_shape())
        turned = in_turn and len(whole) == 3
        if turned:
            whole = (whole[0], whole[2], whole[1])
        elif in_turn and len(whole) == 4:
            scales, whole = _scales(files, stored, whole), (*whole[:2], whole[2] * mxfp4.BLOCK)
        for name, number, rows, shape in in_stack(stored, whole, templates, in_turn):
            if name in self._places:
                raise CheckpointError(f"{checkpoint.path} has {name!r} twice, once of them in {stored!r}")
            self._places[name] = TensorPlace(file, stored, rows, turned, matrix=number, scales=scales)
            self.shapes[name] = shape

    @classmethod
    def opened(cls, checkpoint: Checkpoint) -> Iterator[tuple[Path, Any]]:
        """Yields the safetensors files of a folder, and each of them opened."""
        for path in cls._files(checkpoint):
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
            yield path, file

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
                raise CheckpointError(f"{checkpoint.path} lacks {', '.join(missing) or 'the files its index names'}")
            return [path for name in names if (path := checkpoint.weights(name)) is not None]
        folder = None if checkpoint.path is None else checkpoint.path / checkpoint.inner
        if folder is not None and [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]:
            raise CheckpointError(
                f"{folder} has its weights as pickled files only, which can run code when opened; convert them to "
                "safetensors (in transformers: AutoModel.from_pretrained(folder).save_pretrained(new_folder))"
            )
        raise CheckpointError(f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json")

    def read_into(self, name: str, target: Tensor, part: tuple[slice, ...] = ()) -> None:
        target.copy_(self._places[name].read(part))

    def stored_type(self, name: str) -> tuple[str, int]:
        place, shape = self._places[name], self.shapes[name]
        kind = place.file.get_slice(place.name).get_dtype()
        return (kind, 2 * shape[1]) if kind in ("F16", "BF16") and len(shape) == 2 else ("", 0)

    def stored(self, name: str) -> StoredRows | None:
        kind, _ = self.stored_type(name)
        rows = self._places[name].read(()).contiguous() if kind else None
        return None if rows is None else StoredRows(kind, rows.view(torch.uint8).numpy())


def in_stack(
    stored: str, shape: Sequence[int], templates: Sequence[str], in_turn: bool = False
) -> Iterator[tuple[str, int, slice, tuple[int, ...]]]:
    """Yields each tensor of a stack [matrices, outputs, inputs] with the number of its matrix, its rows in it, and its
    shape; of biases the stack is [matrices, outputs]. templates: as of `Names.of_stack`; in_turn: as of Names. Raises
    CheckpointError where the shape is none of a stack."""
    parts, is_bias = len(templates), templates[0].endswith(".bias")
    if len(shape) != (2 if is_bias else 3) or shape[1] % parts:
        form = "[experts, outputs]" if is_bias else "[experts, outputs, inputs]"
        raise CheckpointError(f"{stored} is {list(shape)}; it must be {form}")
    size = shape[1] // parts
    for number in range(shape[0]):
        for part, template in enumerate(templates):
            rows = slice(part, None, parts) if in_turn else slice(part * size, (part + 1) * size)
            yield template.format(number), number, rows, (size, *shape[2:])


def _scales(files: Mapping[str, Any], stored: str, shape: Sequence[int]) -> tuple[Any, str]:
    """Returns the file and the name of the scales of a stack of MXFP4's blocks [matrices, outputs, blocks, bytes]."""
    name = stored.removesuffix("_blocks") + "_scales"
    if name not in files:
        raise CheckpointError(f"{stored} has no scales: {name} is missing")
    scales = files[name].get_slice(name).get_shape()
    if list(scales) != list(shape[:3]) or 2 * shape[3] != mxfp4.BLOCK:
        raise CheckpointError(f"{stored} is {list(shape)} with scales {list(scales)}; blocks have 16 bytes and a scale")
    return files[name], name


def _within(outer: slice | None, inner: slice) -> slice:
    """Returns the slice `inner` of what `outer` (None: everything) gives, as one slice."""
    if outer is None:
        return inner
    start, stop, _ = inner.indices(outer.stop - outer.start)
    return slice(outer.start + start, outer.start + stop)


class GGUFSource:
    """A GGUFSource reads the tensors of a GGUF file by their Hugging Face names, dequantised a block of rows at a time.

    So a model that is loaded takes little more memory than its weights: neither a tensor as float32 nor what was read
    of the file stays beside them.
    """

    BLOCK = 1 << 20  # numbers dequantised at once: 4 MiB of float32, which caches hold and malloc gives back
    # Parts of the config.
    IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    # Architectures whose files have the halves of heads in turn: what converts the first ones puts them so.
    IN_TURN = ("llama", "smollm3", "granite", "granitemoe", "cohere2")

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        offsets: Mapping[str, float] = MappingProxyType({}),
        wanted: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ):
        """offsets: what the model adds to tensors, by their names; it has been added to those of the file. wanted: the
        shapes of its tensors; files leave sizes of 1 out."""
        self.file, self.offsets = file, offsets
        arch = str(file.metadata.get("general.architecture"))
        names = GGUF_OF.get(arch) or (GGUF_OUT_NORMS if config.out_norms else GGUF)
        self.negative_exponentials = names.negative_exponentials
        self.order = head_order(config.head_dim, config.turned, arch in self.IN_TURN)
        self._stored: dict[str, tuple[str, int]] = {}  # the tensor in the file, and its first row
        self.shapes: dict[str, tuple[int, ...]] = {}
        for stored, tensor in file.tensors.items():
            if stored in self.IGNORED:
                continue
            if templates := names.of_stack(stored):
                for name, number, rows, shape in in_stack(stored, tensor.shape, templates):
                    self._stored[name] = (stored, number * tensor.shape[1] + rows.start)
                    self.shapes[name] = shape
                continue
            own_names = names.of_tensor(stored)
            sizes = config.fused_sizes(own_names) if len(own_names) > 1 else tensor.shape[:1]
            if len(own_names) > 1 and tensor.shape[0] != sum(sizes):
                raise CheckpointError(f"{stored} of {file.path} has {tensor.shape[0]} outputs, not {sum(sizes)}")
            for name, size, last in zip(own_names, sizes, accumulate(sizes), strict=True):
                self._stored[name] = (stored, last - size)
                shape = (size, *tensor.shape[1:])
                thin = tuple(number for number in wanted.get(name, ()) if number != 1)
                self.shapes[name] = wanted[name] if thin == shape else shape

    def read_into(self, name: str, target: Tensor, part: tuple[slice, ...] = ()) -> None:
        (stored, first_row), shape = self._stored[name], self.shapes[name]
        order = self._order_of(name)
        if len(shape) < 2:
            values = _tensor(self.file.dequantize(stored).ravel()[first_row : first_row + shape[0]])
            target.copy_(self._values(name, values, order)[part])
            return
        begin, end, _ = (part[0] if part else slice(None)).indices(shape[0])
        # A head whose rows are in another order in the file is read whole.
        unit = 1 if order is None else len(order)
        step = unit * max(1, self.BLOCK // (unit * math.prod(shape[1:])))
        for start in range(begin // unit * unit, end, step):
            stop = min(start + step, -(-end // unit) * unit)
            rows = self._dequantised(stored, slice(first_row + start, first_row + stop), target.device)
            block = self._values(name, rows, order).view(-1, *shape[1:])
            first, last = max(start, begin), min(stop, end)
            target[first - begin : last - begin].copy_(block[(slice(first - start, last - start), *part[1:])])

    def stored_type(self, name: str) -> tuple[str, int]:
        stored, shape = self._stored[name][0], self.shapes[name]
        return (self.file.type_name(stored), self.file.raw(stored).shape[-1]) if len(shape) == 2 else ("", 0)

    def stored(self, name: str) -> StoredRows | None:
        kind, row = self.stored_type(name)
        if not kind:
            return None
        (stored, first), outputs = self._stored[name], self.shapes[name][0]
        rows = self.file.raw(stored).reshape(-1, row)[first : first + outputs]
        if (order := self._order_of(name)) is not None:
            rows = rows.reshape(-1, len(order), row)[:, list(order)].reshape(-1, row)
        return StoredRows(kind, rows)

    def _order_of(self, name: str) -> Sequence[int] | None:
        return self.order if name.split(".")[-2] in ("q_proj", "k_proj") else None

    def _dequantised(self, stored: str, rows: slice, device: torch.device) -> Tensor:
        """Returns rows of a tensor of the file, float32. For a CPU our kernels decode them, where they know the type:
        they do it on all threads, and about ten times as fast as NumPy on one."""
        compiled = kernels.load() if device.type == "cpu" else None
        kind, inputs = self.file.type_name(stored), self.file.tensors[stored].shape[-1]
        if compiled is None or not compiled.has_blocks(kind, inputs):
            return _tensor(self.file.dequantize(stored, rows))
        raw = self.file.raw(stored)
        # A pool of its own makes no pieces larger than what is asked for.
        stored_rows = StoredRows(kind, raw.reshape(-1, raw.shape[-1])[rows])
        blocks = compiled.pack_blocks([stored_rows], inputs, kernels.PanelPool(piece=0))
        assert blocks is not None  # of one type
        return tensor_of(compiled.block_rows(blocks, np.arange(blocks.outputs), kernels.FLOAT32))

    def _values(self, name: str, values: Tensor, order: Sequence[int] | None) -> Tensor:
        """Returns the tensor `name` or rows of it, out of what is stored. order: of the rows of each head."""
        values = in_order(values, order)
        if self.negative_exponentials and name.endswith(self.negative_exponentials):
            return values.neg().log()
        return values - self.offsets[name] if self.offsets.get(name) else values


def _tensor(array: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class RandomSource:
    """A RandomSource gives normal numbers of standard deviation 0.02, and 1 for norms, less what the model adds to them
    (`offsets`, by their names); the same for the same seed.

    Every tensor is a stretch, begun at a place of its own, of one long repeated draw, so that a
    geometry of eight billion parameters is filled at the speed of memory.
    """

    POOL = 1_000_003  # a prime: rows of a matrix do not repeat in step

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, offsets: Mapping[str, float] = MappingProxyType({})
    ):
        self.shapes, self.seed, self.offsets = shapes, seed, offsets

    def stored_type(self, name: str) -> tuple[str, int]:
        return "", 0

    def stored(self, name: str) -> StoredRows | None:
        return None

    @cached_property
    def _pool(self) -> Tensor:
        return torch.randn(self.POOL, generator=torch.Generator().manual_seed(self.seed)) * 0.02

    def read_into(self, name: str, target: Tensor, part: tuple[slice, ...] = ()) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1 - self.offsets.get(name, 0))
            return
        if part:
            whole = target.new_empty(self.shapes[name])
            self.read_into(name, whole)
            target.copy_(whole[part])
            return
        pool = self._pool.roll(zlib.crc32(name.encode()) % self.POOL).to(target.device, target.dtype)
        for values in target.view(-1).split(self.POOL):
            values.copy_(pool[: len(values)])
