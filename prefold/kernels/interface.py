"""The functions of the compiled library: their names, what they take, and how Python finds them."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class TileCall(Structure):
    """A call names queries, where their results go, and lists, by their addresses.

    This structure and those below are those of the same names in src/attention.h, with their fields in their order.
    """

    _fields_ = (
        *_fields("q out", c_void_p),
        *_fields("q_row q_head queries heads kv_heads dim tiles", c_int64),
        *_fields("run_offsets mask_offsets runs masked tile_starts own_offsets own sinks", c_void_p),
        ("scale", c_float),
        ("threads", c_int32),
        ("cap", c_float),
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

    _fields_ = (*_fields("keys values unsafe", c_void_p), *_fields("slots kv_heads dim rounded", c_int64))


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


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

KINDS = {"p": c_void_p, "q": c_int64, "i": c_int32, "f": c_float}
# What may follow a name: in the keys of `bind`, and in C.
ALONE: dict[tuple[Any, ...], str] = {(): ""}
MIXED: dict[tuple[Any, ...], str] = {
    (torch.float32, torch.float32): "_float32",
    (torch.bfloat16, torch.bfloat16): "_bfloat16",
    (torch.bfloat16, torch.float32): "_bfloat16_float32",
}
EACH: dict[tuple[Any, ...], str] = {(dtype,): f"_{suffix}" for dtype, suffix in DTYPES.items()}
GATED: dict[tuple[Any, ...], str] = {
    (activation, dtype): f"_{activation}_{suffix}"
    for activation in ("silu", "gelu_tanh")
    for dtype, suffix in DTYPES.items()
}
EXPERTS = GATED | {("clamped", dtype): f"_clamped_{suffix}" for dtype, suffix in DTYPES.items()}
# What each function returns (nothing, or one value), ":", its arguments; p: an address, q: int64, i: int32, f: float.
FUNCTIONS = {
    "plan_rows": ("p:pqppqpqp", ALONE),
    "row_list_sizes": (":pp", ALONE),
    "copy_row_lists": (":ppppp", ALONE),
    "free_row_lists": (":p", ALONE),
    "row_attention": ("i:pi", ALONE),
    "plan_slots": ("p:pppppqqpqq", ALONE),
    "slot_list_sizes": (":pp", ALONE),
    "copy_slot_lists": (":pppppppp", ALONE),
    "free_slot_lists": (":p", ALONE),
    "write_slots": ("i:pi", ALONE),
    "slot_attention": ("i:pi", ALONE),
    "follow_program": (":pi", ALONE),
    "run_program": ("i:p", ALONE),
    "stores_bf16_pairs": ("i:", ALONE),
    "add_rms_norm": (":ppppqqqqqfi", MIXED),
    "rope": (":pppqqqqqfi", MIXED),
    "gate_mul": (":ppqqqi", GATED),
    "has_products": ("i:i", ALONE),
    "linear": ("i:pqppppqqqip", MIXED),
    "gated_linear": ("i:pqppppqqqip", GATED),
    "block_panel_size": ("q:qq", ALONE),
    "pack_blocks": (":qpqqpi", ALONE),
    "block_rows": (":pppqqi", EACH),
    "has_int8": ("i:", ALONE),
    "pack_int8": ("i:pqqqqpi", EACH),
    "experts": ("i:p", EXPERTS),
    "greedy": ("i:ppppqqqqiqp", EACH),
    "sum_ranks": ("i:ppqi", EACH),
    "gather_ranks": ("i:ppqp", ALONE),
    "short_conv": (":p", EACH),
    "delta_net": ("i:p", EACH),
    "log_sum_exp": (":pqqqppi", ALONE),
    "entropy": (":pqqqpppi", ALONE),
    "draw": (":pqqpppqpi", ALONE),
    "calm_openmp": (":", ALONE),
}


class Family:
    """A family of kernels has the functions of the library in `_calls`, by the keys of `bind`."""

    _calls: Mapping[Hashable, Any]


def bind(library: ctypes.CDLL) -> dict[Hashable, Any]:
    """Returns the C functions by name, or by (name, what follows it) where there are several.

    What follows is the dtypes of x and of the weight or the result, or an activation and a dtype. Raises AttributeError
    where the library lacks one.
    """
    functions: dict[Hashable, Any] = {}
    for name, (signature, variants) in FUNCTIONS.items():
        result, arguments = signature.split(":")
        for key, suffix in variants.items():
            function = getattr(library, f"prefold_{name}{suffix}")
            function.restype = KINDS[result] if result else None
            function.argtypes = [KINDS[kind] for kind in arguments]
            functions[(name, *key) if key else name] = function
    return functions
