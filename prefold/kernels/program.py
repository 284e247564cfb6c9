"""Programs: the forward pass of a model as a list of operations, which one call runs for the rows of a step."""

from __future__ import annotations

from ctypes import byref

from .abi import Failure, ProgramCall
from .interface import Family
from .ranks import check_met


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
