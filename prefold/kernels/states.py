"""Layers whose state runs along the sequence: a call takes rows of a step through a layer, but for its linears."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .abi import ConvCall, DeltaCall, ShortConvCall
from .interface import Family


@dataclass(frozen=True, eq=False, slots=True)
class ConvPlaces:
    """A ConvPlaces says which rows a causal convolution reads: a place below `kept` columns for each state of the table
    is one of these columns, and the places above are rows.

    above  int64 [kept, rows]: of each row the places of the rows above it, the nearest first
    below  int64 [ends, kept]: the rows that each state to be stored consists of, the oldest first
    to     int64 [ends]: where in the table these are stored; a state there is read by none but the rows of the one that
           takes its place
    """

    above: np.ndarray
    below: np.ndarray
    to: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class RunOrder:
    """A RunOrder is the runs of a step in an order in which they can be computed.

    first, stop  int64 [runs]: the first row of each run, and the row behind its last
    source, to   int64 [runs]: the states that it starts from and leaves, those of the table, and behind these others
                 that only later runs need; to is -1 where no state is needed, and else a state that no other run of
                 its wave or of a later one starts from, but for runs that go on from this one
    waves        int64: where the runs that do not depend on each other begin, and the number of all
    between      how many states only later runs need
    """

    first: np.ndarray
    stop: np.ndarray
    source: np.ndarray
    to: np.ndarray
    waves: np.ndarray
    between: int


class StateKernels(Family):
    """Computes mixers of hybrids. x is of one of DTYPES on the CPU, what a mixer's first linear gives of each row."""

    def short_conv(
        self, x: Tensor, states: Tensor, taps: Tensor, bias: Tensor | None, places: ConvPlaces, pick: Tensor | None
    ) -> Tensor:
        """Returns c * conv(b * x) of the rows in `pick`, [rows, channels], and writes the states at the ends.

        x            [rows, 3 * channels]: b, c and x
        states       [states, kept, channels], of x's dtype
        taps, bias   float32 [kept + 1, channels], the last tap of the row itself; [channels] or None
        pick         int64; None: all rows
        """
        conv = self._conv(x, states, taps, bias, places)
        picked = len(x) if pick is None else len(pick)
        out = torch.empty(picked, states.shape[2], dtype=x.dtype)
        call = ShortConvCall(conv, out.data_ptr(), _address(pick), picked, torch.get_num_threads())
        self._calls["short_conv", x.dtype](byref(call))
        return out

    def delta_net(
        self,
        x: Tensor,
        columns: Tensor,
        states: Tensor,
        taps: Tensor,
        places: ConvPlaces,
        order: RunOrder,
        *,
        key_heads: int,
        rates: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        pick: Tensor | None,
    ) -> Tensor:
        """Returns what a gated delta net gives for the rows in `pick`, [rows, heads * value dim], and writes the two
        parts of the states at the ends.

        x         [rows, channels + heads * value dim + 2 * heads]: q, k, v, z, b and a
        columns   [states, kept, channels]; taps float32 [kept + 1, channels]: of the convolution of q, k and v
        states    float32 [states, heads, key dim, value dim]
        rates     float32 [heads]: -exp(a_log); dt_bias float32 [heads]; norm float32 [value dim]

        Raises ValueError where sizes do not fit, and MemoryError.
        """
        _, heads, key_dim, value_dim = states.shape
        values = heads * value_dim
        sizes = 2 * key_heads * key_dim + values, 2 * key_heads * key_dim + 2 * values + 2 * heads
        if (columns.shape[2], x.shape[1]) != sizes or states.dtype != torch.float32 or not states.is_contiguous():
            raise ValueError(f"x {list(x.shape)} and states {list(states.shape)} do not fit together")
        conv = self._conv(x, columns, taps, None, places)
        between = torch.empty(order.between, *states.shape[1:])
        picked = len(x) if pick is None else len(pick)
        out = torch.empty(picked, values, dtype=x.dtype)
        runs = (getattr(order, name).ctypes.data for name in ("first", "stop", "source", "to", "waves"))
        tensors = (rates.data_ptr(), dt_bias.data_ptr(), norm.data_ptr())
        call = DeltaCall(
            conv, out.data_ptr(), _address(pick), states.data_ptr(), between.data_ptr(), *runs, *tensors, picked,
            len(order.waves) - 1, len(states), heads, key_heads, key_dim, value_dim, eps, torch.get_num_threads(),
        )  # fmt: skip
        if self._calls["delta_net", x.dtype](byref(call)):
            raise MemoryError("delta_net")
        return out

    @staticmethod
    def _conv(x: Tensor, states: Tensor, taps: Tensor, bias: Tensor | None, places: ConvPlaces) -> ConvCall:
        """Returns the part of a call that says what is convolved."""
        count, kept, channels = states.shape
        if taps.shape != (kept + 1, channels) or x.stride()[1] != 1 or places.above.shape != (kept, len(x)):
            raise ValueError(f"taps {list(taps.shape)}, states {list(states.shape)} and x {list(x.shape)} do not fit")
        return ConvCall(
            x.data_ptr(), states.data_ptr(), taps.data_ptr(), _address(bias), places.above.ctypes.data,
            places.below.ctypes.data, places.to.ctypes.data, len(x), x.stride()[0], channels, kept, count * kept,
            len(places.to),
        )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
