"""Calls of single operations: norms, rotations, gates, and statistics of logits."""

from __future__ import annotations

import numpy as np

from .interface import FLOAT32, Family, address, is_dense, step
from .threads import threads


class ElementwiseKernels(Family):
    """The operations of a layer between its products. Arrays have one of DTYPES."""

    def add_rms_norm(self, x: np.ndarray, delta: np.ndarray | None, weight: np.ndarray, eps: float) -> np.ndarray:
        """Add delta (or None) to x in place, and return the RMS norm of x, [rows, width].

        x, delta [rows, width], each row contiguous; weight [width], of x's dtype or float32. Raise ValueError if the
        shapes do not fit together.
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
        """Rotate x [rows, heads, dim] in place. With a norm_weight, norm each head first.

        cos_sin float32 [rows, dim]: cosines, then sines. Raise ValueError if the shapes do not fit together.
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
        """Return activation(gate) * up, [rows, width], from gate_up [rows, 2 * width].

        Raise ValueError if gate_up has an odd number of columns.

        Args:
            activation: "silu" or "gelu_tanh"
        """
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate and up have {width} columns together, an odd number")
        out = np.empty((rows, width // 2), gate_up.dtype)
        call = self._calls["gate_mul", activation, gate_up.dtype]
        call(address(gate_up), address(out), rows, width // 2, step(gate_up), threads())
        return out


class LogitKernels(Family):
    """Statistics of float32 logits, and draws of tokens from them."""

    @staticmethod
    def can_log_sum_exp(x: np.ndarray) -> bool:
        """Return whether `log_sum_exp` and `entropy` accept this array: float32, with contiguous rows."""
        return x.dtype == FLOAT32 and x.ndim == 2 and is_dense(x)

    def log_sum_exp(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-sum-exp of each row of float32 logits [rows, columns], and the column of its largest number.

        The results are float32 and int64 [rows]. If a row has a NaN, its sum is NaN. NaN is never the largest number.
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
        """Return the results of `log_sum_exp`, and the entropy of each row's probabilities in nats, float32 [rows].

        The entropy is NaN if the row has a NaN, or if its largest number is infinite. A logit of -inf adds nothing.
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
        """Draw a token from the logits of each row in `rows`. Return int64 [n].

        The token is -1 if the largest number of the row is not finite, or if there are filters and a number is NaN.

        Args:
            logits: float32 [r, vocab], each row contiguous.
            rows: int64 [n].
            inverses: float32 [n], 1 / temperature.
            keys: uint64 [n], the keys of the noise.
            filters: float64 [n, 4], top_n_sigma, min_p, top_k and top_p, applied in this order.

        Raises:
            ValueError: the logits or filters have a wrong shape or dtype, or a row does not exist.
            MemoryError: there is not enough memory.
        """
        if logits.dtype != FLOAT32 or not is_dense(logits):
            raise ValueError(f"cannot draw from {logits.dtype} {list(logits.shape)}; pass contiguous float32 rows")
        _check_rows(rows, logits)
        if filters is not None and filters.shape != (len(rows), 4):
            raise ValueError(f"filters {list(filters.shape)} for {len(rows)} draws; pass four numbers for each")
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
            raise MemoryError("not enough memory for draws")
        return tokens

    def largest(self, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `count` largest numbers of each row, in descending order, and their columns.

        logits float32 [rows, columns]; results float32 and int64 [rows, count]. Ties go to the lower column. NaN counts
        as the lowest number. Time grows with the square of `count`. Raise ValueError if the logits have another form,
        or fewer than `count` columns.
        """
        if logits.dtype != FLOAT32 or not is_dense(logits) or not 0 <= count <= logits.shape[1]:
            raise ValueError(
                f"no {count} largest numbers in {logits.dtype} {list(logits.shape)}; pass contiguous float32 rows"
            )
        rows, columns = logits.shape
        values, places = np.empty((rows, count), FLOAT32), np.empty((rows, count), np.int64)
        self._calls["largest"](
            address(logits), rows, columns, step(logits), count, address(values), address(places), threads()
        )
        return values, places

    def count_larger(self, logits: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return how many logits of each row in `rows` are larger than the row's value, int64 [n].

        logits float32 [r, columns]; rows int64 [n]; values float32 [n]. Raise ValueError if the logits have another
        form, or a row does not exist.
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
        raise ValueError(f"rows {rows}: the logits have {len(logits)} rows")
