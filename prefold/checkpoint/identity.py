"""Identify a checkpoint's model without reading all weights, and name the weights' stored form ("Q4_K_M GGUF")."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..spec.files import sampled_digest
from .checkpoint import Checkpoint
from .gguf import GGUFFile

_BLOCKS, _WHOLE = 64, 4 << 20  # files over 4 MiB: hash 64 blocks of 64 KiB, which is fast on a network disk too
# Files that determine what a model computes: its own files, sentence-transformers' modules, additional chat templates.
# `_BARE` files enter the digest with their bare names, as in earlier versions, so that old jobs can be resumed.
# `_PLACED` files enter with their paths in the folder, because a template may have any name.
_BARE = ("*", "*/config.json")
_READ = (".json", ".jinja", ".txt", ".model", ".safetensors", ".gguf")  # suffixes that `read` digests
_PLACED = ("additional_chat_templates/*.jinja",)


def model_identity(checkpoint: Any, read: Callable[[Path], str] | None = None) -> dict[str, Any]:
    """Return a model's name, format, and a digest of its files. For `read`, see `folder_digest`."""
    files = "" if checkpoint.path is None else folder_digest(checkpoint.path, read)
    if getattr(checkpoint, "mmproj", None) is not None:
        files += folder_digest(checkpoint.mmproj.path, read)
    if checkpoint.inner:
        files += folder_digest(checkpoint.path / checkpoint.inner, read)
    content = json.dumps([checkpoint.config, files], sort_keys=True, default=str)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return {"name": checkpoint.name, "format": checkpoint.format, "digest": digest}


def folder_digest(path: Path, read: Callable[[Path], str] | None = None) -> str:
    """Return a digest of a checkpoint's files, which changes if the model is trained further.

    The digest covers the names and sizes of all files, the contents of JSON and Jinja files, and blocks of the weight
    files (see `sampled_digest`). With `read`, it covers `read(path)` of each file with a suffix in `_READ` instead of
    contents and blocks.
    """
    files = {path: path.name}
    if path.is_dir():
        files = {file: file.name for pattern in _BARE for file in path.glob(pattern)}
        files |= {file: file.relative_to(path).as_posix() for pattern in _PLACED for file in path.glob(pattern)}
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{files[file]} {file.stat().st_size}\n".encode())
        if read is not None and file.suffix in _READ:
            digest.update(read(file).encode())
        elif file.suffix in (".json", ".jinja"):
            digest.update(file.read_bytes())
        elif file.suffix in (".safetensors", ".gguf"):
            digest.update(sampled_digest(file, file.stat().st_size, _BLOCKS, _WHOLE).encode())
    return digest.hexdigest()


# {dtype in a safetensors file: PyTorch's name for it}
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
SAFETENSORS |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def stored_as(checkpoint: Checkpoint) -> str:
    """Return how the checkpoint's weights are stored: the type of most weights, or a GGUF file's quantization.

    Examples: "Q4_1 GGUF", "bfloat16" (a folder), "random weights". If a folder's weights cannot be read, return the
    config's dtype. Raise nothing, because job summaries call this function.
    """
    if checkpoint.format == "dummy":
        return "random weights"
    if checkpoint.gguf is not None:
        return f"{_quantisation(checkpoint.gguf)} GGUF"
    weights: Counter[str] = Counter()
    folder = None if checkpoint.path is None else checkpoint.path / checkpoint.inner
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        weights.update(_dtypes(path))
    if weights:
        return SAFETENSORS.get(name := weights.most_common(1)[0][0], name)
    return str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "unknown")


def _quantisation(file: GGUFFile) -> str:
    """Return the file's own name for its mix of types ("Q4_K_M"). Without a name, return the type of most weights."""
    from gguf.constants import LlamaFileType

    kind = file.metadata.get("general.file_type")
    if isinstance(kind, int) and kind in set(LlamaFileType) - {LlamaFileType.GUESSED}:
        return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    weights: Counter[str] = Counter()
    for name, tensor in file.tensors.items():
        weights[file.type_name(name)] += math.prod(tensor.shape)
    return weights.most_common(1)[0][0] if weights else "empty"


def _dtypes(path: Path) -> Counter[str]:
    """Return {safetensors dtype: number of weights} of a file; {} if the file cannot be read."""
    from .safetensors import SafetensorsFile

    counts: Counter[str] = Counter()
    with suppress(CheckpointError):
        for tensor in SafetensorsFile(path).tensors.values():
            counts[tensor.type] += math.prod(tensor.shape)
    return counts
