"""Execute a model's program with tensors, as a function of rows.

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
    """A function that computes attention over one plane.

    Args:
        q: [rows, heads, dim], maybe strided. From the layer that drops unread rows on, only the read rows:
            `len(q) < len(k)`.
        k: [rows, kv_heads, dim], maybe strided. None: the keys of an earlier call for the plane.
        v: [rows, kv_heads, value dim], maybe strided. None: the values of an earlier call for the plane.
        sinks: [heads], as in `attention.RowAttention.attend`.

    Returns:
        [rows, heads, value dim].
    """

    def __call__(
        self, plane: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor: ...


@dataclass(slots=True)
class Pass:
    """Rows on their way through the model."""

    x: Tensor  # the residual stream is x + delta, [rows, hidden]
    delta: Tensor | None
    cos_sin: Sequence[Tensor] | Mapping[int, Tensor]  # cosines and sines at the positions of the rows, by plane
    attend: Attend
    read_rows: Tensor | None  # the rows whose result is read: the only rows after the last plane; None: all
    adapters: RowAdapters  # the LoRA adapter of each row
    ops: Ops  # computes the position-wise operations
    place: int = 0  # index in `ModelConfig.pass_layers` of the next layer
    prelude: Tensor | None = None  # [rows, hidden], added before each visit of a looped model that has a prelude
    states: object = None  # the states of the rows' paths, in a model with recurrent layers
    kept: dict[Buffer, Tensor] = field(default_factory=dict)  # buffers passed from layer to layer, beside the stream
    positions: Tensor | None = None

    @property
    def stream(self) -> Tensor:
        """Return the residual stream, [rows, hidden]."""
        return self.x if self.delta is None else self.x + self.delta


class CausalLM(nn.Module):
    """A model that executes the program of a config.

    It is differentiable unless its linears are packed. New weights are uninitialised: see `load_model`.

    Attributes:
        config: The config of the whole model.
        local: The config with the sizes of this rank's part of the layers.
        program: The program of `local`.
        ranks: The ranks of the model. `attend` gets the heads of this rank.

    Raises:
        UnsupportedModelError: No function computes an operation with tensors.
    """

    computed_by: ClassVar[str] = ""  # for people: the modules that compute a pass, if they are not prefold's

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
        # Rounded like transformers, which stores the scale in a tensor.
        self.embedding_scale = torch.tensor(program.embed.scale, dtype=dtype, device="cpu").item()
        self.lm_head = None if head is None or head == program.embed.table else place.empty(head)
        self.lm_head_bias = None if program.head_bias is None else place.empty(program.head_bias)
        self.lm_head_scale = None if program.head_scale is None else place.empty(program.head_scale)
        self.score = self._score_head(program.score, place)
        self.shape_logits = LogitShape.of(config)
        self.recompute = False  # in the backward pass, recompute each layer from its input, which saves memory
        self.may_pack = False  # pack the LM head when full logits are first read; see `load_model`
        # Overrides the matmul of the whole LM head. Public: assign your own Product.
        self.head_product: Product | None = None
        self._rotary: RotaryTables | None = None
        # The plane of each layer of a pass, in order; None: the layer has no attention.
        self._planes: list[int | None] = list(range(len(config.visited)))
        if len(config.visited) == len({*config.visited}):  # not a looped model, where each visit has its own plane
            layers = config.pass_layers
            self._planes = [config.plane_of(number) if config.attends(number) else None for number in layers]
        places = [place for place, number in enumerate(config.pass_layers) if number == config.reading_layer]
        self._reading = places[-1]  # the index in a pass at which unread rows are dropped

    @staticmethod
    def _score_head(linears: Sequence[Linear], place: Place) -> nn.Module | None:
        """Return the classification head, or None."""
        modules = [hold_linear(linear, place) for linear in linears]
        if len(modules) < 2:
            return modules[0] if modules else None
        between = [nn.ReLU() for _ in modules]
        return nn.Sequential(*(one for pair in zip(modules, between, strict=True) for one in pair))[:-1]

    @property
    def held(self) -> Iterator[HeldWeight]:
        """Yield every parameter with the names of its tensors: the embedding and LM head first, then layer by layer."""
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
        for weight in program.beside:  # registered under the names of the feature's modules, which read them
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
        """Return hidden states after the final norm, [read rows, hidden], in the order of `read_rows`.

        Args:
            tokens: int64 [rows].
            positions: int64 [rows].
            read_rows: int64 [r], ascending and distinct: the rows whose result is read. None: all. The last plane's
                layer computes queries only for these rows, and keys and values for all rows.
            adapters: The LoRA adapter of each row; it must have the same read rows.
            media: The rows of images, or None.
            states: The states of the rows' paths, in a model with recurrent layers.
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
        """Return the rows before the first layer. Arguments: as in `forward`"""
        if adapters.adapters and (read_rows is None) != (adapters.read_rows is None):
            raise ValueError("adapters and the call have different read_rows; pass the same read_rows to both")
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
        """Run rows through the given layers. After the last layer of a pass, only the read rows remain."""
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
        """Return the final norm of rows after the last layer, [rows, hidden]."""
        return self.norm(rows.x, rows.delta, rows.ops)

    def norm(self, x: Tensor, delta: Tensor | None, ops: Ops) -> Tensor:
        """Return the final norm of the residual stream x + delta, [rows, hidden]. It may overwrite x."""
        return self.end.result(OUT, x, delta, ops)

    def arguments(self, step: StreamStep) -> dict[str, Any]:
        """Return extra keyword arguments of the model call for a stream step."""
        return {}

    def logits(self, hidden: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return float32 logits [rows, vocabulary], or [rows, len(ids)] for given ids; hidden as from `forward`.

        Products are summed and returned in float32: a bfloat16 logit near 20 has steps of 0.125, which makes words tie.
        In a split model, rank 0 gets the logits of the whole vocabulary; other ranks get no rows. Raise InputError if
        the checkpoint has no LM head.
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
        """Turn products of the LM head into logits: scale, bias and cap.

        Args:
            ids: The tokens of the columns; None: all.
        """
        if self.program.head_vectors:
            at = slice(None) if ids is None else torch.as_tensor(ids, device=self.device)
            if self.lm_head_scale is not None:
                products = products * (self.program.head_factor * self.lm_head_scale[at])
            if self.lm_head_bias is not None:
                products = products + self.lm_head_bias[at]
        return products if self.shape_logits is None else self.shape_logits(products)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the outputs of the classification head, float32 [rows, num_labels]. Raise InputError without one."""
        if self.score is None:
            raise InputError("this checkpoint has no classification head", field="model", code="no_head")
        outputs: Tensor = self.score(wide(hidden))
        return outputs

    @property
    def head_weight(self) -> Tensor:
        """Return the weight of the LM head, which may be the embedding."""
        return self.embedding if self.lm_head is None else self.lm_head

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the linears' weights and of hidden states."""
        return self.embedding.dtype

    def product_of_head(self) -> Product | None:
        """Return the packed product of the LM head, packed on first use. None: there is none. It has no gradients."""
        if self.may_pack:
            self.may_pack = False
            self.head_product = self.head_product or pack_head(self.head_weight)
        return self.head_product

    def embed(self, tokens: Tensor, positions: Tensor, media: MediaRows[Tensor] | None = None) -> Tensor:
        """Return the residual stream before the first layer, [rows, hidden]. Arguments: as in `forward`"""
        x = self.ranks.embed(tokens, self.embedding, self.shard.vocab)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if media is not None:
            x = x.index_copy(0, media.at, media.values.to(x.dtype))
        if self.position_embedding is None:
            return x
        return x + F.embedding(positions + self.program.embed.first, self.position_embedding)

    def cos_sin(self, positions: Tensor) -> list[Tensor]:
        """Return the rotation of queries and keys by plane, at positions int64 [rows].

        Cosines, then sines, float32 [rows, head_dim]; [rows, 0] if nothing is rotated.
        """
        if self.config.rope is None:
            return [self.embedding.new_empty(len(positions), 0)] * len(self.config.planes)
        return self.rotary(positions.device)(positions)

    def rotary(self, device: torch.device) -> RotaryTables:
        """Return the tables of cosines and sines, for a model with rotary positions."""
        if self._rotary is None or self._rotary.device != device:
            self._rotary = RotaryTables(self.config.ropes, self.config.rotated_dims, device)
        return self._rotary
