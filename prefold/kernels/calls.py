"""What the compiled kernels are given: structures of the C interface, and the lists a plan is made of."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field

import numpy as np

__all__ = ["RowCall", "RowLists", "SlotCall", "SlotLists", "SlotPlane", "TileCall", "WriteCall"]


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class TileCall(Structure):
    """A call names queries, where their results go, and lists, by their addresses.

    This structure and those below are those of the same names in src/attention.h, with their fields in their order.
    """

    _fields_ = (
        *_fields("q out", c_void_p),
        *_fields("q_row q_head queries heads kv_heads dim tiles", c_int64),
        *_fields("run_offsets mask_offsets runs masked tile_starts own_offsets own", c_void_p),
        ("scale", c_float),
        ("threads", c_int32),
    )


@dataclass(frozen=True, slots=True)
class RowLists:
    """Lists name the keys that each tile of sixteen queries reads, as src/tiles.h describes them.

    run_offsets, mask_offsets  int64 [tiles + 1]
    runs                       int32 [runs, 2]: first pair of keys, number of pairs; seen by the whole tile
    masked                     uint32 [masked, 2]: pair of keys, and which query sees which of the two
    call                       a call with these lists, the rest to be filled in: there is one for each plane
    """

    run_offsets: np.ndarray
    mask_offsets: np.ndarray
    runs: np.ndarray
    masked: np.ndarray
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
    tile_starts: np.ndarray
    own_offsets: np.ndarray
    own: np.ndarray
    call: TileCall = field(repr=False)


class RowCall(Structure):
    """A call attends over rows as they lie: those of a carried path, then new ones."""

    _fields_ = (
        ("tiles", TileCall),
        *_fields("k v path_k path_v", c_void_p),
        *_fields("k_row k_head v_row v_head path_k_row path_k_head path_v_row path_v_head rows path", c_int64),
    )


class SlotPlane(Structure):
    """It says where one plane of a KV store lies; the memory is its owner's."""

    _fields_ = (*_fields("keys values unsafe", c_void_p), *_fields("slots kv_heads dim", c_int64))


class SlotCall(Structure):
    """A call attends over the slots of one plane."""

    _fields_ = (("tiles", TileCall), ("plane", SlotPlane))


class WriteCall(Structure):
    """A call puts rows into slots."""

    _fields_ = (
        ("plane", SlotPlane),
        *_fields("slots k v", c_void_p),
        *_fields("k_row k_head v_row v_head rows", c_int64),
        ("threads", c_int32),
    )
