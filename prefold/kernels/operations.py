"""Calls of single operations of a layer: norms, rotations, gates, logits, experts, and layers with a state."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import numpy as np

from .abi import ConvCall, DeltaCall, ExpertsCall, MambaCall, RunLists, ShortConvCall
from .interface import FLOAT32, Family, address, is_dense, step
from .products import COLUMNS
from .threads import threads


class ElementwiseKernels(Family):
    """Computes what a layer does between its products, on arrays of one of DTYPES."""

    def add_rms_norm(self, x: np.ndarray, delta: np.ndarray | None, weight: np.ndarray, eps: float) -> np.ndarray:
        """Adds delta to x in place, and returns the norm of the sum; x, delta [rows, width], each row contiguous.

        weight [width], of x's dtype or float32. Raises ValueError where the shapes do not fit.
        """
        rows, width = x.shape
        if weight.shape[0] != width or (delta is not None and delta.shape != x.shape) or not is_dense(x):
            raise ValueError(f"x {list(x.shape)}, delta and weight {list(weight.shape)} do not fit together")
        out = np.empty((rows, width), x.dtype)
        self._calls["add_rms_norm", x.dtype, weight.dtype](
            address(x),
            address(delta),
            address(weight),
            address(out),
            rows,
            width,
            step(x),
            0 if delta is None else step(delta),
            width,
            eps,
            threads(),
        )
        return out

    def rope(self, x: np.ndarray, cos_sin: np.ndarray, norm_weight: np.ndarray | None, eps: float) -> None:
        """Rotates x [rows, heads, dim] in place, normed before where there is a weight; cos_sin float32 [rows, dim].

        Raises ValueError where the shapes do not fit.
        """
        rows, _, dim = x.shape
        if cos_sin.shape != (rows, dim) or dim % 2 or (norm_weight is not None and norm_weight.shape[0] != dim):
            raise ValueError(f"x {list(x.shape)} and cos_sin {list(cos_sin.shape)} do not fit together")
        self._calls["rope", x.dtype, x.dtype if norm_weight is None else norm_weight.dtype](
            address(x),
            address(cos_sin),
            address(norm_weight),
            *x.shape,
            step(x),
            step(x, 1),
            eps,
            threads(),
        )

    def gate_mul(self, gate_up: np.ndarray, activation: str) -> np.ndarray:
        """Returns activation(gate) * up [rows, width] of gate_up [rows, 2 * width]; activation "silu" or "gelu_tanh".

        Raises ValueError where gate and up have an odd number of columns together.
        """
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate and up have {width} columns together, an odd number")
        out = np.empty((rows, width // 2), gate_up.dtype)
        call = self._calls["gate_mul", activation, gate_up.dtype]
        call(address(gate_up), address(out), rows, width // 2, step(gate_up), threads())
        return out


class LogitKernels(Family):
    """Reads rows of float32 logits."""

    @staticmethod
    def can_log_sum_exp(x: np.ndarray) -> bool:
        """Returns whether `log_sum_exp` and `entropy` take this array: float32, its rows contiguous."""
        return x.dtype == FLOAT32 and x.ndim == 2 and is_dense(x)

    def log_sum_exp(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log-sum-exp of each row of float32 logits [rows, columns], and the place of its largest (int64).

        A NaN makes the sum NaN and is not the largest.
        """
        rows, columns = logits.shape
        sums, largest = np.empty(rows, FLOAT32), np.empty(rows, np.int64)
        self._calls["log_sum_exp"](
            address(logits),
            rows,
            columns,
            step(logits),
            address(sums),
            address(largest),
            threads(),
        )
        return sums, largest

    def entropy(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what `log_sum_exp` does, and the entropy of each row's probabilities in nats, float32 [rows].

        A NaN or an infinity that is the largest makes the entropy NaN; a logit of -inf adds nothing to it.
        """
        rows, columns = logits.shape
        sums, entropies = np.empty((2, rows), FLOAT32)
        largest = np.empty(rows, np.int64)
        self._calls["entropy"](
            address(logits),
            rows,
            columns,
            step(logits),
            *(address(result) for result in (sums, largest, entropies)),
            threads(),
        )
        return sums, largest, entropies

    def draw(
        self,
        logits: np.ndarray,
        rows: np.ndarray,
        inverses: np.ndarray,
        keys: np.ndarray,
        filters: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns a token drawn for each of `rows` of float32 logits [r, vocab], int64 [n]; -1 where a row's largest
        number is not finite, or with filters where one is NaN.

        rows int64 [n]; inverses float32 [n]: 1 / temperature; keys uint64 [n]: of the noise; filters float64 [n, 4]:
        top_n_sigma, min_p, top_k and top_p, in the order in which they are applied. Raises ValueError for other logits
        and filters, and for rows that are not there, and MemoryError.
        """
        if logits.dtype != FLOAT32 or not is_dense(logits):
            raise ValueError(f"no draw from {logits.dtype} {list(logits.shape)}; pass float32 rows")
        _check_rows(rows, logits)
        if filters is not None and filters.shape != (len(rows), 4):
            raise ValueError(f"filters {list(filters.shape)} of {len(rows)} draws; pass four for each")
        rows, tokens = np.ascontiguousarray(rows, np.int64), np.empty(len(rows), np.int64)
        inverses, keys = np.ascontiguousarray(inverses, np.float32), np.ascontiguousarray(keys, np.uint64)
        filters = None if filters is None else np.ascontiguousarray(filters, np.float64)
        if self._calls["draw"](
            address(logits),
            step(logits),
            logits.shape[1],
            *(address(array) for array in (rows, inverses, filters, keys)),
            len(rows),
            address(tokens),
            threads(),
        ):
            raise MemoryError("draw")
        return tokens

    def largest(self, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the `count` largest numbers of each row of float32 logits [rows, columns], falling, and their places:
        float32 and int64 [rows, count]. Of equals the first comes first.

        NaN is not larger than anything. Time grows with the square of `count`. Raises ValueError for other logits, and
        where there are fewer columns.
        """
        if logits.dtype != FLOAT32 or not is_dense(logits) or not 0 <= count <= logits.shape[1]:
            raise ValueError(f"no {count} largest of {logits.dtype} {list(logits.shape)}; pass float32 rows")
        rows, columns = logits.shape
        values, places = np.empty((rows, count), FLOAT32), np.empty((rows, count), np.int64)
        self._calls["largest"](
            address(logits), rows, columns, step(logits), count, address(values), address(places), threads()
        )
        return values, places

    def count_larger(self, logits: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns how many numbers of each of `rows` of float32 logits [r, columns] are larger than its value, int64
        [n].

        rows int64 [n]; values float32 [n]. Raises ValueError for other logits, and for rows that are not there.
        """
        if logits.dtype != FLOAT32 or not is_dense(logits) or len(rows) != len(values):
            raise ValueError(f"no ranks of {len(values)} numbers in {logits.dtype} {list(logits.shape)}")
        _check_rows(rows, logits)
        rows, values = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(values, FLOAT32)
        counts = np.empty(len(rows), np.int64)
        self._calls["count_larger"](
            address(logits),
            step(logits),
            logits.shape[1],
            address(rows),
            address(values),
            len(rows),
            address(counts),
            threads(),
        )
        return counts


def _check_rows(rows: np.ndarray, logits: np.ndarray) -> None:
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
        raise ValueError(f"rows {rows} of {len(logits)}")


class ExpertKernels(Family):
    """Takes rows through experts whose matrices `pack_experts` has packed. All is of one dtype."""

    def experts(
        self,
        x: np.ndarray,
        logits: np.ndarray,
        gate_up: np.ndarray,
        down: np.ndarray,
        *,
        chosen: int,
        normalised: bool,
        activation: str,
        gate_up_bias: np.ndarray | None = None,
        down_bias: np.ndarray | None = None,
    ) -> np.ndarray:
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
        if function is None or not fits or not 0 < chosen <= experts or logits.shape != (rows, experts):
            raise ValueError(f"no experts of {list(gate_up.shape)} words for {x.dtype} {list(x.shape)}")
        biases = [None if bias is None else np.ascontiguousarray(bias) for bias in (gate_up_bias, down_bias)]
        bias_width = 0 if gate_up_bias is None else gate_up_bias.shape[1] // 2
        x, logits = x if is_dense(x) else np.ascontiguousarray(x), np.ascontiguousarray(logits)
        out = np.empty((rows, hidden), x.dtype)
        call = ExpertsCall(
            x=address(x), logits=address(logits), gate_up=address(gate_up), down=address(down),
            gate_up_bias=address(biases[0]), down_bias=address(biases[1]), bias_width=bias_width,
            out=address(out), rows=rows, x_row=step(x), experts=experts, chosen=chosen, hidden=hidden,
            width=width, normalised=normalised, threads=threads(),
        )  # fmt: skip
        if function(byref(call)):
            raise MemoryError("experts")
        return out


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
    """Computes mixers of hybrids. x is of one of DTYPES, what a mixer's first linear gives of each row."""

    def short_conv(
        self,
        x: np.ndarray,
        states: np.ndarray,
        taps: np.ndarray,
        bias: np.ndarray | None,
        places: ConvPlaces,
        pick: np.ndarray | None,
    ) -> np.ndarray:
        """Returns c * conv(b * x) of the rows in `pick`, [rows, channels], and writes the states at the ends.

        x            [rows, 3 * channels]: b, c and x
        states       [states, kept, channels], of x's dtype
        taps, bias   float32 [kept + 1, channels], the last tap of the row itself; [channels] or None
        pick         int64; None: all rows
        """
        conv = self._conv(x, states, taps, bias, places)
        picked = len(x) if pick is None else len(pick)
        out = np.empty((picked, states.shape[2]), x.dtype)
        call = ShortConvCall(conv, address(out), address(pick), picked, threads())
        self._calls["short_conv", x.dtype](byref(call))
        return out

    def delta_net(
        self,
        x: np.ndarray,
        columns: np.ndarray,
        states: np.ndarray,
        taps: np.ndarray,
        places: ConvPlaces,
        order: RunOrder,
        *,
        key_heads: int,
        rates: np.ndarray,
        dt_bias: np.ndarray,
        norm: np.ndarray,
        eps: float,
        pick: np.ndarray | None,
    ) -> np.ndarray:
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
        if (columns.shape[2], x.shape[1]) != sizes or states.dtype != FLOAT32 or not states.flags.c_contiguous:
            raise ValueError(f"x {list(x.shape)} and states {list(states.shape)} do not fit together")
        conv = self._conv(x, columns, taps, None, places)
        between = np.empty((order.between, *states.shape[1:]), FLOAT32)
        picked = len(x) if pick is None else len(pick)
        out = np.empty((picked, values), x.dtype)
        numbers = (address(rates), address(dt_bias), address(norm))
        call = DeltaCall(
            conv, self._runs(order, states), address(out), address(pick), address(states), address(between), *numbers,
            picked, heads, key_heads, key_dim, value_dim, eps, threads(),
        )  # fmt: skip
        if self._calls["delta_net", x.dtype](byref(call)):
            raise MemoryError("delta_net")
        return out

    def mamba2(
        self,
        x: np.ndarray,
        columns: np.ndarray,
        states: np.ndarray,
        taps: np.ndarray,
        conv_bias: np.ndarray | None,
        places: ConvPlaces,
        order: RunOrder,
        *,
        groups: int,
        rates: np.ndarray,
        dt_bias: np.ndarray,
        skips: np.ndarray,
        norm: np.ndarray,
        eps: float,
        limits: tuple[float, float],
        pick: np.ndarray | None,
    ) -> np.ndarray:
        """Return what Mamba-2 gives for the rows in `pick`, [rows, heads * value dim], and write the two parts of the
        states at the ends.

        x          [rows, heads * value dim + channels + heads]: the gate, x, b, c and dt
        columns    [states, kept, channels]; taps float32 [kept + 1, channels], conv_bias float32 [channels] or None: of
                   the convolution of x, b and c
        states     float32 [states, heads, key dim, value dim]
        rates, dt_bias, skips  float32 [heads]; rates: -exp(a_log); skips: what D is in papers
        norm       float32 [heads * value dim]
        limits     the least and the largest time step

        Raise ValueError if sizes do not fit, and MemoryError.
        """
        _, heads, key_dim, value_dim = states.shape
        values = heads * value_dim
        sizes = values + 2 * groups * key_dim, 2 * (values + groups * key_dim) + heads
        if (columns.shape[2], x.shape[1]) != sizes or states.dtype != FLOAT32 or not states.flags.c_contiguous:
            raise ValueError(f"x {list(x.shape)} and states {list(states.shape)} do not fit together")
        conv = self._conv(x, columns, taps, conv_bias, places)
        between = np.empty((order.between, *states.shape[1:]), FLOAT32)
        picked = len(x) if pick is None else len(pick)
        out = np.empty((picked, values), x.dtype)
        numbers = (address(rates), address(dt_bias), address(skips), address(norm))
        call = MambaCall(
            conv, self._runs(order, states), address(out), address(pick), address(states), address(between), *numbers,
            picked, heads, groups, key_dim, value_dim, eps, *limits, threads(),
        )  # fmt: skip
        if self._calls["mamba2", x.dtype](byref(call)):
            raise MemoryError("mamba2")
        return out

    @staticmethod
    def _runs(order: RunOrder, states: np.ndarray) -> RunLists:
        lists = (address(getattr(order, name)) for name in ("first", "stop", "source", "to", "waves"))
        return RunLists(*lists, len(order.waves) - 1, len(states), order.between)

    @staticmethod
    def _conv(
        x: np.ndarray, states: np.ndarray, taps: np.ndarray, bias: np.ndarray | None, places: ConvPlaces
    ) -> ConvCall:
        """Returns the part of a call that says what is convolved."""
        count, kept, channels = states.shape
        if taps.shape != (kept + 1, channels) or not is_dense(x) or places.above.shape != (kept, len(x)):
            raise ValueError(f"taps {list(taps.shape)}, states {list(states.shape)} and x {list(x.shape)} do not fit")
        return ConvCall(
            address(x), None, address(states), address(taps), address(bias), address(places.above),
            address(places.below), address(places.to), len(x), step(x), channels, kept, count * kept,
            len(places.to),
        )  # fmt: skip
