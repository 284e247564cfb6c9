"""A model in memory for the native executor: its program, and its weights in the layout of the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_void_p, sizeof
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ... import kernels
from ...errors import InputError, no_lm_head
from ...kernels import COLUMNS, LANES, Blocks, LowRank, ProgramCall, RowLow
from ...model.adapters import AdapterArrays, LinearAdapter
from ...model.config import STILL, ModelConfig
from ...model.program import Linear, Program, Weight
from ...model.rotary import AngleTables
from ...model.shard import OneRank, own_rows
from .arrays import ClassificationHead

LOW_BYTES = sizeof(RowLow)


@dataclass(frozen=True, slots=True)
class PackedTable:
    """An embedding packed in words, shared with a tied LM head.

    Attributes:
        words: int32 [panels, words along hidden, 32].
    """

    words: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def rows(self, ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the given rows of the table, [ids, hidden]."""
        return np.ascontiguousarray(self.words[ids // COLUMNS, :, ids % COLUMNS]).view(dtype)


@dataclass(frozen=True, slots=True)
class LatentMatrices:
    """The packed matrices of an AttendLatent, one per head, as in `LatentCall`: int32 [heads, panels, words, 32]."""

    expand: np.ndarray
    absorb: np.ndarray
    restore: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.expand.nbytes + self.absorb.nbytes + self.restore.nbytes


# An embedding: a plain array of rows, the blocks of the file, or packed words.
Table = np.ndarray | Blocks | PackedTable


@dataclass(slots=True)
class Memory:
    """The weights of a model."""

    # Linears: packed words, or the blocks of the file.
    matrices: dict[Weight, np.ndarray | Blocks] = field(default_factory=dict)
    # Experts: the matrices of all experts, one after the other, in the same two forms.
    stacks: dict[Weight, np.ndarray | Blocks] = field(default_factory=dict)
    latents: dict[Weight, LatentMatrices] = field(default_factory=dict)  # attention over latents (MLA)
    tables: dict[Weight, Table] = field(default_factory=dict)  # the embedding, and an LM head not tied to it
    arrays: dict[Weight, np.ndarray] = field(default_factory=dict)  # the rest, in the model's dtype or float32

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights, including weights in a mapped file."""
        kinds = (self.matrices, self.stacks, self.latents, self.tables, self.arrays)
        every = [one for kind in kinds for one in kind.values()]
        return sum({id(one): one.nbytes for one in every}.values())


class PartLoader(Protocol):
    """A loader of one part of a model's weights at a time, each in place of the last one, as often as needed.

    Attributes:
        bytes_read: Bytes of weights read so far, as stored in files. A weight that is read twice counts twice.
        most_bytes: Peak bytes of weights in memory.
        needed: Bytes that loading the largest part needs.
        total: Bytes that loading all weights needs.
    """

    bytes_read: int
    most_bytes: int
    needed: int
    total: int

    def load_embedding(self) -> None:
        """Replace the weights in memory by the weights that a pass starts with."""

    def load_layers(self, first: int, stop: int) -> None:
        """Replace the weights in memory by layers [first, stop). The last layer includes the end of a pass."""

    def load_heads(self, *, lm_head: bool) -> None:
        """Replace the weights in memory by the classification head, and by the LM head if wanted."""

    def read_ahead(self, number: int) -> None:
        """Ask the system to read a layer from its file in the background. After the last layer: the LM head."""


class NativeModel:
    """A model as the native executor runs it.

    Args:
        ranks: This rank's view of a split model; None: this process has the whole model.

    Attributes:
        config: The config of the whole model.
        local: The config with the sizes of this rank's part of the layers.
        program: The operations that this process computes.
        widths: The width of each buffer of the program. Outputs of gated linears are padded as the kernels need.
        memory: The weights.
        angles: The tables of rotary positions. None: nothing is rotated.
        stored_as: For people: the weights that lie in memory as the checkpoint stores them.
        ranks: This process's view of the ranks.
        shard: This rank's part of the model.
        loader: Loads parts of the weights in turn. None: all weights stay in memory.
        vocab: The range of tokens in this rank's embedding and LM head.
    """

    computed_by = ""

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype,
        compiled: kernels.Kernels,
        ranks: OneRank[np.ndarray] | None = None,
    ):
        self.config, self.dtype, self.kernels = config, dtype, compiled
        self.ranks = ranks or OneRank()
        self.shard = shard = self.ranks.shard(config)
        self.local, self.vocab, self.program = shard.local(config), shard.vocab, shard.program(config)
        self.widths = padded_widths(self.program)
        self.memory = Memory()
        self.loader: PartLoader | None = None
        self.stored_as = ""
        ropes = config.ropes
        if config.rope is None and config.qk_norm:  # the kernel that rotates heads also norms them
            ropes = (STILL,) * len(config.planes)
        self.angles = AngleTables(ropes, config.rotated_dims) if ropes else None
        self._head: np.ndarray | Blocks | None = None
        self._score: ClassificationHead | None = None
        self._columns: dict[tuple[int, ...], np.ndarray] = {}  # packed rows of the LM head, by tokens
        self._logits = np.empty(0, np.float32)

    def drop_weights(self) -> None:
        """Drop all loaded weights, and the memory of past logits."""
        self.memory, self._head, self._logits = Memory(), None, np.empty(0, np.float32)

    @property
    def head_matrix(self) -> np.ndarray | Blocks | None:
        """Return the LM head in the layout of the linear kernels, packed on first use. None: there is no LM head."""
        head = self.program.head
        if self._head is None and head is not None:
            table = self.memory.tables[head]
            if isinstance(table, np.ndarray):
                self._head = self.kernels.pack_words(table, dtype=self.dtype)
            else:
                self._head = table.words if isinstance(table, PackedTable) else table
        return self._head

    @property
    def view(self) -> kernels.RanksView | None:
        """Return the view with which compiled code exchanges data with other ranks. None: the model is not split."""
        return self.ranks.view

    @property
    def tokens(self) -> int:
        """Return the number of tokens in this rank's embedding and LM head."""
        return self.vocab.stop - self.vocab.start

    def compiled_head(self) -> tuple[int | None, int | None, int] | None:
        """Return the words or blocks of the LM head, and its number of tokens, for a kernel that finds the argmax.

        None: there is no LM head, or the argmax of the products is not the argmax of the logits. A bias or scales move
        logits, and a logit cap can make two large logits equal.
        """
        is_plain = self.config.logit_cap is None and not self.program.head_vectors
        if not is_plain or (head := self.head_matrix) is None:
            return None
        words, blocks = kernels.matrix_addresses(head)
        return words, blocks, self.tokens

    def logits(self, hidden: np.ndarray, ids: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Return float32 logits [rows, vocabulary], or [rows, len(ids)] for given ids; hidden [rows, hidden].

        The next call reuses the memory of logits of the whole vocabulary. In a split model, rank 0 gets the logits of
        the whole vocabulary; other ranks get no rows. Raise InputError if the checkpoint has no LM head.
        """
        if not self.config.lm_head or (head := self.head_matrix) is None:
            raise no_lm_head()
        if ids is None:
            own = self.kernels.linear(hidden, head, self.tokens, out=self._room(len(hidden)))
            return self._shaped(self._biased(self.ranks.gather(own, self.config.vocab_size)))
        head, out = self._columns_of(tuple(np.asarray(ids).tolist())), np.empty((len(hidden), len(ids)), np.float32)
        products = self.ranks.sum(self.kernels.linear(hidden, head, len(ids), out=out))
        return self._shaped(self._biased(products, np.asarray(ids)))

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Return the outputs of the classification head, float32 [rows, labels]. Raise InputError if there is none."""
        if not self.program.score:
            raise InputError("this checkpoint has no classification head", field="model", code="no_head")
        if self._score is None:
            arrays = self.memory.arrays
            linears = [
                (arrays[one.weight], None if one.bias is None else arrays[one.bias]) for one in self.program.score
            ]
            self._score = ClassificationHead(linears, self.kernels)
        return self._score(hidden)

    def _room(self, rows: int) -> np.ndarray:
        """Return memory for logits of this rank's tokens.

        It is reused: fresh pages would make the product 10 to 33 % slower.
        """
        size = rows * self.tokens
        if len(self._logits) < size:
            self._logits = np.empty(size, np.float32)
        return self._logits[:size].reshape(rows, self.tokens)

    def _columns_of(self, ids: tuple[int, ...]) -> np.ndarray:
        """Return the LM head's rows of some tokens, packed. Rows of other ranks are zeros.

        The rows of the last 8 read-outs are cached.
        """
        if ids not in self._columns:
            head = self.program.head
            assert head is not None
            places = np.array(ids, np.int64)
            if is_split := self.ranks.size > 1:
                places, is_own = own_rows(places, self.vocab)
            rows = self._table_rows(head, places)
            if is_split:
                rows[~is_own] = 0
            while len(self._columns) >= 8:
                self._columns.pop(next(iter(self._columns)))
            self._columns[ids] = self.kernels.pack_words(rows, dtype=self.dtype)
        return self._columns[ids]

    def _table_rows(self, table: Weight, ids: np.ndarray) -> np.ndarray:
        """Return the rows of a table for `ids` (int64), in the model's dtype, [ids, hidden]."""
        held = self.memory.tables[table]
        if isinstance(held, Blocks):
            return self.kernels.block_rows(held, ids, self.dtype)
        return held.rows(ids, self.dtype) if isinstance(held, PackedTable) else held[ids]

    def _biased(self, products: np.ndarray, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Apply the LM head's scales and bias to its products, in place.

        Args:
            ids: The tokens of the columns.
        """
        bias, scale = self.program.head_bias, self.program.head_scale
        if scale is not None:
            factors = np.float32(self.program.head_factor) * self.memory.arrays[scale][ids].astype(np.float32)
            np.multiply(products, factors, out=products)
        return products if bias is None else np.add(products, self.memory.arrays[bias][ids], out=products)

    def _shaped(self, products: np.ndarray) -> np.ndarray:
        """Scale and cap the products of the LM head, in place: they become logits."""
        scale, cap = self.config.logit_scale, self.config.logit_cap
        if cap is None:
            return products if scale == 1 else np.multiply(products, np.float32(scale), out=products)
        np.multiply(products, np.float32(scale / cap), out=products)
        return np.multiply(np.tanh(products, out=products), np.float32(cap), out=products)


def padded_widths(program: Program) -> dict[str, int]:
    """Return the width of each buffer of a program. Outputs of gated linears are padded with zeros to whole LANES."""
    widths = dict(program.widths)
    for operation in program.operations:
        if isinstance(operation, Linear) and operation.gated:
            widths[operation.out] = max(widths[operation.out], -(-operation.weight.rows // 2 // LANES) * LANES)
    return widths


def in_turn(columns: np.ndarray) -> np.ndarray:
    """Interleave gate and up: LANES entries of gate, then LANES of up, and so on.

    Args:
        columns: An array with one entry per column, first all of gate, then all of up. Each half is padded with zeros
            to whole LANES.
    """
    halves = columns.reshape(2, -1, *columns.shape[1:])
    fill = -halves.shape[1] % LANES
    halves = np.pad(halves, ((0, 0), (0, fill), *([(0, 0)] * (columns.ndim - 1))))
    lanes = halves.reshape(2, -1, LANES, *columns.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(lanes.reshape(-1, *columns.shape[1:]))


class PackedAdapters:
    """LoRA adapters packed for the kernels. An adapter is packed when a row first uses it."""

    def __init__(self, model: NativeModel, adapters: Sequence[AdapterArrays], linears: Sequence[Linear]):
        self._model, self._adapters, self._linears = model, adapters, linears
        self._packed: dict[int, PackedAdapter] = {}

    def adapt(self, call: ProgramCall, numbers: np.ndarray) -> tuple[Any, ...]:
        """Add the rows' adapters to a call. Return the objects that the call refers to by address, to keep them alive.

        Args:
            numbers: int64 [rows], the adapter of each row; -1: none.
        """
        addresses = (c_void_p * len(self._adapters))()
        for number in np.unique(numbers[numbers >= 0]).tolist():
            if (packed := self._packed.get(number)) is None:
                packed = PackedAdapter(self._model, self._adapters[number], self._linears)
                self._packed[number] = packed
            addresses[number] = addressof(packed.table)
            call.most_ranks = max(call.most_ranks, packed.most_ranks)
        room = np.empty(call.rows * (LOW_BYTES + 4 * call.most_ranks), np.uint8)
        call.numbers, call.adapters = numbers.ctypes.data, addressof(addresses)
        call.adapted = room.ctypes.data
        call.low = call.adapted + call.rows * LOW_BYTES
        return numbers, addresses, room


class PackedAdapter:
    """The matrices of one LoRA adapter, packed for the kernels.

    Attributes:
        table: One LowRank for each linear of the program.
        most_ranks: The largest rank of any linear.
    """

    def __init__(self, model: NativeModel, adapter: AdapterArrays, linears: Sequence[Linear]):
        self.table, self.most_ranks = (LowRank * len(linears))(), 0
        self._keepalive: list[np.ndarray] = []  # the arrays that the table refers to by address
        for number, linear in enumerate(linears):
            added = adapter.layers[linear.layer].get(linear.name) if linear.name else None
            if added is not None:
                matrices = low_rank_matrices(model, added, linear)
                self._keepalive += matrices
                self.table[number] = LowRank(*(matrix.ctypes.data for matrix in matrices), ranks=len(added.a))
                self.most_ranks = max(self.most_ranks, len(added.a))


def low_rank_matrices(
    model: NativeModel, added: LinearAdapter, linear: Linear
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays `a`, `b` and `spans` of a LowRank."""
    ranks, outputs = len(added.a), linear.weight.rows
    b = np.zeros((outputs, ranks), model.dtype)
    for part in added.parts:
        b[part.columns, part.ranks] = part.b
    if linear.gated:
        b = in_turn(b)
    b = np.pad(b, ((0, -len(b) % COLUMNS), (0, 0))).reshape(-1, COLUMNS, ranks).swapaxes(1, 2)
    # A panel stores the ranks from the first to the last one that any of its columns uses.
    used, numbers = (b != 0).any(2), np.arange(ranks)
    first, stop = used.argmax(1), (ranks - used[:, ::-1].argmax(1)) * used.any(1)
    inside = (numbers >= first[:, None]) & (numbers < stop[:, None])
    begins = np.concatenate(([0], (stop - first).cumsum()[:-1])) * COLUMNS
    inputs = model.widths[linear.source]
    a = np.zeros((ranks, inputs), model.dtype)
    a[:, : added.a.shape[1]] = added.a
    spans = np.stack((first, stop, begins), 1).astype(np.int64)
    return model.kernels.pack_words(a), np.ascontiguousarray(b[inside]), spans
