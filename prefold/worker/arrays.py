"""The array operations of read-outs, of the sampler, and of features that run in both executors.

`readouts.py`, `sampler.py` and `pool.py` say what is computed, and know of arrays only an `Arrays`: tensors have
`torch.arrays.TorchArrays`, and NumPy arrays `native.arrays.NumpyArrays`.
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
    """This process among the ranks of a split model."""

    @property
    def rank(self) -> int: ...


class ReadModel(Protocol[Array]):
    """The part of a model that read-outs call.

    logits  float32 [rows, vocabulary], or [rows, ids] of the ids that are given; on a rank other than 0 undefined
    head    float32 [rows, labels] of the classification head
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def ranks(self) -> Rank: ...
    def logits(self, hidden: Array, ids: Sequence[int] | None = None) -> Array: ...
    def head(self, hidden: Array) -> Array: ...


class Arrays(ABC, Generic[Array]):
    """Operations on arrays of one kind, in one place. Nothing here waits for a device but what returns NumPy arrays.

    in_cache: whether work that is done in small pieces stays in a cache, as on a CPU
    """

    in_cache = True

    @abstractmethod
    def send(self, array: np.ndarray) -> Array:
        """Return an array of the host where the others are; whole numbers become int64, but for bytes."""

    @abstractmethod
    def fetch(self, *given: Array) -> Callable[[], tuple[np.ndarray, ...]]:
        """Start to copy arrays to the host. Return a function that waits for them and returns them."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """Return memory of any content."""

    @abstractmethod
    def take(self, x: Array, rows: Array) -> Array:
        """Return copies of these rows."""

    @abstractmethod
    def put(self, x: Array, rows: Array, values: Array) -> Array:
        """Return a copy of x with these values in place of `rows`."""

    @abstractmethod
    def copy(self, x: Array) -> Array:
        """Return a copy of x."""

    @abstractmethod
    def join(self, parts: Sequence[Array]) -> Array:
        """Return the rows of all parts, one part behind the other."""

    @abstractmethod
    def beside(self, parts: Sequence[Array]) -> Array:
        """Return the columns of all parts [rows, columns], one part beside the other."""

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Return x in a dtype, by its name; may be x itself."""

    def float32(self, x: Array) -> Array:
        """Return x in float32; may be x itself."""
        return self.cast(x, "float32")

    @abstractmethod
    def where(self, condition: Array, x: Array | int, y: Array) -> Array:
        """Return x's numbers where the condition is true, else y's."""

    @abstractmethod
    def silu(self, x: Array) -> Array:
        """Return x times its sigmoid."""

    @abstractmethod
    def dots(self, x: Array, y: Array) -> Array:
        """Return the sum of products of each row of x and of y, float32 [rows]."""

    @abstractmethod
    def erf_inverse(self, x: Array) -> Array:
        """Return the inverse of the error function of float64 numbers between -1 and 1."""

    # Logits are float32 [rows, vocabulary], each row's numbers side by side.

    @abstractmethod
    def log_sum_exp(self, logits: Array) -> tuple[Array, Array]:
        """Return the log-sum-exp of each row, [rows], and the place of its largest number, int64 [rows]."""

    @abstractmethod
    def entropy(self, logits: Array) -> tuple[Array, Array, Array]:
        """Return what `log_sum_exp` does, and the entropy of each row's probabilities in nats, [rows]."""

    @abstractmethod
    def largest(self, logits: Array, count: int) -> tuple[Array, Array]:
        """Return the `count` largest numbers of each row, falling, and their places, int64: [rows, count]."""

    @abstractmethod
    def count_larger(self, logits: Array, rows: Array, values: Array) -> Array:
        """Return how many numbers of each of `rows`, int64 [n], are larger than its value, int64 [n]."""

    @abstractmethod
    def most_likely(self, logits: Array) -> Array:
        """Return the place of the largest number of each row, the first of equals, int64 [rows]; NOT_FINITE where it is
        infinite or any number is NaN."""

    @abstractmethod
    def likely_tokens(self, logits: Array, count: int, ids: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the log-probability of each row's token, float32 [rows], and the `count` largest log-probabilities of
        the row with their tokens, float32 and int64 [rows, count]. ids: int64 [rows]"""

    @abstractmethod
    def forbid(self, logits: Array, rows: np.ndarray, bits: np.ndarray) -> None:
        """Put -inf into `rows` for the tokens whose bit is set, as in `Drawing.grammar_masks`."""

    @abstractmethod
    def draw(self, logits: Array, rows: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> Array:
        """Return a token drawn for each of `rows`, int64 [n], as `sampler.draw_scaled` defines it; -1 where a row's
        largest number is not finite.

        rows     int64 [n]
        filters  float64 [n, FILTERS]; the temperature, the first of them, is above 0
        keys     uint64 [n]: of the noise (`engine.sampling.make_key`)
        """

    # Sums for mean pooling are made in float32 within a bag, and in float64 of bags.

    @abstractmethod
    def bag_sums(self, x: Array, rows: Array, starts: Array) -> Array:
        """Return sums of rows of x float32 [n, hidden], float64 [bags, hidden].

        rows    int64: the rows of all bags, one bag behind the other
        starts  int64 [bags], ascending: the place in `rows` of each bag's first; a bag may be empty
        """

    @abstractmethod
    def sum_into(self, count: int, to: Array, x: Array) -> Array:
        """Return float64 [count, hidden], to which each row of x float64 [n, hidden] is added at its place `to`, int64
        [n]."""
