"""The MLPs of layers; which of them a model has, its config says (`ModelConfig.mlp`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import ActivatedLinear, GatedLinear, Linear, Weight, linear_weights
from .lora import RowAdapters
from .ops import Ops
from .parallel import Alone


class Mlp(nn.Module):
    """An Mlp is the MLP of one layer: activation(gate) * up, and down. Another kind is made with the same arguments,
    and has `forward` and `weights`.

    config: with the sizes of this rank's part; number: of the layer in the model
    """

    first: type[ActivatedLinear | GatedLinear] = GatedLinear

    def __init__(self, config: ModelConfig, number: int, ranks: Alone, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        hidden, width, bias = config.hidden, config.intermediate, config.mlp_bias
        self.config, self.number, self.sum = config, number, ranks.sum
        self.gate_up = self.first(hidden, width, activation=config.activation, bias=bias, dtype=dtype, device=device)
        # The bias of what is summed over ranks is added once.
        self.down = Linear(width, hidden, bias=bias and ranks.rank == 0, dtype=dtype, device=device)

    def forward(self, h: Tensor, adapters: RowAdapters, ops: Ops) -> Tensor:
        """Returns the result of the MLP for h [rows, hidden], shaped as h, summed over all ranks."""
        if adapters.adapters:
            h = self.gate_up.activate(adapters.add(self.gate_up(h), h, self.number, "gate_up"), ops)
        else:
            h = self.gate_up.activated(h, ops)
        return self.sum(adapters.add(self.down(h), h, self.number, "down"))

    def weights(self, prefix: str, places: Mapping[str, tuple[slice, ...]]) -> Iterator[Weight]:
        """Yields the parameters with the names of their tensors. prefix: the layer's; places: as of
        `linear_weights`."""
        for linear, (_, modules) in self.config.mlp_kind.linears(self.config).items():
            parts = ((prefix + module, size) for module, size in modules)
            yield from linear_weights(getattr(self, linear), *parts, places=places)


class PlainMlp(Mlp):
    """A PlainMlp has no gate: activation(up), and down."""

    first = ActivatedLinear
