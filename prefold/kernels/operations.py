"""Calls of single operations of a layer: norms, rotations, gates, logits, experts, and layers with a state."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .abi import ConvCall, DeltaCall, ExpertsCall, ShortConvCall
from .interface import Family
from .products import COLUMNS, PanelPool, fill_words


class ElementwiseKernels(Family):
    """Computes what a layer does between its products, on tensors of one of DTYPES on the CPU."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds delta to x in place, and returns the norm of the sum; x, delta [rows, width], each row contiguous.

        weight [width], of x's dtype or float32. Raises ValueError where the shapes do not fit.
        """
        rows, width = x.shape
        if weight.shape[0] != width or (delta is not None and delta.shape != x.shape) or x.stride()[1] != 1 < width:
            raise ValueError(f"x {list(x.shape)}, delta and weight {list(weight.shape)} do not fit together")
        out = torch.empty((rows, width), dtype=x.dtype)
        self._calls["add_rms_norm", x.dtype, weight.dtype](
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            x.stride()[0],
            0 if delta is None else delta.stride()[0],
            width,
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
        self._calls["rope", x.dtype, x.dtype if norm_weight is None else norm_weight.dtype](
            x.data_ptr(),
            cos_sin.data_ptr(),
            None if norm_weight is None else norm_weight.data_ptr(),
            *x.shape,
            *x.stride()[:2],
            eps,
            torch.get_num_threads(),
        )

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up [rows, width] of gate_up [rows, 2 * width]; activation "silu" or "gelu_tanh".

        Raises ValueError where gate and up have an odd number of columns together.
        """
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate and up have {width} columns together, an odd number")
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        threads = torch.get_num_threads()
        call = self._calls["gate_mul", activation, gate_up.dtype]
        call(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gate_up.stride()[0], threads)
        return out


class LogitKernels(Family):
    """Reads rows of float32 logits on the CPU."""

    def can_log_sum_exp(self, x: Tensor) -> bool:
        """Returns whether `log_sum_exp` and `entropy` take this tensor: float32 on the CPU, its rows contiguous."""
        return x.is_cpu and x.dtype == torch.float32 and x.dim() == 2 and x.stride()[-1] == 1

    def log_sum_exp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-sum-exp of each row of float32 logits [rows, columns], and the place of its largest (int64).

        A NaN makes the sum NaN and is not the largest.
        """
        rows, columns = logits.shape
        sums, largest = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        self._calls["log_sum_exp"](
            logits.data_ptr(),
            rows,
            columns,
            logits.stride()[0],
            sums.data_ptr(),
            largest.data_ptr(),
            torch.get_num_threads(),
        )
        return sums, largest

    def entropy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `log_sum_exp` does, and the entropy of each row's probabilities in nats, float32 [rows].

        A NaN or an infinity that is the largest makes the entropy NaN; a logit of -inf adds nothing to it.
        """
        rows, columns = logits.shape
        sums, entropies = torch.empty(2, rows, dtype=torch.float32)
        largest = torch.empty(rows, dtype=torch.int64)
        self._calls["entropy"](
            logits.data_ptr(),
            rows,
            columns,
            logits.stride()[0],
            *(result.data_ptr() for result in (sums, largest, entropies)),
            torch.get_num_threads(),
        )
        return sums, largest, entropies

    def draw(self, logits: Tensor, rows: np.ndarray, inverses: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns a token drawn for each of `rows` of float32 logits [r, vocab], int64 [n]; -1 where a row's largest
        number is not finite.

        rows int64 [n]; inverses float32 [n]: 1 / temperature; keys uint64 [n]: of the noise. Raises ValueError for
        other logits, and for rows that are not there.
        """
        if logits.dtype != torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
            raise ValueError(f"no draw from {logits.dtype} {list(logits.shape)} on {logits.device}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
            raise ValueError(f"rows {rows} of {len(logits)}")
        rows, tokens = np.ascontiguousarray(rows, np.int64), np.empty(len(rows), np.int64)
        inverses, keys = np.ascontiguousarray(inverses, np.float32), np.ascontiguousarray(keys, np.uint64)
        self._calls["draw"](
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            *(array.ctypes.data for array in (rows, inverses, keys)),
            len(rows),
            tokens.ctypes.data,
            torch.get_num_threads(),
        )
        return tokens


LANES = 16  # columns of gate, or of up, that lie side by side


def pack_experts(weight: Tensor, pool: PanelPool | None = None, *, gated: bool) -> Tensor:
    """Returns the matrices of experts packed one behind the other, int32 [experts, panels, words along k, 32].

    weight: [experts, 2 * width, hidden], gate before up, where `gated`; else [experts, hidden, width]. Widths are
    filled up with zeros to whole LANES.
    """
    experts, outputs, inputs = weight.shape
    fill = -(outputs // 2 if gated else inputs) % LANES
    shape = (2 * (outputs // 2 + fill), inputs) if gated else (outputs, inputs + fill)
    words = shape[1] * weight.itemsize // 4
    packed = (pool or PanelPool()).take((experts, -(-shape[0] // COLUMNS), words, COLUMNS))
    for panels, matrix in zip(packed, weight.detach(), strict=True):
        fill_words(panels, _gate_in_turn(matrix, fill) if gated else F.pad(matrix, (0, fill)))
    return packed


def _gate_in_turn(columns: Tensor, fill: int) -> Tensor:
    """Returns rows of gate, then of up, each filled up with so many zeros, with LANES of each in turn."""
    halves = F.pad(columns.unflatten(0, (2, -1)), (0, 0, 0, fill))
    return halves.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)


class ExpertKernels(Family):
    """Takes rows through experts whose matrices `pack_experts` has packed. All is of one dtype, on the CPU."""

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        chosen: int,
        normalised: bool,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Returns the weighed sum of what each row's experts give, [rows, hidden].

        x            [rows, hidden]; logits: float32 [rows, experts], of the router
        chosen       each row goes through so many experts, those of its largest logits
        normalised   whether their shares are the softmax of these logits; else of all
        activation   "silu", "gelu_tanh", or "clamped": that of gpt-oss
        gate_up_bias, down_bias  [experts, 2 * an expert's width], gate before up, and [experts, hidden], of x's dtype

        Raises ValueError where sizes do not fit or there is no such kernel.
        """
        function, (rows, hidden) = self._calls.get(("experts", activation, x.dtype)), x.shape
        experts, panels, words, _ = gate_up.shape
        width = panels * COLUMNS // 2
        fits = words * 4 == hidden * x.itemsize and down.shape[2] * 4 == width * x.itemsize
        if function is None or not x.is_cpu or not fits or not 0 < chosen <= experts or logits.shape != (rows, experts):
            raise ValueError(f"no experts of {list(gate_up.shape)} words for {x.dtype} {list(x.shape)} on {x.device}")
        biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
        bias_width = 0 if gate_up_bias is None else gate_up_bias.shape[1] // 2
        x, logits = x if x.stride()[1] == 1 else x.contiguous(), logits.contiguous()
        out = torch.empty((rows, hidden), dtype=x.dtype)
        call = ExpertsCall(
            x=x.data_ptr(), logits=logits.data_ptr(), gate_up=gate_up.data_ptr(), down=down.data_ptr(),
            gate_up_bias=_address(biases[0]), down_bias=_address(biases[1]), bias_width=bias_width,
            out=out.data_ptr(), rows=rows, x_row=x.stride()[0], experts=experts, chosen=chosen, hidden=hidden,
            width=width, normalised=normalised, threads=torch.get_num_threads(),
        )  # fmt: skip
        if function(byref(call)):
            raise MemoryError("experts")
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
