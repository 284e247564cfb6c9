"""Says which model a checkpoint is, so that two of them can be told apart without reading all of their weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..files import sampled_digest

_BLOCKS, _WHOLE = 64, 4 << 20  # 4 MiB of a file are read, also where it lies on a network's disk
# The files of a folder that say what its model does: its own and those of sentence-transformers' modules, and further
# chat templates. The former count by their bare names, as they always did, so that a job which was begun by an earlier
# version can be resumed; the latter by their names in the folder, as a template may have any name.
_BARE = ("*", "*/config.json")
_PLACED = ("additional_chat_templates/*.jinja",)


def model_identity(checkpoint: Any) -> dict[str, Any]:
    """Returns a model's name, format, and a digest of its files."""
    files = "" if checkpoint.path is None else folder_digest(checkpoint.path)
    if getattr(checkpoint, "mmproj", None) is not None:
        files += folder_digest(checkpoint.mmproj.path)
    content = json.dumps([checkpoint.config, files], sort_keys=True, default=str)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return {"name": checkpoint.name, "format": checkpoint.format, "digest": digest}


def folder_digest(path: Path) -> str:
    """Returns a digest of a checkpoint's files: of their names and sizes, of the contents of small files, and of blocks
    of the weights all over each file, so that another training of the same model is another one."""
    files = {path: path.name}
    if path.is_dir():
        files = {file: file.name for pattern in _BARE for file in path.glob(pattern)}
        files |= {file: file.relative_to(path).as_posix() for pattern in _PLACED for file in path.glob(pattern)}
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{files[file]} {file.stat().st_size}\n".encode())
        if file.suffix in (".json", ".jinja"):
            digest.update(file.read_bytes())
        elif file.suffix in (".safetensors", ".gguf"):
            digest.update(sampled_digest(file, file.stat().st_size, _BLOCKS, _WHOLE).encode())
    return digest.hexdigest()
