"""The array operations of read-outs and of the sampler, on NumPy arrays and by the compiled kernels. No PyTorch.

A row's numbers depend neither on other rows nor on its place: each function of the kernels goes through one row, and no
product of a BLAS library, and no vectorised function of NumPy, is used where they would count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ... import kernels
from ...spec.task import FILTERS
from ..arrays import Arrays
from ..sampler import forbid, likeliest

# Beyond this number of tokens the largest of a row are sorted: the kernel inserts one after the other.
MOST_INSERTED = 128
# The filters of a draw in the order of the kernel, and the temperature, of which it takes the inverse.
*_FILTERS, _TEMPERATURE = (FILTERS.index(name) for name in ("top_n_sigma", "min_p", "top_k", "top_p", "temperature"))
assert len(_FILTERS) + 1 == len(FILTERS), "the kernel lacks a filter"


class NumpyArrays(Arrays[np.ndarray]):
    """NumPy arrays. Hidden states are float32 or bfloat16 of ml_dtypes.

    compiled: the compiled kernels
    """

    def __init__(self, compiled: kernels.Kernels):
        self._kernels = compiled

    def send(self, array: np.ndarray) -> np.ndarray:
        is_kept = array.dtype.kind in "bf" or array.dtype == np.uint8
        return array if is_kept else array.astype(np.int64, copy=False)

    def fetch(self, *given: np.ndarray) -> Callable[[], tuple[np.ndarray, ...]]:
        return lambda: given

    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        return np.empty(shape, dtype)

    def take(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x.take(rows, 0)

    def put(self, x: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        copy = x.copy()
        copy[rows] = values
        return copy

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x.astype(dtype, copy=False)

    def where(self, condition: np.ndarray, x: np.ndarray | int, y: np.ndarray) -> np.ndarray:
        return np.where(condition, x, y)

    def log_sum_exp(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._kernels.log_sum_exp(logits)

    def largest(self, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        if count <= MOST_INSERTED:
            return self._kernels.largest(logits, count)
        places = np.empty((len(logits), count), np.int64)
        for row, own in zip(logits, places, strict=True):
            own[:] = np.argsort(np.where(np.isnan(row), np.inf, -row), kind="stable")[:count]
        return np.take_along_axis(logits, places, -1), places

    def count_larger(self, logits: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self._kernels.count_larger(logits, rows, values)

    def most_likely(self, logits: np.ndarray) -> np.ndarray:
        return likeliest(logits)

    def likely_tokens(
        self, logits: np.ndarray, count: int, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        places = self.largest(logits, count)[1]
        with np.errstate(over="ignore", invalid="ignore"):
            # The logarithm of the sum would lose digits beside large logits.
            below = logits - logits.max(-1, keepdims=True)
            sums = self._kernels.log_sum_exp(below)[0]
            values = np.take_along_axis(below, np.column_stack((ids, places)), -1) - sums[:, None]
        return values[:, 0], values[:, 1:], places

    def forbid(self, logits: np.ndarray, rows: np.ndarray, bits: np.ndarray) -> None:
        forbid(logits, rows, bits)

    def draw(self, logits: np.ndarray, rows: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> np.ndarray:
        inverses = (1.0 / filters[:, _TEMPERATURE]).astype(np.float32)
        return self._kernels.draw(logits, rows, inverses, keys, filters[:, _FILTERS])

    def bag_sums(self, x: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        sizes = np.diff(np.append(starts, len(rows)))
        order = np.argsort(-sizes, kind="stable")  # the largest bags first: those with an n-th row are a slice
        firsts, falling = starts[order], -sizes[order]
        sums = np.zeros((len(starts), x.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # in a request's own numbers
            for n in range(sizes.max(initial=0)):
                held = np.searchsorted(falling, -n)  # bags of more than n rows
                sums[:held] += x[rows[firsts[:held] + n]]
        back = np.empty_like(sums, np.float64)
        back[order] = sums
        return back

    def sum_into(self, count: int, to: np.ndarray, x: np.ndarray) -> np.ndarray:
        sums = np.zeros((count, x.shape[1]))
        np.add.at(sums, to, x)
        return sums


class ClassificationHead:
    """A classification head: linears in float32 with ReLU between two, whatever the dtype of hidden states is. A row's
    outputs do not depend on other rows.

    layers: the weight, float32 [outputs, inputs], and the bias, float32 [outputs] or None, of each linear
    """

    def __init__(self, layers: Sequence[tuple[np.ndarray, np.ndarray | None]], compiled: kernels.Kernels):
        self._kernels = compiled
        self._layers = [(compiled.pack_words(weight), len(weight), bias) for weight, bias in layers]

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Return the outputs, float32 [rows, labels], of hidden states [rows, hidden]."""
        x = hidden.astype(np.float32, copy=False)
        for number, (packed, outputs, bias) in enumerate(self._layers):
            x = self._kernels.linear(np.maximum(x, np.float32(0)) if number else x, packed, outputs, bias)
        return x
