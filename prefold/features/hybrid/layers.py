"""Layers whose state runs along the sequence: mixers, in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import kernels
from ...model.decoder_layer import Layer, norm_of
from ...model.layers import Linear, Weight, linear_weights
from ...model.lora import RowAdapters
from ...model.ops import PYTORCH, Ops
from ...model.parallel import Alone
from ...spec.plugins import named_class
from .carry import Carry, Group, LayerStates
from .config import HybridConfig
from .delta import gated_delta, unit


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

    def forward(self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops) -> Tensor:
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


def compiled_for(x: Tensor) -> kernels.Kernels | None:
    """Returns our compiled kernels, where they compute on such a tensor: they have no gradients."""
    return kernels.load() if x.is_cpu and x.dtype in kernels.DTYPES and not x.requires_grad else None


def _taps(weight: Tensor) -> Tensor:
    """Returns the taps [channels, 1, taps] of a convolution as float32 [taps, channels]."""
    return weight[:, 0].t().float().contiguous()


class ShortConv(Mixer):
    """A ShortConv is the gated short convolution of LFM2: with b, c, x = in_proj(h), out_proj(c * conv(b * x))."""

    def __init__(self, config: HybridConfig, number: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__(config, number, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.taps = nn.Parameter(torch.empty(config.hidden, 1, config.sizes["taps"], **place))
        self.bias = nn.Parameter(torch.empty(config.hidden, **place)) if config.sizes["bias"] else None

    def forward(self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops) -> Tensor:
        x, out = self.linear("in_proj", h, adapters), adapters if read is None else adapters.read
        if compiled := compiled_for(x):
            carry = states.carry
            bias, width = None if self.bias is None else self.bias.float(), self.taps.shape[2] - 1
            (table,) = carry.table.tensors[self.number]
            y = compiled.short_conv(
                carry.unfold(x), table, _taps(self.taps), bias, carry.places(width), carry.picked(read)
            )
            return self.linear("out_proj", y, out)
        b, c, x = x.chunk(3, -1)
        y = states.conv(0, b * x, self.taps[:, 0], self.bias)
        y = c * y if read is None else c[read] * y[read]
        return self.linear("out_proj", y, out)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from super().weights(prefix)
        yield Weight(self, "taps", ((f"{prefix}conv.conv.weight", self.config.hidden),))
        if self.bias is not None:
            yield Weight(self, "bias", ((f"{prefix}conv.conv.bias", self.config.hidden),))


class GatedDeltaNet(Mixer):
    """A GatedDeltaNet is the linear attention of Qwen3.5 (Yang et al. 2024, "Gated Delta Networks"): queries, keys and
    values go through a short convolution; each head's state is decayed and corrected by each row.

    Source: modeling_qwen3_5.py of transformers.
    """

    def __init__(self, config: HybridConfig, number: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__(config, number, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        sizes = config.sizes
        self.heads, self.key_heads, self.dim = sizes["value_heads"], sizes["key_heads"], sizes["value_dim"]
        self.keys, self.values = sizes["key_heads"] * sizes["key_dim"], sizes["value_heads"] * sizes["value_dim"]
        self.taps = nn.Parameter(torch.empty(2 * self.keys + self.values, 1, sizes["taps"], **place))
        self.dt_bias = nn.Parameter(torch.empty(self.heads, **place))
        self.a_log = nn.Parameter(torch.empty(self.heads, **place))
        self.norm = nn.Parameter(torch.empty(self.dim, **place))

    def forward(self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops) -> Tensor:
        x = self.linear("in_proj", h, adapters)
        if compiled := compiled_for(x):
            o = self._by_kernels(compiled, x, states.carry, read)
            return self.linear("out_proj", o, adapters if read is None else adapters.read)
        sizes = [2 * self.keys + self.values, self.values, self.heads, self.heads]
        qkv, z, b, a = x.split(sizes, -1)
        qkv = F.silu(states.conv(0, qkv, self.taps[:, 0]))
        beta = b.sigmoid().float()
        decay = -self.a_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        carry = states.carry
        qkv, beta, decay = carry.unfold(qkv), carry.unfold(beta), carry.unfold(decay)
        q, k, v = qkv.split([self.keys, self.keys, self.values], -1)
        q, k = (unit(x.unflatten(-1, (self.key_heads, -1)).float()) for x in (q, k))
        v = v.unflatten(-1, (self.heads, -1)).float()

        def scan(start: Tensor, group: Group) -> tuple[Tensor, Tensor]:
            by_runs = group.pick
            o, end = gated_delta(by_runs(q), by_runs(k), by_runs(v), by_runs(decay), by_runs(beta), start)
            return o.flatten(2), end

        o = states.scan(1, scan, self.values, torch.float32)
        if read is not None:
            o, z, adapters = o[read], z[read], adapters.read
        o = o.to(h.dtype).unflatten(-1, (self.heads, self.dim))
        o = PYTORCH.add_rms_norm(o, None, self.norm, self.config.norm_eps)[1]
        o = (o.float() * F.silu(z.unflatten(-1, (self.heads, self.dim)).float())).to(h.dtype)
        return self.linear("out_proj", o.flatten(1), adapters)

    def _by_kernels(self, compiled: kernels.Kernels, x: Tensor, carry: Carry, read: Tensor | None) -> Tensor:
        """Returns what the layer gives before its last linear, of what its first one gives."""
        columns, states = carry.table.tensors[self.number]
        return compiled.delta_net(
            carry.unfold(x),
            columns,
            states,
            _taps(self.taps),
            carry.places(self.taps.shape[2] - 1),
            carry.order,
            key_heads=self.key_heads,
            rates=-self.a_log.float().exp(),
            dt_bias=self.dt_bias.float(),
            norm=self.norm.float(),
            eps=self.config.norm_eps,
            pick=carry.picked(read),
        )

    def weights(self, prefix: str) -> Iterator[Weight]:
        prefix += "linear_attn."
        yield from super().weights(prefix.removesuffix("linear_attn."))
        yield Weight(self, "taps", ((f"{prefix}conv1d.weight", len(self.taps)),))
        yield Weight(self, "dt_bias", ((f"{prefix}dt_bias", self.heads),))
        yield Weight(self, "a_log", ((f"{prefix}A_log", self.heads),))
        yield Weight(self, "norm", ((f"{prefix}norm.weight", self.dim),))


class GatedAttention(Layer):
    """A GatedAttention is a Layer whose attention is multiplied with the sigmoid of a gate, which lies beside q in each
    head, and of whose heads the first numbers alone may be rotated (`HybridConfig.gated`, `rotated_dim`)."""

    config: HybridConfig

    def __init__(self, config: HybridConfig, number: int, ranks: Alone, *, splits_q: bool, **place: Any):
        super().__init__(config, number, ranks, splits_q=True, **place)
        self.q = Linear(config.hidden, 2 * config.q_size, bias=config.qkv_bias, **place)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        *,
        cos_sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
        read: Tensor | None,
        adapters: RowAdapters,
        ops: Ops,
    ) -> tuple[Tensor, Tensor | None]:
        config = self.config
        x, h = self.input_norm(x, delta, ops)
        kv = adapters.add(self.kv(h), h, self.number, "kv")
        k, v = kv.unflatten(-1, (2 * config.kv_heads, config.head_dim)).split(config.kv_heads, 1)
        k = ops.rope(k, cos_sin, self.k_norm, config.norm_eps)
        if read is not None:
            x, h, cos_sin, adapters = x[read], h[read], cos_sin[read], adapters.read
        q = adapters.add(self.q(h), h, self.number, "q").unflatten(-1, (config.heads, 2 * config.head_dim))
        q, gate = q.chunk(2, -1)
        o = attend(ops.rope(q, cos_sin, self.q_norm, config.norm_eps), k, v, self.sinks)
        return self._finish(x, o * torch.sigmoid(gate), adapters, ops)

    def own_weights(self, prefix: str) -> Iterator[Weight]:
        """Yields the parameters of the linears with the names of their tensors. prefix: the layer's."""
        for name, (_, modules) in (self.config.mixer_linears(self.number) or {}).items():
            yield from linear_weights(getattr(self, name), *((prefix + module, size) for module, size in modules))


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
        mixed, scale = self.mixer(h, states, read, adapters, ops), self.config.residual_scale
        if read is not None:
            x, adapters = x[read], adapters.read
        x, h = self.post_norm(x, mixed if scale == 1 else scale * mixed, ops)
        delta = self.mlp(h, adapters, ops)
        return x, delta if scale == 1 else scale * delta

    def own_weights(self, prefix: str) -> Iterator[Weight]:
        """Yields the parameters of the mixer with the names of their tensors. prefix: the layer's."""
        yield from self.mixer.weights(prefix)
