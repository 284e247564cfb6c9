"""A model's program, executed with tensors: a function of rows.

The model calls `attend` for attention and knows nothing else about it. Visibility, K/V storage and tries are the
caller's concern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engine.schedule.steps import StreamStep
from ...errors import InputError, no_lm_head
from ...model.config import ModelConfig
from ...model.program import OUT, Buffer, Linear, MediaRows, X
from . import layers
from .layer import Layer, held_weights
from .layers import HeldWeight, recomputed
from .logits import LogitShape
from .lora import NO_ADAPTERS, RowAdapters
from .operations import Place, Rows, execution_of, hold_linear
from .ops import Ops, choose_ops, wide
from .parallel import ALONE, Alone
from .products import Product, pack_head, wide_product
from .rotary_tables import RotaryTables


class Attend(Protocol):
    """An Attend computes attention over one plane.

    q [rows, heads, dim], k [rows, kv_heads, dim], v [rows, kv_heads, value dim] (perhaps strided) -> o [rows, heads,
    value dim]. From the layer on that leaves out the rows that are not read, q has the others alone: `len(q) < len(k)`.
    k, v: None: those of an earlier call for the plane. sinks [heads]: as of `attention.RowAttention.attend`.
    """

    def __call__(
        self, plane: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor: ...


@dataclass(slots=True)
class Pass:
    """A Pass is some rows on their way through the model.

    x, delta   their residual stream, x + delta [rows, hidden]; delta may be None
    place      the place in `ModelConfig.pass_layers` of the layer that they come to next
    cos_sin    of their positions, by plane
    attend     computes attention
    read_rows  rows whose result is wanted, and all that are left after the last plane; None: all
    adapters   which rows have which LoRA adapter
    ops        computes the position-wise operations
    prelude    what the prelude gave, [rows, hidden], where a looped model puts it in before each visit
    states     the states of the rows' paths, in a model whose layers have states
    kept       buffers that layers hand on beside the residual stream
    """

    x: Tensor
    delta: Tensor | None
    cos_sin: Sequence[Tensor] | Mapping[int, Tensor]
    attend: Attend
    read_rows: Tensor | None
    adapters: RowAdapters
    ops: Ops
    place: int = 0
    prelude: Tensor | None = None
    states: object = None
    kept: dict[Buffer, Tensor] = field(default_factory=dict)
    positions: Tensor | None = None

    @property
    def stream(self) -> Tensor:
        """Returns the residual stream, [rows, hidden]."""
        return self.x if self.delta is None else self.x + self.delta


class CausalLM(nn.Module):
    """A CausalLM executes the program of a config.

    Differentiable unless its linears are packed. Weights are left uninitialised: see `load_model`.

    config   of the whole model; local: the same with the sizes of this rank's part of the layers
    program  of `local`
    ranks    those the model is split over; `attend` gets the heads of this one

    Raises UnsupportedModelError for an operation that no function computes with tensors.
    """

    computed_by: ClassVar[str] = ""  # in words, where other modules than prefold's compute a pass

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ranks: Alone = ALONE):
        super().__init__()
        place = Place(dtype, device, ranks)
        self.config, self.ranks = config, ranks
        self.shard = ranks.shard(config)
        self.local = self.shard.local(config)
        self.program = program = self.shard.program(config)
        self._split = self.shard.split(config)
        self.embedding = place.empty(program.embed.table)
        head, learned = program.head, program.embed.positions
        self.position_embedding = None if learned is None else place.empty(learned)
        self.begin = Layer(program.begin, place, kept=program.kept)
        self.layers = nn.ModuleList(
            Layer(operations, place, split=self._split, kept=program.kept) for operations in program.layers
        )
        self.end = Layer(program.end, place)
        # Rounded as in transformers, which has it as a tensor.
        self.embedding_scale = torch.tensor(program.embed.scale, dtype=dtype, device="cpu").item()
        self.lm_head = None if head is None or head == program.embed.table else place.empty(head)
        self.lm_head_bias = None if program.head_bias is None else place.empty(program.head_bias)
        self.lm_head_scale = None if program.head_scale is None else place.empty(program.head_scale)
        self.score = self._score_head(program.score, place)
        self.shape_logits = LogitShape.of(config)
        self.recompute = False  # of each layer, in the backward pass, all but what it began with: to hold less
        self.may_pack = False  # the head, when logits of the whole vocabulary are first wanted; see `load_model`
        # Who multiplies with the whole LM head in place of PyTorch; one of your own may be put here.
        self.head_product: Product | None = None
        self._rotary: RotaryTables | None = None
        # Of each layer that a pass goes through, in its order, the plane; None: the layer has no attention.
        self._planes: list[int | None] = list(range(len(config.visited)))
        if len(config.visited) == len({*config.visited}):  # not a looped model, whose visits have a plane each
            layers = config.pass_layers
            self._planes = [config.plane_of(number) if config.attends(number) else None for number in layers]
        places = [place for place, number in enumerate(config.pass_layers) if number == config.reading_layer]
        self._reading = places[-1]  # the place in a pass where rows that are not read are left out

    @staticmethod
    def _score_head(linears: Sequence[Linear], place: Place) -> nn.Module | None:
        """Return the classification head; None: there is none."""
        modules = [hold_linear(linear, place) for linear in linears]
        if len(modules) < 2:
            return modules[0] if modules else None
        between = [nn.ReLU() for _ in modules]
        return nn.Sequential(*(one for pair in zip(modules, between, strict=True) for one in pair))[:-1]

    @property
    def held(self) -> Iterator[HeldWeight]:
        """Yield every parameter of the model with the names of its tensors; embedding and head first, then layer by
        layer."""
        program = self.program
        tables = (("embedding", program.embed.table), ("lm_head", program.head))
        for name, weight in tables:
            if weight is not None and getattr(self, name) is not None:
                own = self._split.of(weight)
                yield HeldWeight(self, name, weight.parts, places=own if any(own) else ())
        if program.head_bias is not None:
            yield HeldWeight(self, "lm_head_bias", program.head_bias.parts)
        if program.head_scale is not None:
            yield HeldWeight(self, "lm_head_scale", program.head_scale.parts)
        if program.embed.positions is not None:
            yield HeldWeight(self, "position_embedding", program.embed.positions.parts)
        yield from self.begin.held
        yield from self.end.held
        linears = [self.score] if isinstance(self.score, layers.Linear) else [*(self.score or ())][::2]
        for operation, module in zip(program.score, linears, strict=True):
            yield from held_weights(operation, module, execution_of(Linear))
        for weight in program.beside:  # called as the modules of the feature whose code reads them
            path, _, attribute = weight.parts[0][0].rpartition(".")
            yield HeldWeight(self.get_submodule(path), attribute, weight.parts, weight.offset)
        for layer in self.layers:
            yield from layer.held

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
        """Returns hidden states after the final norm, [rows read, hidden], in the order of `read_rows`.

        tokens, positions  int64 [rows]
        read_rows          int64 [r], ascending, each once: rows whose result is wanted; None: all. The last plane's
                           layer computes no more than these (and the keys and values of all)
        adapters           which rows have which LoRA adapter, and the same read rows
        media              the rows that images have; None: there are none
        states             those of the rows' paths, in a model whose layers have states
        """
        rows = self.start(tokens, positions, attend, read_rows, adapters, media)
        rows.states = states
        self.go_through(rows, range(self.config.layers))
        return self.normed(rows)

    def start(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read_rows: Tensor | None = None,
        adapters: RowAdapters = NO_ADAPTERS,
        media: MediaRows[Tensor] | None = None,
    ) -> Pass:
        """Returns rows before the first layer; the arguments are those of a call of the model."""
        if adapters.adapters and (read_rows is None) != (adapters.read_rows is None):
            raise ValueError("adapters must know the same read_rows as the model is given")
        ops = choose_ops(self.dtype, self.device)
        x = self.embed(tokens, positions, media)
        made = Pass(x, None, self.cos_sin(positions), attend, read_rows, adapters, ops, positions=positions)
        if self.program.begin:
            rows = Rows({X: x}, None, None, None, None, NO_ADAPTERS, ops, self.ranks, tokens=tokens)
            self.begin.run(rows)
            made.x, made.kept = (
                rows.get(X),
                {name: rows.get(name) for name in self.program.kept if name in rows.buffers},
            )
        return made

    def go_through(self, rows: Pass, layers: Iterable[int]) -> None:
        """Takes rows through these layers. After the last layer of a pass only the rows that are read are left."""
        recompute = self.recompute and torch.is_grad_enabled()
        every = list(self.layers)
        for place, number in enumerate(layers, rows.place):
            plane = self._planes[place]
            visit = partial(
                every[number],
                cos_sin=None if plane is None else rows.cos_sin[plane],
                attend=None if plane is None else partial(rows.attend, plane),
                read=rows.read_rows if place == self._reading else None,
                adapters=rows.adapters,
                ops=rows.ops,
                states=rows.states,
                positions=rows.positions,
            )
            if recompute:
                (rows.x, rows.kept), rows.delta = recomputed(visit, rows.stream, rows.kept), None
            else:
                rows.x, rows.delta = visit(rows.x, rows.delta, kept=rows.kept)
            rows.place = place + 1
            if place == self._reading and rows.read_rows is not None and rows.place < len(self._planes):
                read = rows.read_rows
                rows.cos_sin = {plane: rows.cos_sin[plane][read] for plane in range(len(self.config.planes))}
                rows.adapters = rows.adapters.read

    def normed(self, rows: Pass) -> Tensor:
        """Returns what the program ends with, of rows after the last layer: the final norm, [rows, hidden]."""
        return self.norm(rows.x, rows.delta, rows.ops)

    def norm(self, x: Tensor, delta: Tensor | None, ops: Ops) -> Tensor:
        """Return the final norm of the residual stream x + delta, [rows, hidden]; may write into x."""
        return self.end.result(OUT, x, delta, ops)

    def arguments(self, step: StreamStep) -> dict[str, Any]:
        """Return the arguments of a call of the model that a step of a row stream has beside its rows."""
        return {}

    def logits(self, hidden: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """Returns float32 logits [rows, vocabulary], or [rows, len(ids)] of the ids given; hidden as from `forward`.

        Products of the model's dtype are summed and kept in float32: a bfloat16 logit of 20 has steps
        of 0.125, which ties words. Of a model that is split, rank 0 gets the logits of the whole vocabulary, others
        get no rows. Raises InputError when the checkpoint has no LM head.
        """
        if not self.config.lm_head:
            raise no_lm_head()
        if ids is not None:
            columns = self.ranks.pick(self.head_weight, ids, self.shard.vocab)
            products = self.ranks.sum(wide_product(hidden, columns))
            return self._shaped(products, ids)
        fits = not torch.is_grad_enabled() and hidden.dtype == self.dtype and hidden.device == self.device
        product = self.product_of_head() if fits else None
        logits = wide_product(hidden, self.head_weight) if product is None else product.wide(hidden)
        logits = self.ranks.gather(logits, self.config.vocab_size)
        return self._shaped(logits)

    def _shaped(self, products: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return the logits of products of the LM head. ids: the tokens that these are of; None: all"""
        if self.program.head_vectors:
            at = slice(None) if ids is None else torch.as_tensor(ids, device=self.device)
            if self.lm_head_scale is not None:
                products = products * (self.program.head_factor * self.lm_head_scale[at])
            if self.lm_head_bias is not None:
                products = products + self.lm_head_bias[at]
        return products if self.shape_logits is None else self.shape_logits(products)

    def head(self, hidden: Tensor) -> Tensor:
        """Returns float32 outputs of the classification head, [rows, num_labels]. Raises InputError without one."""
        if self.score is None:
            raise InputError("this checkpoint has no classification head", field="model", code="no_head")
        outputs: Tensor = self.score(wide(hidden))
        return outputs

    @property
    def head_weight(self) -> Tensor:
        """Returns the weight of the LM head, which may be the embedding."""
        return self.embedding if self.lm_head is None else self.lm_head

    @property
    def device(self) -> torch.device:
        """Returns the device that the weights are on."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the linears' weights, and of hidden states."""
        return self.embedding.dtype

    def product_of_head(self) -> Product | None:
        """Returns the LM head's product with rows of the model's dtype, which has no gradients; None: there is none.
        The first time, the head is packed for it."""
        if self.may_pack:
            self.may_pack = False
            self.head_product = self.head_product or pack_head(self.head_weight)
        return self.head_product

    def embed(self, tokens: Tensor, positions: Tensor, media: MediaRows[Tensor] | None = None) -> Tensor:
        """Returns the residual stream before the first layer, [rows, hidden]; the arguments are those of `forward`."""
        x = self.ranks.embed(tokens, self.embedding, self.shard.vocab)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if media is not None:
            x = x.index_copy(0, media.at, media.values.to(x.dtype))
        if self.position_embedding is None:
            return x
        return x + F.embedding(positions + self.program.embed.first, self.position_embedding)

    def cos_sin(self, positions: Tensor) -> list[Tensor]:
        """Returns what queries and keys of each plane are turned by at positions int64 [rows]: cosines, then sines,
        float32 [rows, head_dim]; [rows, 0] where nothing is rotated."""
        if self.config.rope is None:
            return [self.embedding.new_empty(len(positions), 0)] * len(self.config.planes)
        return self.rotary(positions.device)(positions)

    def rotary(self, device: torch.device) -> RotaryTables:
        """Returns the tables of cosines and sines of a model with rotary positions."""
        if self._rotary is None or self._rotary.device != device:
            self._rotary = RotaryTables(self.config.ropes, self.config.rotated_dims, device)
        return self._rotary
