"""Layers whose state runs along the sequence: mixers, in place of attention.

Gated DeltaNet computes the gated delta rule in chunks (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with
Delta Rule"). Mamba-2 is the recurrent layer of Granite 4 (Dao and Gu 2024, "Transformers are SSMs").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import kernels
from ...model.arrays import ARRAY_DTYPES, array_of, tensor_of
from ...model.decoder_layer import Layer, norm_of
from ...model.layers import Linear, Weight, linear_weights
from ...model.lora import RowAdapters
from ...model.ops import PYTORCH, Ops, settled
from ...model.parallel import Alone
from ...spec.plugins import named_class
from .carry import Carry, Group, LayerStates
from .config import HybridConfig

# Rows of a chunk, within which all is products of matrices.
CHUNK = 64


def unit(x: Tensor) -> Tensor:
    """Returns vectors [..., dim] of length 1, but for a small number under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o [runs, rows, heads, value dim], and the states at the ends of the runs.

    q, k         float32 [runs, rows, key heads, key dim]: each key head is that of some neighbouring heads; q is scaled
                 by the root of the key dim here. Rows of zeros change nothing
    v            float32 [runs, rows, heads, value dim]
    decay, beta  float32 [runs, rows, heads]
    start        float32 [runs, heads, key dim, value dim]
    """
    runs, rows, heads = v.shape[:3]
    shared = heads // k.shape[2]
    q = q * q.shape[-1] ** -0.5
    if rows == 1:
        return _one_row(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], start, shared)
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] < heads else x for x in (q, k, v))
    # A matrix for each run and head.
    q, k, v, decay, beta = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v, decay, beta))
    out, state = torch.empty_like(v), start.flatten(0, 1)
    for first in range(0, rows, CHUNK):
        chunk = slice(first, first + CHUNK)
        out[:, chunk], state = _chunk(q[:, chunk], k[:, chunk], v[:, chunk], decay[:, chunk], beta[:, chunk], state)
    return out.unflatten(0, (runs, heads)).transpose(1, 2), state.unflatten(0, (runs, heads))


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o [matrices, rows, value dim] of the rows of a chunk, and the state behind them; the arguments are those
    of `gated_delta` by matrices."""
    total = decay.cumsum(1)
    between = power(total[:, :, None] - total[:, None, :]).tril_()
    grown = power(total)
    # What each row adds to the state depends on what the rows before it in the chunk added: a triangular system, whose
    # right side has the part that is linear in the state at the chunk's beginning.
    system = torch.bmm(k, k.mT).mul_(between).mul_(beta[..., None])
    prediction = torch.bmm(k, state).mul_(grown[..., None]).neg_().add_(v).mul_(beta[..., None])
    added = torch.linalg.solve_triangular(system, prediction, upper=False, unitriangular=True)
    inner = torch.bmm(q, k.mT).mul_(between)
    out = torch.bmm(q, state).mul_(grown[..., None]).baddbmm_(inner, added)
    remaining = power(total[:, -1:] - total)[..., None]
    return out, (state * grown[:, -1:, None]).baddbmm_((k * remaining).mT, added)


def power(exponent: Tensor) -> Tensor:
    """Returns e to the power of sums of decays, which are no more than 0. What lies above is not used; what decays to
    less than e ** -60 is far below what rounding loses, and smaller numbers would be slow."""
    return exponent.clamp(-60, 0).exp_()


def _one_row(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor, shared: int
) -> tuple[Tensor, Tensor]:
    """Returns what `gated_delta` does for runs of one row; the arguments are those without the dimension of rows."""
    if shared > 1:
        q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
    state = start * decay.exp()[..., None, None]
    added = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state.addcmul_(k[..., :, None], added[..., None, :])
    return (q[..., None, :] @ state).transpose(1, 2), state


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
    return kernels.load() if x.is_cpu and x.dtype in ARRAY_DTYPES and not x.requires_grad else None


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
            (table,) = carry.table.tensors[self.number]
            unfolded, pick = array_of(carry.unfold(x)), array_of(carry.picked(read))
            taps, bias = array_of(_taps(self.taps)), None if self.bias is None else array_of(self.bias.float())
            places = carry.places(self.taps.shape[2] - 1)
            y = tensor_of(compiled.short_conv(unfolded, array_of(table), taps, bias, places, pick))
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
        out = compiled.delta_net(
            array_of(carry.unfold(x)),
            array_of(columns),
            array_of(states),
            array_of(_taps(self.taps)),
            carry.places(self.taps.shape[2] - 1),
            carry.order,
            key_heads=self.key_heads,
            rates=array_of(-self.a_log.float().exp()),
            dt_bias=array_of(self.dt_bias.float()),
            norm=array_of(self.norm.float()),
            eps=self.config.norm_eps,
            pick=array_of(carry.picked(read)),
        )
        return tensor_of(out)

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
        gate = settled(torch.sigmoid, gate) if config.invariant else torch.sigmoid(gate)
        return self._finish(x, o * gate, adapters, ops)

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


class Mamba2(Mixer):
    """A Mamba2 is a mixer of state spaces: x, keys b and queries c go through a short convolution; heads of one group
    share b and c. Source: modeling_granitemoehybrid.py of transformers."""

    def __init__(self, config: HybridConfig, number: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__(config, number, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        sizes = config.sizes
        self.heads, self.groups, self.inner = sizes["heads"], sizes["groups"], sizes["heads"] * sizes["dim"]
        channels = self.inner + 2 * self.groups * sizes["state"]
        self.taps = nn.Parameter(torch.empty(channels, 1, sizes["taps"], **place))
        self.conv_bias = nn.Parameter(torch.empty(channels, **place)) if sizes["conv_bias"] else None
        self.dt_bias, self.a_log, self.d = (nn.Parameter(torch.empty(self.heads, **place)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(self.inner, **place))

    def forward(self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops) -> Tensor:
        inputs = self.linear("in_proj", h, adapters)
        if compiled := compiled_for(inputs):
            y = self._by_kernels(compiled, inputs, states.carry, read)
            return self.linear("out_proj", y, adapters if read is None else adapters.read)
        gate, xbc, dt = inputs.split([self.inner, len(self.taps), self.heads], -1)
        xbc = F.silu(states.conv(0, xbc, self.taps[:, 0], self.conv_bias))
        step = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.config.sizes["limits"])
        carry = states.carry
        # x of rows that prompts share lies at each of them from here on, where a step is folded.
        parts = carry.unfold(xbc).float().split([self.inner, *[(len(self.taps) - self.inner) // 2] * 2], -1)
        numbers = self.heads, self.groups, self.groups
        x, b, c = (part.unflatten(-1, (number, -1)) for part, number in zip(parts, numbers, strict=True))
        step = carry.unfold(step)
        decay = -self.a_log.float().exp() * step

        def scan(start: Tensor, group: Group) -> tuple[Tensor, Tensor]:
            by_runs = group.pick
            y, end = state_space(by_runs(c), by_runs(b), by_runs(x), by_runs(decay), by_runs(step), start)
            return y.flatten(2), end

        y = states.scan(1, scan, self.inner, torch.float32)
        y = y + (carry.fold(x) * self.d.float()[:, None]).flatten(1)
        if read is not None:
            y, gate, adapters = y[read], gate[read], adapters.read
        y = (y.to(h.dtype).float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.config.norm_eps)).flatten(1)
        return self.linear("out_proj", self.norm * y.to(h.dtype), adapters)

    def _by_kernels(self, compiled: kernels.Kernels, x: Tensor, carry: Carry, read: Tensor | None) -> Tensor:
        """Return the input of the layer's last linear, from the output of its first one."""
        columns, states = carry.table.tensors[self.number]
        out = compiled.mamba2(
            array_of(carry.unfold(x)),
            array_of(columns),
            array_of(states),
            array_of(_taps(self.taps)),
            None if self.conv_bias is None else array_of(self.conv_bias.float()),
            carry.places(self.taps.shape[2] - 1),
            carry.order,
            groups=self.groups,
            rates=array_of(-self.a_log.float().exp()),
            dt_bias=array_of(self.dt_bias.float()),
            skips=array_of(self.d.float()),
            norm=array_of(self.norm.float()),
            eps=self.config.norm_eps,
            limits=self.config.sizes["limits"],
            pick=array_of(carry.picked(read)),
        )
        return tensor_of(out)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from super().weights(prefix)
        names = {"taps": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_bias", "a_log": "A_log", "d": "D"}
        for attribute, name in (names | {"norm": "norm.weight"}).items():
            if (parameter := getattr(self, attribute)) is not None:
                yield Weight(self, attribute, ((f"{prefix}mamba.{name}", len(parameter)),))


def state_space(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, step: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y [runs, rows, heads, head dim], and the states at the ends of the runs, in chunks.

    c, b         float32 [runs, rows, groups, state size]: each group is that of some neighbouring heads
    x            float32 [runs, rows, heads, head dim]
    decay, step  float32 [runs, rows, heads]: decay is 0 at most. Rows of zeros change nothing
    start        float32 [runs, heads, state size, head dim]
    """
    runs, rows, heads = x.shape[:3]
    c, b = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (c, b))
    # A matrix for each run and head.
    c, b, x, decay, step = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (c, b, x, decay, step))
    out, state = torch.empty_like(x), start.flatten(0, 1)
    for first in range(0, rows, CHUNK):
        chunk = slice(first, first + CHUNK)
        total = decay[:, chunk].cumsum(1)
        inner = torch.bmm(c[:, chunk], b[:, chunk].mT) * power(total[:, :, None] - total[:, None, :]).tril_()
        out[:, chunk] = torch.bmm(c[:, chunk], state) * power(total)[..., None]
        out[:, chunk] += torch.bmm(inner * step[:, None, chunk], x[:, chunk])
        remaining = power(total[:, -1:] - total) * step[:, chunk]
        state = state * power(total[:, -1:])[..., None] + torch.bmm(
            (b[:, chunk] * remaining[..., None]).mT, x[:, chunk]
        )
    return out.unflatten(0, (runs, heads)).transpose(1, 2), state.unflatten(0, (runs, heads))
