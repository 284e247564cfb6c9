"""The compiled kernels as Python functions over tensors and arrays. The structures they are given are in calls.py."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .calls import AttentionCall, RowLists, SlotCall, SlotLists, SlotPlane, TileCall, WriteCall

__all__ = ["DTYPES", "MAX_HEAD_DIM", "Kernels"]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_HEAD_DIM = 256


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
        self._plan_slots = library.prefold_plan_slots
        self._plan_slots.restype = c_void_p
        self._plan_slots.argtypes = [*[c_void_p] * 5, c_int64, c_int64, c_void_p, c_int64, c_int64]
        self._slot_list_sizes = library.prefold_slot_list_sizes
        self._slot_list_sizes.argtypes = [c_void_p, POINTER(c_int64)]
        self._copy_slot_lists = library.prefold_copy_slot_lists
        self._copy_slot_lists.argtypes = [c_void_p] * 8
        self._free_slot_lists = library.prefold_free_slot_lists
        self._free_slot_lists.argtypes = [c_void_p]
        self._write_slots = library.prefold_write_slots
        self._write_slots.argtypes = [POINTER(WriteCall), c_int32]
        self._slot_attention = library.prefold_slot_attention
        self._slot_attention.argtypes = [POINTER(SlotCall), c_int32]
        # Whether a store keeps bfloat16 as such, two numbers that are summed at once side by side, or as float32.
        self.stores_bf16_pairs = bool(library.prefold_stores_bf16_pairs())
        self._attention = library.prefold_attention
        self._attention.argtypes = [POINTER(AttentionCall), c_int32]
        self._add_rms_norm = _normed(library, "add_rms_norm", [c_void_p] * 4 + [c_int64] * 4 + [c_float, c_int32])
        self._rope = _normed(library, "rope", [c_void_p] * 3 + [c_int64] * 5 + [c_float, c_int32])
        gate = [c_void_p] * 2 + [c_int64] * 3 + [c_int32]
        self._gate_mul = {
            "silu": _by_dtype(library, "silu_mul", gate),
            "gelu_tanh": _by_dtype(library, "gelu_mul", gate),
        }
        self._products = {
            given: _product(library, name)
            for given, name in (
                ((torch.float32, torch.float32), "prefold_linear_float32"),
                ((torch.bfloat16, torch.bfloat16), "prefold_linear_bfloat16"),
                ((torch.bfloat16, torch.float32), "prefold_head_bfloat16"),
            )
        }
        self._gated_products = {
            (dtype, activation): _product(library, f"prefold_gated_linear_{activation}_{suffix}")
            for dtype, suffix in DTYPES.items()
            for activation in ("silu", "gelu_tanh")
        }
        self._log_sum_exp = _function(
            library, "prefold_log_sum_exp", [c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_int32]
        )
        self._draw = _function(
            library, "prefold_draw", [c_void_p, *[c_int64] * 2, *[c_void_p] * 3, c_int64, c_void_p, c_int32]
        )
        self._has_products = library.prefold_has_products
        self._has_products.argtypes = [c_int32]
        self._use_own_threads = library.prefold_use_own_threads
        self._use_own_threads.argtypes = [c_int32]
        # Where products are oneDNN's, on OpenMP's threads, a second pool would be in the way of the first.
        ours = self.has_products(torch.bfloat16) and not torch.cpu._is_amx_tile_supported()
        self.use_own_threads(ours and os.environ.get("PREFOLD_THREADS") != "openmp")
        library.prefold_calm_openmp()

    def plan_rows(
        self, end: np.ndarray, query_rows: np.ndarray, positions: np.ndarray | None, window: int | None
    ) -> RowLists:
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
            lists = RowLists(
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

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: RowLists,
        *,
        scale: float,
        path_k: Tensor | None = None,
        path_v: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T * scale) v over the keys that `tiles` lists; arguments and result as of
        `prefold.attention.RowAttention.attend`. Tensors of one of DTYPES on the CPU, the last dimension contiguous,
        of at most MAX_HEAD_DIM; scale > 0."""
        out = torch.empty(q.shape, dtype=q.dtype)
        call = AttentionCall(rows=len(k), path=0 if path_k is None else len(path_k))
        _fill(call.tiles, q, out, kv_heads=k.shape[1], scale=scale)
        call.tiles.tiles = len(tiles.run_offsets) - 1
        for name in ("run_offsets", "mask_offsets", "runs", "masked"):
            setattr(call.tiles, name, getattr(tiles, name).ctypes.data)
        for name, tensor in (("k", k), ("v", v), ("path_k", path_k), ("path_v", path_v)):
            if tensor is not None:
                setattr(call, name, tensor.data_ptr())
                setattr(call, f"{name}_row", tensor.stride(0))
                setattr(call, f"{name}_head", tensor.stride(1))
        if self._attention(byref(call), q.dtype == torch.bfloat16):
            raise MemoryError("attention workspace")
        return out

    def plan_slots(
        self,
        runs: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        num_queries: int,
        query_positions: np.ndarray | None,
        window: int | None,
        group: int,
    ) -> SlotLists:
        """The tiles of queries over slots. runs: start, count, position, first, last of `attention.KeyRuns`.

        Contiguous int64 arrays, checked by the caller.
        """
        handle = self._plan_slots(
            *(a.ctypes.data for a in runs),
            len(runs[0]),
            num_queries,
            None if query_positions is None else query_positions.ctypes.data,
            window or 0,
            group,
        )
        if not handle:
            raise MemoryError("attention plan")
        try:
            sizes = (c_int64 * 4)()
            self._slot_list_sizes(handle, sizes)
            tiles, num_runs, masked, own = sizes
            lists = {
                "tile_starts": np.empty(tiles + 1, np.int64),
                "run_offsets": np.empty(tiles + 1, np.int64),
                "mask_offsets": np.empty(tiles + 1, np.int64),
                "own_offsets": np.empty(num_queries + 1, np.int64),
                "runs": np.empty((num_runs, 2), np.int32),
                "masked": np.empty((masked, 2), np.uint32),
                "own": np.empty((own, 2), np.int32),
            }
            addresses = {name: a.ctypes.data for name, a in lists.items()}
            self._copy_slot_lists(handle, *addresses.values())
        finally:
            self._free_slot_lists(handle)
        return SlotLists(**lists, call=TileCall(queries=num_queries, tiles=tiles, **addresses))

    def write_slots(self, plane: SlotPlane, slots: Tensor, k: Tensor, v: Tensor) -> bool:
        """Put rows k, v [n, kv_heads, dim] into int64 slots [n]; False where one is out of range: nothing is written.

        Tensors on the CPU, the last dimension contiguous.
        """
        call = WriteCall(
            plane,
            slots.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            *k.stride()[:2],
            *v.stride()[:2],
            len(slots),
            torch.get_num_threads(),
        )
        return not self._write_slots(byref(call), k.dtype == torch.bfloat16)

    def slot_attention(self, plane: SlotPlane, q: Tensor, tiles: SlotLists, scale: float) -> Tensor:
        """softmax(q k^T * scale) v over the slots of `tiles`; q [queries, heads, dim], numbers of a head contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype)
        call = SlotCall(tiles.call, plane)
        _fill(call.tiles, q, out, kv_heads=plane.kv_heads, scale=scale)
        if self._slot_attention(byref(call), q.dtype == torch.bfloat16):
            raise MemoryError("attention workspace")
        return out

    def can_log_sum_exp(self, x: Tensor) -> bool:
        """Whether `log_sum_exp` takes this tensor: float32 on the CPU, its rows contiguous."""
        return x.is_cpu and x.dtype == torch.float32 and x.dim() == 2 and x.stride()[-1] == 1

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x += delta in place, and its norm; x, delta [rows, width], each row contiguous.

        weight [width], of x's dtype or float32. Raises ValueError where the shapes do not fit.
        """
        rows, width = x.shape
        if weight.shape[0] != width or (delta is not None and delta.shape != x.shape) or x.stride()[1] != 1 < width:
            raise ValueError(f"x {list(x.shape)}, delta and weight {list(weight.shape)} do not fit together")
        out = torch.empty((rows, width), dtype=x.dtype)
        self._add_rms_norm[x.dtype, weight.dtype](
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            x.stride()[0],
            0 if delta is None else delta.stride()[0],
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float) -> None:
        """Rotates x [rows, heads, dim] in place, normed before where there is a weight; cos_sin float32 [rows, dim].

        Raises ValueError where the shapes do not fit.
        """
        rows, _, dim = x.shape
        if cos_sin.shape != (rows, dim) or dim % 2 or (norm_weight is not None and norm_weight.shape[0] != dim):
            raise ValueError(f"x {list(x.shape)} and cos_sin {list(cos_sin.shape)} do not fit together")
        self._rope[x.dtype, x.dtype if norm_weight is None else norm_weight.dtype](
            x.data_ptr(),
            cos_sin.data_ptr(),
            None if norm_weight is None else norm_weight.data_ptr(),
            *x.shape,
            *x.stride()[:2],
            eps,
            torch.get_num_threads(),
        )

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of gate_up [rows, 2 * width]; activation "silu" or "gelu_tanh"."""
        return _gate_mul(self._gate_mul[activation], gate_up)

    def use_own_threads(self, own: bool) -> None:
        """Run parallel loops on threads of the kernels' own (`src/pool.h`), or on OpenMP's, which torch uses too."""
        self.own_threads = own
        self._use_own_threads(own)

    def has_products(self, dtype: torch.dtype) -> bool:
        """Whether `linear` is as fast here as the processor's vectors allow."""
        return dtype in DTYPES and bool(self._has_products(dtype == torch.bfloat16))

    def linear(
        self, x: Tensor, packed: Tensor, columns: int, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """[rows, columns]: x [rows, k] times the matrix that `pack_words` has packed, plus bias [columns].

        x, the matrix and the bias are of one dtype, float32 or bfloat16, and so is the result. out: contiguous memory
        for it; in float32 it takes the sums of bfloat16 as they are.
        """
        if out is None:
            out = torch.empty((len(x), columns), dtype=x.dtype)
        return _multiply(self._products.get((x.dtype, out.dtype)), x, packed, columns, bias, out)

    def gated_linear(self, x: Tensor, packed: Tensor, width: int, bias: Tensor | None, activation: str) -> Tensor:
        """activation(gate) * up [rows, width]; activation "silu" or "gelu_tanh".

        The matrix and bias [2 * width] hold sixteen columns of gate, sixteen of up, and so on; the rest as `linear`.
        """
        out = torch.empty((len(x), width), dtype=x.dtype)
        return _multiply(self._gated_products.get((x.dtype, activation)), x, packed, width, bias, out)

    def log_sum_exp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of each row of float32 logits [rows, columns], and the place of its largest (int64).

        A NaN makes the sum NaN and is not the largest.
        """
        rows, columns = logits.shape
        sums, largest = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        self._log_sum_exp(
            logits.data_ptr(),
            rows,
            columns,
            logits.stride()[0],
            sums.data_ptr(),
            largest.data_ptr(),
            torch.get_num_threads(),
        )
        return sums, largest

    def draw(self, logits: Tensor, rows: np.ndarray, inverses: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """A token drawn for each of `rows` of float32 logits [r, vocab], int64 [n]; -1 where a row's largest number is
        not finite. rows int64 [n]; inverses float32 [n]: 1 / temperature; keys uint64 [n]: of the noise."""
        if logits.dtype != torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
            raise ValueError(f"no draw from {logits.dtype} {list(logits.shape)} on {logits.device}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
            raise ValueError(f"rows {rows} of {len(logits)}")
        rows, tokens = np.ascontiguousarray(rows, np.int64), np.empty(len(rows), np.int64)
        inverses, keys = np.ascontiguousarray(inverses, np.float32), np.ascontiguousarray(keys, np.uint64)
        self._draw(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            *(array.ctypes.data for array in (rows, inverses, keys)),
            len(rows),
            tokens.ctypes.data,
            torch.get_num_threads(),
        )
        return tokens


def _fill(call: TileCall, q: Tensor, out: Tensor, *, kv_heads: int, scale: float) -> None:
    """Sets all fields of a call but those of the lists."""
    call.q, call.out = q.data_ptr(), out.data_ptr()
    call.q_row, call.q_head, _ = q.stride()
    call.queries, call.heads, call.dim = q.shape
    call.kv_heads, call.scale, call.threads = kv_heads, scale, torch.get_num_threads()


def _multiply(
    function: ctypes._CFuncPtr | None, x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Calls a product and returns out [rows, columns]; columns: as the function counts them."""
    dtype, (rows, size) = x.dtype, x.shape
    if function is None or not x.is_cpu or size * x.itemsize != packed.shape[1] * 4:
        raise ValueError(f"no product of {dtype} {list(x.shape)} on {x.device} with {list(packed.shape)} words")
    if x.stride()[1] != 1:
        x = x.contiguous()
    short = function(
        x.data_ptr(),
        x.stride()[0],
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        size,
        torch.get_num_threads(),
    )
    if short:
        raise MemoryError("linear")
    return out


def _by_dtype(library: ctypes.CDLL, name: str, argtypes: list) -> dict[torch.dtype, ctypes._CFuncPtr]:
    return {dtype: _function(library, f"prefold_{name}_{suffix}", argtypes) for dtype, suffix in DTYPES.items()}


def _normed(library: ctypes.CDLL, name: str, argtypes: list) -> dict[tuple[torch.dtype, torch.dtype], ctypes._CFuncPtr]:
    """The C functions `name` by the dtypes of the numbers and of the norm's weight."""
    functions = {(dtype, dtype): function for dtype, function in _by_dtype(library, name, argtypes).items()}
    mixed = _function(library, f"prefold_{name}_bfloat16_float32", argtypes)
    return functions | {(torch.bfloat16, torch.float32): mixed}


def _product(library: ctypes.CDLL, name: str) -> ctypes._CFuncPtr:
    function = _function(library, name, [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3, c_int32])
    function.restype = c_int32
    return function


def _function(library: ctypes.CDLL, name: str, argtypes: list) -> ctypes._CFuncPtr:
    function = getattr(library, name)
    function.argtypes = argtypes
    function.restype = None
    return function


def _gate_mul(functions: dict[torch.dtype, ctypes._CFuncPtr], gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate and up have {width} columns together, an odd number")
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    threads = torch.get_num_threads()
    functions[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gate_up.stride()[0], threads)
    return out
