"""The array operations of the native executor: NumPy arrays and compiled kernels. No PyTorch.

The results of a row depend neither on other rows nor on its place. The kernels process one row at a time. BLAS products
and vectorised NumPy functions are avoided wherever their rounding would change results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ... import kernels
from ...spec.task import FILTERS
from ..arrays import Arrays
from ..sampler import forbid, likeliest

# For more tokens than this, the row is sorted: the kernel uses insertion, one token after the other.
MOST_INSERTED = 128
# The filters of a draw in the kernel's order, and the temperature, which the kernel receives inverted.
*_FILTERS, _TEMPERATURE = (FILTERS.index(name) for name in ("top_n_sigma", "min_p", "top_k", "top_p", "temperature"))
assert len(_FILTERS) + 1 == len(FILTERS), "the kernel lacks a filter"


class NumpyArrays(Arrays[np.ndarray]):
    """NumPy arrays. Hidden states are float32, or bfloat16 of ml_dtypes.

    Args:
        compiled: The compiled kernels.
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

    def copy(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def beside(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, -1)

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x.astype(dtype, copy=False)

    def where(self, condition: np.ndarray, x: np.ndarray | int, y: np.ndarray) -> np.ndarray:
        return np.where(condition, x, y)

    def silu(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-x))

    def dots(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):  # affects only the request that overflows
            products: np.ndarray = (self.float32(x) * self.float32(y)).sum(-1)
        return products

    def erf_inverse(self, x: np.ndarray) -> np.ndarray:
        return erf_inverse(x)

    def log_sum_exp(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._kernels.log_sum_exp(logits)

    def entropy(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._kernels.entropy(logits)

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
            # Subtract the maximum first: large logits would cost digits of the log-sum-exp.
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
        order = np.argsort(-sizes, kind="stable")  # largest bags first, so the bags with an n-th row are a slice
        firsts, falling = starts[order], -sizes[order]
        sums = np.zeros((len(starts), x.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # affects only the request that overflows
            for n in range(sizes.max(initial=0)):
                held = np.searchsorted(falling, -n)  # number of bags with more than n rows
                sums[:held] += x[rows[firsts[:held] + n]]
        back = np.empty_like(sums, np.float64)
        back[order] = sums
        return back

    def sum_into(self, count: int, to: np.ndarray, x: np.ndarray) -> np.ndarray:
        sums = np.zeros((count, x.shape[1]))
        np.add.at(sums, to, x)
        return sums


# The inverse of the normal distribution (Wichura 1988, AS 241, PPND16), for three ranges of the distance from
# the middle. Each range has the coefficients of a numerator and a denominator, the constant term first.
_MIDDLE = (
    (3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125, 45921.953931549871457,
     67265.770927008700853, 33430.575583588128105, 2509.0809287301226727),
    (1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077, 21213.794301586595867,
     39307.895800092710610, 28729.085735721942674, 5226.4952788528545610),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
     1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550, 0.148103976427480074590,
     0.0151986665636164571966, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_END = (
    (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 0.296560571828504891230,
     0.0265321895265761230930, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def erf_inverse(x: np.ndarray) -> np.ndarray:
    """Return the inverse of the error function of float64 values between -1 and 1."""
    size = np.abs(x)
    found = _ratio(_MIDDLE, 0.180625 - (x / 2) ** 2) * (x / 2)
    if (far := size > 0.85).any():
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.sqrt(-np.log((1 - size[far]) / 2))
            outside = np.where(depth <= 5, _ratio(_TAIL, depth - 1.6), _ratio(_END, depth - 5))
        found[far] = np.copysign(np.where(depth < np.inf, outside, np.inf), x[far])
    return found / 2**0.5


def _ratio(parts: tuple[tuple[float, ...], tuple[float, ...]], at: np.ndarray) -> np.ndarray:
    """Return the quotient of two polynomials at `at`."""
    over, under = (np.polynomial.polynomial.polyval(at, np.array(part)) for part in parts)
    return over / under


class ClassificationHead:
    """A classification head: float32 linears with ReLU in between, for hidden states of any dtype.

    The outputs of a row do not depend on other rows.

    Args:
        layers: For each linear the weight, float32 [outputs, inputs], and the bias, float32 [outputs] or None.
    """

    def __init__(self, layers: Sequence[tuple[np.ndarray, np.ndarray | None]], compiled: kernels.Kernels):
        self._kernels = compiled
        self._layers = [(compiled.pack_words(weight), len(weight), bias) for weight, bias in layers]

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Return float32 [rows, labels] for hidden states [rows, hidden]."""
        x = hidden.astype(np.float32, copy=False)
        for number, (packed, outputs, bias) in enumerate(self._layers):
            x = self._kernels.linear(np.maximum(x, np.float32(0)) if number else x, packed, outputs, bias)
        return x
