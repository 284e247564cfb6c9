"""Packing of matrices, and products with packed matrices.

A matrix is packed in words, or in blocks that have the number format of its file: the blocks of GGUF, 16-bit numbers
with float32 arithmetic, floats in the same matrix as these, and int8. `src/blocks.h` defines the layout of blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .abi import IN_INT8, ONE_FORM, PANEL, S8, BlockType
from .interface import BFLOAT16, DTYPES, FLOAT32, Family, address, is_dense, step
from .threads import threads

# The block types with a decoder: names, and the numbers of ggml.h.
BLOCK_TYPES = {entry.name: int(entry) for entry in BlockType}
# The block types with integers, which can be multiplied with int8 rows.
WHOLE_TYPES = tuple(name for name in BLOCK_TYPES if name not in ("F32", "F16", "BF16"))
# Sizes of the groups along k in an int8 matrix, the best first. Wide groups need fewer products with scales. In narrow
# groups a large number makes fewer other numbers imprecise. The last size fits all matrices, padded with zeros.
GROUPS, RUN = (128, 192, 64, 32), 32


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a matrix, as bytes of a file."""

    type: str  # a name of BLOCK_TYPES
    rows: np.ndarray  # uint8 [outputs, bytes of a row], each row contiguous


class BlockKernels(Family):
    """Matrices in blocks."""

    def has_blocks(self, kind: str, inputs: int) -> bool:
        """Return whether rows of this type with `inputs` numbers can be packed."""
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
        """Pack rows as one matrix [outputs, inputs]. If the 32 rows of a panel have several types, it becomes float32.

        Args:
            parts: the rows, one part after the other, of types for which `has_blocks` is true.
            inputs: numbers of a row.
            pool: provides the memory.
            gated: the first half of the rows is gate, the second half up. LANES rows of each alternate, and each half
                is padded with zeros to whole LANES.
            experts: the number of matrices in the parts. All have the same size, and each starts with a new panel.
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
        """Pack panels of one type.

        Args:
            rows: int64 addresses of the rows of whole panels; 0: a row of zeros
        """
        panels, size = len(rows) // COLUMNS, self._calls["block_panel_size"](kind, inputs)
        memory = pool.take((panels, size // 4))
        self._calls["pack_blocks"](kind, address(rows), panels, inputs, address(memory), threads())
        starts = address(memory) + size * np.arange(panels)
        return Blocks(np.stack([starts, np.full(panels, kind)], 1), len(rows), inputs, (memory,))

    def _decoded(self, rows: np.ndarray, kinds: np.ndarray, inputs: int) -> np.ndarray:
        """Decode rows of several types to float32 [rows, inputs].

        Args:
            rows, kinds: the address and the type of each row; type -1: a row of zeros
        """
        floats = np.zeros((len(rows), inputs), np.float32)
        for kind in set(kinds.tolist()) - {-1}:
            (own,) = np.nonzero(kinds == kind)
            blocks = self._packed(kind, _filled(rows[own], COLUMNS), inputs, PanelPool(piece=0))
            floats[own] = self.block_rows(blocks, np.arange(len(own)), FLOAT32)
        return floats

    @property
    def has_int8(self) -> bool:
        """Whether this library multiplies int8 rows (`src/int8.h`)."""
        return bool(self._calls["has_int8"]())

    def in_int8(self, blocks: Blocks) -> Blocks:
        """Return the same matrix, in the same memory, marked for products with int8 rows.

        Its types must be in WHOLE_TYPES.
        """
        return Blocks(blocks.table + np.array([0, IN_INT8]), blocks.outputs, blocks.inputs, blocks.held)

    def in_one_form(self, blocks: Blocks) -> Blocks:
        """Return the same matrix, in the same memory, marked for results that do not depend on the number of rows."""
        kinds = blocks.table[:, 1] & ~IN_INT8
        whole = np.isin(kinds, [BLOCK_TYPES[name] for name in WHOLE_TYPES])
        table = blocks.table + np.array([0, ONE_FORM]) * whole[:, None]
        return Blocks(table, blocks.outputs, blocks.inputs, blocks.held)

    def pack_int8(self, weight: np.ndarray, pool: PanelPool | None = None) -> Blocks:
        """Pack weight [outputs, inputs], float32 or bfloat16, as an int8 matrix for products with int8 rows.

        In each group of a row, the largest number becomes 127 or -127. Raise MemoryError if there is not enough memory.

        Args:
            pool: provides the memory
        """
        (outputs, inputs), weight = weight.shape, np.ascontiguousarray(weight)
        group = next(group for group in GROUPS if -(-inputs // RUN) * RUN % group == 0)
        panels, size = -(-outputs // COLUMNS), self._calls["block_panel_size"](S8 + group, inputs)
        memory = (pool or PanelPool()).take((panels, size // 4))
        pack = self._calls["pack_int8", weight.dtype]
        if pack(address(weight), inputs, outputs, inputs, group, address(memory), threads()):
            raise MemoryError("not enough memory to pack an int8 matrix")
        starts = address(memory) + size * np.arange(panels)
        table = np.stack([starts, np.full(panels, S8 + group)], 1)
        return Blocks(table, outputs, inputs, (memory,))

    def block_rows(self, blocks: Blocks, ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the rows `ids` of the matrix, [ids, inputs], as float32 or bfloat16.

        Raise IndexError if a row does not exist.
        """
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < blocks.outputs:
            raise IndexError(f"a row is out of range; the matrix has {blocks.outputs} rows")
        out = np.empty((len(ids), blocks.inputs), dtype)
        self._calls[("block_rows", dtype)](
            address(blocks.table), address(ids), address(out), len(ids), blocks.inputs, threads()
        )
        return out


def _joined(parts: Sequence[Blocks], outputs: int, inputs: int) -> Blocks:
    """Concatenate matrices."""
    held = tuple(memory for part in parts for memory in part.held)
    return Blocks(np.concatenate([part.table for part in parts]), outputs, inputs, held)


def _row_addresses(rows: np.ndarray) -> np.ndarray:
    return address(rows) + rows.strides[0] * np.arange(len(rows), dtype=np.int64)


def _filled(addresses: np.ndarray, unit: int) -> np.ndarray:
    """Pad addresses int64 [..., rows] with nulls to a multiple of `unit`."""
    width = -addresses.shape[-1] % unit
    return np.pad(addresses, [*([(0, 0)] * (addresses.ndim - 1)), (0, width)]) if width else addresses


COLUMNS = PANEL
MIXED = np.iinfo(np.int64).max  # the type of a panel whose rows have several types
LANES = 16  # consecutive columns of gate, or of up
# Bytes per piece of memory. With few rows, a product takes as long as reading the matrix, so pages should be huge.
# NumPy requests huge pages for pieces of this size. Most single matrices are smaller than a huge page.
PIECE = 32 << 20


def can_pack_words(dtype: np.dtype | None, inputs: int) -> bool:
    """Return whether rows of `inputs` numbers are whole words of four bytes. dtype None: not a dtype of the kernels."""
    return dtype is not None and dtype in DTYPES and inputs * dtype.itemsize % 4 == 0


class PackKernels(Family):
    """Matrices in words. Their rows may be in arrays or in a mapped file."""

    def pack_words(
        self,
        weight: np.ndarray | Sequence[np.ndarray],
        pool: PanelPool | None = None,
        *,
        dtype: np.dtype | None = None,
        gated: bool = False,
    ) -> np.ndarray:
        """Pack a matrix: int32 [columns / 32, words along k, 32], with zeros past the last column.

        Args:
            weight: [columns, k], or several such parts, one after the other; float32, bfloat16 or float16, all parts of
                the same dtype. Rows may have any stride and start at any byte. Rows that are not contiguous are copied.
            pool: provides the memory.
            dtype: the dtype of the packed numbers, one of DTYPES (default: the weight's). Numbers are rounded to
                nearest even.
            gated: the first half of the columns is gate, the second half up. LANES columns of each alternate, and each
                half is padded with zeros to whole LANES.

        Raises:
            ValueError: another dtype, parts that do not fit together, or an odd number of columns of gate and up.
        """
        parts = [weight] if isinstance(weight, np.ndarray) else weight
        inputs = {part.shape[1] for part in parts}
        if len(inputs) != 1:
            raise ValueError(f"matrices of {sorted(inputs)} inputs cannot be joined; pass matrices with equal inputs")
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
        """Pack the matrices of experts: int32 [experts, panels, words along k, 32].

        See `pack_words` for other arguments and errors.

        Args:
            weight: [experts, outputs, inputs].
            gated: the first half of the outputs is gate, the second half up. LANES outputs of each alternate.
            filled: pad inputs with zeros to whole LANES, as the outputs of gate and up are padded.
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
        """Pack rows.

        Args:
            parts: the arrays that own them
            addresses: int64, of each row
            fill: zeros to add to each row
        """
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
    """Return rows [n, k], copied unless each row is contiguous."""
    return rows if is_dense(rows) else np.ascontiguousarray(rows)


def _in_turn(addresses: np.ndarray) -> np.ndarray:
    """Interleave the addresses of rows of gate, then of up, [..., rows]: LANES of gate, LANES of up, and so on.

    Each half is padded with nulls to whole LANES. Raise ValueError if the number of rows is odd.
    """
    *experts, rows = addresses.shape
    if rows % 2:
        raise ValueError(f"gate and up have {rows} columns together, an odd number")
    halves = _filled(addresses.reshape(*experts, 2, -1), LANES)
    return np.swapaxes(halves.reshape(*experts, 2, -1, LANES), -3, -2).reshape(*experts, -1)


class PanelPool:
    """An allocator that cuts arrays from a few large pieces. A piece lives as long as any array in it.

    Args:
        piece: the least size of a piece, in bytes
    """

    def __init__(self, piece: int = PIECE) -> None:
        self._piece, self._free = piece, np.empty(0, np.int32)

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an uninitialised int32 array that starts at a cache line."""
        size = int(np.prod(shape))
        if size > len(self._free):
            self._free = self._next_piece(size)
        memory, self._free = self._free[:size], self._free[-(-size // 16) * 16 :]
        return memory.reshape(shape)

    def _next_piece(self, size: int) -> np.ndarray:
        """Return an int32 array of at least `size` numbers that starts at a cache line."""
        piece = np.empty(max(size, self._piece // 4) + 15, np.int32)
        return piece[-address(piece) // 4 % 16 :]


class Arena(PanelPool):
    """A PanelPool that reuses its pieces after `rewind`. Arrays from before `rewind` are then invalid."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[np.ndarray] = []
        self._taken = 0

    def rewind(self) -> None:
        """Mark all memory as free."""
        self._free, self._taken = np.empty(0, np.int32), 0

    def _next_piece(self, size: int) -> np.ndarray:
        for number in range(self._taken, len(self._pieces)):
            if len(self._pieces[number]) >= size:
                # Pieces that are too small move back, for smaller matrices.
                self._pieces.insert(self._taken, self._pieces.pop(number))
                self._taken += 1
                return self._pieces[self._taken - 1]
        piece = super()._next_piece(size)
        self._pieces.insert(self._taken, piece)
        self._taken += 1
        return piece

    @property
    def num_bytes(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in panels of blocks (`src/blocks.h`). `linear` accepts it instead of packed words."""

    table: np.ndarray  # int64 [panels, 2]: the address and the type of each panel
    outputs: int  # columns
    inputs: int  # numbers along k
    held: tuple[np.ndarray, ...]  # the memory to which the addresses point

    @property
    def types(self) -> set[int]:
        """The types of the panels, as numbers (`BLOCK_TYPES`)."""
        return set((self.table[:, 1] & ~(IN_INT8 | ONE_FORM)).tolist())

    @property
    def nbytes(self) -> int:
        """The bytes of the panels."""
        return sum(memory.nbytes for memory in self.held)


def matrix_addresses(packed: np.ndarray | Blocks) -> tuple[int | None, int | None]:
    """Return the address of a matrix's words, and the address of its table of panels. One of the two is None."""
    return (None, address(packed.table)) if isinstance(packed, Blocks) else (address(packed), None)


class ProductKernels(Family):
    """Products of rows with packed matrices. Rows, bias and words have the same dtype, float32 or bfloat16."""

    def has_products(self, dtype: np.dtype) -> bool:
        """Return whether `linear` uses all of the processor's vector width for this dtype."""
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
        """Return x [rows, k] times the packed matrix, plus bias [columns]: [rows, columns], in x's dtype.

        Raise ValueError if shapes or dtypes do not fit.

        Args:
            out: contiguous memory for the result. If it is float32 and x is bfloat16, sums are stored without rounding
        """
        if out is None:
            out = np.empty((len(x), columns), x.dtype)
        return self._multiply(("linear", x.dtype, out.dtype), x, packed, columns, bias, out)

    def gated_linear(
        self, x: np.ndarray, packed: np.ndarray | Blocks, width: int, bias: np.ndarray | None, activation: str
    ) -> np.ndarray:
        """Return activation(gate) * up, [rows, width], for x [rows, k].

        The matrix and bias [2 * width] have sixteen columns of gate, then sixteen of up, and so on. Raise ValueError if
        there is no such product.

        Args:
            activation: a name in `prefold_gated_linear_*` (src/interface.h)
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
        """Call a product and return out [rows, columns].

        Args:
            columns: the C function's `columns` or `width`
        """
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
            raise MemoryError("not enough memory for a product")
        return out
