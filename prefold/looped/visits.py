"""A looped model as functions of states: rows come to a block with their state, and leave it with another.

Rows of one call may be at different visits, and of different requests. Who attends knows which keys they see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..model.config import Plane
from ..model.decoder_layer import Layer
from ..model.lora import NO_ADAPTERS, RowAdapters
from ..model.ops import choose_ops
from ..model.transformer import Attend, Pass
from .model import LoopedLM
from .noise import position_noise


class Visits:
    """A Visits takes states [rows, hidden] through the parts of a looped model. A state is the residual stream between
    two parts, in the model's dtype.

    most_layers  the most layers of any part; `attend` is called with the number of the layer in its part
    planes       of each layer of the model
    """

    def __init__(self, model: LoopedLM):
        self.model, self.loop, layers = model, model.loop, model.config.layers
        visited = list(model.config.visited)
        self._first = [visited.index(number) if number in visited else 0 for number in range(layers)]
        self.planes: tuple[Plane, ...] = tuple(model.config.planes[first] for first in self._first)
        self.prelude, self.coda = range(self.loop.prelude), range(layers - self.loop.coda, layers)
        self.blocks = [self.loop.block(number, layers) for number in range(self.loop.blocks)]
        self.most_layers = max(len(part) for part in (self.prelude, self.coda, *self.blocks))

    @property
    def has_prelude(self) -> bool:
        """Returns whether something comes before the first block: layers, or a state that each visit is given."""
        return bool(self.prelude) or self.model.inject is not None

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the states with which rows begin."""
        return self.model._embed(tokens, positions, None)

    def begin(self, positions: Tensor) -> Tensor:
        """Returns the states with which rows come to their first block, where the prelude's are given beside them."""
        noise = position_noise(self.loop.seed, positions, self.model.config.hidden)
        return (noise * self.loop.noise).to(self.model.dtype)

    def through(
        self,
        part: range,
        states: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: RowAdapters = NO_ADAPTERS,
        cos_sin: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Returns states after the layers of a part; may write into `states`. cos_sin: what `cos_sin` gives for the
        positions, where it is known."""
        model = self.model
        planes = self.cos_sin(positions) if cos_sin is None else cos_sin
        angles = [planes[self._first[layer]] for layer in part]
        rows = Pass(states, None, angles, attend, None, adapters, choose_ops(model.dtype, model.device))
        model.go_through(rows, part)
        return rows.x if rows.delta is None else rows.x + rows.delta

    def visit(
        self,
        block: int,
        states: Tensor,
        given: Tensor | None,
        positions: Tensor,
        attend: Attend,
        adapters: RowAdapters = NO_ADAPTERS,
        cos_sin: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Returns states after a visit to a block. given: states after the prelude, where each visit is given them;
        cos_sin: as of `through`."""
        states = self.through(self.blocks[block], self._brought(states, given), positions, attend, adapters, cos_sin)
        return self._normed(states) if self.loop.between == "norm" else states

    def end(self, states: Tensor, positions: Tensor, attend: Attend, adapters: RowAdapters = NO_ADAPTERS) -> Tensor:
        """Returns states after the coda, of rows after their last visit."""
        if self.model.inject is not None:
            states = self._normed(states)
        return self.through(self.coda, states, positions, attend, adapters)

    def read(self, states: Tensor) -> Tensor:
        """Returns hidden states as they are read, of rows after the coda, or after any visit where there is none."""
        if self.coda:
            return self._normed(states)
        return self.model.read(states.clone(), None, choose_ops(self.model.dtype, self.model.device))

    def project(
        self,
        block: int,
        states: Tensor,
        given: Tensor | None,
        positions: Tensor,
        write: Callable[[int, Tensor, Tensor], None],
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> None:
        """Gives `write` the number, keys and values of each layer of a block, made of states that do not visit it."""
        model, states = self.model, self._brought(states, given)
        part, ops = self.blocks[block], choose_ops(model.dtype, model.device)
        planes = self.cos_sin(positions)
        for number, layer in enumerate(part):
            one = model.layers[layer]
            assert isinstance(one, Layer)
            write(number, *one.keys_values(states.clone(), planes[self._first[layer]], ops, adapters))

    def _brought(self, states: Tensor, given: Tensor | None) -> Tensor:
        return states if self.model.inject is None else self.model.inject(torch.cat((states, given), -1))

    def _normed(self, states: Tensor) -> Tensor:
        return self.model.norm(states.clone(), None, choose_ops(self.model.dtype, self.model.device))[1]

    def cos_sin(self, positions: Tensor) -> list[Tensor]:
        """Returns the cosines and sines of positions, by plane of the model's order."""
        return self.model.cos_sin(positions)
