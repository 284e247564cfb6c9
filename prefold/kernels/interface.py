"""The functions of a compiled library, for ctypes. Checks that Python and the library have the same interface."""

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
    """The library and abi.py come from different versions of src/interface.h."""


@dataclass(frozen=True, slots=True)
class RowLists:
    """The keys that each tile of sixteen queries reads (src/tiles.h)."""

    run_offsets: np.ndarray  # int64 [tiles + 1]
    mask_offsets: np.ndarray  # int64 [tiles + 1]
    runs: np.ndarray  # int32 [runs, 2]: first pair of keys, number of pairs; seen by the whole tile
    masked: np.ndarray  # uint32 [masked, 2]: pair of keys, mask of the queries that see each of the two
    placed_offsets: np.ndarray  # int64 [tiles + 1]
    placed: np.ndarray  # int32 [placed, 4]: first key, number of keys, place, mask of queries
    call: TileCall = field(repr=False)  # has these lists; each plane fills in the rest


@dataclass(frozen=True, slots=True)
class SlotLists:
    """The slots that each tile of queries reads.

    Tiles differ in size, and a query may have keys of its own. The fields without a comment have the form of RowLists,
    with slots instead of keys.
    """

    run_offsets: np.ndarray
    mask_offsets: np.ndarray
    runs: np.ndarray
    masked: np.ndarray
    placed_offsets: np.ndarray
    placed: np.ndarray
    tile_starts: np.ndarray  # int64 [tiles + 1]: the first query of each tile
    own_offsets: np.ndarray  # int64 [queries + 1]
    own: np.ndarray  # int32 [own, 2]: first slot, number of slots; seen by one query
    call: TileCall = field(repr=False)


# NumPy itself has no bfloat16; the package ml_dtypes adds it.
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
# The dtypes of the kernels' arithmetic, and all dtypes that they read.
DTYPES = {FLOAT32: "float32", BFLOAT16: "bfloat16"}
READ_DTYPES = DTYPES | {np.dtype(np.float16): "float16"}
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "relu", "clamped")
# The letters in the signatures of abi.FUNCTIONS.
LETTERS = {"p": c_void_p, "q": c_int64, "i": c_int32, "f": c_float}
# The parts of a C function's name: its name in Python, an activation, dtypes.
_NAME = re.compile(rf"prefold_(.+?)(?:_({'|'.join(ACTIVATIONS)}))?((?:_(?:{'|'.join(READ_DTYPES.values())}))*)")


# The offset of the data pointer in an array object: the first field after the object's head. `ctypes.data` and the
# array interface create objects, and take about ten times as long.
_DATA = object.__basicsize__
_PROBE = np.empty(1)
_IS_FIELD = c_void_p.from_address(id(_PROBE) + _DATA).value == _PROBE.ctypes.data


@overload
def address(array: np.ndarray) -> int: ...
@overload
def address(array: np.ndarray | None) -> int | None: ...
def address(array: np.ndarray | None) -> int | None:
    """Return the address of an array's first number, or None for None."""
    if array is None:
        return None
    return c_void_p.from_address(id(array) + _DATA).value if _IS_FIELD else array.ctypes.data


def step(array: np.ndarray, axis: int = 0) -> int:
    """Return the stride of an axis in elements."""
    return array.strides[axis] // array.itemsize


def is_dense(rows: np.ndarray) -> bool:
    """Return whether each row [..., numbers] is contiguous. An empty array may have any strides."""
    return rows.shape[-1] < 2 or rows.strides[-1] == rows.itemsize or not rows.size


class Family:
    """A group of kernels. `_calls` maps the keys of `bind` to the functions of the library."""

    _calls: Mapping[Hashable, Any]


def bind(library: ctypes.CDLL) -> dict[Hashable, Any]:
    """Return the library's functions by name, or by (name, [activation,] dtypes) if several have the same name.

    If some functions of a name have two dtypes, for x and for a weight or result, all keys of this name have two, even
    if both are equal. Raise InterfaceError if the library was compiled from another src/interface.h.
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
    """Yield the lines that `prefold_layout` (src/layout.cpp) must return: constants, offsets, sizes and signatures."""
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
