"""Calls of programs. One call runs the list of a model's operations for the rows of a step.

The ranks of a split model exchange sums through shared memory.
"""

from __future__ import annotations

from ctypes import byref

import numpy as np

from .abi import RANK_LINE, Failure, ProgramCall, RanksView
from .interface import DTYPES, Family, address
from .threads import threads

PAGE = 4096


class CollectiveError(RuntimeError):
    """A collective call failed, because another rank has ended or did not arrive in time."""


def parts_begin(size: int) -> int:
    """Return the offset of the parts in the shared memory of `size` ranks, in bytes."""
    return -(-size * RANK_LINE // PAGE) * PAGE


def check_met(failed: int) -> None:
    """Raise CollectiveError if a call returned one of the Failures of a meeting."""
    unmet: dict[int, str] = {
        Failure.GONE: "a rank has ended",
        Failure.LATE: "waiting for a rank timed out",
        Failure.APART: "the ranks are at different steps",
    }
    if failed in unmet:
        raise CollectiveError(unmet[failed])


class RankKernels(Family):
    """Exchanges between ranks.

    All ranks make the same calls. The calls raise CollectiveError if a rank does not arrive.
    """

    def sum_ranks(self, view: RanksView, x: np.ndarray) -> None:
        """Set x to the sum over all ranks, added in the order of the ranks and rounded once.

        Args:
            x: Contiguous, of one of DTYPES.
        """
        assert x.flags.c_contiguous and x.dtype in DTYPES
        check_met(self._calls["sum_ranks", x.dtype](byref(view), address(x), x.size, threads()))

    def gather_ranks(self, view: RanksView, piece: np.ndarray) -> np.ndarray | None:
        """Return all ranks' pieces, [ranks, *shape of a piece], on rank 0, and None on other ranks.

        Args:
            piece: Contiguous, with the same shape on all ranks.
        """
        pieces = np.empty((view.size, *piece.shape), piece.dtype) if view.rank == 0 else None
        check_met(self._calls["gather_ranks"](byref(view), address(piece), piece.nbytes, address(pieces)))
        return pieces


class ProgramKernels(Family):
    """Programs (`Kind` in src/interface.h)."""

    def follow_program(self, call: ProgramCall, takes: bool) -> None:
        """Change a call over slots into the call of the next step.

        Each row moves on by one position, one slot and one key of its own.

        Args:
            takes: Whether each row's token becomes the token that the call chose for the row.
        """
        self._calls["follow_program"](byref(call), takes)

    def run_program(self, call: ProgramCall) -> None:
        """Run one step of a program.

        Raises:
            ValueError: a slot, a token or a position does not exist.
            CollectiveError: the ranks of a split model did not meet.
            MemoryError: there is not enough memory.
        """
        if failed := self._calls["run_program"](byref(call)):
            wrong = {
                Failure.NO_SLOT: ("slot", "slots of the store"),
                Failure.NO_TOKEN: ("token", "known ids"),
                Failure.NO_POSITION: ("position", "learned positions"),
            }
            if failed in wrong:
                raise ValueError("a {} does not exist; pass {}".format(*wrong[failed]))
            check_met(failed)
            raise MemoryError("not enough memory for a step of the program")
