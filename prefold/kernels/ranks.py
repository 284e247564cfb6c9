"""What the ranks of a split model exchange through memory that all of them map."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from .abi import RANK_LINE, Failure, RanksView
from .interface import DTYPES, Family

PAGE = 4096


class CollectiveError(RuntimeError):
    """A CollectiveError says that a collective call has failed: another rank has gone, or has not come to it in
    time."""


def parts_begin(size: int) -> int:
    """Returns where the parts of `size` ranks begin in their memory, in bytes."""
    return -(-size * RANK_LINE // PAGE) * PAGE


def check_met(failed: int) -> None:
    """Raises CollectiveError for what a call returned that ranks have not met in."""
    unmet: dict[int, str] = {
        Failure.GONE: "a rank has ended",
        Failure.LATE: "waiting for a rank timed out",
        Failure.APART: "the ranks are at different steps",
    }
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
