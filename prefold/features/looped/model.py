"""A looped transformer: rows pass its layers several times, each time with separate K/V."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.schedule.steps import StreamStep
from ...errors import InputError
from ...model.config import ModelConfig
from ...spec.requests import Exits
from ...worker.torch.arrays import TorchArrays
from ...worker.torch.layers import Linear
from ...worker.torch.model import CausalLM, Pass
from ...worker.torch.ops import choose_ops
from ...worker.torch.parallel import ALONE, Alone
from .config import GATE_FEATURES, LoopedConfig
from .gates import VisitOutputs, gate_logits, handed_on, injected, read_state
from .steps import exits_row


@dataclass(frozen=True, slots=True)
class RowExits:
    """The visits after which rows of a row stream are read. Each field is a number, or a tensor [rows].

    Attributes:
        threshold: a row leaves after the first visit at which its probability of having left is at least this; 1: only
            after the last; nan: the model's threshold
        fewest: minimum number of visits
        most: maximum number of visits. The last visit ends a row anyway
    """

    threshold: float | Tensor = float("nan")
    fewest: float | Tensor = 1
    most: float | Tensor = float("inf")

    @classmethod
    def of(cls, exits: Exits) -> RowExits:
        """Return the same exits for all rows that are read."""
        threshold, fewest, most = exits_row(exits)
        return cls(math.nan if threshold is None else threshold, fewest, most)


def visits_at_exit(gate: Tensor, exits: RowExits, default: float = 1.0) -> Tensor:
    """Return the visit after which each read's row leaves, from 0: int64 [reads].

    The probability of leaving after visit t is l_t times the product of 1 - l over the visits before, where l is the
    gate's sigmoid. After the last visit it is the rest (Ouro: Zhu et al. 2025).

    Args:
        gate: float32 [visits, reads]: logits of leaving after each visit, if the row has not left before
        exits: thresholds and limits
        default: the threshold if `exits` has none
    """
    visits = len(gate)
    share = torch.sigmoid(gate)
    stays = torch.cumprod(1 - share, 0)
    before = torch.cat((torch.ones_like(stays[:1]), stays[:-1]))
    has_left = torch.cumsum(share * before, 0)
    number = torch.arange(1, visits + 1, device=gate.device)[:, None]
    threshold = exits.threshold
    if not isinstance(threshold, Tensor):  # filled on the device: a copy would synchronize, and stop a graph capture
        threshold = torch.full((), threshold, device=gate.device)
    threshold = torch.where(threshold.isnan(), default, threshold)
    leaves = (has_left >= threshold) & (threshold < 1) & (number >= exits.fewest)
    leaves |= (number >= exits.most) | (number == visits)
    return leaves.to(torch.int64).argmax(0)


class Gate(Linear):
    """The weights of a gate, which computes the logit of leaving after a visit (`gates.gate_logits`)."""

    def __init__(self, config: LoopedConfig, *, device: torch.device):
        inputs = config.hidden if config.loop.gate_reads == "state" else GATE_FEATURES
        super().__init__(inputs, 1, bias=True, dtype=torch.float32, device=device)


class Router(nn.Module):
    """The weights of a router (`gates.router_logits`): two linears, and a vector for each visit."""

    def __init__(self, config: LoopedConfig, *, device: torch.device):
        super().__init__()
        assert config.loop.router is not None
        inputs = 2 if config.loop.router.reads == "request" else 1
        self.inner = _linear(inputs * config.hidden, config.hidden, device)
        self.step = nn.Parameter(torch.empty(len(config.loop.order), config.hidden, device=device))
        self.outer = _linear(config.hidden, config.loop.blocks + 1, device)


class Planner(nn.Module):
    """The weights of a planner (`gates.planner_logits`)."""

    def __init__(self, config: LoopedConfig, *, device: torch.device):
        super().__init__()
        self.inner = _linear(2 * config.hidden, config.hidden, device)
        self.outer = _linear(config.hidden, len(config.loop.order) * (config.loop.blocks + 1), device)


def _linear(inputs: int, outputs: int, device: torch.device) -> Linear:
    return Linear(inputs, outputs, bias=True, dtype=torch.float32, device=device)


class LoopedLM(CausalLM):
    """A CausalLM that visits its blocks of layers in the order of `config.loop`.

    Call it like a CausalLM, or visit by visit: `start`, then `visit` for each visit, then `finish`.

    Attributes:
        gate: computes the logit of leaving after a visit; or None
        router: computes the logits of the next block and of leaving; or None. A call of the model does not use it, and
            visits the blocks in their order; see `train.routed`
        planner: computes the router's logits of all visits before the first one; or None
        inject: the linear that mixes the prelude's output into the residual stream before each visit; or None
        prelude: the layers before the first visit
        coda: the layers after the last visit
        first: the first plane of each layer
    """

    config: LoopedConfig

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ranks: Alone = ALONE):
        super().__init__(config, dtype=dtype, device=device, ranks=ranks)
        assert isinstance(config, LoopedConfig)
        self.loop = config.loop
        size = config.hidden
        self.prelude = range(self.loop.prelude)
        self.coda = range(config.layers - self.loop.coda, config.layers)
        self.first = config.first_planes
        self.gate = Gate(config, device=device) if self.loop.gate else None
        routing = self.loop.router
        self.router = None if routing is None else Router(config, device=device)
        self.planner = Planner(config, device=device) if routing is not None and routing.planner else None
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.inject = Linear(2 * size, size, bias=False, **place) if self.loop.between == "inject" else None

    def forward(
        self, *inputs: Any, exits: RowExits | None = None, route: Sequence[int] | None = None, **options: Any
    ) -> Tensor:
        """Return each row's hidden states after the visit after which it leaves.

        Args:
            inputs: as for a CausalLM
            exits: the visits after which rows are read; None: as in `config.loop`
            route: the blocks that all rows visit, at most as many as the order has; None: the order
            options: as for a CausalLM
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
        """Return hidden states as read after each visit, each [rows read, hidden], for rows from `start`.

        Raise InputError for a model with a coda, because its coda runs only once.

        Args:
            order: the blocks to visit, at most as many as in the config's order; None: the config's order
        """
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
            states.append(read_state(self, state.clone()))  # a copy, because `read_state` may overwrite its argument
        return states

    def leaving(self, states: Tensor) -> Tensor:
        """Return logits of leaving, float32 [visits, rows], for states [visits, rows, hidden] as read after each visit.

        Raise InputError for a model without a gate.
        """
        logits, before = [], None
        for state in states:
            logit, before = self.leaves(state, before)
            logits.append(logit)
        return torch.stack(logits)

    def leaves(self, state: Tensor, before: VisitOutputs[Tensor] | None) -> tuple[Tensor, VisitOutputs[Tensor] | None]:
        """Return (logits of leaving after a visit, float32 [rows]; its VisitOutputs for the next call).

        Raise InputError for a model without a gate.

        Args:
            state: [rows, hidden] as read after the visit
            before: the VisitOutputs of the previous visit; None after the first
        """
        if self.gate is None:
            raise InputError("the model has no gate, so its rows leave after the last visit only", field="model")
        return gate_logits(self, state, before)

    def start(self, tokens: Tensor, positions: Tensor, *inputs: Any, **options: Any) -> Pass:
        """Return rows after the prelude, before the first visit. Arguments are as for a call of the model."""
        rows = super().start(tokens, positions, *inputs, **options)
        self.go_through(rows, self.prelude)
        stream, rows.prelude = handed_on(self, rows.stream, positions)
        if rows.prelude is not None:
            rows.x, rows.delta = stream, None
        return rows

    def visit(self, rows: Pass, block: int) -> None:
        """Run rows through a block. After the last plane only the rows that are read remain."""
        if rows.prelude is not None:
            rows.x, rows.delta = injected(self, rows.stream, rows.prelude), None
        self.go_through(rows, self.loop.block(block, self.config.layers))
        if self.loop.between == "norm":
            rows.x, rows.delta = self.normed(rows), None

    def finish(self, rows: Pass) -> Tensor:
        """Return hidden states after the coda and the final norm, [rows read, hidden], of rows after their visits."""
        coda = self.coda
        planes = len(self.config.planes)
        if rows.place < planes - len(coda):  # the route is shorter than the order
            rows.place = planes - len(coda)
            if not coda and rows.read_rows is not None:
                rows.x = rows.x[rows.read_rows]
                rows.delta = None if rows.delta is None else rows.delta[rows.read_rows]
        if not coda:
            return read_state(self, rows.stream)
        if self.inject is not None:
            rows.x, rows.delta = self.normed(rows), None
        self.go_through(rows, coda)
        return self.normed(rows)

    # The methods of `gates.LoopedModel`.

    @property
    def arrays(self) -> TorchArrays:
        return TorchArrays(self.device)

    def multiply(self, name: str, x: Tensor) -> Tensor:
        product: Tensor = self.get_submodule(name)(x)
        return product

    def weight(self, name: str) -> Tensor:
        return self.get_parameter(name)

    def norm_rows(self, x: Tensor) -> Tensor:
        return self.norm(x, None, choose_ops(self.dtype, self.device))

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)
