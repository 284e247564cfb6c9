"""A transformers model as a function of rows: its modules, with prefold's attention and matrix products."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from ...errors import UnsupportedModelError, no_lm_head
from ...model.program import MediaRows
from ...worker.torch.layers import Linear
from ...worker.torch.lora import NO_ADAPTERS, RowAdapters
from ...worker.torch.model import Attend, CausalLM
from ...worker.torch.ops import wide
from ...worker.torch.parallel import ALONE
from ...worker.torch.products import Product, pack, wide_product
from .config import PlaneHeads, TransformersConfig

# The name of prefold's attention in transformers' table.
NAME = "prefold_rows"


@dataclass(slots=True)
class RowPass:
    """What the modules of one model need to know about the pass that runs.

    Attributes:
        attention: how each plane calls attention
        scale: factor of query-key products in `attend`
        sizes: (query heads, KV heads, head_dim) of the K/V
        attend: computes attention; None between passes
        adapters: the LoRA adapter of each row
        plane: the plane of the next call of attention
        calls: the record of calls (`check.AttentionCalls`) in the one pass that is recorded
    """

    attention: Sequence[PlaneHeads] = ()
    scale: float = 1.0
    sizes: tuple[int, int, int] = (1, 1, 1)
    attend: Attend | None = None
    adapters: RowAdapters = NO_ADAPTERS
    plane: int = 0
    calls: Any = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return attention in the next plane, [rows, heads, value_dim].

        Args:
            q: [rows, heads, dim]
            k: [rows, kv_heads, dim]
            v: [rows, kv_heads, value_dim]
        """
        plane = self.plane
        self.plane += 1
        assert self.attend is not None
        if plane >= len(self.attention):
            raise UnsupportedModelError("attention is called more often than in the recorded pass")
        own_heads, attend = self.attention[plane], self.attend
        if not math.isclose(own_heads.scale, self.scale, rel_tol=1e-9):
            q = q * (own_heads.scale / self.scale)
        sizes = own_heads.heads, own_heads.kv_heads, own_heads.head_dim, own_heads.value_dim
        if sizes == (*self.sizes, self.sizes[2]):
            return attend(plane, q, k, v, sinks)
        sinks = None if sinks is None else self._of_sinks(sinks, own_heads)
        return self._narrow(attend(plane, *self._widen(q, k, v, own_heads), sinks), own_heads)

    def _widen(self, q: Tensor, k: Tensor, v: Tensor, own_heads: PlaneHeads) -> tuple[Tensor, Tensor, Tensor]:
        """Pad q, k and v with zeros to the sizes of the K/V, and repeat KV heads."""
        heads, kv_heads, dim = self.sizes
        times, group = own_heads.groups(self.sizes[1])
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        more = kv_heads - k.shape[1]
        q = q.unflatten(1, (-1, group))
        q = F.pad(q, (0, dim - own_heads.head_dim, 0, heads // kv_heads - group, 0, more)).flatten(1, 2)
        return q, *(F.pad(x, (0, dim - x.shape[-1], 0, more)) for x in (k, v))

    def _narrow(self, o: Tensor, own_heads: PlaneHeads) -> Tensor:
        """Return the plane's own heads of o [rows, heads, dim], as [rows, heads, value_dim]."""
        times, group = own_heads.groups(self.sizes[1])
        o = o.unflatten(1, (self.sizes[1], -1))
        return o[:, : times * own_heads.kv_heads, :group, : own_heads.value_dim].flatten(1, 2)

    def _of_sinks(self, sinks: Tensor, own_heads: PlaneHeads) -> Tensor:
        """Pad a plane's sinks [heads] to the query heads of the K/V."""
        heads, kv_heads, _ = self.sizes
        group = own_heads.groups(self.sizes[1])[1]
        return F.pad(
            sinks.unflatten(0, (-1, group)), (0, heads // kv_heads - group, 0, kv_heads - len(sinks) // group)
        ).flatten()


# The pass of every module of loaded models: transformers calls attention with nothing but the module.
PASSES: weakref.WeakKeyDictionary[nn.Module, RowPass] = weakref.WeakKeyDictionary()


class RowLinear(nn.Module):
    """A linear that replaces transformers': x [..., inputs] -> [..., outputs].

    Attributes:
        name: the linear's name in the model, by which adapters find the linear
        product: multiplies by the packed weight; None: PyTorch multiplies by `weight`
    """

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, rows: RowPass, *, packed: bool):
        super().__init__()
        self.name, self.rows = name, rows
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.product: Product | None = pack(weight) if packed else None
        self.weight = None if self.product else weight

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if self.product is None or torch.is_grad_enabled():
            out = F.linear(flat, self.weight, self.bias)
        else:
            out = self.product(flat.contiguous(), self.bias)
        if self.rows.adapters.adapters:
            out = self.rows.adapters.add(out, flat, 0, self.name)
        return out.view(*x.shape[:-1], self.out_features)


class Head(nn.Module):
    """The LM head that replaces transformers': float32 logits of all ids, or of `ids`."""

    def __init__(self, model: CausalLM, bias: Tensor | None):
        super().__init__()
        self._model, self.bias = weakref.ref(model), bias  # weak: the model has this head as a submodule
        self.ids: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        model, bias = self._model(), self.bias
        assert model is not None
        weight = model.embedding if model.lm_head is None else model.lm_head
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.ids is not None:
            weight, bias = weight[self.ids], None if bias is None else bias[self.ids]
        fits = self.ids is None and not torch.is_grad_enabled() and flat.dtype == weight.dtype
        product = model.product_of_head() if fits else None
        out = wide_product(flat, weight) if product is None else product.wide(flat.contiguous())
        return (out if bias is None else out + bias).view(*hidden.shape[:-1], -1)


class ReadyStates(nn.Module):
    """A stand-in for the decoder that returns hidden states computed before, so that only logits are computed."""

    last_hidden_state: Tensor | None = None

    def forward(self, *arguments: Any, **options: Any) -> ReadyStates:
        return self

    def __getitem__(self, number: int) -> Tensor | None:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> Any:
        return None  # caches, router logits, hidden states of all layers


class TransformersLM(CausalLM):
    """A CausalLM with the modules of a transformers model as its layers.

    Attributes:
        whole: the transformers model, with a ReadyStates in place of its decoder
        decoder: computes hidden states
    """

    computed_by: ClassVar[str] = "transformers' modules"
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, whole: Any, decoder: nn.Module, rows: RowPass):
        nn.Module.__init__(self)
        self.config, self.ranks = config, ALONE
        self.shard = ALONE.shard(config)
        self.local = self.shard.local(config)
        self.whole, self.decoder, self.rows = whole, decoder, rows
        self.embedding = decoder.get_input_embeddings().weight
        self.position_embedding = self.lm_head = self.score = None
        self.layers = nn.ModuleList()
        self.recompute = self.may_pack = False
        self.head_product = None
        self.ready_states: ReadyStates | None = None
        self.wide_head: Head | None = None

    def settle(self, config: TransformersConfig) -> None:
        """Set the model's final config, which has the attention of each plane."""
        self.config = config
        self.shard = ALONE.shard(config)
        self.local = self.shard.local(config)
        self.rows.attention, self.rows.scale = config.attention, config.scale
        self.rows.sizes = (config.heads, config.kv_heads, config.head_dim)

    def take_head(self, name: str) -> None:
        """Put a ReadyStates in place of the decoder, the model's module `name`, and a Head in place of the LM head.

        An LM head that is not a plain linear stays.
        """
        head, self.ready_states = self.whole.get_output_embeddings(), ReadyStates()
        self.whole.set_submodule(name, self.ready_states)
        if type(head) is not nn.Linear:
            return
        if head.weight is not self.embedding:
            self.lm_head = head.weight
        self.wide_head = Head(self, head.bias)
        for path, module in list(self.whole.named_modules()):
            if module is head:
                self.whole.set_submodule(path, self.wide_head)

    def take_score(self, score: nn.Linear) -> None:
        """Copy the classification head, in float32."""
        place: dict[str, Any] = {"dtype": torch.float32, "device": score.weight.device}
        self.score = Linear(score.in_features, score.out_features, bias=score.bias is not None, **place)
        with torch.no_grad():
            self.score.weight.copy_(score.weight)  # type: ignore[union-attr]
            if score.bias is not None:
                self.score.bias.copy_(score.bias)  # type: ignore[union-attr]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read_rows: Tensor | None = None,
        adapters: RowAdapters = NO_ADAPTERS,
        media: MediaRows[Tensor] | None = None,
        states: object = None,
    ) -> Tensor:
        rows = self.rows
        rows.attend, rows.adapters, rows.plane = attend, adapters, 0
        try:
            out = self.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        finally:
            rows.attend, rows.adapters = None, NO_ADAPTERS
        hidden = out[0][0]
        return hidden if read_rows is None else hidden.index_select(0, read_rows)

    def logits(self, hidden: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor:
        if self.ready_states is None:
            raise no_lm_head()
        if not len(hidden):
            return wide(hidden).new_empty(0, self.config.vocab_size if ids is None else len(ids))
        self.ready_states.last_hidden_state, head = hidden[None], self.wide_head
        if ids is not None:
            ids = torch.as_tensor(ids, device=hidden.device)
        if head is not None:
            head.ids = ids
        try:
            # Operations after the LM head (caps, factors) run in float32.
            logits = wide(self.whole(inputs_embeds=hidden[None], use_cache=False).logits[0])
            return logits if ids is None or head is not None else logits[:, ids]
        finally:
            self.ready_states.last_hidden_state = None
            if head is not None:
                head.ids = None


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, scaling: Any = None,
    dropout: float = 0.0, s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention over the keys and values that rows see, [1, rows, heads, value_dim].

    Args:
        query: [1, heads, rows, dim]
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return PASSES[module](q.to(v.dtype), k.to(v.dtype), v, s_aux)[None], None


AttentionInterface.register(NAME, _attention)
