"""Compile a program for the kernels: one call takes the rows of a step through all operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import Array, Structure, addressof, c_void_p, sizeof
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import numpy as np

from ... import kernels
from ...engine.schedule.steps import NOT_FINITE, SlotStep
from ...errors import UnsupportedModelError
from ...kernels import LANES, Activation, Kind, PathPlane, ProgramCall, SlotPlane, TileCall
from ...kernels.abi import (
    ConvCall,
    DeltaCall,
    ExpertsCall,
    LatentCall,
    LatentSplit,
    MambaCall,
    RouterScore,
    ShortConvCall,
)
from ...kernels.abi import Operation as CompiledOperation
from ...kernels.threads import threads
from ...model.adapters import AdapterArrays
from ...model.config import KVSizes, ModelConfig
from ...model.program import (
    DELTA,
    OUT,
    ActivateGated,
    Add,
    Attend,
    AttendLatent,
    Buffer,
    ByPosition,
    Clamp,
    Embed,
    Experts,
    Gate,
    GatedDelta,
    H,
    Interpolate,
    Linear,
    Mamba2,
    Match,
    MediaRows,
    Mix,
    Norm,
    NormHeads,
    Operation,
    Pick,
    Rope,
    Scale,
    ScaleHeads,
    ShortConv,
    SparseGate,
    Weight,
    X,
    Xielu,
)
from ..attention.row_plan import RowPlan
from ..attention.slot_plan import SlotPlan
from ..parts import CallFields
from .memory import LINE, Workspace, place_buffers
from .model import NativeModel, PackedAdapters, PackedTable, in_turn
from .steps import NativePath, PathKV, SlotBatch, StreamBatch
from .store import NativeStore

MOST_POSITIONS = 1 << 62
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
ACTIVATIONS = {
    "": Activation.LINEARLY,
    "silu": Activation.SILU,
    "gelu_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "clamped": Activation.CLAMPED,
}
SCORES = {
    "softmax": RouterScore.SOFTMAX,
    "sigmoid": RouterScore.SIGMOID,
    "sparsemixer": RouterScore.SPARSE_MIXER,
}
# A layer of a pass, the plane where its K/V is stored, and the plane of the config with its window and RoPE.
Visit = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a pass, which a program of its own runs (`NativeProgram.through`)."""

    visits: tuple[Visit, ...] = ()  # the layers; planes are counted from 0
    embeds: bool = False  # the part starts with the embedding
    is_last: bool = False  # the part has the last layer of the pass, which drops unread rows
    keys: bool = False  # the part ends before the attention of its only layer: only keys and values are computed
    ends: bool = False  # the part has the operations after the last layer


class StreamMemory:
    """The K/V that a stream step reads and writes.

    Args:
        planes: The config planes that the path has; None: all.

    Attributes:
        kv: The K/V of the path above the next step, as in NativePath.
        fields: Fields of the kernel call.
    """

    def __init__(self, model: NativeModel, batch: StreamBatch, path: NativePath, planes: Sequence[int] | None = None):
        config, dtype = model.local, model.dtype
        planes = range(len(config.planes)) if planes is None else planes
        kept_path, kept_new = len(batch.keep_path), len(batch.keep_new)
        every = [config.kv_sizes(plane) for plane in planes]
        self.kv: PathKV = [_path_rows(sizes, kept_path + kept_new, dtype) for sizes in every]
        self._paths, self._before = (PathPlane * len(every))(), path.kv
        for plane, rows in enumerate(self.kv):
            before = path.kv[plane] if path.rows else (None, None)
            addresses = [None if half is None else half.ctypes.data for half in (*before, *rows)]
            self._paths[plane] = PathPlane(*addresses)
        self.fields: dict[str, Any] = {
            "path": path.rows, "kept_path": kept_path, "kept_new": kept_new,
            "keep_path": batch.keep_path.ctypes.data, "keep_new": batch.keep_new.ctypes.data,
        }  # fmt: skip
        if batch.scatter is not None and batch.gather is not None:
            most = max(
                [config.heads * (of.dim + of.value_dim) + of.heads * (of.dim + of.value_dim) for of in every], default=0
            )
            if (latent := config.latent) is not None:
                most = config.heads * (latent.dim + latent.tail + latent.value_dim) + latent.kept.dim
            self._room = np.empty((len(batch.scatter), most), dtype)
            self.fields |= {
                "unfolded": len(self._room), "unfolded_room": self._room.ctypes.data,
                "scatter": batch.scatter.ctypes.data, "gather": batch.gather.ctypes.data,
                "read_order": None if batch.read_order is None else batch.read_order.ctypes.data,
            }  # fmt: skip

    def paths(self, first: int = 0) -> int:
        """Return the address of the kernels' plane table, from plane `first` on."""
        return addressof(self._paths) + first * sizeof(PathPlane)


def _path_rows(sizes: KVSizes, rows: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
    """Allocate keys and values for the rows of a path."""
    keys = np.empty((rows, sizes.heads, sizes.dim), dtype)
    return keys, None if sizes.in_keys else np.empty((rows, sizes.heads, sizes.value_dim), dtype)


@dataclass(slots=True)
class PreparedStep:
    """A step that is ready to run. One object serves all repetitions of the step (`NativeProgram.follow`)."""

    batch: SlotBatch | StreamBatch
    call: ProgramCall
    buffers: np.ndarray  # int64, the addresses of the buffers
    last: int  # the largest position of the rows
    keepalive: tuple[Any, ...]  # other objects that the call refers to by address
    ids: np.ndarray | None = None  # memory for the most likely tokens, if they are read
    # True if each row's visible keys can grow in place by one key per step. None: not checked yet.
    grows: bool | None = None
    fields: Mapping[str, Any] = field(default_factory=lambda: NO_FIELDS)  # extra fields of the call
    memory: object = None  # the K/V that the call uses, in a part of a pass


class Compiler:
    """The conversion of operations to the kernels' operations (`kernels/src/interface.h`).

    Attributes:
        number: The number of each buffer.
        windows: The distinct sliding windows of planes.
        linears: Linears that adapters can modify, in the order of the adapter tables.
        states: The mixers, in the order of their states.
    """

    def __init__(self, model: NativeModel):
        self.model, self.config, self.memory = model, model.config, model.memory
        self.tables = [] if model.angles is None else model.angles.table_of
        self.is_split = model.view is not None
        self.number = {name: number for number, name in enumerate(model.program.widths)}
        self.windows = list(dict.fromkeys(plane.window for plane in model.config.planes))
        self.linears: list[Linear] = []
        self.operations: list[CompiledOperation] = []
        self.keepalive: list[np.ndarray | Structure] = []
        self.states: list[ShortConv | GatedDelta | Mamba2] = []
        self.plane = self.like = 0
        self.is_last = False
        self._pending: Add | None = None

    def add(self, kind: Kind, **fields: Any) -> None:
        """Append a compiled operation."""
        self.operations.append(CompiledOperation(kind=kind, **fields))

    def compile(self, operations: Iterable[Operation]) -> None:
        """Append operations. A sum and its norm are fused, even if the norm comes with the next call."""
        for operation in operations:
            if (pending := self._pending) is not None:
                self._pending = None
                if type(operation) is Norm and _norms_sum(operation, pending):
                    self.norm(operation, self.number[pending.beside])
                    continue
                self._sum(pending)
            if type(operation) is Add:
                self._pending = operation
                continue
            compile_one = COMPILE.get(type(operation))
            if compile_one is None:
                raise UnsupportedModelError(f"the compiled kernels lack the operation {type(operation).__name__}")
            compile_one(self, operation)

    def finish(self) -> None:
        """Append a pending sum."""
        if self._pending is not None:
            self._sum(self._pending)
        self._pending = None

    def _sum(self, add: Add) -> None:
        source, beside = self.number[add.source], self.number[add.beside]
        self.add(Kind.ADD, source=source, beside=beside, eps=add.scale, summed=self.is_split and add.summed)

    def norm(self, norm: Norm, beside: int = -1) -> None:
        """Append a norm.

        Args:
            beside: The buffer to add to the input first; -1: none.
        """
        factor, eps = norm.plain
        own = np.ones(norm.size, self.model.dtype) if norm.weight is None else self.memory.arrays[norm.weight]
        own = own if factor == 1 else own.astype(np.float32) * np.float32(factor)
        weight, wide, bias = self.address(own), own.dtype != self.model.dtype, None
        if norm.kind == "layer":  # the kernel reads the bias in the dtype of the weight
            bias = self.address(
                np.zeros_like(own) if norm.bias is None else self.memory.arrays[norm.bias].astype(own.dtype)
            )
        self.add(
            Kind.NORM, source=self.number[norm.source], out=self.number[norm.out], beside=beside, at=norm.at,
            weight=weight, bias=bias, columns=norm.size, wide=wide, eps=eps,
            summed=self.is_split and norm.whole > 0, heads=norm.whole, kv_heads=norm.copies,
        )  # fmt: skip

    def address(self, array: np.ndarray) -> int:
        """Return the address of an array, and keep the array alive as long as the program."""
        self.keepalive.append(array)
        return array.ctypes.data

    def structure(self, call: Structure) -> int:
        """Return the address of a structure, and keep it alive as long as the program."""
        self.keepalive.append(call)
        return addressof(call)

    def floats(self, weight: Weight) -> np.ndarray:
        """Return a weight in float32, with values rounded to the model's dtype."""
        return self.memory.arrays[weight].astype(np.float32)

    def vector(self, weight: Weight) -> tuple[int, bool]:
        """Return the address of a weight's values, and True if they are float32 in a model of another dtype."""
        array = self.memory.arrays[weight]
        return self.address(array), array.dtype != self.model.dtype

    def is_added(self, summed: bool) -> bool:
        """Return True if this process adds the bias. If ranks sum their results, only rank 0 adds it."""
        return not summed or self.model.ranks.rank == 0

    def bias(self, linear: Linear) -> int | None:
        """Return the address of a linear's bias, padded with zeros to all outputs. None: this process adds none."""
        if linear.bias is None or not self.is_added(linear.summed):
            return None
        bias = self.memory.arrays[linear.bias]
        bias = np.pad(bias, (0, linear.weight.rows - len(bias)))
        return self.address(in_turn(bias) if linear.gated else bias)

    def linear(self, linear: Linear) -> None:
        """Append a product."""
        words, blocks = kernels.matrix_addresses(self.memory.matrices[linear.weight])
        self.add(
            Kind.GATED if linear.gated else Kind.LINEAR, source=self.number[linear.source],
            out=self.number[linear.out], weight=words, blocks=blocks, bias=self.bias(linear),
            activation=ACTIVATIONS[linear.activation], eps=linear.gate_scale, linear=len(self.linears),
            summed=self.is_split and linear.summed,
        )  # fmt: skip
        self.linears.append(linear)

    def rope(self, rope: Rope) -> None:
        """Append the norm and the rotation of heads."""
        weight, wide = (None, False) if rope.norm is None else self.vector(rope.norm)
        self.add(
            Kind.ROPE, source=self.number[rope.source], plane=self.tables[self.like] if rope.turned else -1, at=rope.at,
            heads=rope.heads, dim=rope.dim, stride=rope.stride, weight=weight, eps=rope.eps, wide=wide,
        )  # fmt: skip

    def attend(self, attend: Attend) -> None:
        """Append attention."""
        sinks = None if attend.sinks is None else self.vector(attend.sinks)[0]
        self.add(
            Kind.ATTEND, source=self.number[attend.source], out=self.number[attend.out], at=attend.at,
            beside=self.number[attend.beside], keys=attend.keys, heads=attend.heads, dim=attend.dim,
            stride=attend.stride, plane=self.plane, wide=not attend.is_own, columns=attend.value_dim or attend.dim,
            kv_heads=attend.kv_heads, window=self.windows.index(self.config.planes[self.like].window), weight=sinks,
        )  # fmt: skip

    def pick(self, pick: Pick) -> None:
        """Append the removal of unread rows, in the last visit of a pass."""
        for source in pick.sources if self.is_last else ():
            self.add(Kind.PICK, source=self.number[source], beside=source == pick.sources[-1])

    def embed(self, embed: Embed, at: int, columns: int, *, beside: bool = False) -> None:
        """Append an embedding.

        Args:
            at, columns: The first token of this rank and its number of tokens.
            beside: True for an embedding other than the model's input embedding.
        """
        table = self.memory.tables[embed.table]
        is_packed = isinstance(table, PackedTable)
        rows, blocks = kernels.matrix_addresses(table.words if isinstance(table, PackedTable) else table)
        learned = None if embed.positions is None else self.address(self.memory.arrays[embed.positions][embed.first :])
        scale = float(np.array(embed.scale, self.model.dtype))  # rounded like transformers' tensor
        self.add(
            Kind.EMBED, out=self.number[embed.out], weight=rows, blocks=blocks, wide=is_packed, bias=learned,
            at=at, columns=columns, keys=embed.table.rows if beside else 0, dim=self.config.vocab_size, eps=scale,
            summed=self.is_split,
            positions=0 if embed.positions is None else embed.positions.rows - embed.first,
        )  # fmt: skip


def _attend_latent(compiler: Compiler, attend: AttendLatent) -> None:
    matrices = compiler.memory.latents[attend.up]
    words = {name: compiler.address(getattr(matrices, name)) for name in ("expand", "absorb", "restore")}
    sizes = {f"{name}_words": getattr(matrices, name)[0].size for name in words}
    call = LatentCall(
        **words, **sizes, rank=attend.rank, tail=attend.tail, dim=attend.dim, value_dim=attend.value_dim
    )  # fmt: skip
    compiler.add(
        Kind.ATTEND_LATENT, source=compiler.number[attend.source], beside=compiler.number[attend.beside],
        out=compiler.number[attend.out], heads=attend.heads, kv_heads=1, dim=attend.dim + attend.tail,
        columns=attend.value_dim, plane=compiler.plane,
        window=compiler.windows.index(compiler.config.planes[compiler.like].window), call=compiler.structure(call),
    )  # fmt: skip


def _norm_heads(compiler: Compiler, norm: NormHeads) -> None:
    factor, eps = norm.plain
    weight = np.ones(norm.dim, np.float32) if norm.weight is None else compiler.floats(norm.weight)
    weight = weight * np.float32(factor)
    bias = None if norm.kind != "layer" else np.zeros_like(weight) if norm.bias is None else compiler.floats(norm.bias)
    compiler.add(
        Kind.NORM_HEADS, source=compiler.number[norm.source], at=norm.at, heads=norm.heads, dim=norm.dim,
        stride=norm.stride, columns=norm.dim if len(weight) > norm.dim else 0, weight=compiler.address(weight),
        bias=None if bias is None else compiler.address(bias), eps=eps,
    )  # fmt: skip


def _by_position(compiler: Compiler, scale: ByPosition) -> None:
    compiler.add(
        Kind.BY_POSITION, source=compiler.number[scale.source], at=scale.at, heads=scale.heads, dim=scale.dim,
        stride=scale.stride, eps=scale.rate, positions=scale.period,
    )  # fmt: skip


def _scale_heads(compiler: Compiler, scale: ScaleHeads) -> None:
    numbers = (np.float32(scale.factor) * compiler.memory.arrays[scale.weight].astype(np.float32)) ** scale.power
    compiler.add(
        Kind.SCALE_HEADS, source=compiler.number[scale.source], at=scale.at, heads=scale.heads, dim=scale.dim,
        stride=scale.stride, weight=compiler.address(numbers),
    )  # fmt: skip


def _activate_gated(compiler: Compiler, gated: ActivateGated) -> None:
    compiler.add(
        Kind.ACTIVATE_GATED, source=compiler.number[gated.source], out=compiler.number[gated.out],
        columns=gated.width, activation=ACTIVATIONS[gated.activation],
    )  # fmt: skip


def _interpolate(compiler: Compiler, one: Interpolate) -> None:
    rates = np.abs(np.float32(one.factor) * compiler.memory.arrays[one.weight].astype(np.float32))
    source, beside = compiler.number[one.source], compiler.number[one.beside]
    compiler.add(Kind.INTERPOLATE, source=source, beside=beside, weight=compiler.address(rates))


def _xielu(compiler: Compiler, xielu: Xielu) -> None:
    alphas = [xielu.alpha_p, xielu.alpha_n, xielu.beta, xielu.eps]
    p, n, beta, eps = (float(compiler.memory.arrays[weight][0]) for weight in alphas)
    numbers = np.array([np.logaddexp(p, 0), beta + np.logaddexp(n, 0), beta, eps], np.float32)
    compiler.add(Kind.XIELU, source=compiler.number[xielu.source], weight=compiler.address(numbers))


def _gate(compiler: Compiler, gate: Gate) -> None:
    compiler.add(
        Kind.GATE, source=compiler.number[gate.source], beside=compiler.number[gate.by], at=gate.at, heads=gate.groups,
        dim=gate.dim, stride=gate.stride or 1, columns=gate.dim if gate.each else 1, wide=not gate.activation,
        activation=ACTIVATIONS.get(gate.activation, Activation.LINEARLY),
    )  # fmt: skip


def _embed(compiler: Compiler, embed: Embed) -> None:
    compiler.embed(embed, 0, embed.table.rows, beside=True)


def _scale(compiler: Compiler, scale: Scale) -> None:
    source, factor, weight = compiler.number[scale.source], scale.factor, None
    if scale.weight is not None:
        weight = compiler.floats(scale.weight)
        if len(weight) == 1 and scale.out is None:
            factor, weight = factor * float(weight[0]), None
    out = source if scale.out is None else compiler.number[scale.out]
    address = None if weight is None else compiler.address(weight)
    compiler.add(Kind.SCALE_ROWS, source=source, out=out, weight=address, eps=factor)


def _mix(compiler: Compiler, mix: Mix) -> None:
    buffers = np.array([compiler.number[name] for name in (*mix.sources, *mix.others)], np.int64)
    compiler.add(
        Kind.MIX, beside=compiler.number[mix.by], heads=len(mix.sources), kv_heads=len(mix.others), eps=mix.offset,
        weight=compiler.address(compiler.floats(mix.weight)), bias=compiler.address(buffers),
        columns=mix.weight.inputs[0],
    )  # fmt: skip


def _match(compiler: Compiler, match: Match) -> None:
    numbers = {"source": compiler.number[match.source], "beside": compiler.number[match.beside]}
    compiler.add(Kind.MATCH, **numbers, eps=match.least)


def _sparse_gate(compiler: Compiler, gate: SparseGate) -> None:
    compiler.add(
        Kind.SPARSE_GATE, source=compiler.number[gate.source], out=compiler.number[gate.out], columns=gate.width,
        activation=ACTIVATIONS[gate.activation], eps=gate.deviations,
    )  # fmt: skip


def _clamp(compiler: Compiler, clamp: Clamp) -> None:
    limits = np.concatenate([compiler.floats(weight) for weight in (clamp.low, clamp.high)])
    compiler.add(
        Kind.CLAMP, source=compiler.number[clamp.source], out=compiler.number[clamp.out], at=clamp.at,
        columns=clamp.size, weight=compiler.address(limits),
    )  # fmt: skip


def _experts(compiler: Compiler, experts: Experts) -> None:
    memory = compiler.memory

    def bias(weight: Weight | None) -> int | None:
        return None if weight is None else compiler.address(memory.arrays[weight])

    width = experts.down.inputs[0]
    gate_up, gate_up_blocks = kernels.matrix_addresses(memory.stacks[experts.gate_up])
    down, down_blocks = kernels.matrix_addresses(memory.stacks[experts.down])
    call = ExpertsCall(
        gate_up=gate_up, gate_up_blocks=gate_up_blocks, down=down, down_blocks=down_blocks,
        gate_up_bias=bias(experts.gate_up_bias), experts=experts.experts,
        down_bias=bias(experts.down_bias) if compiler.is_added(experts.summed) else None,
        chosen=experts.chosen, width=-(-width // LANES) * LANES, bias_width=width, normalised=experts.normalised,
        correction=bias(experts.correction), groups=experts.groups, chosen_groups=experts.chosen_groups,
        group_best=experts.group_best, scales=bias(experts.scales),
        scale=experts.scale, least_sum=experts.least_sum, tolerance=experts.tolerance,
        score=SCORES[experts.score], corrects_logits=experts.corrects_logits, is_plain=not experts.gated,
    )  # fmt: skip
    words, blocks = kernels.matrix_addresses(memory.matrices[experts.router])
    compiler.add(
        Kind.EXPERTS, source=compiler.number[experts.source], out=compiler.number[experts.out], weight=words,
        blocks=blocks, bias=bias(experts.router_bias), activation=ACTIVATIONS[experts.activation],
        summed=compiler.is_split and experts.summed, call=compiler.structure(call),
        beside=compiler.number[experts.by or experts.source],
    )  # fmt: skip


def _mixer(compiler: Compiler, kind: Kind, mixer: ShortConv | GatedDelta | Mamba2, call: Structure) -> None:
    compiler.add(
        kind, source=compiler.number[mixer.source], out=compiler.number[mixer.out], plane=len(compiler.states),
        beside=mixer.picked and compiler.is_last, call=compiler.structure(call),
    )  # fmt: skip
    compiler.states.append(mixer)


def _conv(compiler: Compiler, taps: Weight, bias: Weight | None, scales: np.ndarray | float = 1.0) -> ConvCall:
    """Return the constant part of a convolution, with float32 taps [taps, channels].

    Args:
        scales: [channels, 1].
    """
    of_channels = compiler.floats(taps)[:, 0] * np.float32(scales)
    channels, count = of_channels.shape
    return ConvCall(
        taps=compiler.address(np.ascontiguousarray(of_channels.T)), channels=channels, kept=count - 1,
        bias=None if bias is None else compiler.address(compiler.floats(bias)),
    )  # fmt: skip


def _short_conv(compiler: Compiler, mixer: ShortConv) -> None:
    _mixer(compiler, Kind.SHORT_CONV, mixer, ShortConvCall(_conv(compiler, mixer.taps, mixer.bias)))


def _gated_delta(compiler: Compiler, mixer: GatedDelta) -> None:
    call = DeltaCall(
        _conv(compiler, mixer.taps, None), rates=compiler.address(-np.exp(compiler.floats(mixer.a_log))),
        dt_bias=compiler.address(compiler.floats(mixer.dt_bias)), norm=compiler.address(compiler.floats(mixer.norm)),
        heads=mixer.heads, key_heads=mixer.key_heads, key_dim=mixer.key_dim, value_dim=mixer.value_dim, eps=mixer.eps,
        beta_scale=mixer.beta_scale, tiled=mixer.tiled,
    )  # fmt: skip
    _mixer(compiler, Kind.GATED_DELTA, mixer, call)


def _mamba2(compiler: Compiler, mixer: Mamba2) -> None:
    least, most = mixer.limits
    scales, sizes = zip(*mixer.section_scales, strict=True)
    conv = _conv(compiler, mixer.taps, mixer.conv_bias, np.repeat(scales, sizes)[:, None])
    norm = None if mixer.norm is None else compiler.address(compiler.floats(mixer.norm))
    call = MambaCall(
        conv, rates=compiler.address(-np.exp(compiler.floats(mixer.a_log))),
        dt_bias=compiler.address(compiler.floats(mixer.dt_bias)), skips=compiler.address(compiler.floats(mixer.d)),
        norm=norm, heads=mixer.heads, groups=mixer.groups, key_dim=mixer.state, value_dim=mixer.dim, eps=mixer.eps,
        least=least, most=most, norm_first=mixer.norm_first, gate_scale=mixer.scales[0], step_scale=mixer.scales[4],
    )  # fmt: skip
    _mixer(compiler, Kind.MAMBA2, mixer, call)


def _norms_sum(norm: Norm, add: Add) -> bool:
    """Return True if the norm's input is the sum that was just computed."""
    return add.scale == 1 and not add.summed and norm.source == add.source and norm.at == 0


COMPILE: dict[type[Operation], Callable[[Compiler, Any], None]] = {
    Norm: Compiler.norm,
    Linear: Compiler.linear,
    Rope: Compiler.rope,
    Attend: Compiler.attend,
    AttendLatent: _attend_latent,
    Pick: Compiler.pick,
    NormHeads: _norm_heads,
    ByPosition: _by_position,
    ScaleHeads: _scale_heads,
    ActivateGated: _activate_gated,
    Interpolate: _interpolate,
    Xielu: _xielu,
    Gate: _gate,
    Scale: _scale,
    Mix: _mix,
    Match: _match,
    SparseGate: _sparse_gate,
    Clamp: _clamp,
    Embed: _embed,
    Experts: _experts,
    ShortConv: _short_conv,
    GatedDelta: _gated_delta,
    Mamba2: _mamba2,
}


class NativeProgram:
    """The compiled layers and final norm of one model, or a part of a pass.

    Attributes:
        memory: The memory of the buffers, reused by every step.
        memory_rows: The maximum number of rows that the buffers can hold.
    """

    def __init__(
        self,
        model: NativeModel,
        adapters: Sequence[AdapterArrays] = (),
        part: Part | None = None,
        workspace: Workspace | None = None,
    ):
        """Compile the program.

        Args:
            adapters: LoRA adapters, in the order by which steps number them.
            part: The part of a pass to run. None: a whole pass.
            workspace: Memory shared by several programs. None: the program has its own memory.
        """
        self.model, self._kernels = model, model.kernels
        program = model.program
        self._part = part or Part(tuple(visits_of(model.config)), embeds=True, is_last=True, ends=True)
        every = self._part.visits
        self._planes = list(dict(sorted((plane, like) for _, plane, like in every if plane >= 0)).values())
        compiler = Compiler(model)
        self._number, self._windows = compiler.number, compiler.windows
        if self._part.embeds:
            compiler.embed(program.embed, model.vocab.start, model.tokens)
            compiler.compile(program.begin)
        of_reading = (place for place, (number, _, _) in enumerate(every, 1) if number == model.config.reading_layer)
        reading = max(of_reading, default=len(every))
        layers = {number: program.layers[number] for number, _, _ in every}
        for place, (number, plane, like) in enumerate(every, 1):
            compiler.plane, compiler.like = plane, like
            compiler.is_last = self._part.is_last and place >= reading
            compiler.compile(before_attention(layers[number]) if self._part.keys else layers[number])
        if self._part.ends:
            compiler.compile(program.end)
        compiler.finish()
        self._operations, self._keepalive = compiler.operations, compiler.keepalive
        self._layers_end = len(self._operations)
        self._head: tuple[int | None, int | None, int] | None = None
        self._array = (CompiledOperation * len(self._operations))(*self._operations)
        self._widths = np.array([model.widths[name] for name in program.widths], np.int64)
        self._layers = list(layers.values())
        self._workspace = workspace or Workspace()
        self.memory, self.memory_rows = self._workspace.memory, 0
        self._dims = np.array([] if model.angles is None else model.angles.dims, np.int64)
        self._num_tables = len(self._dims)
        self._tables: list[np.ndarray] = []
        self._addresses = (c_void_p * self._num_tables)()
        self._positions = 0 if self._num_tables else MOST_POSITIONS  # number of positions that the tables cover
        self._adapters = PackedAdapters(model, adapters, compiler.linears)
        self._last: PreparedStep | None = None  # the last step over slots

    def embedded(self, batch: SlotBatch | StreamBatch, media: MediaRows[np.ndarray]) -> np.ndarray:
        """Return the input of the first layer, [rows, hidden]: embeddings, and media rows in place of media tokens."""
        model, at = self.model, media.at
        x, learned = self._empty(len(batch.tokens)), model.program.embed.positions
        buffers = np.zeros(len(self._number), np.int64)
        buffers[self._number[X]] = x.ctypes.data
        call = ProgramCall(
            operations=addressof(self._array), count=1, buffers=buffers.ctypes.data, widths=self._widths.ctypes.data,
            rows=len(x), tokens=batch.tokens.ctypes.data, positions=batch.positions.ctypes.data, threads=threads(),
            is_bf16=model.dtype.itemsize == 2, ranks=None if model.view is None else addressof(model.view),
        )  # fmt: skip
        self._kernels.run_program(call)
        x[at] = media.values
        if learned is not None:
            x[at] += model.memory.arrays[learned][batch.positions[at] + model.program.embed.first]
        return x

    def over_slots(
        self, batch: SlotBatch, store: NativeStore, x: np.ndarray | None = None, fields: Mapping[str, Any] = NO_FIELDS
    ) -> np.ndarray:
        """Run a step over slots, and return the hidden states of the read rows, [rows, hidden].

        The K/V of the step is then in the store.

        Args:
            x: The input of the first layer; it is overwritten. None: the embeddings.
            fields: Extra fields of the call. Passing the same mapping object as in the last step says that the values
                have not changed.
        """
        return self._run(self._over(batch, store, x, fields))

    def greedy(
        self, batch: SlotBatch, store: NativeStore, x: np.ndarray | None = None, fields: Mapping[str, Any] = NO_FIELDS
    ) -> np.ndarray | None:
        """Run a step over slots, and return the most likely token of each read row, int64.

        Arguments as in `over_slots`. The next step may overwrite the result. Return None without computing anything if
        the LM head has no compiled form.
        """
        if not self._adds_head():
            return None
        step = self._over(batch, store, x, fields)
        if step.ids is None:
            step.ids, out = np.empty(step.call.picked, np.int64), self._empty(step.call.picked)
            step.call.ids, step.buffers[self._number[OUT]] = step.ids.ctypes.data, out.ctypes.data
            step.keepalive = (*step.keepalive, out)
        self._call(step)
        return step.ids

    def follow(self, step: SlotStep, fields: Mapping[str, Any] = NO_FIELDS) -> SlotBatch | None:
        """Turn the last batch into the batch of the step that follows it (`SlotStep.follows`), and return it.

        Return None and change nothing if the last call is gone, has other fields, or cannot grow.
        """
        last = self._last
        if last is None or last.fields is not fields:
            return None
        batch = last.batch
        assert isinstance(batch, SlotBatch)
        if last.grows is None:
            last.grows = all([plan.can_grow(step.slots) for plan in batch.plans.values()])
        if not last.grows:
            return None
        if not (takes := step.tokens is last.ids):
            batch.numbers[0] = step.tokens
        self._kernels.follow_program(last.call, takes)
        last.last += 1
        if last.last >= self._positions:
            self._cover(last.last)
        return batch

    def greedy_again(self, step: SlotStep) -> np.ndarray | None:
        """Return the result of `greedy` for the step that follows the last step.

        Return None without computing anything if the last step was not greedy or `follow` returns None.
        """
        last = self._last
        if last is None or last.ids is None or self.follow(step) is None:
            return None
        self._kernels.run_program(last.call)
        return last.ids

    def over_rows(
        self, batch: StreamBatch, path: NativePath, x: np.ndarray | None = None, fields: Mapping[str, Any] = NO_FIELDS
    ) -> tuple[np.ndarray, PathKV]:
        """Run a stream step.

        Return the hidden states of the read rows, [rows, hidden], and the K/V of the path above the next step. The K/V
        is as in NativePath, for the planes of the program's part.

        Args:
            x, fields: As in `over_slots`.
        """
        memory = StreamMemory(self.model, batch, path, self._planes)
        step = self._prepared(batch, x, paths=memory.paths(), **memory.fields, **fields)
        step.keepalive = (*step.keepalive, memory)
        return self._run(step), memory.kv

    def through(
        self,
        x: np.ndarray | None,
        batch: SlotBatch | StreamBatch,
        memory: NativeStore | StreamMemory,
        first: int = 0,
        fields: CallFields = NO_FIELDS,
    ) -> np.ndarray:
        """Run the program's part of a pass, and return the residual stream [rows, hidden] after it.

        After the last layer of a pass, the result has only the read rows.

        Args:
            x: The residual stream before the part; it is overwritten. None: the part starts with the embedding.
            memory: The K/V.
            first: The plane of the first visit.
            fields: Extra fields of the call. They must stay equal for one batch and its memory.
        """
        step = self._last if self.memory is self._workspace.memory else None
        if step is None or step.batch is not batch or step.memory is not memory:
            slots = batch.slots.ctypes.data if isinstance(batch, SlotBatch) else None
            own = memory.fields if isinstance(memory, StreamMemory) else {}
            self._last = step = self._prepared(batch, None, slots=slots, none=NOT_FINITE, **own, **fields)
            step.memory = memory
        if x is None:
            x = self._empty(len(batch.tokens))
        step.buffers[self._number[X]] = x.ctypes.data
        if isinstance(memory, StreamMemory):
            step.call.paths = memory.paths(first)
        else:
            step.call.planes = addressof(memory.structs) + first * sizeof(SlotPlane)
        self._call(step)
        return x[: step.call.picked] if self._part.is_last else x

    def keys_values(self, x: np.ndarray, batch: SlotBatch) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values [rows, kv_heads, dim] of the only layer of a part.

        Args:
            x: [rows, hidden], the residual stream; it is overwritten.
        """
        self._call(self._prepared(batch, x))
        number, _, _ = self._part.visits[0]
        attend = next(one for one in self.model.program.layers[number] if isinstance(one, Attend))
        place, width = self._number[attend.beside], self.model.widths[attend.beside]
        first = int(self._buffers[place]) - self.memory.ctypes.data
        size = attend.kv_heads * attend.dim
        rows = self.memory[first : first + len(x) * width * x.itemsize].view(x.dtype).reshape(len(x), width)
        halves = (rows[:, at : at + size].reshape(len(x), -1, attend.dim) for at in (attend.keys, attend.keys + size))
        keys, values = (half.copy() for half in halves)
        return keys, values

    def end_of(self, x: np.ndarray, batch: SlotBatch) -> np.ndarray:
        """Run the operations after the last layer, for a part without visits. Return [rows, hidden].

        Args:
            x: [rows, hidden], the residual stream; it is overwritten.
        """
        return self._run(self._prepared(batch, x))

    def _over(
        self, batch: SlotBatch, store: NativeStore, x: np.ndarray | None, fields: Mapping[str, Any]
    ) -> PreparedStep:
        """Return a step over slots that is ready to run: the last one if its batch, store and fields match."""
        step, planes = self._last, addressof(store.structs)
        if (
            step is None
            or step.batch is not batch
            or step.call.planes != planes
            or step.fields is not fields
            or x is not None
        ):
            step = self._prepared(batch, x, slots=batch.slots.ctypes.data, planes=planes, none=NOT_FINITE, **fields)
            step.fields = fields
            self._last = step if x is None else None
        return step

    def _adds_head(self) -> bool:
        """Append the model's LM head to the operations, if it has a compiled form. Return True if it has."""
        head = self.model.compiled_head()
        if head is None:
            return False
        if head != self._head:
            del self._operations[self._layers_end :]
            words, blocks, columns = head
            source, first = self._number[OUT], self.model.vocab.start
            self._operations.append(
                CompiledOperation(kind=Kind.HEAD, source=source, weight=words, blocks=blocks, columns=columns, at=first)
            )
            self._array = (CompiledOperation * len(self._operations))(*self._operations)
            self._head, self._last = head, None
        return True

    def _empty(self, rows: int) -> np.ndarray:
        return np.empty((rows, self.model.config.hidden), self.model.dtype)

    def _run(self, step: PreparedStep) -> np.ndarray:
        """Run a step, and return the hidden states of the read rows."""
        out = self._empty(step.call.picked)
        step.buffers[self._number[OUT]], step.ids, step.call.ids = out.ctypes.data, None, None
        self._call(step)
        return out

    def _call(self, step: PreparedStep) -> None:
        step.call.threads = threads()
        self._kernels.run_program(step.call)

    def _prepared(self, batch: SlotBatch | StreamBatch, x: np.ndarray | None, **call_fields: Any) -> PreparedStep:
        """Prepare a step.

        Args:
            x: The input of the first layer, which is overwritten (None: the embeddings).
            call_fields: Extra fields of the call, for its K/V and its results.
        """
        rows = len(batch.tokens)
        if rows > self.memory_rows or self.memory is not self._workspace.memory:
            self._make_room(max(rows, self.memory_rows))
        last = int(batch.positions.max(initial=-1))
        if last >= self._positions:
            self._cover(last)
        model, read_rows = self.model, batch.read_rows
        buffers = self._buffers.copy()
        skipped = 0  # number of operations: a pass with given inputs skips its embedding
        if x is not None:
            buffers[self._number[X]], skipped = x.ctypes.data, int(self._part.embeds)
        plans, read_plans = self._calls(batch.plans), self._calls(batch.read_plans)
        splits, read_splits = self._splits(batch.plans), self._splits(batch.read_plans)
        call = ProgramCall(
            operations=addressof(self._array) + skipped * sizeof(CompiledOperation),
            count=len(self._array) - skipped, buffers=buffers.ctypes.data, widths=self._widths.ctypes.data, rows=rows,
            picked=rows if read_rows is None else len(read_rows),
            read=None if read_rows is None else read_rows.ctypes.data, tokens=batch.tokens.ctypes.data,
            positions=batch.positions.ctypes.data, tables=addressof(self._addresses), num_tables=self._num_tables,
            dims=self._dims.ctypes.data, angles=self._angles,
            scale=model.config.scale, cap=model.config.attention_cap or 0,
            plans=addressof(plans), read_plans=addressof(read_plans), is_bf16=model.dtype.itemsize == 2,
            splits=None if splits is None else addressof(splits),
            read_splits=None if read_splits is None else addressof(read_splits),
            ranks=None if model.view is None else addressof(model.view), **call_fields,
        )  # fmt: skip
        adapted = None if batch.adapters is None else self._adapters.adapt(call, batch.adapters)
        return PreparedStep(batch, call, buffers, last, (x, plans, read_plans, splits, read_splits, adapted))

    def _calls(self, plans: Mapping[int | None, RowPlan] | Mapping[int | None, SlotPlan]) -> Any:
        """Return one TileCall per sliding window. A window without a plan gets zero queries."""
        calls = (TileCall * len(self._windows))()
        for number, window in enumerate(self._windows):
            if window in plans:
                calls[number] = plans[window].lists.call  # type: ignore[union-attr]
        return calls

    def _splits(self, plans: Mapping[int | None, RowPlan] | Mapping[int | None, SlotPlan]) -> Array[LatentSplit] | None:
        """Return the groups of queries by the numbers of windows; None: no plan has groups."""
        calls = (LatentSplit * len(self._windows))()
        found = False
        for number, window in enumerate(self._windows):
            plan = plans.get(window)
            if isinstance(plan, SlotPlan) and (split := plan.split) is not None:
                found, (absorbed, expanded, slots) = True, (split.absorbed, split.expanded, split.slots)
                calls[number] = LatentSplit(
                    absorbed.ctypes.data, expanded.ctypes.data, slots.ctypes.data, len(absorbed), len(expanded),
                    len(slots), split.lists.call,
                )  # fmt: skip
        return calls if found else None

    def _cover(self, last: int) -> None:
        """Extend the tables of rotary positions to position `last`."""
        assert self.model.angles is not None
        self._tables = list(self.model.angles.covering(last + 1))
        self._positions = min(map(len, self._tables))
        self._addresses[:] = [table.ctypes.data for table in self._tables]

    def _make_room(self, rows: int) -> None:
        """Allocate the buffers for steps of up to `rows` rows. The result is allocated separately."""
        size = self.model.dtype.itemsize
        sizes = {name: -(-width * rows * size // LINE) * LINE for name, width in self.model.widths.items()}
        del sizes[OUT]
        program = self.model.program
        places, end = place_buffers([program.begin, *self._layers], sizes, (X, H, DELTA, *program.kept))
        self.memory = self._workspace.reserve(end + rows * int(self._dims.sum()) * 4)
        first = self.memory.ctypes.data
        self._buffers = np.array([places.get(name, 0) for name in self._number], np.int64) + first
        self._angles, self.memory_rows = first + end, rows
        self._last = None


def before_attention(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operations of a layer that come before its attention."""
    return tuple(takewhile(lambda one: not isinstance(one, Attend), operations))


class ProgramParts:
    """Parts of a program, which run one at a time over rows of the caller. A part has no attention and no states.

    If a part ends with a sum and the next part starts with the norm of the sum, the next part does the addition.
    It then needs both buffers.

    Args:
        parts: In the order in which each row passes through them.
    """

    def __init__(self, model: NativeModel, parts: Iterable[Sequence[Operation]]):
        self._model, compiler = model, Compiler(model)
        self._ends, self._names = [0], list[frozenset[Buffer]]()
        for operations in parts:
            compiler.compile(operations)
            self._ends.append(len(compiler.operations))
            self._names.append(frozenset(name for one in operations for name in one.buffers))
        compiler.finish()
        self._ends[-1] = len(compiler.operations)
        self._number, self._keepalive = compiler.number, compiler.keepalive
        self._array = (CompiledOperation * len(compiler.operations))(*compiler.operations)
        self._widths = np.array([model.widths[name] for name in compiler.number], np.int64)

    def run(self, part: int, buffers: Mapping[Buffer, np.ndarray]) -> None:
        """Run a part in place over contiguous arrays, [rows, width] each. Missing buffers are allocated."""
        arrays = dict(buffers)
        assert all(array.flags.c_contiguous for array in arrays.values()), "a buffer is not contiguous"
        rows = len(next(iter(arrays.values())))
        for name in self._names[part] - arrays.keys():
            arrays[name] = np.empty((rows, self._model.widths[name]), self._model.dtype)
        addresses = np.zeros(len(self._number), np.int64)
        for name, array in arrays.items():
            addresses[self._number[name]] = array.ctypes.data
        first, end = self._ends[part], self._ends[part + 1]
        call = ProgramCall(
            operations=addressof(self._array) + first * sizeof(CompiledOperation), count=end - first,
            buffers=addresses.ctypes.data, widths=self._widths.ctypes.data, rows=rows, threads=threads(),
            is_bf16=self._model.dtype.itemsize == 2,
        )  # fmt: skip
        self._model.kernels.run_program(call)


def visits_of(config: ModelConfig) -> list[Visit]:
    """Return the visits of a whole pass. The plane of a layer without attention is -1."""
    if len(config.visited) != len({*config.visited}):  # a looped model: each visit has its own plane
        return [(number, plane, plane) for plane, number in enumerate(config.visited)]
    planes = {number: config.plane_of(number) for number in config.pass_layers if config.attends(number)}
    return [(number, planes.get(number, -1), planes.get(number, -1)) for number in config.pass_layers]
