"""Read LoRA adapters (Hu et al. 2021) in PEFT's format, scale them, and check them against a model. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.safetensors import FLOATING, SafetensorsFile
from ..errors import CheckpointError, UnsupportedModelError
from .adapter_config import AdapterConfig, read_adapter_config
from .config import ModelConfig
from .program import Program
from .shard import Shard
from .sources import in_order, rows_of_parts

TENSOR = re.compile(r"(?:base_model\.model\.)?([\w.]+)\.lora_([AB])\.weight")
MODULE = re.compile(r"layers\.(\d{1,9})\.(\w+\.\w+)")  # prefold's name


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One module's part of a fused linear."""

    ranks: slice  # the module's rows of `LinearAdapter.a`
    columns: slice  # the module's columns of the linear's result
    b: NDArray[np.float32]  # scale * B [columns, ranks]


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """A and B of one linear."""

    a: NDArray[np.float32]  # [ranks of all parts, inputs]
    parts: tuple[AdapterPart, ...]

    @classmethod
    def joined(cls, parts: Sequence[tuple[np.ndarray, np.ndarray, slice]]) -> LinearAdapter:
        """Join the modules of a linear. Each part has A, scaled B, and the columns of the result."""
        ends = np.cumsum([len(a) for a, _, _ in parts]).tolist()
        return cls(
            np.concatenate([a for a, _, _ in parts]),
            tuple(
                AdapterPart(slice(end - len(a), end), columns, b)
                for end, (a, b, columns) in zip(ends, parts, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True)
class AdapterArrays:
    """A LoRA adapter that fits a model."""

    name: str  # the adapter's name in the option `adapters`, else its path
    layers: tuple[Mapping[str, LinearAdapter], ...]  # per layer, by the name of the linear


@dataclass(slots=True)
class Pair:
    """A and B of one module, with the module's name in the checkpoint."""

    name: str
    a: np.ndarray | None = None
    b: np.ndarray | None = None


def read_adapter(
    path: str | Path, config: ModelConfig, *, name: str | None = None, shard: Shard | None = None
) -> AdapterArrays:
    """Read the adapter in a PEFT folder (adapter_config.json, adapter_model.safetensors).

    Args:
        path: the folder.
        config: the model.
        name: name of the adapter; None: the path.
        shard: keep only this rank's share of a split model; None: keep all.

    Raises:
        UnsupportedModelError: the adapter is more than LoRA of the layers' linears.
        CheckpointError: files are missing or do not fit the model.
    """
    folder = Path(path).expanduser()
    settings = read_adapter_config(folder)
    pairs = _read_pairs(folder, config)
    layers: list[dict[str, LinearAdapter]] = []
    local = config if shard is None else shard.local(config)
    whole = config.program()
    own_program = whole if shard is None else local.program(shard.copies)
    for number in range(config.layers):
        linears, own_linears = {}, _linears(own_program, number)
        for linear, modules in _linears(whole, number).items():
            parts = []
            for (module, columns, inputs), (_, own, _) in zip(modules, own_linears[linear], strict=True):
                pair = pairs.pop((number, module), None)
                if pair is not None:
                    shape = (columns.stop - columns.start, inputs)
                    a, b = scaled(pair, settings, *shape, folder)
                    outputs, *of_inputs = [slice(None)] if shard is None else shard.part(config, module, shape)
                    parts.append((a[:, *of_inputs], b[outputs], own))
            if parts:
                linears[linear] = LinearAdapter.joined(parts)
        layers.append(linears)
    if pairs:
        names = ", ".join(pair.name for pair in list(pairs.values())[:4])
        raise UnsupportedModelError(f"{folder} adapts modules that the model lacks or does not support: {names}")
    if not any(layers):
        raise CheckpointError(f"{folder} adapts nothing")
    return AdapterArrays(name or str(path), tuple(layers))


def adapter_file(folder: Path) -> SafetensorsFile:
    """Open the tensors of a PEFT folder. Raise CheckpointError if it has no safetensors file."""
    path = folder / "adapter_model.safetensors"
    if path.is_file():
        return SafetensorsFile(path)
    if [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        raise CheckpointError(
            f"{folder} has only pickled weights, which can run code when opened; save them as safetensors (in PEFT: "
            "save_pretrained(folder, safe_serialization=True))"
        )
    raise CheckpointError(f"{folder} has no adapter_model.safetensors")


def _read_pairs(folder: Path, config: ModelConfig) -> dict[tuple[int, str], Pair]:
    """Return A and B by (layer, module), such as (0, "self_attn.q_proj"). A fused linear yields one pair per module."""
    file, names = adapter_file(folder), config.names
    pairs: dict[str, Pair] = {}
    modules: dict[str, list[re.Match[str]]] = {}
    strange = []
    for stored in file.tensors:
        match = TENSOR.fullmatch(stored)
        name, side = match.groups() if match else ("", "")
        found = [MODULE.fullmatch(module) for module in names.of_module(name)]
        hits = [hit for hit in found if hit is not None]
        if len(hits) < len(found):
            strange.append(stored)
            continue
        modules[name] = hits
        setattr(pairs.setdefault(name, Pair(name)), side.lower(), file.array(stored))
    if strange:
        raise UnsupportedModelError(
            f"{file.path} has {', '.join(strange[:4])}, not supported; only LoRA of the layers' linears is"
        )
    return {
        (int(module[1]), module[2]): part
        for name, hits in modules.items()
        for module, part in zip(hits, _parted(pairs[name], [module[0] for module in hits], config, folder), strict=True)
    }


def _parted(pair: Pair, modules: list[str], config: ModelConfig, folder: Path) -> list[Pair]:
    """Return one pair per module. All share A, and each has its rows of B."""
    if pair.b is None:
        return [pair] * len(modules)
    sizes = config.fused_sizes(modules) if len(modules) > 1 else [len(pair.b)]
    if len(pair.b) != sum(sizes):
        raise CheckpointError(f"{folder}: {pair.name} has lora_B {list(pair.b.shape)}, not {sum(sizes)} rows")
    rows = rows_of_parts(sizes, config.groups_of(pair.name))
    parts = zip(modules, (pair.b[part] for part in rows), strict=True)
    return [Pair(pair.name, pair.a, in_order(b, config.row_order(f"{module}.weight"))) for module, b in parts]


def _linears(program: Program, number: int) -> dict[str, list[tuple[str, slice, int]]]:
    """Return, per linear of a layer, its fused modules as (module, columns of the result, number of inputs)."""
    placed: dict[str, list[tuple[str, slice, int]]] = {}
    for linear in program.linears(number):
        (inputs,), parts = linear.weight.inputs, linear.weight.parts
        modules = [tensor.removeprefix(f"layers.{number}.").removesuffix(".weight") for tensor, _ in parts]
        ends = np.cumsum([size for _, size in parts]).tolist()
        placed[linear.name] = [
            (module, slice(end - size, end), inputs)
            for module, (_, size), end in zip(modules, parts, ends, strict=True)
        ]
    return placed


def scaled(
    pair: Pair, settings: AdapterConfig, outputs: int, inputs: int, folder: Path
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (A, scale * B)."""
    if pair.a is None or pair.b is None:
        raise CheckpointError(f"{folder} has only lora_{'A' if pair.b is None else 'B'} of {pair.name}")
    rank = settings.ranks.of(pair.name)
    if pair.a.shape != (rank, inputs) or pair.b.shape != (outputs, rank):
        raise CheckpointError(
            f"{folder}: {pair.name} has lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, not "
            f"{[rank, inputs]} and {[outputs, rank]}, which its rank and the model need"
        )
    for side, array in (("A", pair.a), ("B", pair.b)):
        if array.dtype not in FLOATING:
            raise CheckpointError(
                f"{folder}: lora_{side} of {pair.name} has dtype {array.dtype}; it must be floating-point"
            )
    scale = settings.scale(pair.name)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = pair.a.astype(np.float32), pair.b.astype(np.float32) * np.float32(scale)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{folder}: {pair.name} has values that are not finite (scale {scale:g})")
    return a, b
