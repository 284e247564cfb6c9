"""Build the program of a config, layer by layer. No NumPy, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import UnsupportedModelError
from ..spec.plugins import named_class
from .config import ATTENTION, HeadNorm, KVSizes, Latent, ModelConfig, Plane, StateShape
from .program import (
    DELTA,
    OUT,
    ActivateGated,
    Add,
    Attend,
    AttendLatent,
    Buffer,
    ByPosition,
    Embed,
    Experts,
    Gate,
    H,
    Interpolate,
    Linear,
    Norm,
    NormHeads,
    Operation,
    Pick,
    Program,
    Rope,
    Scale,
    ScaleHeads,
    Weight,
    X,
    Xielu,
)

EMBEDDING, LM_HEAD, LM_HEAD_BIAS = "embed_tokens.weight", "lm_head.weight", "lm_head.bias"
LM_HEAD_SCALE = "lm_head.logit_scale"
# Buffers of attention: q, k and v together, or q apart from k and v; its result. The inside of an MLP.
QKV, Q, KV, ATTENDED, WIDE = "qkv", "q", "kv", "attended", "wide"
KV_LATENT, QUERY_LATENT = "kv_latent", "query_latent"
# Gates of attention; gate and up of an MLP before the activation.
GATES, GATE_UP = "gates", "gate_up"
LATENT_EPS = 1e-6  # eps in norms of latents, for any eps of the model
# Buffers: the result of a second mixer; the shared expert's result, inside and gate; input and result of experts that
# lie between two linears.
MIXED_BESIDE, SHARED, SHARED_WIDE, SHARED_GATE = "mixed_beside", "shared", "shared_wide", "shared_gate"
LATENT, LATENT_OUT = "latent", "latent_out"
# Buffers: per-layer inputs of all layers; their part computed from the embedding; the gated input of one layer. The
# input of a router with its own norm.
LAYER_INPUTS, LAYER_CONTEXT, LAYER_INPUT, ROUTED = "layer_inputs", "layer_context", "layer_input", "routed"
# The name of a module, and its number of outputs.
Module = tuple[str, int]


class LayerBuilder:
    """The operations of one layer, while they are collected.

    Attributes:
        config: the model's config, with the sizes of this rank's part of the layer.
        number: index of the layer.
        is_last: this layer drops unread rows, see `ModelConfig.reading_layer`.
        copies: ranks that hold each KV head.
        begun: buffers other than the residual stream that are filled before the first layer.
        mixed: buffer for the result of the current mixer.
    """

    def __init__(self, config: ModelConfig, number: int, copies: int = 1, begun: Sequence[Buffer] = ()):
        self.config, self.number, self.copies, self.begun = config, number, copies, begun
        self.is_last = number == config.reading_layer
        self.prefix, self.mixed = f"layers.{number}.", DELTA
        self.in_norms, self.out_norms = config.in_norms_of(number), config.out_norms_of(number)
        self.operations: list[Operation] = []

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def norm(self, name: str, source: Buffer, out: Buffer) -> Buffer:
        """Add a norm over the width of the residual stream. Return `out`."""
        self.add(norm(self.config, self.prefix + name, source, out))
        return out

    def linear(
        self,
        name: str,
        modules: Iterable[Module],
        source: Buffer,
        out: Buffer,
        inputs: int,
        *,
        biased: Iterable[Module] = (),
        activation: str = "",
        gated: bool = False,
        summed: bool = False,
        gate_scale: float = 1.0,
    ) -> None:
        """Add a linear that fuses modules.

        Args:
            name: by which adapters find the linear; "": adapters cannot change it.
            modules: modules whose outputs lie side by side.
            inputs: number of input elements.
            biased: the first modules, those with a bias.
            activation, gated, summed, gate_scale: see `Linear`.
        """
        weight = Weight(tuple((f"{self.prefix}{module}.weight", rows) for module, rows in modules), (inputs,))
        parts = tuple((f"{self.prefix}{module}.bias", rows) for module, rows in biased)
        bias = Weight(parts) if parts else None
        self.add(Linear(source, out, weight, bias, self.number, name, activation, gated, summed, gate_scale))

    def decoder_layer(self) -> tuple[Operation, ...]:
        """Return the operations of a layer with mixers and an MLP."""
        config = self.config
        mixers = config.mixers_of(self.number)
        if config.embedding_norm and not self.number:
            self.add(norm(config, "embed_norm", X, X))
        if not mixers:
            if self.is_last:
                self.pick()
            self.mlp_part("input_layernorm")
            return tuple(self.operations)
        h = self.stream_norm("input_layernorm")
        scale = self._mix(h, mixers)
        if config.parallel:
            # H must stay unchanged for the shared expert, which reads it after the experts.
            beside = H if config.experts is None else MIXED_BESIDE
            self.mlp(self.norm("post_attention_layernorm", X, H) if config.mlp_norm else h, beside)
            self.add(Add(DELTA, beside, self.scale_of("mlp") / scale))
            self.add(Add(X, DELTA, scale))
            return tuple(self.operations)
        normed = self.out_norms or config.sum_norms
        if self.out_norms:
            self.norm("post_attention_layernorm", DELTA, DELTA)
        self.join_stream(scale, "lambda_1")
        if config.sum_norms:
            self.norm("post_attention_layernorm", X, X)
        if config.mlp_of(self.number) != NO_MLP:
            self.mlp_part("pre_feedforward_layernorm" if normed else "post_attention_layernorm")
        if config.layer_inputs:
            self.layer_input(X)
            self.add(Add(X, DELTA))
        if config.layer_scales:
            self.add(Scale(X, weight=Weight(((f"{self.prefix}layer_scalar", 1),), wide=True)))
        return tuple(self.operations)

    def layer_input(self, source: Buffer) -> None:
        """Compute the layer's result from its per-layer embedding of the rows' tokens (Gemma 3n) into DELTA.

        Its gates are computed from `source`.
        """
        size, hidden = self.config.layer_inputs, self.config.hidden
        gate = [("per_layer_input_gate", size)]
        self.linear("", gate, source, LAYER_INPUT, hidden, activation=self.config.activation)
        self.add(Gate(LAYER_INPUT, LAYER_INPUTS, 1, size, at=self.number * size, activation=""))
        self.linear("", [("per_layer_projection", hidden)], LAYER_INPUT, DELTA, size)
        self.norm("post_per_layer_input_norm", DELTA, DELTA)

    def mlp_part(self, name: str) -> None:
        """Add the MLP with its norms, and add its result to the residual stream. `name` is the norm before the MLP."""
        h = self.stream_norm(name)
        self.mlp(h, DELTA)
        if self.out_norms:
            self.norm("post_feedforward_layernorm", DELTA, DELTA)
        self.join_stream(self.scale_of("mlp"), "lambda_2")
        if self.config.sum_norms:
            self.norm("post_feedforward_layernorm", X, X)

    def stream_norm(self, name: str) -> Buffer:
        """Add the norm before a sublayer, if the layer has one. Return the buffer that the sublayer reads."""
        if not self.in_norms:
            return X
        return self.norm(name, X, H if self.config.sphere is None else X)

    def join_stream(self, scale: float, rate: str) -> None:
        """Add DELTA to the residual stream. On the unit sphere, move the stream towards DELTA by the tensor `rate`."""
        if self.config.sphere is None:
            self.add(Add(X, DELTA, scale))
        else:
            self.add(Interpolate(X, DELTA, self._vector(rate, self.config.hidden), self.config.sphere.rates))

    def _vector(self, *names_and_rows: str | int) -> Weight:
        """Return a float32 weight of several vectors. Arguments: a name, its size, a name, its size, ..."""
        parts = zip(names_and_rows[::2], names_and_rows[1::2], strict=True)
        return Weight(tuple((f"{self.prefix}{name}", int(rows)) for name, rows in parts), wide=True)

    def scale_of(self, part: str) -> float:
        """Return the factor of the result of a mixer, or of "mlp", when it is added to the residual stream."""
        return self.config.residual_scale * self.config.part_scales.get(part, 1.0)

    def pick(self, *buffers: Buffer) -> None:
        """Drop unread rows. `buffers` are further buffers that later operations read, beside X and mixer results."""
        before = (DELTA,) if self.mixed != DELTA else ()
        self.add(Pick(tuple(dict.fromkeys((X, *before, *buffers, *self.begun)))))

    def _mix(self, h: Buffer, mixers: Sequence[str]) -> float:
        """Add the mixers of the layer, which read `h` and fill DELTA. Return the factor of DELTA."""
        is_last = self.is_last
        # Attention comes last: in the last layer it drops rows, but a mixer with a state needs all rows.
        first, *others = sorted(mixers, key=lambda name: name == ATTENTION)
        for name in (first, *others):
            self.mixed = DELTA if name == first else MIXED_BESIDE
            self.is_last = is_last and name == [first, *others][-1]
            if name == ATTENTION:
                self.attention(h)
            else:
                MIXERS[name].build(self, h)
            if name != first:
                self.add(Add(DELTA, MIXED_BESIDE, self.scale_of(name) / self.scale_of(first)))
        self.mixed = DELTA
        return self.scale_of(first)

    def attention(self, h: Buffer) -> None:
        """Add attention, from `h` to `mixed`."""
        config = self.config
        if config.latent is not None:
            self._latent_attention(h, config.latent)
            return
        sizes, tied = self.plane.sizes or config.own_sizes, self.plane.tied
        heads, kv_heads, dim = config.heads, sizes.heads, sizes.dim
        stride = 2 * dim if config.gated else dim  # each head has a query, then its gates
        queries, size = heads * stride, kv_heads * dim
        q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
        keys, values = (k, size), (k if tied else v, size)
        q_modules, has_each = [(q, queries)], config.head_gates == "each"
        gates = [("self_attn.g_proj", heads * dim if has_each else heads)] if config.head_gates else []
        beside_gates = gates if config.sphere is not None else []  # scaled gates need their own linear
        gates = [] if beside_gates else gates
        kv, q_buffer, qkv, attended = self.kv_buffer, *map(self._of_plane, (Q, QKV, ATTENDED))
        is_own = config.kv_layer(self.number) == self.number
        if self.is_last or config.kv_layers:
            if is_own:
                self.linear("kv", [keys, values], h, kv, config.hidden, biased=self._biased([keys], [values]))
                self._rope(kv, 0, kv_heads, dim, dim, "k_norm")
                self._norm_values(kv, size, sizes)
            if self.is_last:
                self.pick(h)
            self.linear("q", [*q_modules, *gates], h, q_buffer, config.hidden, biased=self._biased(q_modules, []))
            self._rope(q_buffer, 0, heads, dim, stride, "q_norm")
            source, beside, at, gates_at = q_buffer, kv, 0, queries
        else:
            biased = self._biased([*q_modules, keys], [values])
            self.linear("qkv", [*q_modules, keys, values, *gates], h, qkv, config.hidden, biased=biased)
            if config.qk_norm or config.row_qk_norm or config.gated or config.query_growth or config.sphere:
                self._rope(qkv, 0, heads, dim, stride, "q_norm")
                self._rope(qkv, queries, kv_heads, dim, dim, "k_norm")
            else:
                self._rope(qkv, 0, heads + kv_heads, dim, dim, "")
            self._norm_values(qkv, queries + size, sizes)
            source, beside, at, gates_at = qkv, qkv, queries, queries + 2 * size
        sinks = Weight(((f"{self.prefix}self_attn.sinks", heads),), wide=True) if config.sinks else None
        self.add(Attend(source, 0, stride, beside, at, attended, heads, kv_heads, dim, sinks, is_own=is_own))
        if config.gated:
            self.add(Gate(attended, source, heads, dim, at=dim, stride=stride))
        if gates:
            self.add(Gate(attended, source, heads, dim, at=gates_at, stride=dim if has_each else 1, each=has_each))
        if beside_gates and config.sphere is not None:
            self.linear("gates", beside_gates, h, GATES, config.hidden)
            each = beside_gates[0][1]
            scales = self._vector("self_attn.s_gate", each)
            self.add(ScaleHeads(GATES, 0, 1, each, each, scales, config.sphere.gates, 2))
            self.add(Gate(attended, GATES, heads, dim, stride=dim if has_each else 1, each=has_each))
        if config.inner_norms:
            whole = None if config.whole is None else config.whole.q_size
            self._inner_norm("self_attn.attn_sub_norm", attended, heads * dim, whole)
        o = [("self_attn.o_proj", config.hidden)]
        self.linear("o", o, attended, self.mixed, heads * dim, biased=o if config.o_bias else (), summed=True)

    def _latent_attention(self, h: Buffer, sizes: Latent) -> None:
        config, heads, dim = self.config, self.config.heads, sizes.dim + sizes.tail
        biased = config.qkv_bias
        latents = [("self_attn.kv_a_proj_with_mqa", sizes.rank + sizes.tail)]
        self.linear("kv_a", latents, h, KV_LATENT, config.hidden, biased=latents if biased else ())
        self._norm_of(KV_LATENT, sizes.rank, "self_attn.kv_a_layernorm")
        self._rotate(KV_LATENT, sizes.rank, 1, sizes.tail, sizes.tail)
        if self.is_last:
            self.pick(h)
        source, inputs, name = h, config.hidden, "q_proj"
        if sizes.query_rank:
            first = [("self_attn.q_a_proj", sizes.query_rank)]
            self.linear("q_a", first, h, QUERY_LATENT, config.hidden, biased=first if biased else ())
            self._norm_of(QUERY_LATENT, sizes.query_rank, "self_attn.q_a_layernorm")
            source, inputs, name = QUERY_LATENT, sizes.query_rank, "q_b_proj"
        self.linear("q", [(f"self_attn.{name}", heads * dim)], source, Q, inputs)
        self._rotate(Q, sizes.dim, heads, sizes.tail, dim)
        if config.query_growth is not None:
            self.add(ByPosition(Q, 0, heads, dim, dim, *config.query_growth))
        up = Weight(
            ((f"{self.prefix}self_attn.kv_b_proj.weight", heads * (sizes.dim + sizes.value_dim)),), (sizes.rank,)
        )
        self.add(AttendLatent(Q, KV_LATENT, ATTENDED, heads, sizes.dim, sizes.tail, sizes.value_dim, up))
        o = [("self_attn.o_proj", config.hidden)]
        self.linear("o", o, ATTENDED, self.mixed, heads * sizes.value_dim, biased=o if config.o_bias else ())

    def _norm_of(self, buffer: Buffer, size: int, name: str) -> None:
        """Add a norm of the first `size` elements of a buffer."""
        self.add(Norm(buffer, buffer, Weight(((f"{self.prefix}{name}.weight", size),)), LATENT_EPS))

    def _rotate(self, source: Buffer, at: int, heads: int, dim: int, stride: int) -> None:
        self.add(Rope(source, at, heads, dim, dim, stride))

    @property
    def kv_buffer(self) -> Buffer:
        """Return the buffer of the keys and values that this layer reads.

        Its name is unique if other layers read it too, so that it outlives the layer.
        """
        of = self.config.kv_layer(self.number)
        return f"{KV}@{of}" if self.config.kv_layers.count(of) > 1 else self._of_plane(KV)

    @property
    def plane(self) -> Plane:
        """Return the layer's plane. A layer that a looped model never visits gets the first plane."""
        config = self.config
        is_visited = config.kv_layer(self.number) in config.visited
        return config.planes[config.plane_of(self.number) if is_visited else 0]

    def _of_plane(self, buffer: Buffer) -> Buffer:
        """Return a name that differs between planes of different sizes, because buffers have one width."""
        sizes = self.plane.sizes
        return buffer if sizes is None else f"{buffer}:{sizes.heads}x{sizes.dim}"

    def _norm_values(self, buffer: Buffer, at: int, sizes: KVSizes) -> None:
        """Add the norm of value heads, which start at `at`, if the model has one."""
        if self.config.value_norm:
            dim = sizes.value_dim
            self.add(NormHeads(buffer, at, sizes.heads, dim, dim, self.config.norm_eps))

    def _biased(self, of_qk: Sequence[Module], of_v: Sequence[Module]) -> list[Module]:
        """Return the modules with a bias."""
        config = self.config
        return [*of_qk, *of_v] if config.qkv_bias else [*of_qk] if config.qk_bias else []

    def _rope(self, source: Buffer, at: int, heads: int, dim: int, stride: int, name: str) -> None:
        """Add the norm and the rotation of some heads, and the factors of queries. `name` is the norm."""
        config, weight, head_norm = self.config, None, None
        if isinstance(config.qk_norm, HeadNorm):
            head_norm = self._head_norm(config.qk_norm, source, at, heads, dim, stride, name)
            if not config.qk_norm.after:
                self.add(head_norm)
        elif config.row_qk_norm and name:
            size, whole = heads * dim, config.whole
            row = Weight(((f"{self.prefix}self_attn.{name}.weight", size),), offset=config.norm_offset)
            of_all = 0 if whole is None else whole.q_size if name == "q_norm" else whole.kv_size
            copies = self.copies if name == "k_norm" else 1
            self.add(Norm(source, source, row, config.norm_eps, at=at, whole=of_all, copies=copies))
        elif config.qk_norm and name:
            weight = Weight(
                ((f"{self.prefix}self_attn.{name}.weight", dim),),
                offset=config.norm_offset,
                wide=bool(config.norm_offset),
            )
        if config.rope is not None or weight is not None:
            turned = 0 if config.rope is None else config.rotated_dim or dim
            self.add(Rope(source, at, heads, dim, turned, stride, weight, config.norm_eps))
        if config.sphere is not None and name == "q_norm":
            scales = self._vector("self_attn.sqk", heads * dim)
            self.add(ScaleHeads(source, at, heads, dim, stride, scales, config.sphere.queries, 2))
        if head_norm is not None and isinstance(config.qk_norm, HeadNorm) and config.qk_norm.after:
            self.add(head_norm)
        if config.query_growth is not None and name == "q_norm":
            self.add(ByPosition(source, at, heads, dim, stride, *config.query_growth))

    def _head_norm(
        self, kind: HeadNorm, source: Buffer, at: int, heads: int, dim: int, stride: int, name: str
    ) -> NormHeads:
        config, tensor = self.config, f"{self.prefix}self_attn.{name}"

        def weight(end: str) -> Weight:
            offset = config.norm_offset if end == "weight" else 0.0
            rows = dim if kind.weights == "shared" else heads * dim
            parts: tuple[tuple[str, int], ...] = ((f"{tensor}.{end}", rows),)
            if kind.weights == "apart":
                parts = tuple((f"{tensor}.{head}.{end}", dim) for head in range(heads))
            return Weight(parts, offset=offset, wide=bool(offset))

        own, bias = None if kind.weights == "none" else weight("weight"), weight("bias") if kind.biased else None
        return NormHeads(source, at, heads, dim, stride, config.norm_eps, own, bias, kind.kind)

    def _inner_norm(self, name: str, buffer: Buffer, size: int, whole: int | None) -> None:
        """Add a norm before the last linear of a sublayer.

        `whole` is the number of elements on all ranks; None: this rank has all.
        """
        kind = self.config.norm if self.config.norm == "unit" else "rms"
        is_bare = kind == "unit" and not self.config.norm_weight
        weight = None if is_bare else Weight(((f"{self.prefix}{name}.weight", size),))
        self.add(Norm(buffer, buffer, weight, self.config.norm_eps, kind=kind, whole=whole or 0, size=size))

    def mlp(self, h: Buffer, out: Buffer) -> None:
        """Add the MLP kind that the config names for this layer."""
        kind = self.config.mlp_of(self.number)
        if kind not in MLPS:
            raise UnsupportedModelError(f"mlp is {kind!r}; it must be one of {', '.join(MLPS)}")
        MLPS[kind].build(self, h, out)

    def gated_mlp(
        self, h: Buffer, out: Buffer, width: int, prefix: str = "mlp.", named: bool = True, summed: bool = True
    ) -> None:
        """Add down(activation(gate) * up).

        Args:
            width: inner width.
            prefix: the prefix of the module names.
            named: adapters can change its linears.
            summed: sum the result over all ranks.
        """
        config = self.config
        gate_up = [(f"{prefix}gate_proj", width), (f"{prefix}up_proj", width)]
        self._mlp(h, out, gate_up, [(f"{prefix}down_proj", config.hidden)], named, gated=True, summed=summed)

    def plain_mlp(
        self, h: Buffer, out: Buffer, width: int, prefix: str = "mlp.", named: bool = True, summed: bool = True
    ) -> None:
        """Add down(activation(up)), with the arguments of `gated_mlp`."""
        up, down = [(f"{prefix}up_proj", width)], [(f"{prefix}down_proj", self.config.hidden)]
        self._mlp(h, out, up, down, named, gated=False, summed=summed)

    def _mlp(
        self,
        h: Buffer,
        out: Buffer,
        first: list[Module],
        second: list[Module],
        named: bool,
        *,
        gated: bool,
        summed: bool = True,
    ) -> None:
        config, width = self.config, first[0][1]
        biased, is_xielu = config.mlp_bias, config.activation == "xielu"
        inside = WIDE if named else SHARED_WIDE
        if named and config.mlp_widths:
            inside = f"{WIDE}:{width}"
        if config.sphere is not None and gated:  # gate and up are scaled before the activation
            self.linear("gate_up", first, h, GATE_UP, config.hidden, biased=first if biased else ())
            scales = self._vector("mlp.suv_gate", width, "mlp.suv_up", width)
            self.add(ScaleHeads(GATE_UP, 0, 1, 2 * width, 2 * width, scales, config.sphere.inside))
            self.add(ActivateGated(GATE_UP, inside, width, config.activation))
        else:
            self.linear(
                "gate_up" if named else "",
                first,
                h,
                inside,
                config.hidden,
                biased=first if biased else (),
                activation="" if is_xielu else config.activation,
                gated=gated,
                gate_scale=config.gate_scale,
            )
        if is_xielu:
            numbers = ("alpha_p", "alpha_n", "beta", "eps")
            names = [f"{self.prefix}mlp.act_fn.{name}" for name in numbers]
            self.add(Xielu(inside, *(Weight(((name, 1),), wide=True) for name in names)))
        if config.inner_norms:
            whole = None if config.whole is None else config.whole.intermediate
            self._inner_norm("mlp.ffn_sub_norm", inside, width, whole)
        biased_second = second if biased else ()
        self.linear("down" if named else "", second, inside, out, width, biased=biased_second, summed=summed)


def decoder_layer(builder: LayerBuilder) -> tuple[Operation, ...]:
    """Return the operations of a layer with mixers and an MLP. This is the default `ModelConfig.layer_builder`."""
    return builder.decoder_layer()


@dataclass(frozen=True, slots=True)
class MlpKind:
    """A kind of MLP, which `ModelConfig.mlp` names."""

    # Adds the operations of the MLP to a layer; takes the input buffer and the buffer for the result.
    build: Callable[[LayerBuilder, Buffer, Buffer], None]


def add_mlp(name: str, kind: MlpKind) -> None:
    """Register a kind of MLP. Configs name it in `mlp`."""
    MLPS[name] = kind


def _build_gated(builder: LayerBuilder, h: Buffer, out: Buffer) -> None:
    builder.gated_mlp(h, out, builder.config.mlp_width(builder.number))


def _build_plain(builder: LayerBuilder, h: Buffer, out: Buffer) -> None:
    builder.plain_mlp(h, out, builder.config.mlp_width(builder.number))


def _build_beside(builder: LayerBuilder, h: Buffer, out: Buffer) -> None:
    """Add a gated MLP and a mixture of experts whose results are added (Gemma 4).

    The MLP, the experts and the router each have their own norm, and the experts have further factors.
    """
    hidden, mixture = builder.config.hidden, builder.config.experts
    _build_gated(builder, h, out)
    builder.norm("post_feedforward_layernorm_1", out, out)
    builder.add(Norm(X, ROUTED, Weight(((f"{builder.prefix}router.scale", hidden),)), builder.config.norm_eps))
    builder.add(Scale(ROUTED, hidden**-0.5))
    builder.norm("pre_feedforward_layernorm_2", X, H)
    scales = Weight(((f"{builder.prefix}router.per_expert_scale", mixture.count if mixture else 0),), wide=True)
    _build_experts(builder, H, SHARED, by=ROUTED, scales=scales)
    builder.norm("post_feedforward_layernorm_2", SHARED, SHARED)
    builder.add(Add(out, SHARED))


def _build_experts(
    builder: LayerBuilder, h: Buffer, out: Buffer, by: Buffer | None = None, scales: Weight | None = None
) -> None:
    """Add a mixture of experts, and the shared expert if there is one. `by` and `scales` are fields of `Experts`."""
    mixture, hidden, mlp = builder.config.experts, builder.config.hidden, f"{builder.prefix}mlp."
    if mixture is None:
        raise UnsupportedModelError("mlp is 'experts', but the config has no Mixture in `experts`")
    names = [f"{mlp}experts.{number}." for number in range(mixture.count)]
    inner = ("gate", "up") if mixture.gated else ("up",)
    source, given, inputs = (LATENT, LATENT_OUT, mixture.latent) if mixture.latent else (h, out, hidden)
    halves = [(f"{name}{half}_proj", mixture.width) for name in names for half in inner]
    downs = [(f"{name}down_proj", inputs) for name in names]
    router = [(f"{mlp}gate", mixture.count)]

    def weight(modules: Sequence[Module], inputs: int) -> Weight:
        return Weight(tuple((f"{module}.weight", rows) for module, rows in modules), (inputs,))

    def bias(modules: Sequence[Module]) -> Weight | None:
        return Weight(tuple((f"{module}.bias", rows) for module, rows in modules)) if mixture.biases else None

    def latent(name: str, source: Buffer, out: Buffer, outputs: int, inputs: int) -> None:
        module = [(f"mlp.latent_{name}", outputs)]
        builder.linear("", module, source, out, inputs, biased=module if builder.config.mlp_bias else ())

    if mixture.latent:
        latent("in", h, LATENT, mixture.latent, hidden)
    corrected = Weight(((f"{mlp}gate.correction", mixture.count),), wide=True) if mixture.corrected else None
    # Without biases, one sum over ranks covers the experts and the shared expert. Biases must be added once, so each
    # result is then summed by itself.
    biased = mixture.biases or builder.config.mlp_bias
    together = mixture.shared > 0 and not mixture.latent and not biased
    builder.add(
        Experts(
            source,
            given,
            weight(router, hidden),
            weight(halves, inputs),
            weight(downs, mixture.width),
            experts=mixture.count,
            chosen=mixture.chosen,
            normalised=mixture.normalised,
            activation="clamped" if mixture.clamped else builder.config.activation,
            score=mixture.score,
            least_sum=mixture.least_sum,
            tolerance=mixture.tolerance,
            scale=mixture.scale,
            groups=mixture.groups,
            chosen_groups=mixture.chosen_groups,
            group_best=mixture.group_best,
            correction=corrected,
            corrects_logits=mixture.corrected == "logits",
            router_bias=bias(router),
            gate_up_bias=bias(halves),
            down_bias=bias(downs),
            summed=not together,
            gated=mixture.gated,
            by=by or (h if mixture.latent else None),
            scales=scales,
        )
    )
    if mixture.latent:
        latent("out", LATENT_OUT, out, hidden, mixture.latent)
    if not mixture.shared:
        return
    mlp_beside = builder.gated_mlp if mixture.gated else builder.plain_mlp
    mlp_beside(h, SHARED, mixture.shared, "mlp.shared_expert.", named=False, summed=not together)
    if mixture.shared_gate:
        builder.linear("", [("mlp.shared_expert_gate", 1)], h, SHARED_GATE, hidden)
        builder.add(Gate(SHARED, SHARED_GATE, 1, hidden, each=False))
    builder.add(Add(out, SHARED, mixture.shared_scale, summed=together))


EXPERTS, BESIDE_EXPERTS, NO_MLP = "experts", "beside_experts", "none"
MLPS = {
    "gated": MlpKind(_build_gated),
    "plain": MlpKind(_build_plain),
    EXPERTS: MlpKind(_build_experts),
    BESIDE_EXPERTS: MlpKind(_build_beside),
}


@dataclass(frozen=True, slots=True)
class MixerKind:
    """A kind of mixer with a state, which replaces attention in a layer. `ModelConfig.mixers` names it."""

    # Adds the operations of the mixer to a layer; takes the input buffer, and fills the buffer `builder.mixed`.
    build: Callable[[LayerBuilder, Buffer], None]
    states: Callable[[ModelConfig], tuple[StateShape, ...]]  # returns the shapes of a layer's state


MIXERS: dict[str, MixerKind] = {}


def add_mixer(name: str, kind: MixerKind) -> None:
    """Register a kind of mixer with a state. Configs name it in `mixers`."""
    MIXERS[name] = kind


def decoder_program(config: ModelConfig, copies: int = 1) -> Program:
    """Return the program of a decoder.

    Args:
        config: the model's config, with the sizes of this rank's part of the layers. Its `layer_builder` builds each
            layer.
        copies: ranks that hold each KV head.
    """
    hidden, vocabulary = config.hidden, config.vocab_size
    table = Weight(((EMBEDDING, vocabulary),), (hidden,))
    positions = config.max_positions + config.first_position
    learned = None if config.rope else Weight((("embed_positions.weight", positions),), (hidden,))
    begin = _begin(config)
    begun = [LAYER_INPUTS] if begin else []
    build = named_class(config.layer_builder)
    layers = tuple(build(LayerBuilder(config, number, copies, begun)) for number in range(config.layers))
    head = None
    if config.lm_head:
        head = table if config.tie_embeddings else Weight(((LM_HEAD, vocabulary),), (hidden,))
    shared = {buffer for layer in layers for one in layer for buffer in one.buffers if buffer.startswith(f"{KV}@")}
    return Program(
        widths=widths_of(config, (begin, *layers)),
        embed=Embed(X, table, learned, config.embedding_scale, config.first_position),
        layers=layers,
        end=(norm(config, "norm", X, OUT),),
        head=head,
        score=score_head(config),
        begin=begin,
        kept=(*begun, *sorted(shared)),
        head_bias=Weight(((LM_HEAD_BIAS, vocabulary),), wide=True) if head and config.lm_head_bias else None,
        head_scale=Weight(((LM_HEAD_SCALE, vocabulary),), wide=True) if head and config.sphere else None,
        head_factor=1.0 if config.sphere is None else config.sphere.logits,
    )


def _begin(config: ModelConfig) -> tuple[Operation, ...]:
    """Return the operations that compute the per-layer inputs of all layers (Gemma 3n and 4), before the first layer.

    An input is the sum of a per-layer embedding of the token and a linear of its ordinary embedding.
    """
    size, hidden, layers = config.layer_inputs, config.hidden, config.layers
    if not size:
        return ()
    table = Weight((("embed_tokens_per_layer.weight", config.layer_vocab or config.vocab_size),), (layers * size,))
    linear = Weight((("per_layer_model_projection.weight", layers * size),), (hidden,))
    own_norm = Weight((("per_layer_projection_norm.weight", size),))
    return (
        Embed(LAYER_INPUTS, table, scale=size**0.5),
        Linear(X, LAYER_CONTEXT, linear),
        Scale(LAYER_CONTEXT, hidden**-0.5),
        NormHeads(LAYER_CONTEXT, 0, layers, size, size, config.norm_eps, own_norm),
        Add(LAYER_INPUTS, LAYER_CONTEXT),
        Scale(LAYER_INPUTS, 2**-0.5),
    )


def norm(config: ModelConfig, name: str, source: Buffer, out: Buffer) -> Norm:
    """Return a norm over the width of the residual stream.

    It is float32 if the checkpoint stores the weights minus 1, because rounding 1 + w would lose the last bits of w.
    """
    if not config.norm_weight:
        return Norm(source, out, None, config.norm_eps, kind=config.norm, size=config.hidden)
    weight = Weight(((f"{name}.weight", config.hidden),), offset=config.norm_offset, wide=bool(config.norm_offset))
    biased = config.norm == "layer" and config.norm_bias
    bias = Weight(((f"{name}.bias", config.hidden),)) if biased else None
    return Norm(source, out, weight, config.norm_eps, bias, config.norm)


def score_head(config: ModelConfig) -> tuple[Linear, ...]:
    """Return the linears of the classification head; () if there is none.

    They are float32: they cost next to nothing, and their scores are compared.
    """
    if not config.num_labels:
        return ()

    def linear(name: str, rows: int, bias: bool) -> Linear:
        weight = Weight(((f"{name}.weight", rows),), (config.hidden,), wide=True)
        return Linear(OUT, OUT, weight, Weight(((f"{name}.bias", rows),), wide=True) if bias else None)

    if config.head_layers == 1:
        return (linear("score", config.num_labels, config.head_bias),)
    return linear("score.0", config.hidden, True), linear("score.2", config.num_labels, True)


def widths_of(config: ModelConfig, layers: Iterable[Iterable[Operation]]) -> dict[Buffer, int]:
    """Return the width of each buffer. Raise ValueError if operations fill a buffer with different widths.

    A buffer needs one width because kernels multiply whole rows.
    """
    widths = dict.fromkeys((X, H, DELTA, OUT), config.hidden)
    for layer in layers:
        for operation in layer:
            if (filled := operation.fills) is not None:
                buffer, width = filled
                if widths.setdefault(buffer, width) != width:
                    raise ValueError(f"the buffer {buffer!r} has rows of {widths[buffer]} and of {width} elements")
    return widths
