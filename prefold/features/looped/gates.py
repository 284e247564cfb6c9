"""Where rows of a looped model go after a visit: a gate says whether a row leaves, a router which block comes next.

A planner computes beforehand the logits that a router computes visit by visit. Both executors run these functions; a
`LoopedModel` multiplies with the weights. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np

from ...worker.arrays import Array, Arrays, ReadModel
from .config import GATE_FEATURES, LoopedConfig

# What of a batch-invariant model depends on the batch.
VARIES = "gates and routers of looped models"
# The noise is cut off at so many standard deviations; the share of the normal distribution within them.
BOUND = 3.0
INSIDE = math.erf(BOUND / 2**0.5)
# Rows of noise that are drawn at once: to draw one takes some 40 bytes a column.
DRAWN_ROWS = 128
_WORD = 2**32 - 1


class LoopedModel(ReadModel[Array], Protocol[Array]):
    """The part of a looped model that each executor has a form of.

    arrays     operations on its arrays
    multiply   what a linear gives, by the name of its tensors: "gate", "inject", "router.inner", ...
    weight     any other tensor, by its name
    norm_rows  the final norm of the residual stream [rows, hidden]
    rounded    float32 numbers in the dtype of the residual stream
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
    """A VisitOutputs holds the outputs of the previous visit that a gate compares with those of the next.

    hidden  [rows, hidden]: the states as they were read
    likely  int64 [rows]: the likeliest token of each row
    """

    hidden: Array
    likely: np.ndarray


def gate_logits(
    model: LoopedModel[Array], hidden: Array, before: VisitOutputs[Array] | None
) -> tuple[Array, VisitOutputs[Array] | None]:
    """Return the gate's logits of leaving after a visit, float32 [rows], and the VisitOutputs for the next call.

    hidden  [rows, hidden] as it is read after the visit
    before  the VisitOutputs of the visit before; None after the first
    """
    if model.config.loop.gate_reads == "state":
        return model.multiply("gate", model.arrays.float32(hidden))[:, 0], None
    features, outputs = features_of(model, hidden, before)
    return model.multiply("gate", features)[:, 0], outputs


def features_of(
    model: LoopedModel[Array], hidden: Array, before: VisitOutputs[Array] | None
) -> tuple[Array, VisitOutputs[Array]]:
    """Return what a gate reads in place of states, float32 [rows, 4], and the VisitOutputs of this visit: of the tokens
    that the state gives, the largest probability; whether the likeliest is that of the visit before; their entropy over
    the vocabulary's largest; and the cosine between the state and that of the visit before. After the first visit the
    second and the last are 0.

    They have no gradients: a gate learns what the model says, and not the model to please its gate.
    """
    arrays = model.arrays
    logits = model.logits(hidden)
    sums, likely, spread = arrays.entropy(logits)
    wait = arrays.fetch(sums, likely, spread, arrays.largest(logits, 1)[0])
    of_logits, tokens, entropies, largest = wait()
    features = np.zeros((len(tokens), GATE_FEATURES), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # in a request's own numbers
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
    """Return the router's logits of each block and of leaving before a visit, float32 [n, blocks + 1], that of leaving
    last. It is -inf before the first visit.

    states  float32 [n, inputs], see `summary`
    visit   the number of the visit that is to come, from 0
    """
    inner = model.multiply("router.inner", states) + model.weight("router.step")[visit]
    logits = model.multiply("router.outer", model.arrays.silu(inner))
    if not visit:
        logits[:, -1] = -math.inf
    return logits


def planner_logits(model: LoopedModel[Array], states: Array) -> Array:
    """Return the planner's logits of all visits, float32 [visits, n, blocks + 1], each as `router_logits` has them.
    states: float32 [n, 2 * hidden], see `summary`, before the first visit: what the embedding and the prelude give"""
    loop = model.config.loop
    logits = model.multiply("planner.outer", model.arrays.silu(model.multiply("planner.inner", states)))
    of_visits = logits.reshape(len(logits), len(loop.order), loop.blocks + 1).swapaxes(0, 1)
    of_visits[0, :, -1] = -math.inf
    return of_visits


def summary(arrays: Arrays[Array], last: Array, mean: Array | None = None) -> Array:
    """Return the input of a router, float32 [n, inputs]: each state divided by its root mean square.

    last  [n, hidden]: the residual stream of each request's last prompt row, or of each row
    mean  [n, hidden]: the mean of the residual stream over each request's prompt rows; None: the router reads rows
    """
    of_last = _at_unit_size(arrays.float32(last))
    return of_last if mean is None else arrays.beside((_at_unit_size(arrays.float32(mean)), of_last))


def _at_unit_size(x: Array) -> Array:
    return x * ((x * x).mean(-1) + 1e-6)[:, None] ** -0.5


def choose(logits: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """Return the number of the likeliest block, or of blocks where there are no more visits: int64 [n].

    logits     float32 [n, blocks + 1]. Of blocks that are as likely the first is chosen
    threshold  there are no more visits where the probability of leaving is at least this; a number, or an array [n]
    """
    with np.errstate(over="ignore", invalid="ignore"):  # in a request's own numbers
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        leaves = shares[:, -1] / shares.sum(-1) >= np.asarray(threshold, np.float32)
    return np.where(leaves, logits.shape[-1] - 1, logits[:, :-1].argmax(-1))


def injected(model: LoopedModel[Array], x: Array, prelude: Array | None) -> Array:
    """Return the residual stream that enters a visit: x, or x and the prelude's output, mixed or added. prelude: as
    `handed_on` gives it"""
    if prelude is None:
        return x
    if model.config.loop.between == "add":
        return model.norm_rows(model.arrays.copy(x)) + prelude
    return model.multiply("inject", model.arrays.beside((x, prelude)))


def handed_on(model: LoopedModel[Array], x: Array, positions: Array) -> tuple[Array, Array | None]:
    """Return the states that rows have before the first visit, and the part of the prelude's output x that is put in
    before each visit; None: nothing is. positions: int64 [rows]"""
    between = model.config.loop.between
    if between == "inject":
        return first_states(model, positions), x
    return x, model.norm_rows(model.arrays.copy(x)) if between == "add" else None


def read_state(model: LoopedModel[Array], x: Array) -> Array:
    """Return hidden states as they are read after any visit, [rows, hidden], of a model without a coda; may write into
    x, the residual stream [rows, hidden]."""
    between = model.config.loop.between
    if between == "norm":  # the visit has ended with it
        return x
    if between == "inject":  # as in Huginn, which norms before its coda and after it
        x = model.norm_rows(x)
    return model.norm_rows(x)


def first_states(model: LoopedModel[Array], positions: Array) -> Array:
    """Return the noise that rows have as their state before the first visit, where the prelude's is mixed in.
    positions: int64 [rows]"""
    loop = model.config.loop
    noise = position_noise(model.arrays, loop.seed, positions, model.config.hidden)
    return model.rounded(noise * loop.noise)


def position_noise(arrays: Arrays[Array], seed: int, positions: Array, columns: int) -> Array:
    """Return float32 [rows, columns] of the standard normal distribution within three deviations of 0.

    positions  int64 [rows], below 2**32
    """
    starts = range(0, max(1, len(positions)), DRAWN_ROWS)
    return arrays.join([_drawn(arrays, seed, positions[first : first + DRAWN_ROWS], columns) for first in starts])


def _drawn(arrays: Arrays[Array], seed: int, positions: Array, columns: int) -> Array:
    seeds = seed & _WORD, seed >> 32 & _WORD
    # Each position has a key of 64 bits.
    low = _mixed(positions ^ seeds[0], seeds[1])
    high = _mixed(positions ^ seeds[1], ~seeds[0] & _WORD)
    hashes = _mixed(arrays.send(np.arange(columns)) ^ low[:, None], high[:, None])
    # Between -1 and 1; the sum of integers and of an array of float64 is float64.
    uniform = (hashes + arrays.send(np.full(1, 0.5))) * 2.0**-31 - 1.0
    return arrays.float32(arrays.erf_inverse(uniform * INSIDE) * 2**0.5)


def _mixed(x: Array, key: Array | int) -> Array:
    """Return 32 random bits of each number in x, int64 of 32 bits: Wellons' `triple32`, with a key put in midway."""
    x = (x ^ x >> 17) * 0xED5AD4BB & _WORD
    x = (x ^ x >> 11 ^ key) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return x ^ x >> 14
