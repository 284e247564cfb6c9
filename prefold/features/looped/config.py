"""Looped models as data: how their layers are visited, which exits a request may ask for, and the families.

A family is a function from a Hugging Face config (a dict) to a ModelConfig. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar

from ...checkpoint.settings import MOST_LAYERS, Settings
from ...errors import InputError, UnsupportedModelError
from ...model.config import HeadNorm, ModelConfig, Sphere
from ...model.decoders import (
    FULL,
    SLIDING,
    HFConfig,
    decoder,
    llama,
    num_layers,
    qwen_windows,
    rope_of,
    windows_of,
    with_local_rope,
)
from ...model.names import Names
from ...model.program import Program, Weight
from ...spec.requests import Exits

T = TypeVar("T", "Loop", "Routing")
ROUTING_KINDS = ("fixed", "soft", "hard", "top", "planned")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a looped model's router picks the block of each visit, or ends the visits.

    A request makes at least one visit, and at most as many as its Loop's order has.

    Attributes:
        kind: "fixed": the router is not used, and the visits follow the order. "soft": every visit runs all blocks, and
            the router's probabilities mix their outputs. "hard": the likeliest block. "top": the `top` likeliest
            blocks, mixed. "planned": the planner picks all visits before the first one, each as with "hard"
        reads: the router's input. "request": the mean and the last of the states of a prompt's rows; all rows of the
            prompt, and the rows generated after it, then have one route. "row": a row's own state; each row has its
            own route
        threshold: no more visits follow if the probability of leaving is at least this. ("soft" ignores it: the share
            that has not left continues)
        top: number of blocks that "top" mixes
        planner: there is a planner beside the router
    """

    kind: Literal["fixed", "soft", "hard", "top", "planned"] = "hard"
    reads: Literal["request", "row"] = "request"
    threshold: float = 0.5
    top: int = 1
    planner: bool = False

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, ROUTING_KINDS)
        _check_choice("reads", self.reads, ("request", "row"))
        _check_threshold(self.threshold)
        if self.top < 1:
            raise UnsupportedModelError(f"top is {self.top}; it must be at least 1")
        if self.kind == "planned" and not self.planner:
            raise UnsupportedModelError('kind is "planned", but planner is false; a planner has its own weights')
        if self.planner and self.reads == "row":
            raise UnsupportedModelError('planner is true, but reads is "row"; a planner reads requests')


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UnsupportedModelError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _check_threshold(value: float) -> None:
    if not 0 < value <= 1:
        raise UnsupportedModelError(f"threshold is {value}; it must be above 0 and at most 1")


# A config with more planes than this is damaged.
MOST_PLANES = 2**14
# Number of features that a gate reads with gate_reads="features" (`gates.features_of`).
GATE_FEATURES = 4


@dataclass(frozen=True, slots=True)
class Loop:
    """The order in which a looped model runs its layers, and the visit after which rows are read.

    The model's layers are the prelude, then the blocks, all of the same size, then the coda. A pass runs the prelude
    once, one block per visit, and the coda once.

    Attributes:
        blocks: number of blocks
        order: the block of each visit, from 0. With a router: the route without the router, and the maximum number of
            visits
        prelude: number of layers of the prelude
        coda: number of layers of the coda
        between: what visits do to the residual stream. "nothing". "norm": each visit ends with the model's final norm.
            "inject": the stream starts as noise, and a linear mixes the prelude's output into it before each visit; the
            final norm follows the last visit, or an earlier one after which a row is read. "add": each visit starts
            with the final norm of the stream plus the final norm of the prelude's output
        noise: standard deviation of the noise
        seed: seed of the noise, which also depends on a row's position
        gate: a linear computes each row's probability of leaving after a visit
        gate_reads: the gate's input. "state": the state as it is read. "features": four numbers (`gates.features_of`)
        threshold: a row is read after the first visit at which its probability of having left is at least this; 1:
            after the last visit. All rows make all visits, so K/V do not depend on the threshold
        router: picks the blocks; None: they follow the order
    """

    blocks: int
    order: tuple[int, ...]
    prelude: int = 0
    coda: int = 0
    between: Literal["nothing", "norm", "inject", "add"] = "nothing"
    noise: float = 0.0
    seed: int = 0
    gate: bool = False
    gate_reads: Literal["state", "features"] = "state"
    threshold: float = 1.0
    router: Routing | None = None

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise UnsupportedModelError(f"blocks is {self.blocks}; a looped model has at least one block")
        if not self.order:
            raise UnsupportedModelError("order is empty; a pass makes at least one visit")
        for block in self.order:
            if not 0 <= block < self.blocks:
                raise UnsupportedModelError(
                    f"order names the block {block}; the model has blocks 0 to {self.blocks - 1}"
                )
        _check_choice("between", self.between, ("nothing", "norm", "inject", "add"))
        _check_choice("gate_reads", self.gate_reads, ("state", "features"))
        _check_threshold(self.threshold)
        if self.threshold < 1 and not self.gate:
            raise UnsupportedModelError(
                f"threshold is {self.threshold}, but gate is false; only a gate lets rows leave"
            )
        if self.gate and self.coda:
            raise UnsupportedModelError(
                f"gate is true, but coda is {self.coda}; a model with a coda has only one exit, after the coda"
            )
        if self.router is not None:
            if self.router.top > self.blocks:
                raise UnsupportedModelError(f"router.top is {self.router.top}; the model has {self.blocks} blocks")
            if lost := sorted(set(range(self.blocks)) - set(self.order)):
                raise UnsupportedModelError(f"order lacks the block {lost[0]}, which the router may pick")

    @property
    def has_prelude(self) -> bool:
        """Return whether something runs before the first visit: layers, or the state that each visit gets."""
        return self.prelude > 0 or self.between in ("inject", "add")

    def per_block(self, layers: int) -> int:
        """Return the number of layers of a block, in a model with `layers` layers."""
        rest = layers - self.prelude - self.coda
        if rest < self.blocks or rest % self.blocks:
            raise UnsupportedModelError(
                f"{layers} layers, {self.prelude} of them prelude and {self.coda} coda, do not make {self.blocks} "
                "blocks of equal size"
            )
        return rest // self.blocks

    def block(self, number: int, layers: int) -> range:
        """Return the layers of a block, in a model with `layers` layers."""
        size = self.per_block(layers)
        return range(self.prelude + number * size, self.prelude + (number + 1) * size)

    def visited(self, layers: int) -> tuple[int, ...]:
        """Return the layer of each plane in the order of a pass, in a model with `layers` layers."""
        planes = self.prelude + len(self.order) * self.per_block(layers) + self.coda
        if planes > MOST_PLANES:
            raise UnsupportedModelError(f"a pass visits {planes:,} layers; at most {MOST_PLANES:,} are allowed")
        visits = (layer for number in self.order for layer in self.block(number, layers))
        return (*range(self.prelude), *visits, *range(layers - self.coda, layers))

    def check_route(self, route: Sequence[int], name: str = "the route") -> None:
        """Raise InputError if a route is empty, longer than the order, or names an unknown block.

        Args:
            name: the route's name in errors
        """
        if not 1 <= len(route) <= len(self.order):
            raise InputError(
                f"{name} has {len(route)} visits", field="route", remedy=f"give 1 to {len(self.order)} blocks"
            )
        for block in route:
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < self.blocks:
                raise InputError(
                    f"{name} names the block {block!r}", field="route", remedy=f"give 0 to {self.blocks - 1}"
                )


@dataclass(frozen=True, kw_only=True)
class LoopedConfig(ModelConfig):
    """The config of a looped model: it has one plane for each layer of each visit."""

    model: ClassVar[str] = "prefold.features.looped.model:LoopedLM"

    loop: Loop  # how the layers are visited

    @classmethod
    def of(cls, config: ModelConfig, loop: Loop) -> LoopedConfig:
        """Return the config of a looped model with the layers of `config`."""
        own = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
        return cls(**own | {"planes": tuple(config.planes[i] for i in loop.visited(config.layers)), "loop": loop})

    def check_exits(self, exits: Exits) -> None:
        """Raise InputError for invalid values, and for exits that need a gate or visits that the model lacks.

        `EnginePart.check` checks whether the engine's mode can follow the exits.
        """
        for name, value, most in (("exit_threshold", exits.threshold, 1), ("exit_change", exits.change, math.inf)):
            if value is not None and not (
                isinstance(value, Real) and not isinstance(value, bool) and 0 < value <= most and value < math.inf
            ):
                remedy = "give a number above 0" + (", at most 1" if most == 1 else "")
                raise InputError(f"{name} is {value!r:.80}", field=name, remedy=remedy, code="out_of_range")
        if exits.threshold is not None and not self.loop.gate:
            message = f"exit_threshold is {exits.threshold!r}, but the model has no gate"
            raise InputError(message, field="exit_threshold", remedy="leave it out", code="no_gate")
        if exits.route is not None:
            self.loop.check_route(exits.route)
        if any(visits < 1 for visits in exits.visits):
            raise InputError("exit_visits has a number below 1", field="exit_visits", remedy="give 1 or more")
        visits = len(self.loop.order if exits.route is None else exits.route)
        for name, value in (("min_visits", exits.min_visits), ("max_visits", exits.max_visits)):
            if value is not None and not 1 <= value <= visits:
                remedy = f"give a number from 1 to {visits}, the visits that the model makes"
                raise InputError(f"{name} is {value}", field=name, remedy=remedy, code="out_of_range")
        if exits.max_visits is not None and exits.min_visits > exits.max_visits:
            message = f"min_visits is {exits.min_visits}, which is more than max_visits ({exits.max_visits})"
            raise InputError(message, field="min_visits", remedy="give a smaller min_visits", code="out_of_range")

    @property
    def visited(self) -> tuple[int, ...]:
        return self.loop.visited(self.layers)

    @property
    def first_planes(self) -> list[int]:
        """Return the first plane of each layer; 0 for a layer that only routes of requests visit.

        All visits to a layer have the window and rotation of its first plane.
        """
        visited = list(self.visited)
        return [visited.index(layer) if layer in visited else 0 for layer in range(self.layers)]

    @property
    def fixed(self) -> str:
        return super().fixed or "it is looped, so its rows at a visit may depend on more than their tokens"

    @property
    def resident(self) -> str:
        return "the model is looped: its layers are visited more than once"

    def program(self, copies: int = 1) -> Program:
        return replace(super().program(copies), beside=tuple(self._weights_beside()))

    def _weights_beside(self) -> Iterator[Weight]:
        """Yield the weights of the gate, the router and the mix before each visit. All but the mix are float32."""
        loop, hidden = self.loop, self.hidden

        def linear(name: str, rows: int, inputs: int, *, bias: bool = False, wide: bool = True) -> Iterator[Weight]:
            yield Weight(((f"{name}.weight", rows),), (inputs,), wide=wide)
            if bias:
                yield Weight(((f"{name}.bias", rows),), wide=True)

        if loop.gate:
            yield from linear("gate", 1, GATE_FEATURES if loop.gate_reads == "features" else hidden, bias=True)
        if loop.between == "inject":
            yield from linear("inject", hidden, 2 * hidden, wide=False)
        if loop.router is None:
            return
        yield Weight((("router.step", len(loop.order)),), (hidden,), wide=True)
        inputs, choices = (2 if loop.router.reads == "request" else 1) * hidden, loop.blocks + 1
        yield from linear("router.inner", hidden, inputs, bias=True)
        yield from linear("router.outer", choices, hidden, bias=True)
        if loop.router.planner:
            yield from linear("planner.inner", hidden, 2 * hidden, bias=True)
            yield from linear("planner.outer", len(loop.order) * choices, hidden, bias=True)

    @property
    def linear_flops(self) -> int:
        return super().linear_flops + len(self.loop.order) * 2 * self._injection

    @property
    def _injection(self) -> int:
        return 2 * self.hidden**2 if self.loop.between == "inject" else 0


# The supported value of settings of Huginn that may be absent. Other values belong to models of another structure.
HUGINN = {
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "test_time_noise": 0,
}

# Names of Ouro's parts in checkpoints.
OURO = Names(
    parts={
        "early_exit_gate": ("gate",),
        "input_layernorm_2": ("post_attention_layernorm",),
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
        "post_attention_layernorm_2": ("post_feedforward_layernorm",),
    },
)


def ouro(hf: HFConfig) -> ModelConfig:
    """Return the config of an Ouro (LoopLM): all layers `total_ut_steps` times, each time ended by the final norm.

    The norms are as in Gemma 3. With `early_exit_step`, every row is read after the visit of this number, from 0.
    """
    hf = Settings.of(hf)
    visits = _visits(hf, "total_ut_steps", 4)
    step = hf.size("early_exit_step", None, least=-(2**31), most=2**31)
    if step is not None and 0 <= step < visits:
        visits = step + 1
    threshold = hf.number("early_exit_threshold", 1.0, zero=True)
    if not 0 < threshold <= 1:
        raise UnsupportedModelError(f"early_exit_threshold is {threshold}; it must be above 0 and at most 1")
    if step is not None and visits == step + 1:
        threshold = 1.0  # early_exit_step decides
    config = decoder(hf, windows=qwen_windows(hf), out_norms=True, names=OURO)
    loop = Loop(blocks=1, order=(0,) * visits, between="norm", gate=True, threshold=float(threshold))
    return LoopedConfig.of(config, loop)


def huginn_names(prelude: int, core: int) -> Names:
    """Return the names of a Huginn with these numbers of layers in its prelude and its core."""
    return Names(
        prefix="transformer.",
        lists={"prelude": 0, "core_block": prelude, "coda": prelude + core},
        parts={
            "wte": ("embed_tokens",),
            "adapter": ("inject",),
            "ln_f": ("norm",),
            "norm_1": ("input_layernorm",),
            "norm_2": ("post_attention_layernorm",),
            "norm_3": ("pre_feedforward_layernorm",),
            "norm_4": ("post_feedforward_layernorm",),
            "attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn.qk_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias"),
            "attn.proj": ("self_attn.o_proj",),
            "mlp.fc": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.proj": ("mlp.down_proj",),
        },
        interleaved=True,
    )


def huginn(hf: HFConfig) -> ModelConfig:
    """Return the config of a Huginn (RavenForCausalLM): a prelude, a core that is visited `mean_recurrence` times, and
    a coda.

    The initial state of the core is drawn from the seed `state_seed` (default: 0).
    """
    hf = Settings.of(hf)
    for key, value in HUGINN.items():
        if hf.get(key) not in (None, value):
            raise UnsupportedModelError(f"{key} is {hf[key]!r}; only {value!r} is supported")
    heads = hf.size("n_heads", None) or hf.size("num_attention_heads")
    if hf.size("num_key_value_heads", heads) != heads:
        raise UnsupportedModelError(f"num_key_value_heads is {hf['num_key_value_heads']}; it must be the {heads} heads")
    hidden = hf.size("n_embd", None) or hf.size("hidden_size")
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd is {hidden}; it must be a multiple of the {heads} heads")
    most = {"least": 0, "most": MOST_LAYERS}
    prelude, coda = hf.size("n_layers_in_prelude", **most), hf.size("n_layers_in_coda", **most)
    core = hf.size("n_layers_in_recurrent_block", most=MOST_LAYERS)
    renamed: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": prelude + core + coda,
        "max_position_embeddings": hf.size("block_size"),
        "rms_norm_eps": hf.number("norm_eps", 1e-6),
        "rope_theta": hf.number("rope_base", 50000.0),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", hf.flag("tie_embeddings", True)),
    }
    config = decoder(
        hf | renamed,
        kv_heads=heads,
        head_dim=hidden // heads,
        qk_bias=hf.flag("qk_bias"),
        sum_norms=True,
        embedding_scale=hidden**0.5,
        names=huginn_names(prelude, core),
    )
    return LoopedConfig.of(
        config,
        Loop(
            blocks=1,
            order=(0,) * _visits(hf, "mean_recurrence"),
            prelude=prelude,
            coda=coda,
            between="inject",
            # The standard deviation of initial weights, times the embedding scale.
            noise=(2 / (5 * hidden)) ** 0.5 * hidden**0.5,
            seed=hf.size("state_seed", 0, least=0, most=2**63),
        ),
    )


# Names of Dory's parts in checkpoints. Some checkpoints count attention and the MLP after it as two layers.
DORY = Names(
    prefix="backbone.",
    before=r"model\.",
    halves=r"mixer\.|(attn|mlp)_alpha$",
    parts={
        "embeddings": ("embed_tokens",),
        "self_attn.gate_proj": ("self_attn.g_proj",),
        **{f"mixer.{name}_proj": (f"self_attn.{name}_proj",) for name in "qkvog"},
        **{f"mixer.{name}_proj": (f"mlp.{name}_proj",) for name in ("gate", "up", "down")},
        **{f"mixer.{name}": (f"self_attn.{name}",) for name in ("sqk", "s_gate")},
        **{f"mixer.{name}": (f"mlp.{name}",) for name in ("suv_gate", "suv_up")},
        "attn_alpha": ("lambda_1",),
        "mlp_alpha": ("lambda_2",),
    },
)


def dory(hf: HFConfig) -> ModelConfig:
    """Return the config of Dory: nGPT with `n_recurrent_loops` visits to the layers between the first and the last.

    Each visit starts with the norm of the state plus the norm of the input layers' output.
    """
    hf = {"sliding_window": 1024, "head_dim": 256, "num_key_value_heads": 4} | Settings.of(hf)
    loops, mode = _visits(hf, "n_recurrent_loops", 2), hf.text("recurrent_kv_cache_mode", "per_loop")
    _check_choice("recurrent_kv_cache_mode", mode, ("per_loop", "last_loop"))
    if mode == "last_loop" and loops > 1:
        raise UnsupportedModelError(
            'recurrent_kv_cache_mode is "last_loop": earlier loops of a row then see the last loop\'s keys and values '
            "for rows of earlier calls, but their own for rows of the same call, so a shared prefix depends on how "
            'prompts are cut; set it to "per_loop" in config.json'
        )
    counts = {
        "num_hidden_layers": num_layers(hf),
        "n_input_layers": hf.size("n_input_layers", 8, least=0, most=MOST_LAYERS),
        "n_recurrent_layers": hf.size("n_recurrent_layers", None, most=MOST_LAYERS),
        "n_output_layers": hf.size("n_output_layers", 8, least=0, most=MOST_LAYERS),
    }
    types = hf.texts("layer_types", None)
    if types is not None and "mlp" in types:  # attention and MLPs are listed as separate layers
        if set(types[1::2]) != {"mlp"}:
            raise hf.wrong("layer_types", 'a list in which each second entry is "mlp", or none is')
        if odd := [key for key, count in counts.items() if count is not None and count % 2]:
            raise hf.wrong(odd[0], 'an even number, because layer_types lists "mlp" separately')
        types, counts = types[::2], {key: count and count // 2 for key, count in counts.items()}
    layers, prelude, core, coda = counts.values()
    if core is not None and prelude + core + coda != layers:
        raise hf.wrong("n_recurrent_layers", "the layers that are neither input nor output layers")
    types = types or [FULL if (number + 1) % 4 == 0 else SLIDING for number in range(layers)]
    bases, given = {FULL: 1e7, SLIDING: 1e4}, hf.settings("rope_parameters")
    if set(given) - set(bases):
        raise hf.wrong("rope_parameters", f"an object with settings for {FULL} and {SLIDING}")
    for place in (hf, *map(given.settings, bases)):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise place.wrong("partial_rotary_factor", "1, because Dory rotates whole heads")
    ropes = {kind: given.settings(kind) or {"rope_theta": base} for kind, base in bases.items()}
    own = {"num_hidden_layers": layers, "layer_types": types, "rope_parameters": ropes, "rms_norm_eps": 1e-6}
    hidden, dim, deviation = hf.size("hidden_size"), hf.size("head_dim"), hf.number("initializer_range", 0.0177)
    config = llama(
        rope_of(hf | own, FULL, "rope_theta", bases[FULL]),
        windows=windows_of(hf | own, types),
        norm="unit",
        norm_weight=False,
        sphere=Sphere(
            queries=dim**0.5 / deviation,
            gates=hidden**0.25 / deviation,
            inside=hidden**0.5,
            rates=hf.number("ngpt_alpha_init", 0.05) / deviation,
            logits=1 / deviation,
        ),
        qk_norm=HeadNorm("unit", weights="none"),
        head_gates="each",
        out_norms=True,
        inner_norms=True,
        names=DORY,
    )
    config = with_local_rope(config, types, rope_of(hf | own, SLIDING, "rope_theta", bases[SLIDING]))
    return LoopedConfig.of(config, Loop(blocks=1, order=(0,) * loops, prelude=prelude, coda=coda, between="add"))


def looped(hf: HFConfig) -> ModelConfig:
    """Return the config of a looped Llama, prefold's own family.

    Llama's keys define the layers. The object `loop` has the fields of `Loop`. Instead of `order` it may have `visits`:
    this many visits to the blocks in turn.
    """
    hf = Settings.of(hf)
    settings = hf.settings("loop")
    blocks = settings.size("blocks", least=-MOST_LAYERS, most=MOST_LAYERS)
    order, router = settings.get("order"), settings.get("router")
    if order is None:
        order = [visit % max(1, blocks) for visit in range(_visits(settings, "visits"))]
    elif not isinstance(order, list) or not all(type(block) is int for block in order):
        raise settings.wrong("order", "a list of numbers of blocks")
    if router is not None:  # a string is short for an object with this kind
        values = Settings({"kind": router}, settings.file, f"{settings.prefix}router.")
        values = values if isinstance(router, str) else settings.settings("router")
        if unknown := sorted(set(values) - {field.name for field in fields(Routing)}):
            raise UnsupportedModelError(f"{values.prefix}{unknown[0]} is unknown")
        router = _read(Routing, values)
    return LoopedConfig.of(decoder(hf), _read(Loop, settings, blocks=blocks, order=tuple(order), router=router))


def _read(kind: type[T], settings: Settings, **values: Any) -> T:
    """Return a Loop or a Routing with the given fields, and the other fields from the settings."""
    for entry in fields(kind):
        if entry.name in values:
            continue
        if isinstance(entry.default, str):
            values[entry.name] = settings.text(entry.name, entry.default)
        elif isinstance(entry.default, bool):
            values[entry.name] = settings.flag(entry.name, entry.default)
        elif isinstance(entry.default, float):
            values[entry.name] = float(settings.number(entry.name, entry.default, zero=True))
        else:
            most = 2**63 if entry.name == "seed" else MOST_LAYERS
            values[entry.name] = settings.size(entry.name, entry.default, least=0, most=most)
    try:
        return kind(**values)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{settings.prefix}{error}") from None


def _visits(hf: Settings, key: str, default: int | None = None) -> int:
    visits = hf.size(key, *([] if default is None else [default]), least=-MOST_PLANES, most=MOST_PLANES)
    if visits < 1:
        raise UnsupportedModelError(f"{hf.prefix}{key} is {visits}; a pass makes at least one visit")
    return visits
