"""Products with matrices that `pack_words` has packed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .abi import PANEL
from .interface import DTYPES, Family

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
