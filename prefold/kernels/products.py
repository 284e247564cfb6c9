"""Products with matrices that `pack_words` has packed, and with matrices that stay in their file's number format.

The latter are GGUF's blocks, 16-bit numbers under float32 arithmetic, and int8; `src/blocks.h` defines their layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .abi import IN_INT8, ONE_FORM, PANEL, S8, BlockType
from .interface import DTYPES, Family

# The types that there are decoders for, by their names, with ggml's numbers.
BLOCK_TYPES = {entry.name: int(entry) for entry in BlockType}
# Of these the numbers are whole, and can be multiplied with rows of int8 as they are.
WHOLE_TYPES = tuple(name for name in BLOCK_TYPES if name.startswith("Q"))
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

    def pack_blocks(self, parts: Sequence[StoredRows], inputs: int, pool: PanelPool | None = None) -> Blocks | None:
        """Returns rows that lie one behind the other as one matrix [outputs, inputs]; None where a panel of 32 of them
        would have numbers of two types.

        parts   rows of types that `has_blocks` takes; neighbours of one type share panels
        pool    where the memory comes from
        """
        pool, table, memories = pool or PanelPool(), [], []
        stretches: list[list[StoredRows]] = []
        for part in parts:
            if stretches and stretches[-1][0].type == part.type:
                stretches[-1].append(part)
            else:
                stretches.append([part])
        for number, stretch in enumerate(stretches):
            count, kind = sum(len(part.rows) for part in stretch), BLOCK_TYPES[stretch[0].type]
            if count % COLUMNS and number < len(stretches) - 1:
                return None
            addresses = np.zeros(-(-count // COLUMNS) * COLUMNS, np.int64)
            addresses[:count] = np.concatenate([_row_addresses(part.rows) for part in stretch])
            panels, size = len(addresses) // COLUMNS, self._calls["block_panel_size"](kind, inputs)
            memory = pool.take((panels, size // 4))
            self._calls["pack_blocks"](
                kind, addresses.ctypes.data, panels, inputs, memory.data_ptr(), torch.get_num_threads()
            )
            memories.append(memory)
            starts = memory.data_ptr() + size * np.arange(panels)
            table.append(np.stack([starts, np.full(panels, kind)], 1))
        outputs = sum(len(part.rows) for part in parts)
        return Blocks(torch.from_numpy(np.concatenate(table)), outputs, inputs, tuple(memories))

    @property
    def has_int8(self) -> bool:
        """Returns whether rows of int8 are multiplied here (`src/int8.h`)."""
        return bool(self._calls["has_int8"]())

    def in_int8(self, blocks: Blocks) -> Blocks:
        """Returns the same matrix, in the same memory, to be multiplied with rows of int8. Its types are of
        WHOLE_TYPES."""
        return Blocks(blocks.table + torch.tensor([0, IN_INT8]), blocks.outputs, blocks.inputs, blocks.held)

    def in_one_form(self, blocks: Blocks) -> Blocks:
        """Return the same matrix, in the same memory. A row's product does not depend on how many rows there are."""
        kinds = blocks.table[:, 1] & ~IN_INT8
        whole = sum(kinds == BLOCK_TYPES[name] for name in WHOLE_TYPES)
        table = blocks.table + torch.tensor([0, ONE_FORM]) * whole[:, None]
        return Blocks(table, blocks.outputs, blocks.inputs, blocks.held)

    def pack_int8(self, weight: Tensor, pool: PanelPool | None = None) -> Blocks:
        """Returns weight [outputs, inputs], float32 or bfloat16, as a matrix of int8, to be multiplied with rows of
        int8. Of each row and group the largest number becomes 127 or -127.

        pool: where the memory comes from. Raises MemoryError where there is none.
        """
        (outputs, inputs), weight = weight.shape, weight.detach().contiguous()
        group = next(group for group in GROUPS if -(-inputs // RUN) * RUN % group == 0)
        panels, size = -(-outputs // COLUMNS), self._calls["block_panel_size"](S8 + group, inputs)
        memory = (pool or PanelPool()).take((panels, size // 4))
        pack = self._calls["pack_int8", weight.dtype]
        if pack(weight.data_ptr(), inputs, outputs, inputs, group, memory.data_ptr(), torch.get_num_threads()):
            raise MemoryError("pack_int8")
        starts = memory.data_ptr() + size * np.arange(panels)
        table = torch.from_numpy(np.stack([starts, np.full(panels, S8 + group)], 1))
        return Blocks(table, outputs, inputs, (memory,))

    def block_rows(self, blocks: Blocks, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows of the matrix, [ids, inputs], float32 or bfloat16. Raises IndexError for a row that is not
        there."""
        ids = ids.contiguous().to(torch.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < blocks.outputs:
            raise IndexError(f"a row is not one of {blocks.outputs}")
        out = torch.empty((len(ids), blocks.inputs), dtype=dtype)
        assert dtype in DTYPES
        self._calls[("block_rows", dtype)](
            blocks.table.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), blocks.inputs, torch.get_num_threads()
        )
        return out


def _row_addresses(rows: np.ndarray) -> np.ndarray:
    return rows.ctypes.data + rows.strides[0] * np.arange(len(rows), dtype=np.int64)


COLUMNS = PANEL
# Memory comes from NumPy, which asks for huge pages, in pieces this large: with few rows the time of a product is
# that of reading the matrix, and most matrices are smaller than a huge page.
PIECE = 32 << 20


def can_pack_words(weight: Tensor) -> bool:
    """Returns whether rows of `weight` [columns, k] are whole words of four bytes."""
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] * weight.itemsize % 4 == 0


def pack_words(weight: Tensor, pool: PanelPool | None = None) -> Tensor:
    """Returns weight [columns, k] packed: int32 [columns / 32, words along k, 32], zeros past the last column."""
    words = weight.shape[1] * weight.itemsize // 4
    packed = (pool or PanelPool()).take((-(-len(weight) // COLUMNS), words, COLUMNS))
    fill_words(packed, weight.detach())
    return packed


def fill_words(packed: Tensor, weight: Tensor) -> None:
    """Packs weight [columns, k] into memory of the shape that `pack_words` returns."""
    # NumPy copies a transposed array three to four times as fast as PyTorch.
    words, whole = weight.contiguous().view(torch.int32).numpy(), len(weight) // COLUMNS
    panels, rest = packed.numpy(), words[whole * COLUMNS :]
    panels[:whole] = words[: whole * COLUMNS].reshape(whole, COLUMNS, words.shape[1]).transpose(0, 2, 1)
    if len(rest):
        panels[whole, :, : len(rest)], panels[whole, :, len(rest) :] = rest.T, 0


class PanelPool:
    """Hands out memory of a few large pieces; a piece lives as long as any tensor in it.

    piece: its bytes, at least
    """

    def __init__(self, piece: int = PIECE) -> None:
        self._piece, self._free = piece, torch.empty(0, dtype=torch.int32)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialised int32 tensor that starts at a cache line."""
        size = int(np.prod(shape))
        if size > len(self._free):
            self._free = torch.from_numpy(np.empty(max(size, self._piece // 4) + 15, np.int32))
            self._free = self._free[-self._free.data_ptr() // 4 % 16 :]
        memory, self._free = self._free[:size], self._free[-(-size // 16) * 16 :]
        return memory.view(shape)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A Blocks is a matrix in panels of blocks (`src/blocks.h`), which `linear` takes in place of packed words.

    table            int64 [panels, 2]: where each panel begins, and its type
    outputs, inputs  columns, and numbers along k
    held             the memory that the table names by address
    """

    table: Tensor
    outputs: int
    inputs: int
    held: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the panels."""
        return sum(tensor.nbytes for tensor in self.held)


def matrix_addresses(packed: Tensor | Blocks) -> tuple[int | None, int | None]:
    """Returns where a matrix's words are, or None, and where its panels of blocks are named, or None."""
    return (None, packed.table.data_ptr()) if isinstance(packed, Blocks) else (packed.data_ptr(), None)


class ProductKernels(Family):
    """Multiplies rows by packed matrices. What is multiplied is of one dtype, float32 or bfloat16, on the CPU."""

    def has_products(self, dtype: torch.dtype) -> bool:
        """Returns whether `linear` is as fast here as the processor's vectors allow."""
        return dtype in DTYPES and bool(self._calls["has_products"](dtype == torch.bfloat16))

    def linear(
        self, x: Tensor, packed: Tensor | Blocks, columns: int, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Returns x [rows, k] times the packed matrix, plus bias [columns]: [rows, columns], of x's dtype.

        out: contiguous memory for it; in float32 it takes the sums of bfloat16 as they are. Raises ValueError where
        there is no such product.
        """
        if out is None:
            out = torch.empty((len(x), columns), dtype=x.dtype)
        return self._multiply(("linear", x.dtype, out.dtype), x, packed, columns, bias, out)

    def gated_linear(
        self, x: Tensor, packed: Tensor | Blocks, width: int, bias: Tensor | None, activation: str
    ) -> Tensor:
        """Returns activation(gate) * up [rows, width] of x [rows, k]; activation "silu" or "gelu_tanh".

        The matrix and bias [2 * width] hold sixteen columns of gate, sixteen of up, and so on. Raises ValueError where
        there is no such product.
        """
        out = torch.empty((len(x), width), dtype=x.dtype)
        return self._multiply(("gated_linear", activation, x.dtype), x, packed, width, bias, out)

    def _multiply(
        self, key: Hashable, x: Tensor, packed: Tensor | Blocks, columns: int, bias: Tensor | None, out: Tensor
    ) -> Tensor:
        """Calls a product and returns out [rows, columns]; columns: as the C function counts them."""
        function, (rows, size) = self._calls.get(key), x.shape
        inputs = packed.inputs if isinstance(packed, Blocks) else packed.shape[1] * 4 // x.itemsize
        if function is None or not x.is_cpu or size != inputs:
            raise ValueError(f"no product of {x.dtype} {list(x.shape)} on {x.device} with {inputs} inputs")
        if x.stride()[1] != 1:
            x = x.contiguous()
        short = function(
            x.data_ptr(),
            x.stride()[0],
            *matrix_addresses(packed),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
            size,
            torch.get_num_threads(),
            None,
        )
        if short:
            raise MemoryError("linear")
        return out
