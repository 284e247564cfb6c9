"""Ranks that are processes of one machine, and exchange through memory that all of them map."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from ctypes import addressof, c_char, c_int32
from mmap import mmap

import torch
from torch import Tensor

from .. import kernels
from ..kernels import DTYPES, RanksView
from ..kernels.ranks import parts_begin
from ..model.parallel import Ranks

# Bytes that a rank gives at once. No more memory is taken than the largest exchange needs, and that twice.
PART = 8 << 20


def memory_file(size: int) -> int:
    """Returns the descriptor of a file in memory for `size` ranks, which has no name and goes with its last user."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("prefold-ranks")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.truncate(file, parts_begin(size) + 2 * size * PART)
    return file


class MemoryRanks(Ranks):
    """A MemoryRanks is this process's rank of a model that is split over processes of one machine.

    file      of `memory_file`, which may be closed afterwards
    pipes     descriptors of which one is hung up where a rank ends
    patience  seconds for which another rank is waited for
    """

    def __init__(self, rank: int, size: int, file: int, pipes: Sequence[int], patience: float):
        self.rank, self.size = rank, size
        compiled = kernels.load()
        assert compiled is not None
        self._kernels, memory = compiled, mmap(file, 0)
        # These hold the memory.
        self._buffers = (c_char * len(memory)).from_buffer(memory), (c_int32 * len(pipes))(*pipes)
        self.view: RanksView = RanksView(
            memory=addressof(self._buffers[0]), first=parts_begin(size), part=PART, rank=rank, size=size,
            pipes=addressof(self._buffers[1]), num_pipes=len(pipes), patience=patience,
        )  # fmt: skip

    def sum(self, x: Tensor) -> Tensor:
        summed = x.contiguous() if x.dtype in DTYPES else x.float()
        self._kernels.sum_ranks(self.view, summed)
        return summed.to(x.dtype)

    def agree(self, own: bool) -> bool:
        return bool(self.sum(torch.tensor([float(own)])) == self.size)

    def collect(self, piece: Tensor) -> list[Tensor] | None:
        pieces = self._kernels.gather_ranks(self.view, piece)
        return None if pieces is None else list(pieces)
