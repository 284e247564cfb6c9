"""What the ranks of a split model exchange through memory that all of them map."""

from __future__ import annotations

from ctypes import Structure, byref, c_double, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from .interface import DTYPES, Family

LINE = 64  # bytes of a rank's Line
PAGE = 4096


class CollectiveError(RuntimeError):
    """A CollectiveError says that a collective call has failed: another rank has gone, or has not come to it in
    time."""


class RanksView(Structure):
    """A RanksView is the Ranks of src/ranks.h, which says what its fields mean, with its fields in their order."""

    _fields_ = (
        ("memory", c_void_p),
        *((name, c_int64) for name in ("first", "part", "rank", "size")),
        ("pipes", c_void_p),
        ("num_pipes", c_int64),
        ("patience", c_double),
        ("met", c_uint64),
    )


def parts_begin(size: int) -> int:
    """Returns where the parts of `size` ranks begin in their memory, in bytes."""
    return -(-size * LINE // PAGE) * PAGE


def check_met(failed: int) -> None:
    """Raises CollectiveError for what a call returned that ranks have not met in."""
    unmet = {5: "a rank has ended", 6: "waiting for a rank timed out", 7: "the ranks are at different steps"}
    if failed in unmet:
        raise CollectiveError(unmet[failed])


class RankKernels(Family):
    """Exchanges between ranks; all make the same calls. They raise CollectiveError where one does not come."""

    def sum_ranks(self, view: RanksView, x: Tensor) -> None:
        """Adds up every rank's x, contiguous and of one of DTYPES, into x: in the order of the ranks, rounded once."""
        assert x.is_contiguous() and x.dtype in DTYPES
        check_met(self._calls["sum_ranks", x.dtype](byref(view), x.data_ptr(), x.numel(), torch.get_num_threads()))

    def gather_ranks(self, view: RanksView, piece: Tensor) -> Tensor | None:
        """Returns every rank's piece, [ranks, *shape of a piece], on rank 0; None on others. piece: contiguous, of one
        shape on all ranks"""
        pieces = piece.new_empty(view.size, *piece.shape) if view.rank == 0 else None
        address = None if pieces is None else pieces.data_ptr()
        check_met(self._calls["gather_ranks"](byref(view), piece.data_ptr(), piece.nbytes, address))
        return pieces
