"""The functions of the compiled library: how Python finds and calls them, and the check that both mean the same."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Hashable, Iterator, Mapping
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, overload

import ml_dtypes
import numpy as np

from .abi import CONSTANTS, ENUMS, FUNCTIONS, STRUCTURES, TileCall


class InterfaceError(Exception):
    """A library was compiled from another src/interface.h than abi.py was written from."""


@dataclass(frozen=True, slots=True)
class RowLists:
    """Lists name the keys that each tile of sixteen queries reads, as src/tiles.h describes them.

    run_offsets, mask_offsets  int64 [tiles + 1]
    runs                       int32 [runs, 2]: first pair of keys, number of pairs; seen by the whole tile
    masked                     uint32 [masked, 2]: pair of keys, and which query sees which of the two
    placed_offsets, placed     int64 [tiles + 1]; int32 [placed, 4]: first key, number of keys, place, queries
    call                       a call with these lists, the rest to be filled in: there is one for each plane
    """

    run_offsets: np.ndarray
    mask_offsets: np.ndarray
    runs: np.ndarray
    masked: np.ndarray
    placed_offsets: np.ndarray
    placed: np.ndarray
    call: TileCall = field(repr=False)


@dataclass(frozen=True, slots=True)
class SlotLists:
    """Lists name the slots that each tile of queries reads; tiles differ in size, and a query may have keys of its own.

    tile_starts  int64 [tiles + 1]: first query
    own_offsets  int64 [queries + 1]
    own          int32 [own, 2]: first slot, number of slots; seen by one query

    The other lists are those of RowLists, over slots in place of keys.
    """

    run_offsets: np.ndarray
    mask_offsets: np.ndarray
    runs: np.ndarray
    masked: np.ndarray
    placed_offsets: np.ndarray
    placed: np.ndarray
    tile_starts: np.ndarray
    own_offsets: np.ndarray
    own: np.ndarray
    call: TileCall = field(repr=False)


# NumPy has no bfloat16 of its own: arrays of it have the dtype of the package ml_dtypes.
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
# The dtypes that the kernels compute in, and all dtypes that they read.
DTYPES = {FLOAT32: "float32", BFLOAT16: "bfloat16"}
READ_DTYPES = DTYPES | {np.dtype(np.float16): "float16"}
ACTIVATIONS = ("silu", "gelu_tanh", "relu2", "clamped")
# The letters in the signatures of abi.FUNCTIONS.
LETTERS = {"p": c_void_p, "q": c_int64, "i": c_int32, "f": c_float}
# The name of a function in C: its name in Python, an activation, and dtypes.
_NAME = re.compile(rf"prefold_(.+?)(?:_({'|'.join(ACTIVATIONS)}))?((?:_(?:{'|'.join(READ_DTYPES.values())}))*)")


# Where an array object has the address of its numbers: the first field behind the head of every object. `ctypes.data`
# and the interface of arrays make objects on the way, and take about ten times as long.
_DATA = object.__basicsize__
_PROBE = np.empty(1)
_IS_FIELD = c_void_p.from_address(id(_PROBE) + _DATA).value == _PROBE.ctypes.data


@overload
def address(array: np.ndarray) -> int: ...
@overload
def address(array: np.ndarray | None) -> int | None: ...
def address(array: np.ndarray | None) -> int | None:
    """Return the address of an array's first number; None for None."""
    if array is None:
        return None
    return c_void_p.from_address(id(array) + _DATA).value if _IS_FIELD else array.ctypes.data


def step(array: np.ndarray, axis: int = 0) -> int:
    """Return how many numbers apart the entries of an array are along an axis."""
    return array.strides[axis] // array.itemsize


def is_dense(rows: np.ndarray) -> bool:
    """Return whether the numbers of each row [..., numbers] are side by side. An empty array has any strides."""
    return rows.shape[-1] < 2 or rows.strides[-1] == rows.itemsize or not rows.size


class Family:
    """A family of kernels. `_calls` has the functions of the library, by the keys of `bind`."""

    _calls: Mapping[Hashable, Any]


def bind(library: ctypes.CDLL) -> dict[Hashable, Any]:
    """Return the library's functions by name, or by (name, activation, dtypes) if there are several of a name.

    A function for x of one dtype and a weight or result of another has both dtypes in its key: also where they are the
    same. Raise InterfaceError if the library was compiled from another src/interface.h.
    """
    try:
        library.prefold_layout.restype = c_char_p
        found = library.prefold_layout().decode().splitlines()
    except AttributeError:
        raise _other_interface(library, "prefold_layout") from None
    for one, other in zip_longest(found, layout(), fillvalue=""):
        if one != other:
            raise _other_interface(library, (other or one).split()[0])
    functions: dict[Hashable, Any] = {}
    for name, key in _keys().items():
        result, arguments = FUNCTIONS[name].split(":")
        function = getattr(library, name)
        function.restype = LETTERS[result] if result else None
        function.argtypes = [LETTERS[letter] for letter in arguments]
        functions[key] = function
    return functions


def layout() -> Iterator[str]:
    """Yield what `prefold_layout` of src/layout.cpp must say: constants, places in memory, and signatures."""
    for name, value in CONSTANTS.items():
        yield f"{name} {value}"
    for enum in ENUMS:
        for entry in enum:
            yield f"{enum.__name__}.{entry.name} {entry.value}"
    for structure in STRUCTURES:
        yield f"{structure.__name__} 0 {ctypes.sizeof(structure)}"
        for name, *_ in structure._fields_:
            place = getattr(structure, name)
            yield f"{structure.__name__}.{name} {place.offset} {place.size}"
    for name, signature in FUNCTIONS.items():
        yield f"{name} {signature}"


def _keys() -> dict[str, Hashable]:
    """Return the key of each function of abi.FUNCTIONS."""
    parts = {name: match.groups() for name in FUNCTIONS if (match := _NAME.fullmatch(name))}
    by_name = {text: dtype for dtype, text in READ_DTYPES.items()}
    dtypes = {name: [by_name[text] for text in suffix.split("_")[1:]] for name, (_, _, suffix) in parts.items()}
    of_two = {parts[name][0] for name, found in dtypes.items() if len(found) == 2}
    keys: dict[str, Hashable] = {}
    for name, (base, activation, _) in parts.items():
        found = dtypes[name] * 2 if base in of_two and len(dtypes[name]) == 1 else dtypes[name]
        more = (*filter(None, [activation]), *found)
        keys[name] = (base, *more) if more else base
    return keys


def _other_interface(library: ctypes.CDLL, name: str) -> InterfaceError:
    message = f"{library._name} and this prefold do not agree on {name}"
    return InterfaceError(f"{message}; install prefold again (after a change of interface.h: scripts/generate)")
