"""Programs: the forward pass of a model as a list of operations, which one call runs for the rows of a step.

The ranks of a split model exchange sums through memory that all of them map.
"""

from __future__ import annotations

from ctypes import byref

import numpy as np

from .abi import RANK_LINE, Failure, ProgramCall, RanksView
from .interface import DTYPES, Family, address
from .threads import threads

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

    def sum_ranks(self, view: RanksView, x: np.ndarray) -> None:
        """Adds up every rank's x, contiguous and of one of DTYPES, into x: in the order of the ranks, rounded once."""
        assert x.flags.c_contiguous and x.dtype in DTYPES
        check_met(self._calls["sum_ranks", x.dtype](byref(view), address(x), x.size, threads()))

    def gather_ranks(self, view: RanksView, piece: np.ndarray) -> np.ndarray | None:
        """Returns every rank's piece, [ranks, *shape of a piece], on rank 0; None on others. piece: contiguous, of one
        shape on all ranks"""
        pieces = np.empty((view.size, *piece.shape), piece.dtype) if view.rank == 0 else None
        check_met(self._calls["gather_ranks"](byref(view), address(piece), piece.nbytes, address(pieces)))
        return pieces


class ProgramKernels(Family):
    """Runs programs."""

    def follow_program(self, call: ProgramCall, takes: bool) -> None:
        """Lets each row of a call over slots go on by a position, a slot and a key of its own. takes: whether it gets
        the token that the call has given for it"""
        self._calls["follow_program"](byref(call), takes)

    def run_program(self, call: ProgramCall) -> None:
        """Runs a program for one step. Raises MemoryError where memory is short, ValueError for a slot, a token or a
        position that is not there, CollectiveError where the ranks of a split model do not meet."""
        if failed := self._calls["run_program"](byref(call)):
            wrong = {
                Failure.NO_SLOT: ("slot", "slots of the store"),
                Failure.NO_TOKEN: ("token", "known ids"),
                Failure.NO_POSITION: ("position", "learned ones"),
            }
            if failed in wrong:
                raise ValueError("a {} that is not there; pass {}".format(*wrong[failed]))
            check_met(failed)
            raise MemoryError("program")
