"""Where rows go after a visit to a block: a gate decides if a row leaves, and a router which block comes next.

A planner computes the router's logits of all visits beforehand. Both executors run these functions; a `LoopedModel`
does the products with weights. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np

from ...worker.arrays import Array, Arrays, ReadModel
from .config import GATE_FEATURES, LoopedConfig

# The parts of a model that depend on the batch even with batch invariance.
VARIES = "gates and routers of looped models"
# The noise is cut off at this number of standard deviations. INSIDE is the probability of a value within them.
BOUND = 3.0
INSIDE = math.erf(BOUND / 2**0.5)
# Rows of noise that are drawn at once, because drawing a row needs about 40 bytes per column.
DRAWN_ROWS = 128
_WORD = 2**32 - 1


class LoopedModel(ReadModel[Array], Protocol[Array]):
    """The part of a looped model that each executor implements.

    Attributes:
        arrays: operations on its arrays
        multiply: the output of a linear, by the name of its tensors: "gate", "inject", "router.inner", ...
        weight: any other tensor, by its name
        norm_rows: the final norm of the residual stream [rows, hidden]
        rounded: casts float32 values to the dtype of the residual stream
    """

    @property
    def config(self) -> LoopedConfig: ...
    @property
    def arrays(self) -> Arrays[Array]: ...
    def multiply(self, name: str, x: Array) -> Array: ...
    def weight(self, name: str) -> Array: ...
    def norm_rows(self, x: Array) -> Array: ...
    def rounded(self, x: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class VisitOutputs(Generic[Array]):
    """The outputs of the previous visit, which a gate compares with the next visit's."""

    hidden: Array  # [rows, hidden]: the states as they were read
    likely: np.ndarray  # int64 [rows]: the likeliest token of each row


def gate_logits(
    model: LoopedModel[Array], hidden: Array, before: VisitOutputs[Array] | None
) -> tuple[Array, VisitOutputs[Array] | None]:
    """Return (the gate's logits of leaving after a visit, float32 [rows]; the VisitOutputs for the next call).

    Args:
        hidden: [rows, hidden] as read after the visit
        before: the VisitOutputs of the previous visit; None after the first
    """
    if model.config.loop.gate_reads == "state":
        return model.multiply("gate", model.arrays.float32(hidden))[:, 0], None
    features, outputs = features_of(model, hidden, before)
    return model.multiply("gate", features)[:, 0], outputs


def features_of(
    model: LoopedModel[Array], hidden: Array, before: VisitOutputs[Array] | None
) -> tuple[Array, VisitOutputs[Array]]:
    """Return (the features that a gate reads instead of states, float32 [rows, 4]; the VisitOutputs of this visit).

    The features are: the largest probability of a token; 1 if the likeliest token is the same as after the previous
    visit; the entropy of the tokens divided by its maximum; the cosine between this state and the previous visit's.
    After the first visit the second and the last feature are 0.

    They have no gradients: the gate learns from the model, but the model does not learn to please its gate.
    """
    arrays = model.arrays
    logits = model.logits(hidden)
    sums, likely, spread = arrays.entropy(logits)
    wait = arrays.fetch(sums, likely, spread, arrays.largest(logits, 1)[0])
    of_logits, tokens, entropies, largest = wait()
    features = np.zeros((len(tokens), GATE_FEATURES), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # caused by a request's own values
        features[:, 0] = np.exp(largest[:, 0] - of_logits)
        features[:, 2] = entropies / math.log(logits.shape[-1])
        if before is not None:
            features[:, 1] = tokens == before.likely
            features[:, 3] = _cosines(arrays, hidden, before.hidden)
    return arrays.send(features), VisitOutputs(hidden, tokens)


def _cosines(arrays: Arrays[Array], x: Array, y: Array) -> np.ndarray:
    products, of_x, of_y = arrays.fetch(arrays.dots(x, y), arrays.dots(x, x), arrays.dots(y, y))()
    return products / np.maximum(np.sqrt(of_x) * np.sqrt(of_y), np.float32(1e-8))


def router_logits(model: LoopedModel[Array], states: Array, visit: int) -> Array:
    """Return the router's logits before a visit, float32 [n, blocks + 1]: one per block, and the last for leaving.

    The logit for leaving is -inf before the first visit.

    Args:
        states: float32 [n, inputs], from `summary`
        visit: the number of the next visit, from 0
    """
    inner = model.multiply("router.inner", states) + model.weight("router.step")[visit]
    logits = model.multiply("router.outer", model.arrays.silu(inner))
    if not visit:
        logits[:, -1] = -math.inf
    return logits


def planner_logits(model: LoopedModel[Array], states: Array) -> Array:
    """Return the planner's logits of all visits, float32 [visits, n, blocks + 1], each as in `router_logits`.

    Args:
        states: float32 [n, 2 * hidden], from `summary` of the states before the first visit, after embedding and
            prelude
    """
    loop = model.config.loop
    logits = model.multiply("planner.outer", model.arrays.silu(model.multiply("planner.inner", states)))
    of_visits = logits.reshape(len(logits), len(loop.order), loop.blocks + 1).swapaxes(0, 1)
    of_visits[0, :, -1] = -math.inf
    return of_visits


def summary(arrays: Arrays[Array], last: Array, mean: Array | None = None) -> Array:
    """Return the input of a router, float32 [n, inputs]: each state divided by its root mean square.

    Args:
        last: [n, hidden]: the residual stream of each request's last prompt row, or of each row
        mean: [n, hidden]: the mean of the residual stream over each request's prompt rows; None if the router reads
            rows
    """
    of_last = _at_unit_size(arrays.float32(last))
    return of_last if mean is None else arrays.beside((_at_unit_size(arrays.float32(mean)), of_last))


def _at_unit_size(x: Array) -> Array:
    return x * ((x * x).mean(-1) + 1e-6)[:, None] ** -0.5


def choose(logits: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """Return the number of the likeliest block, or `blocks` if no more visits follow: int64 [n].

    Args:
        logits: float32 [n, blocks + 1]. Among equally likely blocks the first wins
        threshold: no more visits follow if the probability of leaving is at least this; a number, or an array [n]
    """
    with np.errstate(over="ignore", invalid="ignore"):  # caused by a request's own values
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        leaves = shares[:, -1] / shares.sum(-1) >= np.asarray(threshold, np.float32)
    return np.where(leaves, logits.shape[-1] - 1, logits[:, :-1].argmax(-1))


def injected(model: LoopedModel[Array], x: Array, prelude: Array | None) -> Array:
    """Return the residual stream at the start of a visit: x, or x mixed with or added to the prelude's output.

    Args:
        prelude: the second result of `handed_on`
    """
    if prelude is None:
        return x
    if model.config.loop.between == "add":
        return model.norm_rows(model.arrays.copy(x)) + prelude
    return model.multiply("inject", model.arrays.beside((x, prelude)))


def handed_on(model: LoopedModel[Array], x: Array, positions: Array) -> tuple[Array, Array | None]:
    """Return (states before the first visit, the part of the prelude's output x for `injected` or None).

    Args:
        positions: int64 [rows]
    """
    between = model.config.loop.between
    if between == "inject":
        return first_states(model, positions), x
    return x, model.norm_rows(model.arrays.copy(x)) if between == "add" else None


def read_state(model: LoopedModel[Array], x: Array) -> Array:
    """Return hidden states as read after any visit, [rows, hidden], for a model without a coda.

    Args:
        x: the residual stream [rows, hidden], which may be overwritten
    """
    between = model.config.loop.between
    if between == "norm":  # the visit ended with the norm
        return x
    if between == "inject":  # as in Huginn, which has a norm before its coda and after it
        x = model.norm_rows(x)
    return model.norm_rows(x)


def first_states(model: LoopedModel[Array], positions: Array) -> Array:
    """Return the noise that is the rows' state before the first visit, for between="inject".

    Args:
        positions: int64 [rows]
    """
    loop = model.config.loop
    noise = position_noise(model.arrays, loop.seed, positions, model.config.hidden)
    return model.rounded(noise * loop.noise)


def position_noise(arrays: Arrays[Array], seed: int, positions: Array, columns: int) -> Array:
    """Return normal noise with deviation 1, cut off at three deviations, float32 [rows, columns].

    Args:
        positions: int64 [rows], below 2**32
    """
    starts = range(0, max(1, len(positions)), DRAWN_ROWS)
    return arrays.join([_drawn(arrays, seed, positions[first : first + DRAWN_ROWS], columns) for first in starts])


def _drawn(arrays: Arrays[Array], seed: int, positions: Array, columns: int) -> Array:
    seeds = seed & _WORD, seed >> 32 & _WORD
    # Each position has a key of 64 bits.
    low = _mixed(positions ^ seeds[0], seeds[1])
    high = _mixed(positions ^ seeds[1], ~seeds[0] & _WORD)
    hashes = _mixed(arrays.send(np.arange(columns)) ^ low[:, None], high[:, None])
    # Between -1 and 1. The sum of integers and a float64 array is float64.
    uniform = (hashes + arrays.send(np.full(1, 0.5))) * 2.0**-31 - 1.0
    return arrays.float32(arrays.erf_inverse(uniform * INSIDE) * 2**0.5)


def _mixed(x: Array, key: Array | int) -> Array:
    """Return 32 random bits for each 32-bit number in x (int64): Wellons' `triple32`, with a key added midway."""
    x = (x ^ x >> 17) * 0xED5AD4BB & _WORD
    x = (x ^ x >> 11 ^ key) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return x ^ x >> 14
