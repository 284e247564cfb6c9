"""Says in words for a person what the weights of a checkpoint are stored as: "Q4_K_M GGUF", "bfloat16"."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path

from .checkpoint import Checkpoint
from .gguf import GGUFFile

# The names that torch has for the dtypes of safetensors.
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
SAFETENSORS |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
# Longer headers, in bytes, are refused, as the safetensors library does.
LARGEST_HEADER = 100_000_000


def stored_as(checkpoint: Checkpoint) -> str:
    """Returns how the checkpoint's weights are stored: the type of most of them, and for a GGUF file its quantisation.

    Examples are "Q4_1 GGUF", "bfloat16" (of a folder) and "random weights". A folder whose weights cannot be read gives
    what its config says. It never raises, since it is for summaries.
    """
    if checkpoint.format == "dummy":
        return "random weights"
    if checkpoint.gguf is not None:
        return f"{_quantisation(checkpoint.gguf)} GGUF"
    weights: Counter[str] = Counter()
    for path in sorted(checkpoint.path.glob("*.safetensors")) if checkpoint.path is not None else []:
        weights.update(_dtypes(path))
    if weights:
        return SAFETENSORS.get(name := weights.most_common(1)[0][0], name)
    return str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "unknown")


def _quantisation(file: GGUFFile) -> str:
    """Returns the name of the file's mixture of types ("Q4_K_M") where the file gives one, else the type of most
    weights."""
    from gguf.constants import LlamaFileType

    kind = file.metadata.get("general.file_type")
    if isinstance(kind, int) and kind in set(LlamaFileType) - {LlamaFileType.GUESSED}:
        return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    weights: Counter[str] = Counter()
    for name, tensor in file.tensors.items():
        weights[file.type_name(name)] += math.prod(tensor.shape)
    return weights.most_common(1)[0][0] if weights else "empty"


def _dtypes(path: Path) -> Counter[str]:
    """Returns {dtype: number of weights} of a safetensors file; an empty Counter where its header cannot be read."""
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size <= LARGEST_HEADER else {}
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        counts: Counter[str] = Counter()
        for tensor in tensors:
            counts[str(tensor["dtype"])] += math.prod(tensor["shape"])
        return counts
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError, RecursionError):
        return Counter()
