"""The layers of a transformer: attention and an MLP around the residual stream of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..spec.plugins import named_class
from .config import ModelConfig
from .layers import ActivatedLinear, GatedLinear, Linear, NoNorm, Norm, PlainLayerNorm, Weight, linear_weights
from .lora import NO_ADAPTERS, RowAdapters
from .ops import Ops, wide
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
        self.input_norm = norm_of(config, **place) if config.in_norms else NoNorm()
        if splits_q:
            self.q = Linear(hidden, q, bias=config.qkv_bias or config.qk_bias, **place)
            self.kv = Linear(hidden, kv, bias=config.qkv_bias or config.qk_bias * kv // 2, **place)
        else:
            self.qkv = Linear(hidden, q + kv, bias=config.qkv_bias or config.qk_bias * (q + kv // 2), **place)
        self.q_norm = _head_norm(config, **place) if config.qk_norm else None
        self.k_norm = _head_norm(config, **place) if config.qk_norm else None
        wide = torch.promote_types(dtype, torch.float32)
        self.sinks = nn.Parameter(torch.empty(config.heads, dtype=wide, device=device)) if config.sinks else None
        self.o = Linear(q, hidden, bias=config.o_bias and first, **place)
        normed = config.out_norms or config.sum_norms
        self.o_norm = norm_of(config, **place) if normed else None
        self.post_norm = norm_of(config, **place) if config.in_norms and not config.parallel else NoNorm()
        self.mlp = named_class(config.mlp_kind.module)(config, number, ranks, **place)
        self._mlp = self.mlp.forward  # to call a module costs more
        self.down_norm = norm_of(config, **place) if normed else None

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
        """Returns the residual stream x + delta [rows, hidden] after this layer, as its x and delta; may write into x.

        cos_sin  of the rows' positions, as for `Ops.rope`
        attend   q, k, v, sinks -> o, shaped as q
        read     int64: the rows whose result is wanted; None: all
        ops      computes the position-wise operations
        """
        x, h = self.input_norm(x, delta, ops)
        x, q, k, v = self._project(x, h, cos_sin, read, adapters, ops)
        o = attend(q, k, v, self.sinks)
        del h, q, k, v, delta  # so that the MLP, where most memory is held, does not run beside them
        return self._finish(x, o, adapters if read is None else adapters.read, ops)

    def keys_values(
        self, x: Tensor, cos_sin: Tensor, ops: Ops, adapters: RowAdapters = NO_ADAPTERS
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [rows, kv_heads, dim] that this layer makes of the residual stream x [rows,
        hidden]; may write into x."""
        x, h = self.input_norm(x, None, ops)
        return self._project(x, h, cos_sin, None, adapters, ops)[2:]

    def _project(
        self, x: Tensor, h: Tensor, cos_sin: Tensor, read: Tensor | None, adapters: RowAdapters, ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the residual stream x of the rows in `read`, q of these rows, and k and v of all. h: the norm of
        x."""
        config = self.config
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


class ScaledLayer(Layer):
    """A ScaledLayer multiplies what attention and the MLP give (`ModelConfig.residual_scale`)."""

    def _finish(self, x: Tensor, o: Tensor, adapters: RowAdapters, ops: Ops) -> tuple[Tensor, Tensor | None]:
        scale = self.config.residual_scale
        delta = self._output(o, adapters)
        x, h = self.post_norm(x, scale * (delta if self.o_norm is None else self.o_norm(delta, None, ops)[1]), ops)
        delta = self._mlp(h, adapters, ops)
        return x, scale * (delta if self.down_norm is None else self.down_norm(delta, None, ops)[1])


class ParallelLayer(Layer):
    """A ParallelLayer has an MLP that reads what attention reads (`ModelConfig.parallel`)."""

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
        x, h = self.input_norm(x, delta, ops)
        x, q, k, v = self._project(x, h, cos_sin, read, adapters, ops)
        o = attend(q, k, v, self.sinks)
        del q, k, v, delta
        if read is not None:
            h, adapters = h[read], adapters.read
        return x, self._output(o, adapters) + self._mlp(h, adapters, ops)


class RowNormedLayer(Layer):
    """A RowNormedLayer has norms over all query heads of a row, and over its key heads (`ModelConfig.row_qk_norm`).

    Of a model that is split over ranks each has a part of a row: they add up their sums of squares.
    """

    def __init__(self, config: ModelConfig, number: int, ranks: Alone, **options: Any):
        super().__init__(config, number, ranks, **options)
        whole = config.whole or config
        self._sizes, self._alone = (whole.q_size, whole.kv_size), ranks.size == 1
        # A KV head that several ranks have is counted once.
        self._copies = ranks.shard(whole).copies
        place: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        self.q_norm = nn.Parameter(torch.empty(config.q_size, **place))
        self.k_norm = nn.Parameter(torch.empty(config.kv_size, **place))

    def _project(
        self, x: Tensor, h: Tensor, cos_sin: Tensor, read: Tensor | None, adapters: RowAdapters, ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        config, sizes = self.config, (self.config.q_size, self.config.kv_size, self.config.kv_size)
        q_cos_sin = cos_sin
        if self.splits_q:
            k, v = adapters.add(self.kv(h), h, self.number, "kv").split(sizes[1:], 1)
            if read is not None:
                x, h, q_cos_sin, adapters = x[read], h[read], cos_sin[read], adapters.read
            q = adapters.add(self.q(h), h, self.number, "q")
        else:
            q, k, v = adapters.add(self.qkv(h), h, self.number, "qkv").split(sizes, 1)
            if read is not None:
                x, q, q_cos_sin = x[read], q[read], cos_sin[read]
        q, k = self._normed(q, k, ops)
        q = ops.rope(q.unflatten(1, (config.heads, config.head_dim)), q_cos_sin)
        k = ops.rope(k.unflatten(1, (config.kv_heads, config.head_dim)), cos_sin)
        return x, q, k, v.unflatten(1, (config.kv_heads, config.head_dim))

    def _normed(self, q: Tensor, k: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Returns the norms of q [rows, heads * head_dim] and k [rows, kv_heads * head_dim]."""
        assert self.q_norm is not None and self.k_norm is not None
        eps, norms = self.config.norm_eps, (self.q_norm, self.k_norm)
        if self._alone:
            q, k = (ops.add_rms_norm(t.contiguous(), None, norm, eps)[1] for t, norm in zip((q, k), norms, strict=True))
            return q, k
        sums = [wide(q).pow(2).sum(-1), wide(k).pow(2).sum(-1) / self._copies]
        of_all = self.sum(torch.cat(sums)).split([len(q), len(k)])
        q, k = (
            (norm * (wide(t) * torch.rsqrt(total[:, None] / size + eps))).to(t.dtype)
            for t, norm, total, size in zip((q, k), norms, of_all, self._sizes, strict=True)
        )
        return q, k


def layer_of(config: ModelConfig) -> type[Layer]:
    """Returns the class of a model's layers."""
    kinds = {
        SumNormedLayer: config.sum_norms,
        ParallelLayer: config.parallel,
        RowNormedLayer: config.row_qk_norm,
        ScaledLayer: config.residual_scale != 1,
    }
    return next((kind for kind, is_wanted in kinds.items() if is_wanted), Layer)


def norm_of(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Norm:
    """Returns a norm of the residual stream."""
    kind = PlainLayerNorm if config.norm == "layer" and not config.norm_bias else Norm
    biased = config.norm == "layer" and config.norm_bias
    dtype = _norm_dtype(config, dtype)
    return kind(config.hidden, bias=biased, eps=config.norm_eps, dtype=dtype, device=device)


def _head_norm(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Returns the weight of an RMS norm over head_dim."""
    return nn.Parameter(torch.empty(config.head_dim, dtype=_norm_dtype(config, dtype), device=device))


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of norm weights: float32 where they are stored less one, since 1 + w would lose the last bits
    of w."""
    return torch.float32 if config.norm_offset else dtype
