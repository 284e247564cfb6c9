"""Visits of whole sequences with gradients, for training. `routed` defines the routes.

Every block is computed for every row. Blocks that a router did not pick have weight 0; an engine skips them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import InputError
from ...train.batch import TrainBatch, dtype_on
from ...train.losses import check_trained, target_logprobs
from ...worker.torch.layer import Layer
from ...worker.torch.lora import NO_ADAPTERS
from ...worker.torch.model import Attend, CausalLM, Pass
from ...worker.torch.rows import Path, StepAttend
from .config import Loop, Routing
from .gates import choose, injected, planner_logits, read_state, router_logits, summary
from .model import LoopedLM


@dataclass(frozen=True, slots=True)
class Visit:
    """The states of rows after one visit, and the router's logits and weights that led to them.

    Attributes:
        state: [rows, hidden] as read after the visit
        logits: float32 [n, blocks + 1]: the router's logits before the visit, per sequence, or per row if the router
            reads rows; None: the router was not asked
        weights: float32 [n, blocks + 1]: the share of each block's output in the state, and of the state before
    """

    state: Tensor
    logits: Tensor | None
    weights: Tensor


def routed(
    model: LoopedLM,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    lengths: Tensor,
    routing: Routing | None = None,
    routes: Sequence[Sequence[int]] | None = None,
) -> Iterator[Visit]:
    """Yield each visit of whole sequences. The sequences' rows follow each other and are not shared.

    A row that has left keeps its state. The router's choices have the gradients of its probabilities. If the router
    reads rows, a row sees in each block the K/V of every row's last visit to that block. If a row has not visited the
    block, its K/V there are computed from its present state.

    Args:
        model: a looped model without a coda
        tokens: int64 [rows]
        positions: int64 [rows]
        attend: has all these rows as queries and keys, and may be called any number of times
        lengths: int64 [sequences]: rows of each sequence
        routing: how the router picks; default: as in the config
        routes: the blocks that each sequence visits, in place of the router; shorter sequences of blocks stop earlier

    Yields:
        one Visit per visit

    Raises:
        InputError: if the number of routes is not the number of sequences, a route names an unknown block, the model
        has
            a coda, or the model has no router (or no planner) and no routes are given
    """
    loop, count = model.loop, len(lengths)
    if loop.coda:
        raise InputError("the model has a coda, so it is read after its last visit only", field="model")
    routing = routing or loop.router
    if routes is None and routing is not None and routing.kind == "fixed":
        routes = [loop.order] * count
    if routes is None and (routing is None or model.router is None):
        raise InputError("the model has no router", field="routes", remedy="give a route for each sequence")
    if routes is None and routing is not None and routing.kind == "planned" and model.planner is None:
        raise InputError("the model has no planner", field="routes", remedy="give a route for each sequence")
    rows = model.start(tokens, positions, attend)
    of_row = torch.repeat_interleave(torch.arange(count, device=tokens.device), lengths)
    by_row = routes is None and routing is not None and routing.reads == "row"
    blocks = _Blocks(model, rows, by_row and routing is not None and routing.kind != "soft")
    route_shares = None if routes is None else _shares_of(routes, count, loop).to(tokens.device)
    x, planned = rows.stream, None
    share_left = torch.ones(len(tokens) if by_row else count, device=tokens.device)
    for visit in range(len(loop.order) if route_shares is None else len(route_shares)):
        if route_shares is not None:
            logits, shares = None, route_shares[visit]
        else:
            assert routing is not None and model.router is not None
            if routing.kind != "planned":
                logits = router_logits(model, _read_by_router(model, x, None if by_row else lengths, of_row), visit)
            else:
                if planned is None:
                    assert model.planner is not None
                    planned = planner_logits(model, _read_by_router(model, x, lengths, of_row))
                logits = planned[visit]
            shares = mixture(logits, routing)
            if routing.kind != "soft" and torch.is_grad_enabled():
                soft = torch.softmax(logits, -1)
                shares = shares.detach() + (soft - soft.detach())  # straight through (Bengio et al. 2013)
        # Rows that have left have weight 0 in all blocks.
        weights = shares[:, :-1] * share_left[:, None]
        share_left = share_left * (1 - shares[:, -1])
        weights = torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), -1)
        x = blocks(x, weights if by_row else weights[of_row])
        yield Visit(read_state(model, x.clone()), logits, weights)


def _shares_of(routes: Sequence[Sequence[int]], count: int, loop: Loop) -> Tensor:
    """Return the shares of known routes, float32 [visits, n, blocks + 1].

    The share is 1 for the block of a visit, or for the state if a route has ended.
    """
    if len(routes) != count:
        raise InputError(f"{len(routes)} routes for {count} sequences", field="routes")
    for number, route in enumerate(routes):
        loop.check_route(route, f"the route of sequence {number}")
    visits = max(map(len, routes))
    whole_routes = [[*route, *[loop.blocks] * (visits - len(route))] for route in routes]
    return F.one_hot(torch.tensor(whole_routes).T, loop.blocks + 1).float()


def _read_by_router(model: LoopedLM, x: Tensor, lengths: Tensor | None, of_row: Tensor) -> Tensor:
    """Return the router's input from the residual stream [rows, hidden] (see `summary`).

    Args:
        lengths: rows of each sequence; None: the router reads rows
    """
    if lengths is None:
        return summary(model.arrays, x)
    sums = x.new_zeros(len(lengths), x.shape[1], dtype=torch.float32).index_add(0, of_row, x.float())
    return summary(model.arrays, x[lengths.cumsum(0) - 1], sums / lengths[:, None])


def mixture(logits: Tensor, routing: Routing) -> Tensor:
    """Return the weights of each block's output and of the unchanged state, float32 [n, blocks + 1]. They sum to 1.

    Args:
        logits: float32 [n, blocks + 1]
    """
    if routing.kind == "soft":
        return torch.softmax(logits, -1)
    blocks = logits.shape[-1] - 1
    chosen = torch.from_numpy(choose(logits.detach().cpu().numpy(), routing.threshold)).to(logits.device)
    picked = F.one_hot(chosen, blocks + 1).to(logits.dtype)
    if routing.kind != "top":
        return picked
    best = logits[:, :-1].topk(min(routing.top, blocks), -1)
    shares = torch.zeros_like(logits).scatter(-1, best.indices, torch.softmax(best.values, -1))
    return torch.where(picked[:, -1:] > 0, picked, shares)


class _Blocks:
    """Runs rows through all blocks at once.

    Args:
        last_visits: rows are in different blocks, so a row's keys in a block are from its last visit to that block
    """

    def __init__(self, model: LoopedLM, rows: Pass, last_visits: bool):
        self.model, self.rows, self.last_visits = model, rows, last_visits
        # By layer: keys, values, and which rows have visited the layer.
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, shares: Tensor) -> Tensor:
        """Return the residual stream [rows, hidden] after a visit.

        Args:
            shares: float32 [rows, blocks + 1]
        """
        mixed = x * shares[:, -1:].to(x.dtype)
        for block in range(self.model.loop.blocks):
            visits = shares[:, block] > 0
            if bool(visits.any()):
                mixed = mixed + self._through(x, block, visits) * shares[:, block : block + 1].to(x.dtype)
        return mixed

    def _through(self, x: Tensor, block: int, visits: Tensor) -> Tensor:
        model, rows = self.model, self.rows
        start = injected(model, x, rows.prelude)
        now, delta = start.clone(), None
        for number in model.loop.block(block, model.config.layers):
            plane = model.first[number]
            see = partial(self._attend, number, start, visits) if self.last_visits else partial(rows.attend, plane)
            cos_sin = rows.cos_sin[plane]
            now, delta = model.layers[number](
                now, delta, cos_sin=cos_sin, attend=see, read=None, adapters=NO_ADAPTERS, ops=rows.ops
            )
        if model.loop.between == "norm":
            return model.norm(now, delta, rows.ops)
        return now if delta is None else now + delta

    def _attend(
        self, number: int, start: Tensor, visits: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention if only the rows of `visits` run through the layer now.

        Args:
            start: states before the block
        """
        rows, layer, plane = self.rows, self.model.layers[number], self.model.first[number]
        assert isinstance(layer, Layer)
        k_of_state, v_of_state = layer.keys_values(start.clone(), rows.cos_sin[plane], rows.ops)
        old_k, old_v, visited = self._kept.get(number, (k_of_state, v_of_state, torch.zeros_like(visits)))
        k, v = (
            torch.where(visits[:, None, None], new, torch.where(visited[:, None, None], old, of_state))
            for new, old, of_state in ((k, old_k, k_of_state), (v, old_v, v_of_state))
        )
        self._kept[number] = k, v, visited | visits
        return rows.attend(plane, q, k, v, sinks)


def visit_logprobs(
    model: LoopedLM, batch: TrainBatch, ids: np.ndarray | None = None, order: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of a batch's targets after each visit of a looped model, with gradients.

    Args:
        model: a looped model without a coda
        batch: the targets and their sequences
        ids: int64 [visits, targets]: the target token after each visit; default: the sequence's token at every visit
        order: the blocks to visit, as many as by default; None: the config's order

    Returns:
        (log-probabilities, the gate's logits of leaving), both float32 [visits, targets]. The second is None without a
        gate.

    Raises:
        InputError: if the model does not loop or has a coda
        Exception: all errors of `prefold.train.logprobs`

    Example:
        ```python
        logprobs, gate = visit_logprobs(model, batch)
        loss = -logprobs[-1].mean()  # after the last visit
        ```
    """
    if not isinstance(model, LoopedLM):
        raise InputError("the model does not loop, so it is read once", field="model", remedy="use `logprobs`")
    check_trained(model, batch)
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    rows = model.start(prepared.tokens, prepared.positions, attend, prepared.read_rows)
    states = model.after_each_visit(rows, order)
    return _read(model, batch, states, ids)


def _read(
    model: LoopedLM, batch: TrainBatch, states: list[Tensor], ids: np.ndarray | None
) -> tuple[Tensor, Tensor | None]:
    """Return the result of `visit_logprobs` from the hidden states after each visit."""
    weight = model.embedding if model.lm_head is None else model.lm_head
    ids = np.broadcast_to(batch.target_ids, (len(states), batch.num_targets)) if ids is None else ids
    reads = np.arange(len(states))[:, None] * len(states[0]) + batch.target_reads
    logprobs = target_logprobs(torch.cat(states), weight, reads.ravel(), ids.ravel()).view(ids.shape)
    if model.gate is None:
        return logprobs, None
    return logprobs, model.leaving(torch.stack(states))[:, torch.from_numpy(batch.target_reads).to(logprobs.device)]


@dataclass(frozen=True, slots=True)
class RoutedLogprobs:
    """The log-probabilities of a batch's targets after each visit of a routed model, with gradients.

    Attributes:
        logprobs: float32 [visits, targets]
        gate: float32 [visits, targets]: the gate's logits of leaving; None without a gate
        choices: float32 [visits, n, blocks + 1]: the router's logits before each visit, per sequence, or per row if the
            router reads rows; None: the router was not asked
        weights: float32 [visits, n, blocks + 1]: the blocks' weights, as in `Visit`
    """

    logprobs: Tensor
    gate: Tensor | None
    choices: Tensor | None
    weights: Tensor


def routed_logprobs(
    model: LoopedLM,
    batch: TrainBatch,
    ids: np.ndarray | None = None,
    *,
    routing: Routing | None = None,
    routes: Sequence[Sequence[int]] | None = None,
) -> RoutedLogprobs:
    """Return the log-probabilities of a batch's targets after each visit of a looped model with a router.

    Args:
        model: a looped model without a coda
        batch: the batch, built with sharing="off", because the router chooses a route from a whole sequence
        ids: int64 [visits, targets]: the target token after each visit; default: the sequence's token at every visit
        routing: how the router picks; default: as in the config
        routes: the blocks that each sequence visits, in place of the router

    Returns:
        log-probabilities, the gate's and the router's logits, and the blocks' weights

    Raises:
        InputError: if the batch shares rows, or for the reasons of `routed`
        Exception: all errors of `prefold.train.logprobs`

    Example:
        ```python
        found = routed_logprobs(model, batch, routes=[(0, 1, 0)] * num_sequences)
        loss = -found.logprobs[-1].mean()
        ```
    """
    if not isinstance(model, LoopedLM):
        raise InputError("the model does not loop, so it has no routes", field="model", remedy="use `logprobs`")
    check_trained(model, batch)
    visits = list(routed(model, *whole_sequences(model, batch), routing=routing, routes=routes))
    logprobs, gate = _read(model, batch, [visit.state[batch.step.read_rows] for visit in visits], ids)
    logits = [visit.logits for visit in visits if visit.logits is not None]
    weights = torch.stack([visit.weights for visit in visits])
    return RoutedLogprobs(logprobs, gate, torch.stack(logits) if logits else None, weights)


def whole_sequences(model: CausalLM, batch: TrainBatch) -> tuple[Tensor, Tensor, StepAttend, Tensor]:
    """Return a batch's rows for a model that reads whole sequences. Raise InputError if rows are shared.

    Returns:
        (tokens int64 [rows], positions int64 [rows], their attention, rows of each sequence int64 [sequences])
    """
    if batch.sharing != "off":
        message = f"the batch was laid out with sharing {batch.sharing!r}, but the model reads whole sequences"
        raise InputError(message, field="sharing", remedy='build it with sharing="off"')
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    starts = np.flatnonzero(batch.step.positions == 0)
    lengths = torch.from_numpy(np.diff([*starts, batch.num_rows])).to(model.device)
    return prepared.tokens, prepared.positions, attend, lengths
