"""The layers of a transformer: attention and an MLP around the residual stream of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..plugins import named_class
from .config import ModelConfig
from .layers import ActivatedLinear, GatedLinear, Linear, Norm, Weight, linear_weights
from .lora import NO_ADAPTERS, RowAdapters
from .ops import Ops
from .parallel import Alone


class Mlp(nn.Module):
    """An Mlp is the MLP of one layer: activation(gate) * up, and down. Another kind is made with the same arguments,
    and has `forward` and `weights`.

    config: with the sizes of this rank's part; number: of the layer in the model
    """

    first: type[ActivatedLinear] = GatedLinear

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


class Layer(nn.Module):
    """A Layer computes attention and the MLP of one layer, for every row it is given.

    number    of this layer in the model
    splits_q  q is a linear of its own beside k and v: in the layer that a pass ends with, where q may be wanted of a
              few rows only. Else q, k and v are one linear
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        ranks: Alone,
        *,
        splits_q: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Makes the layer's parameters. config: with the sizes of this rank's part."""
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        first = ranks.rank == 0  # biases of what is summed over ranks are added once
        self.sum = ranks.sum
        q, kv, hidden = config.q_size, 2 * config.kv_size, config.hidden
        self.config, self.number, self.splits_q = config, number, splits_q
        self.input_norm = norm_of(config, **place)
        if splits_q:
            self.q = Linear(hidden, q, bias=config.qkv_bias or config.qk_bias, **place)
            self.kv = Linear(hidden, kv, bias=config.qkv_bias or config.qk_bias * kv // 2, **place)
        else:
            self.qkv = Linear(hidden, q + kv, bias=config.qkv_bias or config.qk_bias * (q + kv // 2), **place)
        self.q_norm = _head_norm(config, **place) if config.qk_norm else None
        self.k_norm = _head_norm(config, **place) if config.qk_norm else None
        self.o = Linear(q, hidden, bias=config.o_bias and first, **place)
        normed = config.out_norms or config.sum_norms
        self.o_norm = norm_of(config, **place) if normed else None
        self.post_norm = norm_of(config, **place)
        self.mlp = named_class(config.mlp_kind.module)(config, number, ranks, **place)
        self._mlp = self.mlp.forward  # to call a module costs more
        self.down_norm = norm_of(config, **place) if normed else None

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        *,
        cos_sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        read: Tensor | None,
        adapters: RowAdapters,
        ops: Ops,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream x + delta [rows, hidden] after this layer, as its x and delta; may write into x.

        cos_sin  of the rows' positions, as for `Ops.rope`
        attend   q, k, v -> o, shaped as q
        read     int64: the rows whose result is wanted; None: all
        ops      computes the position-wise operations
        """
        x, q, k, v = self._project(x, delta, cos_sin, read, adapters, ops)
        o = attend(q, k, v)
        del q, k, v, delta  # so that the MLP, where most memory is held, does not run beside them
        return self._finish(x, o, adapters if read is None else adapters.read, ops)

    def keys_values(
        self, x: Tensor, cos_sin: Tensor, ops: Ops, adapters: RowAdapters = NO_ADAPTERS
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [rows, kv_heads, dim] that this layer makes of the residual stream x [rows,
        hidden]; may write into x."""
        return self._project(x, None, cos_sin, None, adapters, ops)[2:]

    def _project(
        self, x: Tensor, delta: Tensor | None, cos_sin: Tensor, read: Tensor | None, adapters: RowAdapters, ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the residual stream x + delta of the rows in `read`, q of these rows, and k and v of all."""
        config = self.config
        x, h = self.input_norm(x, delta, ops)
        if self.splits_q:
            kv = adapters.add(self.kv(h), h, self.number, "kv")
            k, v = kv.unflatten(-1, (2 * config.kv_heads, config.head_dim)).split(config.kv_heads, 1)
            q_cos_sin = cos_sin
            if read is not None:
                x, h, q_cos_sin, adapters = x[read], h[read], cos_sin[read], adapters.read
            q = adapters.add(self.q(h), h, self.number, "q").unflatten(-1, (config.heads, config.head_dim))
            q = ops.rope(q, q_cos_sin, self.q_norm, config.norm_eps)
            return x, q, ops.rope(k, cos_sin, self.k_norm, config.norm_eps), v
        qkv = adapters.add(self.qkv(h), h, self.number, "qkv")
        qkv = qkv.unflatten(-1, (config.heads + 2 * config.kv_heads, config.head_dim))
        if self.q_norm is None:  # q and k lie side by side: rotated in one call
            qk, v = qkv.split((config.heads + config.kv_heads, config.kv_heads), 1)
            q, k = ops.rope(qk, cos_sin).split((config.heads, config.kv_heads), 1)
        else:
            q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 1)
            q = ops.rope(q, cos_sin, self.q_norm, config.norm_eps)
            k = ops.rope(k, cos_sin, self.k_norm, config.norm_eps)
        return (x, q, k, v) if read is None else (x[read], q[read], k, v)

    def _finish(self, x: Tensor, o: Tensor, adapters: RowAdapters, ops: Ops) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream after attention's o [rows, heads, dim], and what is still to be added to it."""
        delta = self._output(o, adapters)
        x, h = self.post_norm(x, delta if self.o_norm is None else self.o_norm(delta, None, ops)[1], ops)
        delta = self._mlp(h, adapters, ops)
        return x, delta if self.down_norm is None else self.down_norm(delta, None, ops)[1]

    def _output(self, o: Tensor, adapters: RowAdapters) -> Tensor:
        """Returns what attention's o [rows, heads, dim] adds to the residual stream, [rows, hidden]."""
        o = o.flatten(1)
        return self.sum(adapters.add(self.o(o), o, self.number, "o"))


class SumNormedLayer(Layer):
    """A SumNormedLayer norms the residual stream after attention and after the MLP, and goes on with what the norms
    give (`ModelConfig.sum_norms`)."""

    def _finish(self, x: Tensor, o: Tensor, adapters: RowAdapters, ops: Ops) -> tuple[Tensor, Tensor | None]:
        assert self.o_norm is not None and self.down_norm is not None
        x = self.o_norm(x, self._output(o, adapters), ops)[1]
        h = self.post_norm(x, None, ops)[1]
        return self.down_norm(x, self._mlp(h, adapters, ops), ops)[1], None


def norm_of(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Norm:
    """Returns a norm of the residual stream."""
    dtype = _norm_dtype(config, dtype)
    return Norm(config.hidden, kind=config.norm, eps=config.norm_eps, dtype=dtype, device=device)


def _head_norm(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Returns the weight of an RMS norm over head_dim."""
    return nn.Parameter(torch.empty(config.head_dim, dtype=_norm_dtype(config, dtype), device=device))


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of norm weights: float32 where they are stored less one, since 1 + w would lose the last bits
    of w."""
    return torch.float32 if config.norm_offset else dtype
