"""A hybrid as a function of rows: it knows of attention the `attend`, and of states the `Carry` that it is given."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...model.lora import NO_ADAPTERS, RowAdapters
from ...model.rotary import RotaryTables
from ...model.transformer import Attend, CausalLM, MediaRows
from .carry import Carry
from .config import HybridConfig
from .layers import GatedAttention, StateLayer


class HybridLM(CausalLM):
    """A HybridLM is a CausalLM some of whose layers have a state in place of attention."""

    config: HybridConfig

    def new_layer(self, number: int, **place: Any) -> nn.Module:
        config = self.local
        assert isinstance(config, HybridConfig)
        if self.ranks.size > 1:
            raise UnsupportedModelError("a model with layers of states is not split over ranks; use tensor_parallel 1")
        if config.mixer(number) is not None:
            return StateLayer(config, number, self.ranks, **place)
        if config.gated or config.rotated_dim is not None:
            return GatedAttention(config, number, self.ranks, splits_q=True, **place)
        return super().new_layer(number, **place)

    def rotary(self, device: torch.device) -> RotaryTables:
        if self._rotary is None or self._rotary.device != device:
            self._rotary = RotaryTables(self.config.ropes, self.config.rotated_dim or self.config.head_dim, device)
        return self._rotary

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read_rows: Tensor | None = None,
        adapters: RowAdapters = NO_ADAPTERS,
        media: MediaRows | None = None,
        states: Carry | None = None,
    ) -> Tensor:
        """Returns hidden states as a CausalLM does, from the same arguments. states: those of the rows' paths."""
        if states is None or torch.is_grad_enabled():
            raise UnsupportedModelError("a model with layers of states runs in an engine, and is not trained")
        rows, plane = self.start(tokens, positions, attend, read_rows, adapters, media), 0
        for number, layer in enumerate(self.layers):
            read = read_rows if number == self.config.layers - 1 else None
            options: dict[str, Any] = {"read": read, "adapters": adapters, "ops": rows.ops}
            if isinstance(layer, StateLayer):
                options["states"] = states.of(number)
            else:
                options |= {"cos_sin": rows.cos_sin[plane], "attend": partial(attend, plane)}
                plane += 1
            rows.x, rows.delta = layer(rows.x, rows.delta, **options)
        return self.normed(rows)
