"""Makes the fingerprint of a job, so that a journal is never resumed by a job that would give other results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..options import journal_names
from .build import Options, adapter_folders, read_bytes
from .input import COLUMN_OPTIONS, Input

__all__ = ["fingerprint"]


def fingerprint(task: str | None, o: Options, input: Input, seed: int | None) -> dict[str, Any]:
    """Returns the fingerprint of a job: its input, its model, its task, and the options that change a result.

    seed: the seed of sampling; None where nothing is sampled.
    """
    from ..records.fields import read_argument

    options: dict[str, Any] = {}
    for name in (*COLUMN_OPTIONS, *RESULT_OPTIONS):
        value = o.get(name)
        if value is None or value == () or (value is False and name not in ("normalize", "chat")):
            continue
        if name in ("examples", "labels_file") or (name == "json_schema" and value.lstrip()[:1] != "{"):
            value = hashlib.blake2b(read_bytes(value.removeprefix("@")), digest_size=8).hexdigest()
        options[name] = read_argument(value) if isinstance(value, str) else value
    if o.get("adapter"):
        options["adapter"] = {name: _folder_digest(Path(folder)) for name, folder in adapter_folders(o).items()}
    found = {
        "input": input.source.identity,
        "task": task or "openai batch",
        "model": model_identity(input.checkpoint),
        "dtype": o["dtype"],
        "options": options,
        **({} if seed is None else {"seed": seed}),
    }
    return json.loads(json.dumps(found))  # with lists in place of tuples, as the journal gives it back


# What the options of the tasks are made of, and what chooses between them; then how the input is read. Of adapters
# a digest is kept, and the seed has a place of its own.
RESULT_OPTIONS = (*journal_names(), "chat", "recommended", "json_columns", "delimiter", "max_cell_lines")


def model_identity(checkpoint: Any) -> dict[str, Any]:
    """Returns a model's name, format, and a digest of its files."""
    files = "" if checkpoint.path is None else _folder_digest(checkpoint.path)
    content = json.dumps([checkpoint.config, files], sort_keys=True, default=str)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return {"name": checkpoint.name, "format": checkpoint.format, "digest": digest}


def _folder_digest(path: Path) -> str:
    """Returns a digest of a checkpoint's files: of the names and sizes of weights, and the contents of small files."""
    files = [path]
    if path.is_dir():
        files = [file for pattern in ("*", "*/config.json") for file in path.glob(pattern) if file.is_file()]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.suffix in (".json", ".jinja"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
