"""The compiled kernels as Python functions over tensors and arrays: the C interface, in one place."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Kernels", "Tiles"]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """The keys each tile of sixteen queries reads, as src/tiles.h describes them.

    run_offsets, mask_offsets  int64 [tiles + 1]
    runs                       int32 [runs, 2]: first pair of keys, number of pairs; seen by the whole tile
    masked                     uint32 [masked, 2]: pair of keys, and which query sees which of the two
    """

    run_offsets: np.ndarray
    mask_offsets: np.ndarray
    runs: np.ndarray
    masked: np.ndarray


class AttentionCall(Structure):
    """struct AttentionCall of src/attention.h: same fields, same order."""

    _fields_ = (
        [(name, c_void_p) for name in ("q", "k", "v", "path_k", "path_v", "out")]
        + [(f"{name}_{stride}", c_int64) for name in ("q", "k", "v", "path_k", "path_v") for stride in ("row", "head")]
        + [(name, c_int64) for name in ("queries", "rows", "path", "heads", "kv_heads", "dim")]
        + [(name, c_void_p) for name in ("run_offsets", "mask_offsets", "runs", "masked")]
        + [("scale", c_float), ("threads", c_int32)]
    )


class Kernels:
    """The functions of one compiled library. Calls release the GIL and use torch's number of threads."""

    def __init__(self, path: Path):
        # torch is imported above, so that the library finds torch's OpenMP pool and makes none of its own.
        library = ctypes.CDLL(str(path))
        self._plan = library.prefold_plan_tiles
        self._plan.restype = c_void_p
        self._plan.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, POINTER(c_int32)]
        self._tile_sizes = library.prefold_tile_sizes
        self._tile_sizes.argtypes = [c_void_p, *[POINTER(c_int64)] * 3]
        self._copy_tiles = library.prefold_copy_tiles
        self._copy_tiles.argtypes = [c_void_p] * 5
        self._free_tiles = library.prefold_free_tiles
        self._free_tiles.argtypes = [c_void_p]
        self._attention = library.prefold_attention
        self._attention.argtypes = [POINTER(AttentionCall), c_int32]
        self._add_rms_norm = _by_dtype(library, "add_rms_norm", [c_void_p] * 4 + [c_int64] * 4 + [c_float, c_int32])
        self._rope = _by_dtype(library, "rope", [c_void_p] * 3 + [c_int64] * 5 + [c_float, c_int32])
        self._silu_mul = _by_dtype(library, "silu_mul", [c_void_p] * 2 + [c_int64] * 3 + [c_int32])

    def plan_tiles(
        self, end: np.ndarray, query_rows: np.ndarray, positions: np.ndarray | None, window: int | None
    ) -> Tiles:
        """The tiles of `query_rows`; contiguous int64 arrays, checked by the caller.

        ValueError where the intervals [j, end[j]) are not nested, or positions do not ascend along a path.
        """
        not_nested = c_int32()
        handle = self._plan(
            end.ctypes.data,
            query_rows.ctypes.data,
            len(query_rows),
            None if positions is None else positions.ctypes.data,
            window or 0,
            byref(not_nested),
        )
        if not handle:
            if not_nested.value:
                raise ValueError("intervals are not nested")
            raise MemoryError("attention plan")
        try:
            tiles, runs, masked = c_int64(), c_int64(), c_int64()
            self._tile_sizes(handle, byref(tiles), byref(runs), byref(masked))
            lists = Tiles(
                np.empty(tiles.value + 1, np.int64),
                np.empty(tiles.value + 1, np.int64),
                np.empty((runs.value, 2), np.int32),
                np.empty((masked.value, 2), np.uint32),
            )
            self._copy_tiles(
                handle,
                lists.run_offsets.ctypes.data,
                lists.mask_offsets.ctypes.data,
                lists.runs.ctypes.data,
                lists.masked.ctypes.data,
            )
        finally:
            self._free_tiles(handle)
        return lists

    def can_attend(self, *tensors: Tensor | None) -> bool:
        """Whether `attention` takes q, k, v, path_k, path_v as they are."""
        given = [t for t in tensors if t is not None]
        return _on_cpu(*given) and 1 <= given[0].shape[-1] <= MAX_HEAD_DIM and all(t.stride(-1) == 1 for t in given)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        *,
        scale: float,
        path_k: Tensor | None = None,
        path_v: Tensor | None = None,
    ) -> Tensor:
        """As `prefold.attention.interval_attention`, for tensors that `can_attend` accepts and tiles of their plan."""
        out = torch.empty(q.shape, dtype=q.dtype)
        call = AttentionCall(
            out=out.data_ptr(),
            queries=len(q),
            rows=len(k),
            path=0 if path_k is None else len(path_k),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[2],
            run_offsets=tiles.run_offsets.ctypes.data,
            mask_offsets=tiles.mask_offsets.ctypes.data,
            runs=tiles.runs.ctypes.data,
            masked=tiles.masked.ctypes.data,
            scale=scale,
            threads=torch.get_num_threads(),
        )
        for name, tensor in (("q", q), ("k", k), ("v", v), ("path_k", path_k), ("path_v", path_v)):
            if tensor is not None:
                setattr(call, name, tensor.data_ptr())
                setattr(call, f"{name}_row", tensor.stride(0))
                setattr(call, f"{name}_head", tensor.stride(1))
        if self._attention(byref(call), q.dtype == torch.bfloat16):
            raise MemoryError("attention workspace")
        return out

    def can_compute(self, *tensors: Tensor | None) -> bool:
        """Whether the element-wise functions take these tensors: on the CPU, of one known dtype, rows contiguous.

        They write into the first: its rows must not be views of each other.
        """
        given = [t for t in tensors if t is not None]
        return _on_cpu(*given) and all(t.stride(-1) == 1 for t in given) and 0 not in given[0].stride()

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x += delta in place, and its norm; x, delta [rows, width]."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self._add_rms_norm[x.dtype](
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            x.stride(0),
            0 if delta is None else delta.stride(0),
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float) -> None:
        """x [rows, heads, dim] rotated in place, normed before where there is a weight; cos_sin float32 [rows, dim]."""
        self._rope[x.dtype](
            x.data_ptr(),
            cos_sin.data_ptr(),
            None if norm_weight is None else norm_weight.data_ptr(),
            *x.shape,
            x.stride(0),
            x.stride(1),
            eps,
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate_up [rows, 2 * width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        self._silu_mul[gate_up.dtype](
            gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0), torch.get_num_threads()
        )
        return out


def _by_dtype(library: ctypes.CDLL, name: str, argtypes: list) -> dict[torch.dtype, ctypes._CFuncPtr]:
    functions = {}
    for dtype, suffix in DTYPES.items():
        functions[dtype] = getattr(library, f"prefold_{name}_{suffix}")
        functions[dtype].argtypes = argtypes
        functions[dtype].restype = None
    return functions


def _on_cpu(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(t.dtype == dtype and t.device.type == "cpu" for t in tensors)
