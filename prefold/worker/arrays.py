"""The array operations of read-outs, of the sampler, and of features that run in both executors.

`readouts.py`, `sampler.py` and `pool.py` use arrays only through `Arrays`. `torch.arrays.TorchArrays` implements it for
tensors, `native.arrays.NumpyArrays` for NumPy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from ..model.config import ModelConfig

Array = TypeVar("Array", np.ndarray, "Tensor")


class Rank(Protocol):
    """The rank of this process in a split model."""

    @property
    def rank(self) -> int: ...


class ReadModel(Protocol[Array]):
    """The part of a model that read-outs call."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def ranks(self) -> Rank: ...
    def logits(self, hidden: Array, ids: Sequence[int] | None = None) -> Array:
        """Return float32 [rows, vocabulary], or [rows, ids] for given ids; undefined on a rank other than 0."""
        ...

    def head(self, hidden: Array) -> Array:
        """Return the outputs of the classification head, float32 [rows, labels]."""
        ...


class Arrays(ABC, Generic[Array]):
    """Array operations of one executor on one device. Only methods that return NumPy arrays wait for the device."""

    in_cache = True  # small blocks of work stay in a cache, as on a CPU

    @abstractmethod
    def send(self, array: np.ndarray) -> Array:
        """Copy a host array to the device. Integers become int64; bytes stay bytes."""

    @abstractmethod
    def fetch(self, *given: Array) -> Callable[[], tuple[np.ndarray, ...]]:
        """Start to copy arrays to the host. Return a function that waits for them and returns them."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """Return uninitialised memory."""

    @abstractmethod
    def take(self, x: Array, rows: Array) -> Array:
        """Return a copy of the given rows."""

    @abstractmethod
    def put(self, x: Array, rows: Array, values: Array) -> Array:
        """Return a copy of x in which `rows` have the given values."""

    @abstractmethod
    def copy(self, x: Array) -> Array: ...

    @abstractmethod
    def join(self, parts: Sequence[Array]) -> Array:
        """Concatenate along the rows."""

    @abstractmethod
    def beside(self, parts: Sequence[Array]) -> Array:
        """Concatenate [rows, columns] arrays along the columns."""

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Return x in a dtype, given by name; it may be x itself."""

    def float32(self, x: Array) -> Array:
        """Return x in float32; it may be x itself."""
        return self.cast(x, "float32")

    @abstractmethod
    def where(self, condition: Array, x: Array | int, y: Array) -> Array:
        """Return x if the condition is true, else y, element by element."""

    @abstractmethod
    def silu(self, x: Array) -> Array:
        """Return x times its sigmoid."""

    @abstractmethod
    def dots(self, x: Array, y: Array) -> Array:
        """Return the dot product of each row of x with the row of y, float32 [rows]."""

    @abstractmethod
    def erf_inverse(self, x: Array) -> Array:
        """Return the inverse of the error function of float64 values between -1 and 1."""

    # Logits are float32 [rows, vocabulary], contiguous within a row.

    @abstractmethod
    def log_sum_exp(self, logits: Array) -> tuple[Array, Array]:
        """Return the log-sum-exp of each row, [rows], and the index of its largest value, int64 [rows]."""

    @abstractmethod
    def entropy(self, logits: Array) -> tuple[Array, Array, Array]:
        """Return the result of `log_sum_exp`, and the entropy of each row's probabilities in nats, [rows]."""

    @abstractmethod
    def largest(self, logits: Array, count: int) -> tuple[Array, Array]:
        """Return the `count` largest values of each row, descending, and their indices, int64: [rows, count]."""

    @abstractmethod
    def count_larger(self, logits: Array, rows: Array, values: Array) -> Array:
        """Return how many logits of row `rows[i]` exceed `values[i]`, int64 [n].

        Args:
            rows: int64 [n]
            values: float32 [n]
        """

    @abstractmethod
    def most_likely(self, logits: Array) -> Array:
        """Return the index of the largest value of each row, int64 [rows]. Ties go to the lowest index.

        NOT_FINITE marks a row whose largest value is infinite or that contains NaN.
        """

    @abstractmethod
    def likely_tokens(self, logits: Array, count: int, ids: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the log-probabilities of each row's token and of its `count` most likely tokens, and these tokens.

        The results are float32 [rows], float32 [rows, count] and int64 [rows, count].

        Args:
            ids: int64 [rows]
        """

    @abstractmethod
    def forbid(self, logits: Array, rows: np.ndarray, bits: np.ndarray) -> None:
        """Write -inf to the tokens of `rows` whose bit is set; bits as in `Drawing.grammar_masks`."""

    @abstractmethod
    def draw(self, logits: Array, rows: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> Array:
        """Draw one token from each of `rows`, as `sampler.draw_scaled` defines. Return int64 [n].

        The token is -1 if the row's largest logit is not finite.

        Args:
            rows: int64 [n].
            filters: float64 [n, FILTERS]. The temperature, in column 0, is above 0.
            keys: uint64 [n], for the noise (`engine.sampling.make_key`).
        """

    # Mean pooling sums in float32 within a bag, and in float64 over bags.

    @abstractmethod
    def bag_sums(self, x: Array, rows: Array, starts: Array) -> Array:
        """Return the sum of the rows of each bag, float64 [bags, hidden].

        Args:
            x: float32 [n, hidden]
            rows: int64, the rows of all bags, one bag after the other
            starts: int64 [bags], ascending, the index in `rows` of each bag's first row. A bag may be empty
        """

    @abstractmethod
    def sum_into(self, count: int, to: Array, x: Array) -> Array:
        """Add row i of x, float64 [n, hidden], to output row `to[i]`, int64 [n]; return float64 [count, hidden]."""
