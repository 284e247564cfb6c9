"""Layers whose state runs along the sequence: mixers, in place of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..model.decoder_layer import norm_of
from ..model.layers import Linear, Weight, linear_weights
from ..model.lora import RowAdapters
from ..model.ops import Ops
from ..model.parallel import Alone
from ..plugins import named_class
from .carry import LayerStates
from .config import HybridConfig


class Mixer(nn.Module):
    """A Mixer is what a layer has in place of attention. Its linears have the names of `MixerKind.linears`.

    number  of the layer in the model
    """

    def __init__(self, config: HybridConfig, number: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config, self.number = config, number
        for name, (inputs, modules) in (config.mixer_linears(number) or {}).items():
            bias = bool(config.sizes.get("bias"))
            outputs = sum(size for _, size in modules)
            self.add_module(name, Linear(inputs, outputs, bias=bias, dtype=dtype, device=device))

    def forward(
        self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops
    ) -> Tensor:
        """Returns what the layer adds to the residual stream, [rows read, hidden].

        h       [rows, hidden], normed
        states  those of this layer
        read    int64: the rows whose result is wanted; None: all
        """
        raise NotImplementedError

    def linear(self, name: str, x: Tensor, adapters: RowAdapters) -> Tensor:
        """Returns the result of one of the mixer's linears, with what adapters add."""
        return adapters.add(getattr(self, name)(x), x, self.number, name)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yields the parameters with the names of their tensors. prefix: the layer's."""
        for name, (_, modules) in (self.config.mixer_linears(self.number) or {}).items():
            yield from linear_weights(getattr(self, name), *((prefix + module, size) for module, size in modules))


class ShortConv(Mixer):
    """A ShortConv is the gated short convolution of LFM2: with b, c, x = in_proj(h), out_proj(c * conv(b * x))."""

    def __init__(self, config: HybridConfig, number: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__(config, number, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.taps = nn.Parameter(torch.empty(config.hidden, 1, config.sizes["taps"], **place))
        self.bias = nn.Parameter(torch.empty(config.hidden, **place)) if config.sizes["bias"] else None

    def forward(
        self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops
    ) -> Tensor:
        b, c, x = self.linear("in_proj", h, adapters).chunk(3, -1)
        y = states.conv(0, b * x, self.taps[:, 0], self.bias)
        y = c * y if read is None else c[read] * y[read]
        return self.linear("out_proj", y, adapters if read is None else adapters.read)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from super().weights(prefix)
        yield Weight(self, "taps", ((f"{prefix}conv.conv.weight", self.config.hidden),))
        if self.bias is not None:
            yield Weight(self, "bias", ((f"{prefix}conv.conv.bias", self.config.hidden),))


class StateLayer(nn.Module):
    """A StateLayer computes a mixer and the MLP of one layer, for every row it is given."""

    def __init__(self, config: HybridConfig, number: int, ranks: Alone, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        kind = config.mixer(number)
        assert kind is not None
        self.config, self.number = config, number
        self.input_norm, self.post_norm = norm_of(config, **place), norm_of(config, **place)
        self.mixer: Mixer = named_class(kind.module)(config, number, **place)
        self.mlp = named_class(config.mlp_kind.module)(config, number, ranks, **place)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        *,
        states: LayerStates,
        read: Tensor | None,
        adapters: RowAdapters,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream x + delta [rows, hidden] after this layer, as its x and delta; may write into x.
        The arguments are those of `Layer.forward`, and the states of this layer."""
        x, h = self.input_norm(x, delta, ops)
        mixed = self.mixer(h, states, read, adapters, ops)
        if read is not None:
            x, adapters = x[read], adapters.read
        x, h = self.post_norm(x, mixed, ops)
        return x, self.mlp(h, adapters, ops)

    def own_weights(self, prefix: str) -> Iterator[Weight]:
        """Yields the parameters of the mixer with the names of their tensors. prefix: the layer's."""
        yield from self.mixer.weights(prefix)
