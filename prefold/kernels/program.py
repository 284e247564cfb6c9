"""Programs: the forward pass of a model as a list of operations, which one call runs for the rows of a step."""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

from .interface import Family
from .ranks import check_met


class Kind(IntEnum):
    """The kinds of operations, as src/program.cpp numbers them."""

    NORM, LINEAR, GATED, ROPE, ATTEND, PICK, EMBED, HEAD, ADD = range(9)


class Operation(Structure):
    """An Operation is that of src/program.cpp, which says what its fields mean, with its fields in their order."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "source", "out", "beside", "wide", "plane", "window")),
        *((name, c_int32) for name in ("activation", "linear", "summed")),
        ("eps", c_float),
        *((name, c_int64) for name in ("at", "keys", "heads", "dim", "kv_heads", "columns", "positions")),
        *((name, c_void_p) for name in ("weight", "bias", "blocks")),
    )


class LowRank(Structure):
    """A LowRank is that of src/epilogue.h, which says what its fields mean, with its fields in their order."""

    _fields_ = (*((name, c_void_p) for name in ("a", "b", "spans")), ("ranks", c_int64))


class PathPlane(Structure):
    """A PathPlane is that of src/program.cpp, with its fields in their order."""

    _fields_ = tuple((name, c_void_p) for name in ("keys", "values", "next_keys", "next_values"))


class ProgramCall(Structure):
    """A ProgramCall is that of src/program.cpp, with its fields in their order."""

    _fields_ = (
        ("operations", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("buffers", "widths")),
        *((name, c_int64) for name in ("rows", "picked")),
        *((name, c_void_p) for name in ("read", "tokens", "positions", "slots", "tables")),
        *((name, c_int64) for name in ("num_tables", "dim")),
        *((name, c_void_p) for name in ("angles", "ids", "planes", "paths")),
        ("path", c_int64),
        *((name, c_void_p) for name in ("keep_path", "keep_new")),
        *((name, c_int64) for name in ("kept_path", "kept_new", "unfolded")),
        *((name, c_void_p) for name in ("scatter", "gather", "read_order", "unfolded_room", "plans", "read_plans")),
        *((name, c_void_p) for name in ("numbers", "adapters", "adapted", "low")),
        ("most_ranks", c_int64),
        ("ranks", c_void_p),
        ("none", c_int64),
        *((name, c_float) for name in ("scale", "cap")),
        *((name, c_int32) for name in ("threads", "is_bf16")),
    )


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
            wrong = {2: ("slot", "slots of the store"), 3: ("token", "known ids"), 4: ("position", "learned ones")}
            if failed in wrong:
                raise ValueError("a {} that is not there; pass {}".format(*wrong[failed]))
            check_met(failed)
            raise MemoryError("program")
