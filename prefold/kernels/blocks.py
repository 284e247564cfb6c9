"""Matrices that stay in the number format of their file: GGUF's blocks, and 16-bit numbers where the arithmetic is
float32; and matrices of int8. `src/blocks.h` says how they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .abi import IN_INT8, S8, BlockType
from .interface import DTYPES, Family
from .products import COLUMNS, Blocks, PanelPool

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
