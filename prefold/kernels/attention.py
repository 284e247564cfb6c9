"""Interval attention on a CPU: plans as lists of keys, and attention over the rows of a stream and over slots.

abi.py has the structures of the C functions, and interface.py the lists.
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
    """Plans of attention, and attention. Rows have one of DTYPES, and their last dimension is contiguous."""

    @property
    def stores_bf16_pairs(self) -> bool:
        """Whether a store has the bfloat16 numbers of two slots interleaved, because one instruction sums both."""
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
        """Plan the tiles of `query_rows`. The caller must pass contiguous int64 arrays.

        Args:
            end: the end of each key's interval [j, end[j]).
            positions: the position of each key; None without a window.
            first: the first row of each key's span; None without spans.
            placed: write placed runs instead of runs and masked pairs.

        Raises:
            ValueError: the intervals are not nested, or positions do not ascend along a path.
            MemoryError: there is not enough memory.
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
        """Plan the tiles of queries over slots. The caller must pass contiguous int64 arrays.

        Raise MemoryError if there is not enough memory.

        Args:
            runs: start, count, position, first and last of `attention.KeyRuns`
            group: query heads per KV head
            placed: see `plan_rows`
        """
        addresses = (address(array) for array in runs)
        handle = self._calls["plan_slots"](
            *addresses, len(runs[0]), num_queries, address(query_positions), window or 0, group, placed
        )
        return SlotLists(**self._lists("slot", handle, num_queries, placed))

    def choose_expanded(
        self, count: np.ndarray, first: np.ndarray, last: np.ndarray, num_queries: int, sizes: tuple[int, int, int, int]
    ) -> np.ndarray:
        """Return for which queries over slots latent attention expands keys and values, bool [queries].

        The caller must pass contiguous int64 arrays. count, first, last: see `plan_slots`; sizes: rank, tail, dim and
        value_dim of `LatentCall`. Raise MemoryError if memory is short.
        """
        chosen = np.empty(num_queries, bool)
        addresses = (address(array) for array in (count, first, last))
        if self._calls["choose_expanded"](*addresses, len(count), num_queries, *sizes, address(chosen)):
            raise MemoryError("not enough memory for a plan of attention")
        return chosen

    def _lists(
        self, kind: Literal["row", "slot"], handle: int | None, num_queries: int, placed: bool
    ) -> dict[str, Any]:
        """Copy the lists of a plan into NumPy arrays, and free the plan. Return the arrays and a call with them."""
        if not handle:
            raise MemoryError("not enough memory for a plan of attention")
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
        """Return softmax(q k^T * scale) v over the keys in `lists`, [queries, heads, value dim].

        Arguments: see `prefold.worker.attention.RowAttention.attend`. A head has at most MAX_HEAD_DIM numbers, and the
        scale is positive.
        """
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

        Args:
            cap: see `prefold.worker.attention.Heads`
            sinks: see `prefold.worker.attention.RowAttention.attend`
        """
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
        """Set the fields that calls over rows and over slots share, call, and return the result.

        Args:
            values: the number of KV heads, and the dimension of a value
        """
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
            raise MemoryError("not enough memory for attention")
        return out

    def write_slots(self, plane: SlotPlane, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
        """Write rows k [n, kv_heads, dim] and v [n, kv_heads, value dim] into int64 slots [n].

        Return False, and write nothing, if a slot is out of range.
        """
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
