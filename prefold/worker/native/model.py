"""A model in the memory of the native executor: its program, and its weights as the compiled kernels read them."""

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
    """A PackedTable is an embedding that is packed in words, as the LM head that it is too. words: int32 [panels, words
    along hidden, 32]"""

    words: np.ndarray

    @property
    def nbytes(self) -> int:
        """Return the bytes of the words."""
        return self.words.nbytes

    def rows(self, ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return rows of the table, [ids, hidden]."""
        return np.ascontiguousarray(self.words[ids // COLUMNS, :, ids % COLUMNS]).view(dtype)


@dataclass(frozen=True, slots=True)
class LatentMatrices:
    """The packed matrices of an AttendLatent, one for each head, as `LatentCall` has them: int32 [heads, panels, words,
    32]."""

    expand: np.ndarray
    absorb: np.ndarray
    restore: np.ndarray

    @property
    def nbytes(self) -> int:
        """Return the bytes of all matrices."""
        return self.expand.nbytes + self.absorb.nbytes + self.restore.nbytes


# The embedding: rows one behind the other, blocks as the file has them, or words.
Table = np.ndarray | Blocks | PackedTable


@dataclass(slots=True)
class Memory:
    """A Memory holds the weights of a model.

    matrices  of linears: packed words, or blocks as the file has them
    stacks    of experts: the matrices of all, one behind the other, as in `matrices`
    latents   of attention over latents
    tables    the embedding, and an LM head that is not tied to it
    arrays    all others, of the model's dtype, or float32 where they are wide
    """

    matrices: dict[Weight, np.ndarray | Blocks] = field(default_factory=dict)
    stacks: dict[Weight, np.ndarray | Blocks] = field(default_factory=dict)
    latents: dict[Weight, LatentMatrices] = field(default_factory=dict)
    tables: dict[Weight, Table] = field(default_factory=dict)
    arrays: dict[Weight, np.ndarray] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights, those of a mapped file among them."""
        kinds = (self.matrices, self.stacks, self.latents, self.tables, self.arrays)
        every = [one for kind in kinds for one in kind.values()]
        return sum({id(one): one.nbytes for one in every}.values())


class PartLoader(Protocol):
    """Loads one part of a model's weights in place of another, again and again.

    bytes_read  bytes of the weights that were read, as files have them; a weight that is read twice counts twice
    most_bytes  the most bytes of weights that were in memory at once
    needed      bytes that loading the largest part needs
    total       bytes that loading all weights needs
    """

    bytes_read: int
    most_bytes: int
    needed: int
    total: int

    def load_embedding(self) -> None:
        """Load what a pass begins with, in place of what is in memory."""

    def load_layers(self, first: int, stop: int) -> None:
        """Load the layers from `first` to before `stop` in place of what is in memory; with the last layer what ends a
        pass, too."""

    def load_heads(self, *, lm_head: bool) -> None:
        """Load the classification head, and the LM head if it is wanted, in place of what is in memory."""

    def read_ahead(self, number: int) -> None:
        """Let the system read a layer from its file beside what is computed; after the last layer: the LM head."""


class NativeModel:
    """A NativeModel is a model as the native executor has it.

    config     of the whole model; local: the same with the sizes of this rank's part of the layers
    program    what this process computes
    widths     of the program's buffers, those of gates padded as the kernels need it
    memory     its weights
    angles     tables of its rotary positions; None: nothing is rotated
    stored_as  in words, which weights lie in memory as the checkpoint stores them
    ranks      this process among those that the model is split over
    shard      what it holds
    loader     loads parts of the weights in turn, if they do not all stay in memory; None: they do
    vocab      the tokens that its embedding and its LM head have
    """

    computed_by = ""

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype,
        compiled: kernels.Kernels,
        ranks: OneRank[np.ndarray] | None = None,
    ):
        """ranks: None: this process has the whole model"""
        self.config, self.dtype, self.kernels = config, dtype, compiled
        self.ranks = ranks or OneRank()
        self.shard = shard = self.ranks.shard(config)
        self.local, self.vocab, self.program = shard.local(config), shard.vocab, shard.program(config)
        self.widths = padded_widths(self.program)
        self.memory = Memory()
        self.loader: PartLoader | None = None
        self.stored_as = ""
        ropes = config.ropes
        if config.rope is None and config.qk_norm:  # the kernel that rotates heads is the one that norms them
            ropes = (STILL,) * len(config.planes)
        self.angles = AngleTables(ropes, config.rotated_dims) if ropes else None
        self._head: np.ndarray | Blocks | None = None
        self._score: ClassificationHead | None = None
        self._columns: dict[tuple[int, ...], np.ndarray] = {}  # of the head, by tokens
        self._logits = np.empty(0, np.float32)

    def drop_weights(self) -> None:
        """Drop all weights that were loaded, and what reading logits has left."""
        self.memory, self._head, self._logits = Memory(), None, np.empty(0, np.float32)

    @property
    def head_matrix(self) -> np.ndarray | Blocks | None:
        """Return the LM head as products take it; None: the model has none. It is packed when it is first wanted."""
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
        """Return where compiled code exchanges with other ranks; None: it has the whole model."""
        return self.ranks.view

    @property
    def tokens(self) -> int:
        """Return how many tokens the embedding and the LM head of this process have."""
        return self.vocab.stop - self.vocab.start

    def compiled_head(self) -> tuple[int | None, int | None, int] | None:
        """Return the words or the blocks of the LM head, and how many tokens it has; None: there is no head, or the
        largest logit is not that of the largest product. A bias and scales move logits. A cap makes logits equal that
        are far from it and near to each other."""
        is_plain = self.config.logit_cap is None and not self.program.head_vectors
        if not is_plain or (head := self.head_matrix) is None:
            return None
        words, blocks = kernels.matrix_addresses(head)
        return words, blocks, self.tokens

    def logits(self, hidden: np.ndarray, ids: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Return float32 logits [rows, vocabulary], or [rows, len(ids)] of the ids given; hidden [rows, hidden].

        The memory of logits of the whole vocabulary is used again by the next call. With several ranks rank 0 gets
        logits of the whole vocabulary, others get no rows. Raise InputError if the checkpoint has no LM head.
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
        """Return the outputs of the classification head, float32 [rows, labels]. Raise InputError without one."""
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
        """Return memory for logits of all tokens that this process has. Fresh pages would cost a tenth to a third of
        the product again."""
        size = rows * self.tokens
        if len(self._logits) < size:
            self._logits = np.empty(size, np.float32)
        return self._logits[:size].reshape(rows, self.tokens)

    def _columns_of(self, ids: tuple[int, ...]) -> np.ndarray:
        """Return the head's rows of some tokens, packed; zeros for those of other ranks. The rows of the last few
        read-outs are kept."""
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
        """Return rows of a table, [ids, hidden], in the dtype. ids: int64"""
        held = self.memory.tables[table]
        if isinstance(held, Blocks):
            return self.kernels.block_rows(held, ids, self.dtype)
        return held.rows(ids, self.dtype) if isinstance(held, PackedTable) else held[ids]

    def _biased(self, products: np.ndarray, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the products of the LM head with its scales and its bias, in the same memory. ids: the tokens that
        these are of"""
        bias, scale = self.program.head_bias, self.program.head_scale
        if scale is not None:
            factors = np.float32(self.program.head_factor) * self.memory.arrays[scale][ids].astype(np.float32)
            np.multiply(products, factors, out=products)
        return products if bias is None else np.add(products, self.memory.arrays[bias][ids], out=products)

    def _shaped(self, products: np.ndarray) -> np.ndarray:
        """Return the logits of the products of the LM head, in the same memory."""
        scale, cap = self.config.logit_scale, self.config.logit_cap
        if cap is None:
            return products if scale == 1 else np.multiply(products, np.float32(scale), out=products)
        np.multiply(products, np.float32(scale / cap), out=products)
        return np.multiply(np.tanh(products, out=products), np.float32(cap), out=products)


def padded_widths(program: Program) -> dict[str, int]:
    """Return the width of each buffer of a program: what a gate leaves is filled up to whole LANES, with zeros."""
    widths = dict(program.widths)
    for operation in program.operations:
        if isinstance(operation, Linear) and operation.gated:
            widths[operation.out] = max(widths[operation.out], -(-operation.weight.rows // 2 // LANES) * LANES)
    return widths


def in_turn(columns: np.ndarray) -> np.ndarray:
    """Return what has an entry for each column of gate, then of up, filled up with zeros to whole LANES, with LANES of
    each in turn."""
    halves = columns.reshape(2, -1, *columns.shape[1:])
    fill = -halves.shape[1] % LANES
    halves = np.pad(halves, ((0, 0), (0, fill), *([(0, 0)] * (columns.ndim - 1))))
    lanes = halves.reshape(2, -1, LANES, *columns.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(lanes.reshape(-1, *columns.shape[1:]))


class PackedAdapters:
    """A PackedAdapters has the matrices of LoRA adapters as the kernels read them: those of an adapter since a row had
    it first."""

    def __init__(self, model: NativeModel, adapters: Sequence[AdapterArrays], linears: Sequence[Linear]):
        self._model, self._adapters, self._linears = model, adapters, linears
        self._packed: dict[int, PackedAdapter] = {}

    def adapt(self, call: ProgramCall, numbers: np.ndarray) -> tuple[Any, ...]:
        """Say in a call which adapters its rows have, and return what it names by address. numbers: int64 [rows]"""
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
    """A PackedAdapter has an adapter's matrices as the kernels read them.

    table       a LowRank for each of a program's linears
    most_ranks  of a linear
    """

    def __init__(self, model: NativeModel, adapter: AdapterArrays, linears: Sequence[Linear]):
        self.table, self.most_ranks = (LowRank * len(linears))(), 0
        self._keepalive: list[np.ndarray] = []  # what the table names by address
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
    """Return `a`, `b` and `spans` of a LowRank."""
    ranks, outputs = len(added.a), linear.weight.rows
    b = np.zeros((outputs, ranks), model.dtype)
    for part in added.parts:
        b[part.columns, part.ranks] = part.b
    if linear.gated:
        b = in_turn(b)
    b = np.pad(b, ((0, -len(b) % COLUMNS), (0, 0))).reshape(-1, COLUMNS, ranks).swapaxes(1, 2)
    # A panel has the ranks from the first to the last of those that its columns have any part in.
    used, numbers = (b != 0).any(2), np.arange(ranks)
    first, stop = used.argmax(1), (ranks - used[:, ::-1].argmax(1)) * used.any(1)
    inside = (numbers >= first[:, None]) & (numbers < stop[:, None])
    begins = np.concatenate(([0], (stop - first).cumsum()[:-1])) * COLUMNS
    inputs = model.widths[linear.source]
    a = np.zeros((ranks, inputs), model.dtype)
    a[:, : added.a.shape[1]] = added.a
    spans = np.stack((first, stop, begins), 1).astype(np.int64)
    return model.kernels.pack_words(a), np.ascontiguousarray(b[inside]), spans
