"""Identifies the model that a checkpoint is without reading all of its weights, and names the form in which they are
stored: "Q4_K_M GGUF", "bfloat16"."""

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

_BLOCKS, _WHOLE = 64, 4 << 20  # 4 MiB of a file are read, also where it lies on a network's disk
# The files of a folder that say what its model does: its own and those of sentence-transformers' modules, and further
# chat templates. The former count by their bare names, as they always did, so that a job which was begun by an earlier
# version can be resumed; the latter by their names in the folder, as a template may have any name.
_BARE = ("*", "*/config.json")
_READ = (".json", ".jinja", ".txt", ".model", ".safetensors", ".gguf")
_PLACED = ("additional_chat_templates/*.jinja",)


def model_identity(checkpoint: Any, read: Callable[[Path], str] | None = None) -> dict[str, Any]:
    """Returns a model's name, format, and a digest of its files. read: as of `folder_digest`"""
    files = "" if checkpoint.path is None else folder_digest(checkpoint.path, read)
    if getattr(checkpoint, "mmproj", None) is not None:
        files += folder_digest(checkpoint.mmproj.path, read)
    if checkpoint.inner:
        files += folder_digest(checkpoint.path / checkpoint.inner, read)
    content = json.dumps([checkpoint.config, files], sort_keys=True, default=str)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return {"name": checkpoint.name, "format": checkpoint.format, "digest": digest}


def folder_digest(path: Path, read: Callable[[Path], str] | None = None) -> str:
    """Returns a digest of a checkpoint's files: of their names and sizes, of the contents of small files, and of blocks
    of the weights all over each file, so that another training of the same model is another one.

    read  returns a digest of a whole file, to be used for each file that a model is made of; None: blocks will do
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


# The names that torch has for the dtypes of safetensors.
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
SAFETENSORS |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


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
    folder = None if checkpoint.path is None else checkpoint.path / checkpoint.inner
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else []:
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
    """Returns {dtype: number of weights} of a safetensors file; an empty Counter for a file that cannot be read."""
    from .safetensors import SafetensorsFile

    counts: Counter[str] = Counter()
    with suppress(CheckpointError):
        for tensor in SafetensorsFile(path).tensors.values():
            counts[tensor.type] += math.prod(tensor.shape)
    return counts
