"""The transformer, as a function of rows.

Knows of attention only the `attend` it is given: what is visible to whom, where K/V lie, whether
rows are tokens or trie tokens, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from .config import ModelConfig
from .layers import ActivatedLinear, GatedLinear, Linear, Norm
from .lora import NO_ADAPTERS, RowAdapters
from .ops import Ops, choose_ops, wide
from .parallel import ALONE, Alone
from .products import Product, pack_head, wide_product
from .rotary import RotaryTables

__all__ = ["Attend", "CausalLM"]


class Attend(Protocol):
    """Attention over one plane.

    q [rows, heads, dim], k, v [rows, kv_heads, dim] (perhaps strided) -> o, shaped as q. In the last visit of a pass q
    has only the rows that are read, where some are not: `len(q) < len(k)`.
    """

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Layer(nn.Module):
    """One layer with its attention.

    number    of this layer in the model
    splits_q  q is a linear of its own beside k and v: in the layer that is visited last, where q may be wanted of a
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
        """config: with the sizes of this rank's part."""
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        first = ranks.rank == 0  # biases of what is summed over ranks are added once
        self.sum = ranks.sum
        q, kv, hidden = config.q_size, 2 * config.kv_size, config.hidden
        self.config, self.number, self.splits_q = config, number, splits_q
        self.input_norm = _norm(config, **place)
        if splits_q:
            self.q = Linear(hidden, q, bias=config.qkv_bias, **place)
            self.kv = Linear(hidden, kv, bias=config.qkv_bias, **place)
        else:
            self.qkv = Linear(hidden, q + kv, bias=config.qkv_bias, **place)
        self.q_norm = _head_norm(config, **place) if config.qk_norm else None
        self.k_norm = _head_norm(config, **place) if config.qk_norm else None
        self.o = Linear(q, hidden, bias=config.o_bias and first, **place)
        self.o_norm = _norm(config, **place) if config.out_norms else None
        self.post_norm = _norm(config, **place)
        mlp = {"activation": config.activation, "bias": config.mlp_bias}
        # Up alone where there is no gate.
        activated = GatedLinear if config.gated else ActivatedLinear
        self.gate_up = activated(hidden, config.intermediate, **mlp, **place)
        self.down = Linear(config.intermediate, hidden, bias=config.mlp_bias and first, **place)
        self.down_norm = _norm(config, **place) if config.out_norms else None

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
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x + delta [rows, hidden] after this layer, as its x and delta; may write into x.

        cos_sin  of the rows' positions, as for `Ops.rope`
        attend   q, k, v -> o, shaped as q
        read     int64: the rows whose result is wanted; None: all
        ops      who computes the position-wise operations
        """
        x, q, k, v = self._project(x, delta, cos_sin, read, adapters, ops)
        o = attend(q, k, v)
        del q, k, v, delta  # so that the MLP, where most memory is held, does not run beside them
        return self._finish(x, o, adapters if read is None else adapters.read, ops)

    def _project(
        self, x: Tensor, delta: Tensor | None, cos_sin: Tensor, read: Tensor | None, adapters: RowAdapters, ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream x + delta of the rows in `read`, q of these rows, and k and v of all."""
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

    def _finish(self, x: Tensor, o: Tensor, adapters: RowAdapters, ops: Ops) -> tuple[Tensor, Tensor]:
        """The residual stream after attention's o [rows, heads, dim], and what is still to be added to it."""
        o = o.flatten(1)
        delta = self.sum(adapters.add(self.o(o), o, self.number, "o"))
        x, h = self.post_norm(x, delta if self.o_norm is None else self.o_norm(delta, None, ops)[1], ops)
        if adapters.adapters:
            h = self.gate_up.activate(adapters.add(self.gate_up(h), h, self.number, "gate_up"), ops)
        else:
            h = self.gate_up.activated(h, ops)
        delta = self.sum(adapters.add(self.down(h), h, self.number, "down"))
        return x, delta if self.down_norm is None else self.down_norm(delta, None, ops)[1]


class CausalLM(nn.Module):
    """Embedding, layers, final norm; an LM head or a classification head on request.

    Differentiable unless its linears are packed. Weights are left uninitialised: see `load_model`.

    config  of the whole model; local: the same with the sizes of this rank's part of the layers
    ranks   those the model is split over; `attend` gets the heads of this one
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ranks: Alone = ALONE):
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.config, self.ranks = config, ranks
        self.shard = ranks.shard(config)
        self.local = self.shard.local(config)
        vocab = self.shard.vocab.stop - self.shard.vocab.start
        self.embedding = nn.Parameter(torch.empty(vocab, config.hidden, **place))
        learned = config.rope is None
        self.position_embedding = (
            nn.Parameter(torch.empty(config.max_positions, config.hidden, **place)) if learned else None
        )
        last = config.layers - 1
        self.layers = nn.ModuleList(
            Layer(self.local, i, ranks, splits_q=i == last, **place) for i in range(config.layers)
        )
        self.norm = _norm(config, **place)
        # Rounded as transformers rounds it, who has it as a tensor.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device="cpu").item()
        untied = config.lm_head and not config.tie_embeddings
        self.lm_head = nn.Parameter(torch.empty(vocab, config.hidden, **place)) if untied else None
        self.score = _score_head(config, device=device) if config.num_labels else None
        self.recompute = False  # of each layer, in the backward pass, all but what it began with: to hold less
        self.may_pack = False  # the head, when logits of the whole vocabulary are first wanted; see `load_model`
        # Who multiplies with the whole LM head in place of PyTorch; one of your own may be put here.
        self.head_product: Product | None = None
        self._rotary: RotaryTables | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read_rows: Tensor | None = None,
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> Tensor:
        """Hidden states after the final norm, [rows read, hidden], in the order of `read_rows`.

        tokens, positions  int64 [rows]
        read_rows          int64 [r], ascending, each once: rows whose result is wanted; None: all. The last visit
                           computes no more than these (and the keys and values of all)
        adapters           which rows have which LoRA adapter, and the same read rows
        """
        if adapters.adapters and (read_rows is None) != (adapters.read_rows is None):
            raise ValueError("adapters must know the same read_rows as the model is given")
        recompute = self.recompute and torch.is_grad_enabled()
        x, delta = self._embed(tokens, positions), None
        visits, ops = self.visits, choose_ops(self.dtype, self.device)
        for plane, (layer, cos_sin) in enumerate(zip(visits, self._cos_sin(positions), strict=True)):
            read = read_rows if plane == len(visits) - 1 else None
            visit = partial(
                layer, cos_sin=cos_sin, attend=partial(attend, plane), read=read, adapters=adapters, ops=ops
            )
            if recompute:
                x, delta = _again(visit, x), None
            else:
                x, delta = visit(x, delta)
        return self.norm(x, delta, ops)[1]

    def logits(self, hidden: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """float32 logits [rows, vocabulary], or [rows, len(ids)] of the ids given; hidden as from `forward`.

        Products of the model's dtype are summed and kept in float32: a bfloat16 logit of 20 has steps
        of 0.125, which ties words. Of a model that is split, rank 0 gets the logits of the whole vocabulary, others
        get no rows. Raises InputError when the checkpoint has no LM head.
        """
        if not self.config.lm_head:
            raise InputError("this checkpoint has no LM head, so it gives no logits", field="model", code="no_lm_head")
        weight: Tensor = self.embedding if self.lm_head is None else self.lm_head
        if ids is not None:
            return self.ranks.sum(wide_product(hidden, self.ranks.pick(weight, ids, self.shard.vocab)))
        product = self._product_of_head(weight, hidden)
        logits = wide_product(hidden, weight) if product is None else product.wide(hidden)
        return self.ranks.gather(logits, self.config.vocab_size)

    def head(self, hidden: Tensor) -> Tensor:
        """float32 outputs of the classification head, [rows, num_labels]. Raises InputError without one."""
        if self.score is None:
            raise InputError("this checkpoint has no classification head", field="model", code="no_head")
        return self.score(wide(hidden))

    @property
    def visits(self) -> Sequence[Layer]:
        """The layers in the order of a pass: one visit a plane."""
        return cast(list[Layer], list(self.layers))

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the linears' weights, and of hidden states."""
        return self.embedding.dtype

    def _product_of_head(self, weight: Tensor, hidden: Tensor) -> Product | None:
        """The LM head's product where it may be used: without gradients, and with hidden of the model's dtype. The
        first time, the head is packed for it."""
        if torch.is_grad_enabled() or hidden.dtype != weight.dtype or hidden.device != weight.device:
            return None
        if self.may_pack:
            self.may_pack = False
            self.head_product = self.head_product or pack_head(weight)
        return self.head_product

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.ranks.embed(tokens, self.embedding, self.shard.vocab)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        return x if self.position_embedding is None else x + F.embedding(positions, self.position_embedding)

    def _cos_sin(self, positions: Tensor) -> list[Tensor]:
        if self.config.rope is None:
            return [self.embedding.new_empty(len(positions), 0)] * self.config.layers
        if self._rotary is None or self._rotary.device != positions.device:
            self._rotary = RotaryTables(self.config.ropes, self.config.head_dim, positions.device)
        return self._rotary(positions)


def _norm(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Norm:
    dtype = _norm_dtype(config, dtype)
    return Norm(config.hidden, kind=config.norm, eps=config.norm_eps, dtype=dtype, device=device)


def _head_norm(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """The weight of an RMS norm over head_dim."""
    return nn.Parameter(torch.empty(config.head_dim, dtype=_norm_dtype(config, dtype), device=device))


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of norm weights: float32 where they are stored less one, for 1 + w would lose the last bits of w."""
    return torch.float32 if config.norm_offset else dtype


def _score_head(config: ModelConfig, *, device: torch.device) -> nn.Module:
    """The classification head, always in float32: it costs next to nothing, and scores are compared."""
    place: dict[str, Any] = {"dtype": torch.float32, "device": device}
    assert config.num_labels is not None
    if config.head_layers == 1:
        return Linear(config.hidden, config.num_labels, bias=False, **place)
    first = Linear(config.hidden, config.hidden, bias=True, **place)
    return nn.Sequential(first, nn.ReLU(), Linear(config.hidden, config.num_labels, bias=True, **place))


def _again(visit: Callable[[Tensor, None], tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The residual stream [rows, hidden] after a visit, which is computed again in the backward pass: only x is kept
    for it (Chen et al. 2016)."""

    def whole(x: Tensor) -> Tensor:
        x, delta = visit(x, None)
        return x + delta

    return checkpoint(whole, x, use_reentrant=False, preserve_rng_state=False)
