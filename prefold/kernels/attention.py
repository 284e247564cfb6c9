"""Interval attention on a CPU: plans as lists of keys, and attention over rows as they lie and over slots.

The structures that the C functions are given are in abi.py, and the lists in interface.py.
"""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64
from typing import Any, Literal

import numpy as np

from .abi import RowCall, SlotCall, SlotPlane, TileCall, WriteCall
from .interface import BFLOAT16, FLOAT32, Family, RowLists, SlotLists, address, step
from .threads import threads

MAX_HEAD_DIM = 576


class AttentionKernels(Family):
    """Plans and computes attention. Rows are of one of DTYPES, the last dimension contiguous."""

    @property
    def stores_bf16_pairs(self) -> bool:
        """Returns whether a store keeps two bfloat16 numbers that are summed at once side by side; if not, it keeps
        them one after the other."""
        return bool(self._calls["stores_bf16_pairs"]())

    def plan_rows(
        self,
        end: np.ndarray,
        query_rows: np.ndarray,
        positions: np.ndarray | None,
        window: int | None,
        first: np.ndarray | None = None,
        *,
        placed: bool = False,
    ) -> RowLists:
        """Return the tiles of `query_rows`. The arrays are contiguous int64 arrays, checked by the caller.

        first: of the keys, if there are spans; placed: whether to make placed runs in place of the other lists.

        Raises ValueError where the intervals [j, end[j]) are not nested, or positions do not ascend along a path.
        """
        not_nested = c_int32()
        handle = self._calls["plan_rows"](
            address(end),
            len(end),
            address(first),
            address(query_rows),
            len(query_rows),
            address(positions),
            window or 0,
            placed,
            byref(not_nested),
        )
        if not_nested.value:
            raise ValueError("intervals are not nested")
        return RowLists(**self._lists("row", handle, len(query_rows), placed))

    def plan_slots(
        self,
        runs: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        num_queries: int,
        query_positions: np.ndarray | None,
        window: int | None,
        group: int,
        *,
        placed: bool = False,
    ) -> SlotLists:
        """Return the tiles of queries over slots. runs: start, count, position, first, last of `attention.KeyRuns`.

        The arrays are contiguous int64 arrays, checked by the caller. placed: see `plan_rows`.
        """
        addresses = (address(array) for array in runs)
        handle = self._calls["plan_slots"](
            *addresses, len(runs[0]), num_queries, address(query_positions), window or 0, group, placed
        )
        return SlotLists(**self._lists("slot", handle, num_queries, placed))

    def _lists(
        self, kind: Literal["row", "slot"], handle: int | None, num_queries: int, placed: bool
    ) -> dict[str, Any]:
        """Returns the lists of a plan in memory of Python's, and a call with their addresses; frees those of C."""
        if not handle:
            raise MemoryError("attention plan")
        try:
            sizes = (c_int64 * 5)()
            self._calls[f"{kind}_list_sizes"](handle, sizes)
            tiles, runs, masked, placed_runs, own = sizes
            lists: dict[str, Any] = {
                "run_offsets": np.empty(tiles + 1, np.int64),
                "mask_offsets": np.empty(tiles + 1, np.int64),
                "runs": np.empty((runs, 2), np.int32),
                "masked": np.empty((masked, 2), np.uint32),
                "placed_offsets": np.empty(tiles + 1, np.int64),
                "placed": np.empty((placed_runs, 4), np.int32),
            }
            if kind == "slot":
                lists["tile_starts"] = np.empty(tiles + 1, np.int64)
                lists["own_offsets"] = np.empty(num_queries + 1, np.int64)
                lists["own"] = np.empty((own, 2), np.int32)
            addresses = {name: address(array) for name, array in lists.items()}
            self._calls[f"copy_{kind}_lists"](handle, *addresses.values())
        finally:
            self._calls[f"free_{kind}_lists"](handle)
        if not placed:
            del addresses["placed_offsets"], addresses["placed"]
        return lists | {"call": TileCall(tiles=tiles, **addresses)}

    def row_attention(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        lists: RowLists,
        *,
        scale: float,
        cap: float | None = None,
        sinks: np.ndarray | None = None,
        path_k: np.ndarray | None = None,
        path_v: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns softmax(q k^T * scale) v over the keys that `lists` lists; arguments and result as of
        `prefold.worker.attention.RowAttention.attend`. At most MAX_HEAD_DIM numbers a head; scale > 0."""
        call = RowCall(lists.call, rows=len(k), path=0 if path_k is None else len(path_k))
        for name, rows in (("k", k), ("v", v), ("path_k", path_k), ("path_v", path_v)):
            if rows is not None:
                setattr(call, name, address(rows))
                setattr(call, f"{name}_row", step(rows))
                setattr(call, f"{name}_head", step(rows, 1))
        return self._attend("row_attention", call, q, v.shape[1:], scale, cap, sinks)

    def slot_attention(
        self,
        plane: SlotPlane,
        q: np.ndarray,
        lists: SlotLists,
        scale: float,
        cap: float | None,
        sinks: np.ndarray | None,
    ) -> np.ndarray:
        """Return softmax(q k^T * scale) v over the slots in `lists`, [queries, heads, value dim].

        cap: see `prefold.worker.attention.Heads`; sinks: see `prefold.worker.attention.RowAttention.attend`."""
        return self._attend(
            "slot_attention", SlotCall(lists.call, plane), q, (plane.kv_heads, plane.value_dim), scale, cap, sinks
        )

    def _attend(
        self,
        name: str,
        call: RowCall | SlotCall,
        q: np.ndarray,
        values: tuple[int, int],
        scale: float,
        cap: float | None,
        sinks: np.ndarray | None,
    ) -> np.ndarray:
        """Fill in what rows and slots have in common, call, and return the result. values: KV heads, and the dim of a
        value"""
        kv_heads, value_dim = values
        out, tiles = np.empty((*q.shape[:2], value_dim), q.dtype), call.tiles
        sinks = None if sinks is None else np.ascontiguousarray(sinks, FLOAT32)
        tiles.sinks, tiles.q, tiles.out = address(sinks), address(q), address(out)
        tiles.q_row, tiles.q_head = step(q), step(q, 1)
        tiles.queries, tiles.heads, tiles.dim = q.shape
        tiles.value_dim, tiles.kv_heads, tiles.scale, tiles.threads, tiles.cap = (
            value_dim,
            kv_heads,
            scale,
            threads(),
            cap or 0,
        )
        if self._calls[name](byref(call), q.dtype == BFLOAT16):
            raise MemoryError("attention workspace")
        return out

    def write_slots(self, plane: SlotPlane, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
        """Put rows k [n, kv_heads, dim] and v [n, kv_heads, value dim] into int64 slots [n], and return True. Return
        False, and write nothing, if a slot is out of range."""
        call = WriteCall(
            plane,
            address(slots),
            address(k),
            address(v),
            step(k),
            step(k, 1),
            step(v),
            step(v, 1),
            len(slots),
            threads(),
        )
        return not self._calls["write_slots"](byref(call), k.dtype == BFLOAT16)
