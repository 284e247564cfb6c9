"""LoRA adapters (Hu et al. 2021) as PEFT writes them, applied to the rows of a step that have one.

An adapter adds B A x, scaled, to what a linear gives for x. It is never merged into the weights: rows
of several adapters, and rows of none, go through the model together, and only rows that have an
adapter pay for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from ..errors import CheckpointError, UnsupportedModelError
from ..spec.plugins import named_class
from .adapter_config import AdapterConfig, read_adapter_config
from .config import ModelConfig
from .device import send
from .parallel import ALONE, Alone
from .sources import in_order

TENSOR = re.compile(r"(?:base_model\.model\.)?([\w.]+)\.lora_([AB])\.weight")
MODULE = re.compile(r"layers\.(\d{1,9})\.(\w+\.\w+)")  # by its name here


@dataclass(frozen=True, slots=True)
class Part:
    """A Part is one module in a fused linear: which rows of `Delta.a` are its own, its columns of the result, and
    scaled B."""

    ranks: slice
    columns: slice
    b: Tensor


@dataclass(frozen=True, slots=True)
class Delta:
    """A Delta is what an adapter adds to one linear. a [ranks of all parts, inputs]; each part's b [columns, ranks]."""

    a: Tensor
    parts: tuple[Part, ...]

    def add_to(self, out: Tensor, x: Tensor, rows: slice | Tensor) -> None:
        low = F.linear(x[rows], self.a)
        for part in self.parts:
            high = F.linear(low[:, part.ranks], part.b)
            if isinstance(rows, slice):
                out[rows, part.columns] += high
            else:
                out[:, part.columns].index_add_(0, rows, high)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An Adapter is a LoRA adapter that fits a model.

    name    as it was asked for
    layers  by layer, and by the name of the layer's linear, what is added to it
    """

    name: str
    layers: tuple[Mapping[str, Delta], ...]

    @property
    def device(self) -> torch.device:
        return next(self._tensors()).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self):
        for layer in self.layers:
            for delta in layer.values():
                yield delta.a
                yield from (part.b for part in delta.parts)


class RowAdapters:
    """A RowAdapters says which rows have which adapter.

    adapters   those of the step
    numbers    int64 [rows]: of each row the index of its adapter, or -1
    read_rows  int64, ascending: the rows whose result is wanted, as the model is given them; None: all. Known to the
               host, so that no step waits for a device to say it
    """

    def __init__(self, adapters: Sequence[Adapter], numbers: np.ndarray, read_rows: np.ndarray | None = None):
        self.adapters = tuple(adapters)
        self.numbers = numbers
        self.read_rows = read_rows

    @cached_property
    def read(self) -> RowAdapters:
        """Returns the adapters of the rows that are read."""
        return self if self.read_rows is None or not self.adapters else self._of(self.numbers[self.read_rows])

    def _of(self, numbers: np.ndarray, read_rows: np.ndarray | None = None) -> RowAdapters:
        return RowAdapters(self.adapters, numbers, read_rows) if (numbers >= 0).any() else NO_ADAPTERS

    def add(self, out: Tensor, x: Tensor, layer: int, linear: str) -> Tensor:
        """Adds to out [rows, outputs], which the linear gave for x [rows, inputs], what the adapters add, and returns
        it."""
        for rows, adapter in self._groups:
            delta = adapter.layers[layer].get(linear)
            if delta is not None:
                delta.add_to(out, x, rows)
        return out

    @cached_property
    def _groups(self) -> list[tuple[slice | Tensor, Adapter]]:
        """Returns the rows of each adapter; consecutive ones as a slice, which needs no copy."""
        groups: list[tuple[slice | Tensor, Adapter]] = []
        for number, adapter in enumerate(self.adapters):
            rows = np.flatnonzero(self.numbers == number)
            if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
                groups.append((slice(int(rows[0]), int(rows[-1]) + 1), adapter))
            elif len(rows):
                groups.append((send(rows, adapter.device), adapter))
        return groups


NO_ADAPTERS = RowAdapters((), np.empty(0, np.int64))


def load_adapter(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    name: str | None = None,
    ranks: Alone = ALONE,
) -> Adapter:
    """Returns the adapter in a PEFT folder (adapter_config.json, adapter_model.safetensors), for a model of `config`.

    dtype, device, ranks: the model's; this rank's share is kept. Raises UnsupportedModelError for what is more than
    LoRA of a layer's linears, and CheckpointError where files are missing or do not fit, naming what.
    """
    if config.loading:
        options: Any = {"dtype": dtype, "device": device, "name": name, "ranks": ranks}
        return named_class(f"{config.loading}:load_adapter")(path, config, **options)
    folder = Path(path).expanduser()
    settings = read_adapter_config(folder)
    pairs = _read_pairs(folder, config)
    layers: list[dict[str, Delta]] = []
    shard = ranks.shard(config)
    local, places = shard.local(config), shard.parts(config)
    for number in range(config.layers):
        deltas = {}
        for linear, modules in _linears(config, number).items():
            parts = []
            for (module, columns, inputs), (_, own, _) in zip(modules, _linears(local, number)[linear], strict=True):
                pair = pairs.pop((number, module), None)
                if pair is not None:
                    a, b = scaled(pair, settings, columns.stop - columns.start, inputs, folder)
                    outputs, *of_inputs = places[module.rpartition(".")[2]] if ranks.size > 1 else [slice(None)]
                    parts.append((a[:, *of_inputs], b[outputs], own))
            if parts:
                deltas[linear] = delta_of(parts, dtype, torch.device(device))
        layers.append(deltas)
    if pairs:
        names = ", ".join(pair.name for pair in list(pairs.values())[:4])
        raise UnsupportedModelError(f"{folder} adapts modules that the model has not, or that cannot be: {names}")
    if not any(layers):
        raise CheckpointError(f"{folder} adapts nothing")
    return Adapter(name or str(path), tuple(layers))


@dataclass(slots=True)
class Pair:
    """A Pair is A and B of one module, called `name` in the model that was trained."""

    name: str
    a: Tensor | None = None
    b: Tensor | None = None


def _read_pairs(folder: Path, config: ModelConfig) -> dict[tuple[int, str], Pair]:
    """Returns A and B by layer and module ("self_attn.q_proj"); those of several modules in one are parted."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        if [*folder.glob("*.bin"), *folder.glob("*.pt")]:
            raise CheckpointError(
                f"{folder} has its weights as a pickled file only, which can run code when opened; save it as "
                "safetensors (in PEFT: save_pretrained(folder, safe_serialization=True))"
            )
        raise CheckpointError(f"{folder} has no adapter_model.safetensors")
    names = config.names
    pairs: dict[str, Pair] = {}
    modules: dict[str, list[re.Match]] = {}
    strange = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                match = TENSOR.fullmatch(stored)
                name, side = match.groups() if match else ("", "")
                hits = [MODULE.fullmatch(module) for module in names.of_module(name)]
                if not all(hits):
                    strange.append(stored)
                    continue
                modules[name] = hits
                setattr(pairs.setdefault(name, Pair(name)), side.lower(), file.get_tensor(stored))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    if strange:
        raise UnsupportedModelError(
            f"{path} holds {', '.join(strange[:4])}, not supported; LoRA of the layers' linears is"
        )
    return {
        (int(module[1]), module[2]): part
        for name, hits in modules.items()
        for module, part in zip(hits, _parted(pairs[name], [module[2] for module in hits], config, folder), strict=True)
    }


def _parted(pair: Pair, modules: list[str], config: ModelConfig, folder: Path) -> list[Pair]:
    """Returns one pair a module: they share A, and each has its rows of B."""
    if pair.b is None:
        return [pair] * len(modules)
    sizes = config.fused_sizes(modules) if len(modules) > 1 else [len(pair.b)]
    if len(pair.b) != sum(sizes):
        raise CheckpointError(f"{folder}: {pair.name} has lora_B {list(pair.b.shape)}, not {sum(sizes)} rows")
    parts = zip(modules, pair.b.split(sizes), strict=True)
    order = config.head_order
    return [Pair(pair.name, pair.a, in_order(b, order) if module[-6] in "qk" else b) for module, b in parts]


def _linears(config: ModelConfig, number: int) -> dict[str, list[tuple[str, slice, int]]]:
    """Returns the modules that are fused in each linear of a layer, as (module, columns of the result, inputs)."""
    q, kv, hidden = config.q_size, config.kv_size, config.hidden
    qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    last = number == config.visited[-1]
    attention = {
        **({"q": (hidden, qkv[:1]), "kv": (hidden, qkv[1:])} if last else {"qkv": (hidden, qkv)}),
        "o": (q, [("self_attn.o_proj", hidden)]),
    }
    linears = {**(config.mixer_linears(number) or attention), **config.mlp_kind.linears(config)}
    placed: dict[str, list[tuple[str, slice, int]]] = {}
    for linear, (inputs, modules) in linears.items():
        ends = np.cumsum([size for _, size in modules]).tolist()
        placed[linear] = [
            (module, slice(end - size, end), inputs) for (module, size), end in zip(modules, ends, strict=True)
        ]
    return placed


def scaled(pair: Pair, settings: AdapterConfig, outputs: int, inputs: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Returns (A, B times the scale), in float32."""
    if pair.a is None or pair.b is None:
        raise CheckpointError(f"{folder} has only lora_{'A' if pair.b is None else 'B'} of {pair.name}")
    rank = settings.ranks.of(pair.name)
    if pair.a.shape != (rank, inputs) or pair.b.shape != (outputs, rank):
        raise CheckpointError(
            f"{folder}: {pair.name} has lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, not "
            f"{[rank, inputs]} and {[outputs, rank]} as its rank and the model ask for"
        )
    for side, tensor in (("A", pair.a), ("B", pair.b)):
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{folder}: lora_{side} of {pair.name} is of {kind}, not floating-point numbers")
    scale = settings.scale(pair.name)
    a, b = pair.a.float(), pair.b.float() * scale
    if not (a.isfinite().all() and b.isfinite().all()):
        raise CheckpointError(f"{folder}: {pair.name} is not finite, with a scale of {scale:g}")
    return a, b


def delta_of(parts: list[tuple[Tensor, Tensor, slice]], dtype: torch.dtype, device: torch.device) -> Delta:
    ends = np.cumsum([len(a) for a, _, _ in parts]).tolist()
    return Delta(
        torch.cat([a for a, _, _ in parts]).to(device, dtype),
        tuple(
            Part(slice(end - len(a), end), columns, b.to(device, dtype))
            for end, (a, b, columns) in zip(ends, parts, strict=True)
        ),
    )
