"""Loads a checkpoint's weights into a NativeModel.

Names, shapes and memory are checked first. Then each tensor is packed from the file, without a copy in between if the
file has numbers in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ... import kernels
from ...checkpoint import Checkpoint
from ...errors import InputError
from ...kernels import BFLOAT16, Blocks, PanelPool
from ...model.adapters import read_adapter
from ...model.checks import check_tensors, settled_lm_head
from ...model.config import ModelConfig
from ...model.machine import available_memory, check_fits
from ...model.program import Add, Embed, Experts, Linear, Program, Weight
from ...model.sources import StoredSource, open_source
from ...spec.model import ModelSpec
from ..loaded import Loaded
from ..parts import native_parts
from .model import NativeModel, PackedTable, Table
from .program import COMPILE
from .worker import NativeWorker

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
# Of the memory that is free, the part that weights may take before they stay as stored although that is slower.
COMFORTABLE = 0.5
# Bytes of a packed matrix to those of its file: scales of six bits have bytes of their own.
PACKED = 1.03


def missing(config: ModelConfig, dtype: str, *, ranks: int = 1) -> str | None:
    """Return the first thing of a model, or of a model beside it, that the native executor lacks, in words; None: it
    runs the model.

    dtype: by name; ranks: that the model is split over
    """
    found = (_missing(one, dtype, ranks) for one in (config, *config.models_beside))
    return next((thing for thing in found if thing is not None), None)


def _missing(config: ModelConfig, dtype: str, ranks: int) -> str | None:
    """Return the first thing of one model that the native executor lacks; None: it runs the model."""
    compiled = kernels.load()
    if config.loading:
        return "modules of transformers"
    if dtype not in DTYPES:
        return f"the dtype {dtype}"
    unknown = {type(one).__name__ for one in config.program().operations if type(one) not in (*COMPILE, Add, Embed)}
    things = {
        f"compiled kernels ({kernels.status()})": compiled is not None,
        "products of this dtype on this CPU": compiled is None or compiled.has_products(DTYPES[dtype]),
        "heads of this size": 1 <= config.head_dim <= kernels.MAX_HEAD_DIM,
        "a scale of attention": config.scale > 0,
        f"the operation {', '.join(sorted(unknown))}": not unknown,
        f"{ranks} ranks": ranks == 1,
        "a model that is more than its program": config.is_program,
        "rows of whole words": dtype != "bfloat16" or all(inputs % 2 == 0 for inputs in _inputs(config.program())),
    }
    return next((thing for thing, is_there in things.items() if not is_there), None)


def _inputs(program: Program) -> Iterator[int]:
    """Yield how many numbers of a row each product reads. What a gate leaves is filled up."""
    filled = {one.out for one in program.operations if isinstance(one, Linear) and one.gated}
    for one in program.operations:
        if isinstance(one, Linear) and one.source not in filled:
            yield one.weight.inputs[0]
        elif isinstance(one, Experts):
            yield one.router.inputs[0]


def load_native(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str,
    seed: int = 0,
    keep: str = "dtype",
) -> NativeModel:
    """Return the model of a checkpoint.

    dtype   "float32" or "bfloat16", of all weights that are not wide
    seed    of random weights
    keep    which matrices stay as the checkpoint stores them: see `kept_as_stored`

    Raises OutOfMemoryError before anything is read, and CheckpointError with the names of tensors that are missing,
    unexpected or misshapen.
    """
    compiled = kernels.load()
    assert compiled is not None
    program, number = config.program(), DTYPES[dtype]
    if keep == "dtype" or checkpoint.gguf is None:
        # By its numbers alone, before what is far too large is looked at.
        size = replace(config, lm_head=False).num_parameters * number.itemsize
        check_fits(size, checkpoint.name, "use a smaller model, or more memory")
    offsets = {name: weight.offset for weight in program.weights for name, _ in weight.parts}
    source = open_source(checkpoint, config, shapes_of(program.weights), seed, offsets)
    config = settled_lm_head(config, source)
    program = config.program()
    check_tensors(checkpoint, shapes_of(program.weights), source)
    stored = kept_as_stored(keep, program, source, number, compiled, invariant=config.invariant)
    check_memory(checkpoint, program, number, stored)
    model = NativeModel(config, program, number, compiled)
    fill(model, source, stored)
    return model


def fill(model: NativeModel, source: StoredSource, stored: Mapping[Weight, int] = MappingProxyType({})) -> None:
    """Read the weights of a model. stored: the matrices that stay as they are stored, as of `kept_as_stored`"""
    _Loader(model, source, stored).load()


def shapes_of(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their names."""
    return {name: shape for weight in weights for name, shape in weight.shapes.items()}


def check_memory(
    checkpoint: Checkpoint, program: Program, dtype: np.dtype, stored: Mapping[Weight, int] = MappingProxyType({})
) -> None:
    """Raise OutOfMemoryError if the weights of a program do not fit. stored: as of `fill`"""
    sizes = [stored.get(weight, weight.size * _itemsize(weight, dtype)) for weight in program.weights]
    remedy = "use a smaller model, or more memory"
    if dtype.itemsize == 4:
        remedy = f"use bfloat16 ({sum(sizes) / 2e9:.1f} GB), or a smaller model"
    # While a matrix is packed it is there twice.
    check_fits(sum(sizes) + max(sizes), f"{checkpoint.name} in {dtype.name}", remedy)


def kept_as_stored(
    wish: str,
    program: Program,
    source: StoredSource,
    dtype: np.dtype,
    compiled: kernels.Kernels,
    *,
    invariant: bool = False,
) -> dict[Weight, int]:
    """Return which matrices stay as they are stored, and their bytes.

    wish       "dtype": none; "auto" and "file": all that there is code for; "fast": the same, but none in bfloat16 if
               memory is plenty
    invariant  whether few rows are multiplied as many are, for which the dtype is faster: "auto" and "fast" keep none
               as stored if memory is plenty
    """
    if wish == "dtype":
        return {}
    matrices = [one.weight for one in program.operations if isinstance(one, Linear)]
    tables = dict.fromkeys([program.embed.table, *([] if program.head is None else [program.head])])
    sizes = {weight: size for weight in (*tables, *matrices) if (size := _stored_size(weight, source, dtype, compiled))}
    if (wish == "fast" and dtype == BFLOAT16) or (wish != "file" and invariant):
        total = sum(weight.size * _itemsize(weight, dtype) for weight in program.weights)
        if total <= COMFORTABLE * available_memory():
            return {}
    if wish == "file" and not sizes:
        message = "weights are to stay as the checkpoint stores them, and there is no code for its types"
        raise InputError(message, field="weights", remedy="leave --weights out")
    return sizes


def _itemsize(weight: Weight, dtype: np.dtype) -> int:
    return 4 if weight.wide else dtype.itemsize


def _stored_size(weight: Weight, source: StoredSource, dtype: np.dtype, compiled: kernels.Kernels) -> int:
    """Return the bytes of a matrix as it is stored; 0 where it does not stay so."""
    total, (inputs,) = 0, weight.inputs
    for name, rows in weight.parts:
        kind, row = source.stored_type(name)
        if not compiled.has_blocks(kind, inputs) or row >= inputs * dtype.itemsize:
            return 0
        total += rows * row
    return int(total * PACKED)


def load_worker(checkpoint: Checkpoint, config: ModelConfig, options: ModelSpec, *, dtype: str) -> Loaded:
    """Return the model of a checkpoint, ready to run; the errors are those of `LLM`."""
    settle_threads(options.threads)
    model = load_native(checkpoint, config, dtype=dtype, seed=options.seed, keep=options.weights)
    adapters = {
        name: read_adapter(folder, model.config, name=name) for name, folder in (options.adapters or {}).items()
    }
    worker = NativeWorker(model, adapters, parts=native_parts(model, checkpoint, options.seed))
    passes = "; ".join(filter(None, (worker.passes, model.stored_as)))
    return Loaded(worker, model.config, model, "native", passes)


def settle_threads(threads: int | None) -> None:
    """Set the number of threads, if one is given. What a program has set by PyTorch counts too."""
    if "torch" in sys.modules:
        from ...model.device import settle_threads as with_torch

        with_torch(threads)
    elif threads is not None:
        kernels.set_threads(threads)


class _Loader:
    """Fills the memory of a model."""

    def __init__(self, model: NativeModel, source: StoredSource, stored: Mapping[Weight, int]):
        self._model, self._source, self._stored = model, source, stored
        self._pool, self._types = PanelPool(), set[str]()

    def load(self) -> None:
        model, program = self._model, self._model.program
        memory = model.memory
        for weight in dict.fromkeys([program.embed.table, *([] if program.head is None else [program.head])]):
            memory.tables[weight] = self._table(weight)
        for operation in program.operations:
            if isinstance(operation, Linear):
                memory.matrices[operation.weight] = self._matrix(operation)
            elif isinstance(operation, Experts):
                for weight, gated in ((operation.gate_up, True), (operation.down, False)):
                    stack = self._array(weight).reshape(operation.experts, -1, *weight.inputs)
                    memory.stacks[weight] = model.kernels.pack_experts(stack, self._pool, gated=gated)
                memory.matrices[operation.router] = self._words(operation.router, operation.router.inputs[0])
        for weight in program.weights:
            if all(weight not in kind for kind in (memory.matrices, memory.stacks, memory.tables)):
                memory.arrays[weight] = self._array(weight)
        if self._types:
            model.stored_as = f"weights lie in memory as stored ({', '.join(sorted(self._types))})"

    def _blocks(self, weight: Weight, *, gated: bool = False) -> Blocks | None:
        """Return a matrix as it is stored; None: it does not stay so, or a panel would have columns of two types."""
        if weight not in self._stored or (gated and weight.rows % (2 * kernels.LANES)):
            return None
        parts = [rows for name, _ in weight.parts if (rows := self._source.stored(name)) is not None]
        types = {part.type for part in parts}
        if gated:
            starts = range(0, weight.rows // 2, kernels.LANES)
            whole = [(half, at) for at in starts for half in parts]
            parts = [kernels.StoredRows(half.type, half.rows[at : at + kernels.LANES]) for half, at in whole]
        blocks = self._model.kernels.pack_blocks(parts, weight.inputs[0], self._pool)
        if blocks is not None:
            self._types |= types
            if self._model.config.invariant:
                blocks = self._model.kernels.in_one_form(blocks)
        return blocks

    def _table(self, weight: Weight) -> Table:
        """Return the embedding, or an LM head that is not tied to it.

        A head is packed at once if the numbers are not in the mapped file as they are wanted: they would be in memory
        twice.
        """
        blocks = self._blocks(weight)
        if blocks is not None:
            return blocks
        values = self._source.read(weight.parts[0][0])
        if weight == self._model.program.head and not self._is_wanted(values, self._model.dtype):
            return PackedTable(self._words(weight, weight.inputs[0]))
        return self._array(weight)

    @staticmethod
    def _is_wanted(values: np.ndarray, dtype: np.dtype) -> bool:
        """Return whether numbers are as the kernels read them."""
        return values.dtype == dtype and values.flags.c_contiguous and values.ctypes.data % 4 == 0

    def _matrix(self, linear: Linear) -> np.ndarray | Blocks:
        """Return the matrix of a linear."""
        blocks = self._blocks(linear.weight, gated=linear.gated)
        if blocks is not None:
            return blocks
        return self._words(linear.weight, self._model.widths[linear.source], gated=linear.gated)

    def _words(self, weight: Weight, inputs: int, *, gated: bool = False) -> np.ndarray:
        """Return a matrix packed, with zeros up to so many inputs."""
        parts = [self._source.read(name) for name, _ in weight.parts]
        if fill := inputs - weight.inputs[0]:
            parts = [np.pad(part, ((0, 0), (0, fill))) for part in parts]
        if len({part.dtype for part in parts}) > 1 or parts[0].dtype not in (np.float32, np.float16, BFLOAT16):
            parts = [part.astype(np.float32) for part in parts]
        return self._model.kernels.pack_words(parts, self._pool, dtype=self._model.dtype, gated=gated)

    def _array(self, weight: Weight) -> np.ndarray:
        """Return a weight as an array: that of the mapped file where it is one there, in the dtype."""
        dtype = np.dtype(np.float32) if weight.wide else self._model.dtype
        if len(weight.parts) == 1 and not weight.offset:
            values = self._source.read(weight.parts[0][0])
            if self._is_wanted(values, dtype):
                return values
        out = np.empty(weight.shape, dtype)
        at = 0
        for name, rows in weight.parts:
            self._source.read_into(name, out[at : at + rows])
            at += rows
        if weight.offset:
            out += dtype.type(weight.offset)
        return out
