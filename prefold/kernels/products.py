"""Packing matrices into words, and products with such matrices and with those in their file's number format.

The latter are GGUF's blocks, 16-bit numbers under float32 arithmetic, floats beside these, and int8; `src/blocks.h`
defines their layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .abi import IN_INT8, ONE_FORM, PANEL, S8, BlockType
from .interface import BFLOAT16, DTYPES, FLOAT32, Family, address, is_dense, step
from .threads import threads

# The types that there are decoders for, by their names, with ggml's numbers.
BLOCK_TYPES = {entry.name: int(entry) for entry in BlockType}
# Of these the numbers are whole, and can be multiplied with rows of int8 as they are.
WHOLE_TYPES = tuple(name for name in BLOCK_TYPES if name not in ("F32", "F16", "BF16"))
# Groups along k of a matrix of int8, the best first: wide ones have fewer scales to multiply with, and in a narrow one
# a large number spoils fewer others. The last fits all matrices, with zeros behind their rows.
GROUPS, RUN = (128, 192, 64, 32), 32


@dataclass(frozen=True, slots=True)
class StoredRows:
    """StoredRows are rows of a matrix, as the bytes that a file has of them.

    type  a name of BLOCK_TYPES
    rows  uint8 [outputs, bytes of a row], each row in one piece
    """

    type: str
    rows: np.ndarray


class BlockKernels(Family):
    """Packs blocks, and reads rows of them."""

    def has_blocks(self, kind: str, inputs: int) -> bool:
        """Returns whether rows of so many numbers of this type can be packed."""
        return kind in BLOCK_TYPES and self._calls["block_panel_size"](BLOCK_TYPES[kind], inputs) > 0

    def pack_blocks(
        self,
        parts: Sequence[StoredRows],
        inputs: int,
        pool: PanelPool | None = None,
        *,
        gated: bool = False,
        experts: int = 1,
    ) -> Blocks:
        """Return rows as one matrix [outputs, inputs]. A panel whose 32 rows are of several types has floats instead.

        parts    the rows, one part below the other, of types that `has_blocks` takes
        pool     where the memory comes from
        gated    the first half of the rows is gate, the other one up: LANES of each lie in turn, and each half has
                 zeros up to whole LANES
        experts  the parts are as many matrices, all of one size, and each begins with a panel
        """

        def in_panels(of_parts: list[np.ndarray]) -> np.ndarray:
            rows = np.concatenate(of_parts).reshape(experts, -1)
            rows = _filled(_in_turn(rows) if gated else rows, COLUMNS)
            return np.ascontiguousarray(rows).reshape(-1, COLUMNS)

        addresses = in_panels([_row_addresses(part.rows) for part in parts])
        kinds = in_panels([np.full(len(part.rows), BLOCK_TYPES[part.type] + 1) for part in parts]) - 1  # -1: no row
        of_panels = kinds.max(1)
        of_panels[((kinds != of_panels[:, None]) & (kinds >= 0)).any(1)] = MIXED
        borders = [0, *(np.flatnonzero(np.diff(of_panels)) + 1).tolist(), len(of_panels)]
        pool, held = pool or PanelPool(), []
        for first, stop in pairwise(borders):
            rows, kind = addresses[first:stop].ravel(), int(of_panels[first])
            if kind == MIXED:
                floats = self._decoded(rows, kinds[first:stop].ravel(), inputs)
                rows, kind = _row_addresses(floats), BLOCK_TYPES["F32"]
            held.append(self._packed(kind, rows, inputs, pool))
        return _joined(held, sum(len(part.rows) for part in parts), inputs)

    def _packed(self, kind: int, rows: np.ndarray, inputs: int, pool: PanelPool) -> Blocks:
        """Return panels of one type. rows: the addresses of rows of whole panels, int64; 0: zeros"""
        panels, size = len(rows) // COLUMNS, self._calls["block_panel_size"](kind, inputs)
        memory = pool.take((panels, size // 4))
        self._calls["pack_blocks"](kind, address(rows), panels, inputs, address(memory), threads())
        starts = address(memory) + size * np.arange(panels)
        return Blocks(np.stack([starts, np.full(panels, kind)], 1), len(rows), inputs, (memory,))

    def _decoded(self, rows: np.ndarray, kinds: np.ndarray, inputs: int) -> np.ndarray:
        """Return rows of several types as float32 [rows, inputs]. rows, kinds: the address and the type of each; -1:
        zeros"""
        floats = np.zeros((len(rows), inputs), np.float32)
        for kind in set(kinds.tolist()) - {-1}:
            (own,) = np.nonzero(kinds == kind)
            blocks = self._packed(kind, _filled(rows[own], COLUMNS), inputs, PanelPool(piece=0))
            floats[own] = self.block_rows(blocks, np.arange(len(own)), FLOAT32)
        return floats

    @property
    def has_int8(self) -> bool:
        """Returns whether rows of int8 are multiplied here (`src/int8.h`)."""
        return bool(self._calls["has_int8"]())

    def in_int8(self, blocks: Blocks) -> Blocks:
        """Returns the same matrix, in the same memory, to be multiplied with rows of int8. Its types are of
        WHOLE_TYPES."""
        return Blocks(blocks.table + np.array([0, IN_INT8]), blocks.outputs, blocks.inputs, blocks.held)

    def in_one_form(self, blocks: Blocks) -> Blocks:
        """Return the same matrix, in the same memory. A row's product does not depend on how many rows there are."""
        kinds = blocks.table[:, 1] & ~IN_INT8
        whole = np.isin(kinds, [BLOCK_TYPES[name] for name in WHOLE_TYPES])
        table = blocks.table + np.array([0, ONE_FORM]) * whole[:, None]
        return Blocks(table, blocks.outputs, blocks.inputs, blocks.held)

    def pack_int8(self, weight: np.ndarray, pool: PanelPool | None = None) -> Blocks:
        """Returns weight [outputs, inputs], float32 or bfloat16, as a matrix of int8, to be multiplied with rows of
        int8. Of each row and group the largest number becomes 127 or -127.

        pool: where the memory comes from. Raises MemoryError where there is none.
        """
        (outputs, inputs), weight = weight.shape, np.ascontiguousarray(weight)
        group = next(group for group in GROUPS if -(-inputs // RUN) * RUN % group == 0)
        panels, size = -(-outputs // COLUMNS), self._calls["block_panel_size"](S8 + group, inputs)
        memory = (pool or PanelPool()).take((panels, size // 4))
        pack = self._calls["pack_int8", weight.dtype]
        if pack(address(weight), inputs, outputs, inputs, group, address(memory), threads()):
            raise MemoryError("pack_int8")
        starts = address(memory) + size * np.arange(panels)
        table = np.stack([starts, np.full(panels, S8 + group)], 1)
        return Blocks(table, outputs, inputs, (memory,))

    def block_rows(self, blocks: Blocks, ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns rows of the matrix, [ids, inputs], float32 or bfloat16. Raises IndexError for a row that is not
        there."""
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < blocks.outputs:
            raise IndexError(f"a row is not one of {blocks.outputs}")
        out = np.empty((len(ids), blocks.inputs), dtype)
        self._calls[("block_rows", dtype)](
            address(blocks.table), address(ids), address(out), len(ids), blocks.inputs, threads()
        )
        return out


def _joined(parts: Sequence[Blocks], outputs: int, inputs: int) -> Blocks:
    """Return matrices one behind the other as one."""
    held = tuple(memory for part in parts for memory in part.held)
    return Blocks(np.concatenate([part.table for part in parts]), outputs, inputs, held)


def _row_addresses(rows: np.ndarray) -> np.ndarray:
    return address(rows) + rows.strides[0] * np.arange(len(rows), dtype=np.int64)


def _filled(addresses: np.ndarray, unit: int) -> np.ndarray:
    """Returns addresses int64 [..., rows] with nulls behind them, up to a multiple of `unit`."""
    width = -addresses.shape[-1] % unit
    return np.pad(addresses, [*([(0, 0)] * (addresses.ndim - 1)), (0, width)]) if width else addresses


COLUMNS = PANEL
MIXED = np.iinfo(np.int64).max  # the type of a panel whose rows are of several types
LANES = 16  # columns of gate, or of up, that lie side by side
# Memory comes from NumPy, which asks for huge pages, in pieces this large: with few rows the time of a product is
# that of reading the matrix, and most matrices are smaller than a huge page.
PIECE = 32 << 20


def can_pack_words(dtype: np.dtype | None, inputs: int) -> bool:
    """Returns whether rows of so many numbers of a dtype are whole words of four bytes; None: of another dtype."""
    return dtype is not None and dtype in DTYPES and inputs * dtype.itemsize % 4 == 0


class PackKernels(Family):
    """Packs matrices into words, on all threads, from wherever their rows lie: in arrays, or in a mapped file."""

    def pack_words(
        self,
        weight: np.ndarray | Sequence[np.ndarray],
        pool: PanelPool | None = None,
        *,
        dtype: np.dtype | None = None,
        gated: bool = False,
    ) -> np.ndarray:
        """Returns a matrix packed: int32 [columns / 32, words along k, 32], zeros past the last column.

        weight  [columns, k], or several that lie one below the other: float32, bfloat16 or float16, all of one dtype.
                Rows may lie at any distance and at any byte; a row that is not contiguous is copied
        pool    where the memory comes from
        dtype   of the packed numbers, one of DTYPES; None: as of the weight. Others are rounded to nearest even
        gated   the first half of the columns is gate, the other one up: LANES of each lie in turn, and each half has
                zeros up to whole LANES

        Raises ValueError for other dtypes, for parts that do not fit together, and for an odd number of columns of
        gate and up.
        """
        parts = [weight] if isinstance(weight, np.ndarray) else weight
        inputs = {part.shape[1] for part in parts}
        if len(inputs) != 1:
            raise ValueError(f"matrices of {sorted(inputs)} inputs do not lie one below the other; pass equal ones")
        kept = [_contiguous(part) for part in parts]
        addresses = np.concatenate([_row_addresses(part) for part in kept])
        if gated:
            addresses = _in_turn(addresses)
        return self._pack(kept, addresses, inputs.pop(), 0, dtype, pool)

    def pack_experts(
        self,
        weight: np.ndarray,
        pool: PanelPool | None = None,
        *,
        dtype: np.dtype | None = None,
        gated: bool = False,
        filled: bool = False,
    ) -> np.ndarray:
        """Returns the matrices of experts packed one behind the other, int32 [experts, panels, words along k, 32].

        weight  [experts, outputs, inputs]
        gated   the first half of the outputs is gate, the other one up: LANES of each lie in turn
        filled  inputs are filled up with zeros to whole LANES, as the outputs of gate and up are

        The other arguments and errors are as of `pack_words`.
        """
        experts, outputs, inputs = weight.shape
        rows = _contiguous(weight.reshape(-1, inputs))
        addresses = _row_addresses(rows).reshape(experts, outputs)
        addresses = _filled(_in_turn(addresses) if gated else addresses, COLUMNS)
        packed = self._pack([rows], addresses.reshape(-1), inputs, -inputs % LANES if filled else 0, dtype, pool)
        return packed.reshape(experts, -1, *packed.shape[1:])

    def _pack(
        self,
        parts: Sequence[np.ndarray],
        addresses: np.ndarray,
        inputs: int,
        fill: int,
        dtype: np.dtype | None,
        pool: PanelPool | None,
    ) -> np.ndarray:
        """Packs rows. parts: where they lie; addresses: of each row, int64; fill: zeros behind each"""
        dtypes = {part.dtype for part in parts}
        dtype = dtype or parts[0].dtype
        function = self._calls.get(("pack_words", parts[0].dtype, dtype))
        if function is None or len(dtypes) > 1 or (inputs + fill) * dtype.itemsize % 4:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"rows of {inputs} numbers of {names} cannot be packed as {dtype}")
        addresses = np.ascontiguousarray(_filled(addresses, COLUMNS))
        panels, words = len(addresses) // COLUMNS, (inputs + fill) * dtype.itemsize // 4
        packed = (pool or PanelPool()).take((panels, words, COLUMNS))
        function(address(addresses), panels, inputs, words, address(packed), threads())
        return packed


def _contiguous(rows: np.ndarray) -> np.ndarray:
    """Returns rows [n, k] with the numbers of each side by side."""
    return rows if is_dense(rows) else np.ascontiguousarray(rows)


def _in_turn(addresses: np.ndarray) -> np.ndarray:
    """Returns the addresses of rows of gate, then of up [..., rows], each filled up with nulls, with LANES of each in
    turn."""
    *experts, rows = addresses.shape
    if rows % 2:
        raise ValueError(f"gate and up have {rows} columns together, an odd number")
    halves = _filled(addresses.reshape(*experts, 2, -1), LANES)
    return np.swapaxes(halves.reshape(*experts, 2, -1, LANES), -3, -2).reshape(*experts, -1)


class PanelPool:
    """Hands out memory of a few large pieces; a piece lives as long as any array in it.

    piece: its bytes, at least
    """

    def __init__(self, piece: int = PIECE) -> None:
        self._piece, self._free = piece, np.empty(0, np.int32)

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns an uninitialised int32 array that starts at a cache line."""
        size = int(np.prod(shape))
        if size > len(self._free):
            self._free = self._next_piece(size)
        memory, self._free = self._free[:size], self._free[-(-size // 16) * 16 :]
        return memory.reshape(shape)

    def _next_piece(self, size: int) -> np.ndarray:
        """Returns memory for so many numbers at least, int32, that starts at a cache line."""
        piece = np.empty(max(size, self._piece // 4) + 15, np.int32)
        return piece[-address(piece) // 4 % 16 :]


class Arena(PanelPool):
    """A PanelPool that keeps its pieces, and hands them out again after `rewind`. Arrays of before are then void."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[np.ndarray] = []
        self._taken = 0

    def rewind(self) -> None:
        """Let all memory be handed out again."""
        self._free, self._taken = np.empty(0, np.int32), 0

    def _next_piece(self, size: int) -> np.ndarray:
        for number in range(self._taken, len(self._pieces)):
            if len(self._pieces[number]) >= size:
                # Those that are too small stand behind, for smaller matrices.
                self._pieces.insert(self._taken, self._pieces.pop(number))
                self._taken += 1
                return self._pieces[self._taken - 1]
        piece = super()._next_piece(size)
        self._pieces.insert(self._taken, piece)
        self._taken += 1
        return piece

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A Blocks is a matrix in panels of blocks (`src/blocks.h`), which `linear` takes in place of packed words.

    table            int64 [panels, 2]: where each panel begins, and its type
    outputs, inputs  columns, and numbers along k
    held             the memory that the table names by address
    """

    table: np.ndarray
    outputs: int
    inputs: int
    held: tuple[np.ndarray, ...]

    @property
    def types(self) -> set[int]:
        """Return the numbers of the panels' types (`BLOCK_TYPES`)."""
        return set((self.table[:, 1] & ~(IN_INT8 | ONE_FORM)).tolist())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the panels."""
        return sum(memory.nbytes for memory in self.held)


def matrix_addresses(packed: np.ndarray | Blocks) -> tuple[int | None, int | None]:
    """Returns where a matrix's words are, or None, and where its panels of blocks are named, or None."""
    return (None, address(packed.table)) if isinstance(packed, Blocks) else (address(packed), None)


class ProductKernels(Family):
    """Multiplies rows by packed matrices. What is multiplied is of one dtype, float32 or bfloat16."""

    def has_products(self, dtype: np.dtype) -> bool:
        """Returns whether `linear` is as fast here as the processor's vectors allow."""
        return dtype in DTYPES and bool(self._calls["has_products"](dtype == BFLOAT16))

    def linear(
        self,
        x: np.ndarray,
        packed: np.ndarray | Blocks,
        columns: int,
        bias: np.ndarray | None = None,
        *,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns x [rows, k] times the packed matrix, plus bias [columns]: [rows, columns], of x's dtype.

        out: contiguous memory for it; in float32 it takes the sums of bfloat16 as they are. Raises ValueError where
        there is no such product.
        """
        if out is None:
            out = np.empty((len(x), columns), x.dtype)
        return self._multiply(("linear", x.dtype, out.dtype), x, packed, columns, bias, out)

    def gated_linear(
        self, x: np.ndarray, packed: np.ndarray | Blocks, width: int, bias: np.ndarray | None, activation: str
    ) -> np.ndarray:
        """Returns activation(gate) * up [rows, width] of x [rows, k]. activation: as of a Linear

        The matrix and bias [2 * width] hold sixteen columns of gate, sixteen of up, and so on. Raises ValueError where
        there is no such product.
        """
        out = np.empty((len(x), width), x.dtype)
        return self._multiply(("gated_linear", activation, x.dtype), x, packed, width, bias, out)

    def _multiply(
        self,
        key: Hashable,
        x: np.ndarray,
        packed: np.ndarray | Blocks,
        columns: int,
        bias: np.ndarray | None,
        out: np.ndarray,
    ) -> np.ndarray:
        """Calls a product and returns out [rows, columns]; columns: as the C function counts them."""
        function, (rows, size) = self._calls.get(key), x.shape
        inputs = packed.inputs if isinstance(packed, Blocks) else packed.shape[1] * 4 // x.itemsize
        if function is None or size != inputs:
            raise ValueError(f"no product of {x.dtype} {list(x.shape)} with {inputs} inputs")
        x = _contiguous(x)
        short = function(
            address(x),
            step(x),
            *matrix_addresses(packed),
            address(bias),
            address(out),
            rows,
            columns,
            size,
            threads(),
            None,
        )
        if short:
            raise MemoryError("linear")
        return out
