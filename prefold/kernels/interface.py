"""The functions of the compiled library: their names, what they take, and how Python finds them."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

__all__ = ["DTYPES", "Family", "bind"]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

KINDS = {"p": c_void_p, "q": c_int64, "i": c_int32, "f": c_float}
# What may follow a name: in the keys of `bind`, and in C.
ALONE: dict[tuple, str] = {(): ""}
MIXED: dict[tuple, str] = {
    (torch.float32, torch.float32): "_float32",
    (torch.bfloat16, torch.bfloat16): "_bfloat16",
    (torch.bfloat16, torch.float32): "_bfloat16_float32",
}
GATED: dict[tuple, str] = {
    (activation, dtype): f"_{activation}_{suffix}"
    for activation in ("silu", "gelu_tanh")
    for dtype, suffix in DTYPES.items()
}
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
    "stores_bf16_pairs": ("i:", ALONE),
    "add_rms_norm": (":ppppqqqqfi", MIXED),
    "rope": (":pppqqqqqfi", MIXED),
    "gate_mul": (":ppqqqi", GATED),
    "has_products": ("i:i", ALONE),
    "linear": ("i:pqpppqqqi", MIXED),
    "gated_linear": ("i:pqpppqqqi", GATED),
    "log_sum_exp": (":pqqqppi", ALONE),
    "entropy": (":pqqqpppi", ALONE),
    "draw": (":pqqpppqpi", ALONE),
    "use_own_threads": (":i", ALONE),
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
    found: dict[Hashable, Any] = {}
    for name, (signature, variants) in FUNCTIONS.items():
        result, arguments = signature.split(":")
        for key, suffix in variants.items():
            function = getattr(library, f"prefold_{name}{suffix}")
            function.restype = KINDS[result] if result else None
            function.argtypes = [KINDS[kind] for kind in arguments]
            found[(name, *key) if key else name] = function
    return found
