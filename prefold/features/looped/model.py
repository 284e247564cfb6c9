"""A looped transformer: layers that rows go through several times, each time with K/V of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...engine.schedule.steps import StreamStep
from ...errors import InputError
from ...model.config import ModelConfig
from ...model.layers import Linear
from ...model.ops import Ops
from ...model.parallel import ALONE, Alone
from ...model.transformer import CausalLM, Pass
from ...spec.requests import Exits
from .config import LoopedConfig
from .gates import Gate, Planner, Router, RowExits, VisitOutputs, visits_at_exit

# Parts of a model that are no blocks: the layers before the first block, and the layers after the last.
PRELUDE, CODA = -1, -2
_WORD = 2**32 - 1
# The noise is cut off at so many standard deviations.
_BOUND = 3.0
# Rows that are drawn at once: to draw one takes some 40 bytes a column.
_ROWS = 128


@dataclass(slots=True)
class VisitPass(Pass):
    """A VisitPass is a Pass whose layers may be compiled. program: takes a residual stream [rows, hidden] through
    them, and may write into it; None: the modules do it"""

    program: Callable[[Tensor], Tensor] | None = None


def position_noise(seed: int, positions: Tensor, columns: int) -> Tensor:
    """Returns float32 [rows, columns] of the standard normal distribution within three deviations of 0.

    positions  int64 [rows], below 2**32
    """
    return torch.cat([_drawn(seed, block, columns) for block in positions.split(_ROWS)])


def _drawn(seed: int, positions: Tensor, columns: int) -> Tensor:
    seeds = seed & _WORD, seed >> 32 & _WORD
    # Each position has a key of 64 bits.
    low = _mixed(positions ^ seeds[0], seeds[1])
    high = _mixed(positions ^ seeds[1], ~seeds[0] & _WORD)
    hashes = _mixed(torch.arange(columns, device=positions.device) ^ low[:, None], high[:, None])
    inside = math.erf(_BOUND / 2**0.5)  # the share of the distribution within the bound
    uniform = (hashes.double() + 0.5) * 2.0**-31 - 1.0  # between -1 and 1
    return (torch.erfinv(uniform.mul_(inside)) * 2**0.5).float()


def _mixed(x: Tensor, key: Tensor | int) -> Tensor:
    """Returns 32 random bits of each number in x, int64 of 32 bits: Wellons' `triple32`, with a key put in midway."""
    x = (x ^ x >> 17) * 0xED5AD4BB & _WORD
    x = (x ^ x >> 11 ^ key) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return x ^ x >> 14


class LoopedLM(CausalLM):
    """A LoopedLM is a CausalLM whose blocks of layers are visited as `config.loop` says.

    It is called as a CausalLM is, or goes a visit at a time: `start`, one `visit` after another, `finish`.

    gate    gives the logit of a row's leaving after a visit; or None
    router  gives the logits of the next block and of leaving, where `config.loop` has a router; or None. A call of the
            model does not ask it, and goes through the blocks in their order: see `routed`
    planner gives the router's logits of all visits before the first one; or None
    inject  the linear that mixes the prelude's output into the residual stream before each visit; or None
    parts   the layers of each block by its number, and those of PRELUDE and CODA
    first   the first plane of each layer
    """

    config: LoopedConfig

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ranks: Alone = ALONE):
        super().__init__(config, dtype=dtype, device=device, ranks=ranks)
        assert isinstance(config, LoopedConfig)
        self.loop = config.loop
        size = config.hidden
        self.parts = {number: self.loop.block(number, config.layers) for number in range(self.loop.blocks)}
        self.parts |= {PRELUDE: range(self.loop.prelude), CODA: range(config.layers - self.loop.coda, config.layers)}
        visited = list(config.visited)
        self.first = [visited.index(number) if number in visited else 0 for number in range(config.layers)]
        self.gate = Gate(size, self.loop.gate_reads, device=device) if self.loop.gate else None
        routing = self.loop.router
        self.router = None if routing is None else Router(config, device=device)
        self.planner = Planner(config, device=device) if routing is not None and routing.planner else None
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.inject = Linear(2 * size, size, bias=False, **place) if self.loop.between == "inject" else None

    def forward(
        self, *inputs: Any, exits: RowExits | None = None, route: Sequence[int] | None = None, **options: Any
    ) -> Tensor:
        """Returns hidden states as a CausalLM does, from the same arguments: of each row those after the visit that it
        leaves after.

        exits  after which visit rows are read; None: as `config.loop` says
        route  the blocks that all rows visit, at most as many as the order has; None: those of the order
        """
        if exits is None and self.loop.threshold < 1:
            exits = RowExits()
        if exits is not None:
            states = torch.stack(self.after_each_visit(self.start(*inputs, **options), route))
            rows = torch.arange(states.shape[1], device=states.device)
            return states[visits_at_exit(self.leaving(states), exits, self.loop.threshold), rows]
        rows = self.start(*inputs, **options)
        for block in self.loop.order if route is None else route:
            self.visit(rows, block)
        return self.finish(rows)

    def arguments(self, step: StreamStep) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if (exits := step.read_out.readout.exits) is not None:
            arguments["route"] = exits.route
            if (rules := replace(exits, route=None)) != Exits():
                arguments["exits"] = RowExits.of(rules)
        return arguments

    def after_each_visit(self, rows: Pass, order: Sequence[int] | None = None) -> list[Tensor]:
        """Returns hidden states as they are read after each visit, each [rows read, hidden], of rows that `start` gave.
        order: the blocks in place of the config's, at most as many. Raises InputError for a model with a coda, which is
        gone through once."""
        if self.loop.coda:
            raise InputError("the model has a coda, so it is read after its last visit only", field="model")
        states = []
        order = self.loop.order if order is None else order
        for number, block in enumerate(order, 1):
            self.visit(rows, block)
            if number == len(order):
                states.append(self.finish(rows))
                continue
            state = rows.stream if rows.read_rows is None else rows.stream[rows.read_rows]
            states.append(self.read(state.clone(), None, rows.ops))  # a copy: the next visit writes into it
        return states

    def leaving(self, states: Tensor) -> Tensor:
        """Returns the logits of leaving for states [visits, rows, hidden] as they are read after each visit: float32
        [visits, rows]. Raises InputError for a model without a gate."""
        logits, before = [], None
        for state in states:
            logit, before = self.leaves(state, before)
            logits.append(logit)
        return torch.stack(logits)

    def leaves(self, state: Tensor, before: VisitOutputs | None) -> tuple[Tensor, VisitOutputs | None]:
        """Returns the logits of leaving after a visit, float32 [rows], and its VisitOutputs for the next call.

        state   [rows, hidden] as it is read after the visit
        before  the VisitOutputs of the visit before; None after the first

        Raises InputError for a model without a gate.
        """
        if self.gate is None:
            raise InputError("the model has no gate, so its rows leave after the last visit only", field="model")
        if self.gate.reads == "state":
            return self.gate(state.float())[:, 0], None
        features, outputs = self.gate.features(state, self.logits(state), before)
        return self.gate(features)[:, 0], outputs

    def start(self, tokens: Tensor, positions: Tensor, *inputs: Any, **options: Any) -> Pass:
        """Returns rows after the prelude, before the first visit; the arguments are those of a call of the model."""
        rows = super().start(tokens, positions, *inputs, **options)
        self.go_through(rows, self.parts[PRELUDE])
        if self.inject is not None:
            rows.prelude = rows.stream
            rows.x, rows.delta = self.noise(positions), None
        return rows

    def noise(self, positions: Tensor) -> Tensor:
        """Returns the noise that rows have as their state before the first visit, where the prelude's is mixed in."""
        return (position_noise(self.loop.seed, positions, self.config.hidden) * self.loop.noise).to(self.dtype)

    def injected(self, x: Tensor, prelude: Tensor | None) -> Tensor:
        """Returns the residual stream that enters a visit: x, or a mix of x and the prelude's output."""
        return x if self.inject is None else self.inject(torch.cat((x, prelude), -1))

    def go_through(self, rows: Pass, layers: Iterable[int]) -> None:
        if isinstance(rows, VisitPass) and rows.program is not None:
            rows.x, rows.delta = rows.program(rows.stream), None
        else:
            super().go_through(rows, layers)

    def visit(self, rows: Pass, block: int) -> None:
        """Takes rows through a block. After the last plane only the rows that are read are left."""
        if self.inject is not None:
            rows.x, rows.delta = self.injected(rows.stream, rows.prelude), None
        self.go_through(rows, self.parts[block])
        if self.loop.between == "norm":
            rows.x, rows.delta = self.normed(rows), None

    def finish(self, rows: Pass) -> Tensor:
        """Returns hidden states after the coda and the final norm, [rows read, hidden], of rows after their visits."""
        coda = self.parts[CODA]
        planes = len(self.config.planes)
        if rows.place < planes - len(coda):  # a route that is shorter than the order
            rows.place = planes - len(coda)
            if not coda and rows.read_rows is not None:
                rows.x = rows.x[rows.read_rows]
                rows.delta = None if rows.delta is None else rows.delta[rows.read_rows]
        if not coda:
            return self.read(rows.x, rows.delta, rows.ops)
        if self.inject is not None:
            rows.x, rows.delta = self.normed(rows), None
        self.go_through(rows, coda)
        return self.normed(rows)

    def read(self, x: Tensor, delta: Tensor | None, ops: Ops) -> Tensor:
        """Returns hidden states as they are read after any visit, [rows, hidden], of a model without a coda; may write
        into x. x, delta: as of a Pass."""
        if self.loop.between == "norm":  # the visit has ended with it
            return x if delta is None else x + delta
        if self.inject is not None:  # as in Huginn, which norms before its coda and after it
            x, delta = self.norm(x, delta, ops), None
        return self.norm(x, delta, ops)
