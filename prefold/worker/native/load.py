"""Load a checkpoint's weights into a NativeModel.

Names, shapes and memory are checked first. Then each tensor is packed directly from the mapped file, without a copy if
the file stores the values in the order that packing reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ... import kernels
from ...checkpoint import Checkpoint
from ...checkpoint.mapped import Extent
from ...errors import InputError
from ...kernels import BFLOAT16, Arena, Blocks, PanelPool
from ...model.adapters import read_adapter
from ...model.checks import check_tensors, settled_lm_head
from ...model.config import ModelConfig
from ...model.machine import available_memory, check_fits, computes_bf16
from ...model.program import Add, AttendLatent, Embed, Experts, Linear, Operation, Program, Weight
from ...model.shard import OneRank, Shard
from ...model.sources import StoredSource, open_source
from ...spec.model import ModelSpec
from ...text import Tokenizer
from ..loaded import Loaded
from ..parts import native_parts
from .int8 import Probe, probe_tokens
from .model import LatentMatrices, NativeModel, PackedTable, PartLoader, Table, in_turn
from .program import COMPILE
from .worker import NativeWorker

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
# There is plenty of memory if all weights, in the dtype, need at most this share of free memory. Then speed decides.
COMFORTABLE = 0.5
# A mixture is sparse if it has at least this many times as many experts as a row uses: few rows share an expert.
SPARSE = 8
# Ratio of the bytes of a packed matrix to its bytes in the file: scales of six bits get a byte each.
PACKED = 1.03
EXPERT_ACTIVATIONS = ("silu", "gelu_tanh", "relu2", "clamped")  # the activations that have kernels
# Layerwise execution: the maximum number of rows at once, the share of free memory for their hidden states, and the
# bytes of a row in plans. Hidden states never go to disk: the hidden states of 6 * hidden rows are half as
# large as a layer with 12 * hidden**2 weights. So fewer rows and more reads of the weights always move fewer bytes.
MOST_ROWS, STATES_SHARE, PLAN_BYTES = 1 << 16, 0.4, 256
REMEDY = "use a smaller model, or more memory"


def missing(config: ModelConfig, dtype: str, *, ranks: int = 1) -> str | None:
    """Name the first thing that the native executor lacks for a model or for the models beside it.

    Return None if the executor can run the model.

    Args:
        dtype: Name of the dtype.
        ranks: Number of ranks of the model.
    """
    found = (_missing(one, dtype, ranks) for one in (config, *config.models_beside))
    return next((thing for thing in found if thing is not None), None)


def _missing(config: ModelConfig, dtype: str, ranks: int) -> str | None:
    """Name the first thing that the native executor lacks for one model; None if it can run the model."""
    compiled = kernels.load()
    if config.loading:
        return "modules of transformers"
    if dtype not in DTYPES:
        return f"the dtype {dtype}"
    programs = [Shard.of(config, rank, ranks).program(config) for rank in range(ranks)]
    unknown = {type(one).__name__ for one in programs[0].operations if type(one) not in (*COMPILE, Add, Embed)}
    things = {
        f"compiled kernels ({kernels.status()})": compiled is not None,
        "products of this dtype on this CPU": compiled is None or compiled.has_products(DTYPES[dtype]),
        "heads of this size": all(
            config.kv_sizes(plane).dim <= kernels.MAX_HEAD_DIM for plane in range(len(config.planes))
        ),
        "a scale of attention": config.scale > 0,
        f"the operation {', '.join(sorted(unknown))}": not unknown,
        "experts of this activation": all(
            one.activation in EXPERT_ACTIVATIONS for one in programs[0].operations if isinstance(one, Experts)
        ),
        "rows of whole words": dtype != "bfloat16" or all(map(_has_whole_words, programs)),
    }
    return next((thing for thing, is_there in things.items() if not is_there), None)


def _has_whole_words(program: Program) -> bool:
    """Return True if each product reads an even number of values per row. Outputs of gated linears are padded."""
    filled = {one.out for one in program.operations if isinstance(one, Linear) and one.gated}
    experts = [one for one in program.operations if isinstance(one, Experts)]
    products = [weight for one in experts for weight in (one.router, one.gate_up)]
    products += [one.weight for one in program.operations if isinstance(one, Linear) and one.source not in filled]
    latent = [one for one in program.operations if isinstance(one, AttendLatent)]
    return all(weight.inputs[0] % 2 == 0 for weight in products) and all(
        size % 2 == 0 for one in latent for size in (one.rank, one.dim + one.tail)
    )


def load_native(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str,
    seed: int = 0,
    keep: str = "dtype",
    ranks: OneRank[np.ndarray] | None = None,
    int8: np.ndarray | None = None,
    layerwise: str = "off",
) -> NativeModel:
    """Load the model of a checkpoint.

    Args:
        dtype: "float32" or "bfloat16", for all weights that are not wide (always float32).
        seed: Seed of random weights.
        keep: Which matrices stay as the checkpoint stores them; see `kept_as_stored`.
        ranks: This rank's view of a split model; only its part is read. None: this process has the whole model.
        int8: Tokens of a probe text. Linears of a layer run in int8 if that changes the text's results little. None:
            no int8.
        layerwise: As `wish` of `reads_by_layer`. If weights are read layer by layer, this function reads none.

    Raises:
        OutOfMemoryError: The weights do not fit; raised before anything is read.
        CheckpointError: Tensors are missing, unexpected or have a wrong shape. It names them.
    """
    compiled = kernels.load()
    assert compiled is not None
    program, number = config.program(), DTYPES[dtype]
    may_read = reads_by_layer(layerwise, checkpoint, config, 1 if ranks is None else ranks.size, int8 is not None)
    if not may_read and (keep == "dtype" or checkpoint.format == "dummy"):
        # Check the config alone first: the file of a model that is far too large is not even opened.
        size = replace(config, lm_head=False).num_parameters * number.itemsize
        check_fits(size, checkpoint.name, REMEDY)
    offsets = {name: weight.offset for weight in program.weights for name, _ in weight.parts}
    source = open_source(checkpoint, config, shapes_of(program.weights), seed, offsets)
    config = settled_lm_head(config, source)
    whole = config.program()
    check_tensors(checkpoint, shapes_of(whole.weights), source)
    model = NativeModel(config, number, compiled, ranks)
    stored = kept_as_stored(keep if int8 is None else "file", model, source)
    if keep == "file" and not stored:
        message = "weights is 'file', but the kernels support none of the checkpoint's types"
        raise InputError(message, field="weights", remedy="leave --weights out")
    sizes = sizes_of(model.program.weights, number, stored)
    if layerwise == "on" or (may_read and needed_for(sizes) > available_memory()):
        loader = Loader(model, source, stored, pool=Arena())
        loader.check_memory(checkpoint, sizes)
        model.loader = loader
        return model
    # The ranks share one memory, so rank 0 checks the whole model.
    check_memory(checkpoint, model.program if model.ranks.rank else whole, number, stored)
    fill(model, source, stored, None if int8 is None else Probe(model, int8))
    return model


def fill(
    model: NativeModel,
    source: StoredSource,
    stored: Mapping[Weight, int] = MappingProxyType({}),
    probe: Probe | None = None,
) -> None:
    """Read the weights of a model.

    Args:
        stored: The matrices that stay as stored, from `kept_as_stored`.
        probe: Decides which layers run in int8 (None: no layer).
    """
    Loader(model, source, stored, probe).load()


def shapes_of(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name."""
    return {name: shape for weight in weights for name, shape in weight.shapes.items()}


def check_memory(
    checkpoint: Checkpoint, program: Program, dtype: np.dtype, stored: Mapping[Weight, int] = MappingProxyType({})
) -> None:
    """Raise OutOfMemoryError if the weights of a program do not fit.

    Args:
        stored: As in `fill`.
    """
    sizes, remedy = sizes_of(program.weights, dtype, stored), REMEDY
    if dtype.itemsize == 4:
        remedy = f"use bfloat16 ({sum(sizes.values()) / 2e9:.1f} GB), or a smaller model"
    check_fits(needed_for(sizes), f"{checkpoint.name} in {dtype.name}", remedy)


def sizes_of(weights: Iterable[Weight], dtype: np.dtype, stored: Mapping[Weight, int]) -> dict[Weight, int]:
    """Return the bytes in memory of each weight.

    Args:
        stored: As in `fill`.
    """
    return {weight: stored.get(weight, weight.size * _itemsize(weight, dtype)) for weight in weights}


def needed_for(sizes: Mapping[Weight, int]) -> int:
    """Return the bytes needed to load weights of these sizes. While a matrix is packed, it is in memory twice."""
    return sum(sizes.values()) + max(sizes.values(), default=0)


def reads_by_layer(wish: str, checkpoint: Checkpoint, config: ModelConfig, ranks: int, int8: bool) -> bool:
    """Return True if the weights may be read layer by layer, once for many rows, instead of staying in memory.

    Raise InputError if `wish` is "on" and the model cannot run layer by layer.

    Args:
        wish: "on", "off" or "auto". With "auto", return True if the weights may not fit in memory. Random weights have
            no file, so they always stay in memory.
    """
    reason = config.resident
    if ranks > 1:
        reason = "the model is split over ranks"
    if int8:
        reason = "int8 needs all weights in memory, to find the layers that tolerate it"
    if wish == "on" and reason is not None:
        raise InputError(f"layerwise is on, and {reason}", field="layerwise", remedy="leave --layerwise out")
    return wish == "on" or (wish == "auto" and reason is None and checkpoint.format != "dummy")


def kept_as_stored(wish: str, model: NativeModel, source: StoredSource) -> dict[Weight, int]:
    """Return the matrices that stay as they are stored, and their bytes.

    Args:
        wish: "dtype": none. "file": every matrix whose type has kernels. "auto" and "fast": the same, with exceptions.

    A split model keeps none. If there is plenty of memory, "auto" and "fast" also keep none if the dtype is faster:

    - a batch-invariant model, because it multiplies few rows like many
    - "auto" in bfloat16 on a CPU without bfloat16 multiplication, except for the experts of a sparse mixture
    - "fast" in bfloat16

    Time of a step relative to weights in the dtype, measured with SmolLM2-135M as Q4_1 (docs/cpus.md):

    - float32 (AVX2, AVX-512): 0.4 to 0.5 with one sequence, 0.6 to 0.8 with two to four, 0.6 to 1.2 with eight, 1.5
      with sixteen, 1.05 with 64, 1.0 for prompts. The slower the memory, the smaller the ratio.
    - bfloat16 with AMX: 0.45 with one sequence, 1.06 with eight, 1.14 with 64, 1.10 for prompts.
    - bfloat16 with AVX-512: 0.7 to 1.4 with one sequence, 1.1 to 1.4 with eight.
    - bfloat16 with AVX2: 0.45 with one sequence, 0.75 with two, 2.7 to 3.5 with four to sixteen, 1.3 with 64, 1.04 for
      prompts.

    Relative time of experts, with 3 of 96 experts (Qwen3.5-35B-A3B uses 8 of 256) of 2,048 by 512, as Q4_K and Q6_K, on
    AVX2 with two threads of a shared machine:

    - bfloat16: 0.5 to 0.9 with 1 to 16 rows, 1.0 with 32, 1.3 with 64, 2.0 to 2.6 with 128 and 256, 1.6 with 1,024.
    - float32: 0.2 to 0.7 with 1 to 32 rows, 0.8 with 64, 1.0 to 1.2 with more.
    """
    program, dtype, compiled, invariant = model.program, model.dtype, model.kernels, model.config.invariant
    is_split = model.ranks.size > 1
    if is_split and wish == "file":
        message = "weights is 'file', but a model on several ranks cannot use weights as the checkpoint stores them"
        raise InputError(message, field="weights", remedy="leave --weights out")
    if is_split or wish == "dtype":
        return {}
    matrices = dict.fromkeys(program.tables, False)
    matrices |= {one.weight: one.gated for one in program.operations if isinstance(one, Linear)}
    for one in program.operations:
        matrices |= {one.gate_up: True, one.down: False} if isinstance(one, Experts) else {}
    of_files = ((weight, _stored_size(weight, gated, source, dtype, compiled)) for weight, gated in matrices.items())
    sizes = {weight: size for weight, size in of_files if size}
    is_slower = dtype == BFLOAT16 and (wish == "fast" or not computes_bf16())
    if wish != "file" and (is_slower or invariant):
        total = sum(weight.size * _itemsize(weight, dtype) for weight in program.weights)
        if total <= COMFORTABLE * available_memory():
            sparse = _sparse_stacks(program) if wish == "auto" and not invariant else ()
            return {weight: sizes[weight] for weight in sparse if weight in sizes}
    return sizes


def _sparse_stacks(program: Program) -> list[Weight]:
    """Return the expert matrices of sparse mixtures."""
    mixtures = [one for one in program.operations if isinstance(one, Experts) and one.experts >= SPARSE * one.chosen]
    return [weight for one in mixtures for weight in (one.gate_up, one.down)]


def _itemsize(weight: Weight, dtype: np.dtype) -> int:
    return 4 if weight.wide else dtype.itemsize


def _stored_size(weight: Weight, gated: bool, source: StoredSource, dtype: np.dtype, compiled: kernels.Kernels) -> int:
    """Return the bytes of a matrix kept as stored, or 0 if it cannot be.

    It cannot if a type in it has no kernel, if it would not be smaller, or if gate and up, which share panels, have two
    types.
    """
    (inputs,), parts = weight.inputs, [(rows, *source.stored_type(name)) for name, rows in weight.parts]
    kinds = {kind for _, kind, _ in parts}
    if (gated and len(kinds) > 1) or not all(compiled.has_blocks(kind, inputs) for kind in kinds):
        return 0
    size = int(sum(rows * row for rows, _, row in parts) * PACKED)
    return size if size < weight.size * _itemsize(weight, dtype) else 0


def window_rows(config: ModelConfig, itemsize: int, needed: int) -> int:
    """Return the number of rows that run through a model layer by layer at once.

    Their hidden states use a share of the free memory. More rows than MOST_ROWS gain nothing: reading the weights then
    needs much less time than computing with them.

    Args:
        itemsize: Bytes per number.
        needed: Bytes of the largest part of the weights.
    """
    row_bytes = config.hidden * itemsize + PLAN_BYTES
    return max(1, min(MOST_ROWS, int((available_memory() - needed) * STATES_SHARE) // row_bytes))


def window_extents(source: StoredSource, config: ModelConfig) -> list[Extent]:
    """Return the file extents that one window with logits reads, layer by layer. Valid while `source` lives."""
    program = config.program()
    parts: list[Iterable[Weight]] = [program.embed.weights, program.score_weights]
    parts += [[weight for one in operations for weight in one.weights] for operations in (*program.layers, program.end)]
    parts += [[] if program.head is None or program.head.parts[0][0] not in source.shapes else [program.head]]
    return [source.extent(name) for part in parts for weight in dict.fromkeys(part) for name, _ in weight.parts]


def load_worker(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: ModelSpec,
    tokenizer: Tokenizer | None,
    *,
    dtype: str,
    ranks: OneRank[np.ndarray] | None = None,
) -> Loaded:
    """Load the model of a checkpoint. The errors are as documented for `LLM`.

    Args:
        ranks: This rank's view of a split model; None: this process has the whole model.
    """
    settle_threads(options.threads)
    int8 = probe_tokens(tokenizer, config) if options.arithmetic == "int8" else None
    model = load_native(
        checkpoint, config, dtype=dtype, seed=options.seed, keep=options.weights, ranks=ranks, int8=int8,
        layerwise=options.layerwise,
    )  # fmt: skip
    shard = model.shard if model.ranks.size > 1 else None
    adapters = {
        name: read_adapter(folder, model.config, name=name, shard=shard)
        for name, folder in (options.adapters or {}).items()
    }
    worker = NativeWorker(model, adapters, parts=native_parts(model, checkpoint, options.seed))
    passes = "; ".join(filter(None, (worker.passes, model.stored_as)))
    return Loaded(worker, model.config, model, "native", passes)


def settle_threads(threads: int | None) -> None:
    """Set the number of threads if one is given. If PyTorch is loaded, its thread settings count too."""
    if "torch" in sys.modules:
        from ..torch.device import settle_threads as with_torch

        with_torch(threads)
    elif threads is not None:
        kernels.set_threads(threads)


class Loader(PartLoader):
    """The loader of a model's memory: all weights at once, or one part of the weights at a time.

    Args:
        stored, probe: As in `fill`.
        pool: An Arena to load one part at a time, or None.
    """

    def __init__(
        self,
        model: NativeModel,
        source: StoredSource,
        stored: Mapping[Weight, int],
        probe: Probe | None = None,
        pool: PanelPool | None = None,
    ):
        self._model, self._source, self._stored, self._probe = model, source, stored, probe
        self._pool, self._types = pool or PanelPool(), set[str]()
        self._split = model.shard.split(model.config)
        self.bytes_read = self.most_bytes = self.needed = self.total = 0

    def load(self) -> None:
        """Load all weights."""
        model, program = self._model, self._model.program
        words = []
        for weight in program.tables:
            model.memory.tables[weight] = self._table(weight)
        self._load(model.program.embed.weights)
        self._load_operations(program.begin)
        for number, layer in enumerate(program.layers):
            self._load_layer(number, layer)
        self._load_operations(program.end)
        self._load(program.weights)
        if self._probe is not None:
            words.append(self._probe.finish().words(str(model.dtype)))
        if self._types:
            words.append(f"weights lie in memory as stored ({', '.join(sorted(self._types))})")
        model.stored_as = "; ".join(words)

    # -------------------------------------------------------------------------------------------- one part at a time

    def load_embedding(self) -> None:
        embed = self._model.program.embed
        self._empty()
        self._model.memory.tables[embed.table] = self._table(embed.table)
        self._load(embed.weights)
        self._note()

    def load_layers(self, first: int, stop: int) -> None:
        program = self._model.program
        self._empty()
        for layer in program.layers[first:stop]:
            self._load_operations(layer)
        if stop == len(program.layers):
            self._load_operations(program.end)
        self._note()

    def load_heads(self, *, lm_head: bool) -> None:
        program = self._model.program
        self._empty()
        if lm_head and program.head is not None:
            self._model.memory.tables[program.head] = self._table(program.head)
            self._load(program.head_vectors)
        self._load(program.score_weights)
        self._note()

    def read_ahead(self, number: int) -> None:
        program = self._model.program
        weights = [] if program.head is None else [program.head]
        if number < len(program.layers):
            weights = [weight for operation in program.layers[number] for weight in operation.weights]
        for name in dict.fromkeys(name for weight in weights for name, _ in weight.parts):
            self._source.extent(name).read_ahead()

    def check_memory(self, checkpoint: Checkpoint, sizes: Mapping[Weight, int]) -> None:
        """Set `needed` and `total`. Raise OutOfMemoryError if the largest part does not fit.

        Args:
            sizes: Bytes by weight.
        """
        program = self._model.program
        reading, ends = self._model.config.reading_layer, {weight for one in program.end for weight in one.weights}
        layers = [*([layer] for layer in program.layers[:reading]), program.layers[reading:]]
        parts = [{weight for layer in some for one in layer for weight in one.weights} | ends for some in layers]
        parts += [set(program.embed.weights), set() if program.head is None else {program.head}]
        self.total = needed_for(sizes)
        self.needed = max(needed_for({weight: sizes[weight] for weight in part}) for part in parts)
        check_fits(self.needed, f"the largest part of {checkpoint.name}", REMEDY)

    def _empty(self) -> None:
        self._model.drop_weights()
        assert isinstance(self._pool, Arena)
        self._pool.rewind()

    def _note(self) -> None:
        self.most_bytes = max(self.most_bytes, self._model.memory.num_bytes)

    # ------------------------------------------------------------------------------------------------------- weights

    def _read(self, weight: Weight) -> list[np.ndarray]:
        """Return this rank's part of each tensor of a weight."""
        parts = zip(weight.parts, self._split.of(weight), strict=True)
        return [self._source.read(name, part) for (name, _), part in parts]

    def count(self, weight: Weight) -> None:
        """Add the bytes of a weight to `bytes_read`."""
        self.bytes_read += sum(self._source.extent(name).size for name, _ in weight.parts)

    def _load_operations(self, operations: Iterable[Operation]) -> None:
        memory = self._model.memory
        for operation in operations:
            if isinstance(operation, Linear):
                memory.matrices[operation.weight] = self._matrix(operation)
            elif isinstance(operation, AttendLatent):
                memory.latents[operation.up] = self._latent(operation)
            elif isinstance(operation, Experts):
                for weight, gated, filled in (
                    (operation.gate_up, operation.gated, False),
                    (operation.down, False, True),
                ):
                    memory.stacks[weight] = self._stack(weight, operation.experts, gated=gated, filled=filled)
                memory.matrices[operation.router] = self._words(operation.router, operation.router.inputs[0])
            self._load(operation.weights)

    def _latent(self, attend: AttendLatent) -> LatentMatrices:
        """Return the matrices for attention over latents."""
        heads, dim, tail, rank = attend.heads, attend.dim, attend.tail, attend.rank
        up = self._array(attend.up).reshape(heads, -1, rank)
        absorb = np.zeros((heads, rank + tail, dim + tail), up.dtype)
        absorb[:, :rank, :dim] = up[:, :dim].swapaxes(1, 2)
        absorb[:, rank:, dim:] = np.eye(tail)

        def packed(matrices: np.ndarray) -> np.ndarray:
            pack, dtype = self._model.kernels.pack_words, self._model.dtype
            return np.stack([pack([np.ascontiguousarray(one)], PanelPool(piece=0), dtype=dtype) for one in matrices])

        return LatentMatrices(packed(up), packed(absorb), packed(up[:, dim:]))

    def _load(self, weights: Iterable[Weight]) -> None:
        """Load the weights that are not in memory yet."""
        memory = self._model.memory
        for weight in weights:
            kinds = (memory.matrices, memory.stacks, memory.latents, memory.tables, memory.arrays)
            if all(weight not in kind for kind in kinds):
                memory.arrays[weight] = self._array(weight)

    def _load_layer(self, number: int, layer: Sequence[Operation]) -> None:
        """Load the operations of a layer, and let the probe decide which of its linears run in int8."""
        if self._probe is None:
            self._load_operations(layer)
            return
        pool, self._pool = self._pool, PanelPool(piece=0)  # most matrices packed in the dtype are freed again soon
        self._load_operations(layer)
        self._pool = pool
        linears = [operation for operation in layer if isinstance(operation, Linear)]
        self._probe.layer(number, {linear.weight: self._in_int8(linear, self._probe) for linear in linears})

    def _in_int8(self, linear: Linear, probe: Probe) -> Blocks:
        """Return the int8 matrix of a linear whose matrix is in memory."""
        compiled, held, weight = self._model.kernels, self._model.memory.matrices[linear.weight], linear.weight
        types = {self._source.stored_type(name)[0] for name, _ in weight.parts}
        whole = {kernels.BLOCK_TYPES[name] for name in kernels.WHOLE_TYPES}
        if isinstance(held, Blocks) and held.types <= whole:
            return compiled.in_int8(held)
        if types <= set(kernels.WHOLE_TYPES):
            probe.report.num_requantised += 1
        values = self._array(weight)
        if linear.gated:
            values = in_turn(values)
        fill = self._model.widths[linear.source] - weight.inputs[0]
        return compiled.pack_int8(np.pad(values, ((0, 0), (0, fill))) if fill else values, self._pool)

    def _blocks(self, weight: Weight, *, gated: bool = False, experts: int = 1) -> Blocks | None:
        """Return a matrix, or all experts' matrices, as stored. None: the weight does not stay as stored."""
        if weight not in self._stored:
            return None
        compiled = self._model.kernels
        parts = [rows for name, _ in weight.parts if (rows := self._source.stored(name)) is not None]
        blocks = compiled.pack_blocks(parts, weight.inputs[0], self._pool, gated=gated, experts=experts)
        self.count(weight)
        self._types |= {part.type for part in parts}
        return compiled.in_one_form(blocks) if self._model.config.invariant else blocks

    def _stack(self, weight: Weight, experts: int, *, gated: bool, filled: bool) -> np.ndarray | Blocks:
        """Return the matrices of all experts.

        Args:
            gated, filled: As in `pack_experts`.
        """
        blocks = self._blocks(weight, gated=gated, experts=experts)
        if blocks is not None:
            return blocks
        stack = self._array(weight).reshape(experts, -1, *weight.inputs)
        return self._model.kernels.pack_experts(stack, self._pool, gated=gated, filled=filled)

    def _table(self, weight: Weight) -> Table:
        """Return the embedding, or an LM head that is not tied to it.

        A head is packed now unless the mapped file has it in the right form: packing it later would need the memory of
        both forms.
        """
        blocks = self._blocks(weight)
        if blocks is not None:
            return blocks
        (values,) = self._read(weight)
        if weight == self._model.program.head and not self._is_wanted(values, self._model.dtype):
            return PackedTable(self._words(weight, weight.inputs[0]))
        return self._array(weight)

    @staticmethod
    def _is_wanted(values: np.ndarray, dtype: np.dtype) -> bool:
        """Return True if the kernels can read the array directly."""
        return values.dtype == dtype and values.flags.c_contiguous and values.ctypes.data % 4 == 0

    def _matrix(self, linear: Linear) -> np.ndarray | Blocks:
        """Return the matrix of a linear, in the form of the kernels."""
        blocks = self._blocks(linear.weight, gated=linear.gated)
        if blocks is not None:
            return blocks
        return self._words(linear.weight, self._model.widths[linear.source], gated=linear.gated)

    def _words(self, weight: Weight, inputs: int, *, gated: bool = False) -> np.ndarray:
        """Return a packed matrix, padded with zeros to `inputs` inputs."""
        self.count(weight)
        parts = self._read(weight)
        if fill := inputs - weight.inputs[0]:
            parts = [np.pad(part, ((0, 0), (0, fill))) for part in parts]
        if len({part.dtype for part in parts}) > 1 or parts[0].dtype not in (np.float32, np.float16, BFLOAT16):
            parts = [part.astype(np.float32) for part in parts]
        return self._model.kernels.pack_words(parts, self._pool, dtype=self._model.dtype, gated=gated)

    def _array(self, weight: Weight) -> np.ndarray:
        """Return a weight as an array in its dtype: a view of the mapped file if possible, else a copy."""
        dtype = np.dtype(np.float32) if weight.wide else self._model.dtype
        self.count(weight)
        if len(weight.parts) == 1 and not weight.offset:
            (values,) = self._read(weight)
            if self._is_wanted(values, dtype):
                return values
        out = np.empty(weight.shape, dtype)
        at = 0
        for (name, rows), part in zip(weight.parts, self._split.of(weight), strict=True):
            self._source.read_into(name, out[at : at + rows], part)
            at += rows
        if weight.offset:
            out += dtype.type(weight.offset)
        return out
