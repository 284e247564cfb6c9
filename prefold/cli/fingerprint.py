"""Makes the fingerprint of a job, so that a journal is never resumed by a job that would give other results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..checkpoint.identity import folder_digest, model_identity
from ..model_options import model_fields
from ..options import OPTIONS, cli_names, kind_of
from .build import Options, adapter_folders, read_bytes
from .input import COLUMN_OPTIONS, Input


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
        if name in FILES or (name == "json_schema" and value.lstrip()[:1] != "{"):
            value = hashlib.blake2b(read_bytes(value.removeprefix("@")), digest_size=8).hexdigest()
        options[name] = read_argument(value) if name in TEXTS else value
    if o.get("adapter"):
        options["adapter"] = {name: folder_digest(Path(folder)) for name, folder in adapter_folders(o).items()}
    found = {
        "input": input.source.identity,
        "format": input.source.format,
        "task": task or "openai batch",
        "model": model_identity(input.checkpoint),
        "dtype": o["dtype"],
        "options": options,
        **({} if seed is None else {"seed": seed}),
    }
    return json.loads(json.dumps(found))  # with lists in place of tuples, as the journal gives it back


# Options that are a text or, as @FILE, a file with it; of the others some may begin with an @ and mean it.
TEXTS = {"prompt", "query", "document", "continuation", "tools", "regex", "grammar"}
TEXTS |= {one.name for kind in OPTIONS.values() for one in fields(kind) if kind_of(one) is str}
# Options that name a file, of which a digest is kept.
FILES = ("examples", "labels_file", "cache_reuse_shifted")


def _journal_names() -> tuple[str, ...]:
    """Returns the parameters, but for adapters, with which a job of a task is another job when they differ."""
    names = [
        name
        for task, kind in OPTIONS.items()
        for one in fields(kind)
        if one.metadata["journal"] and one.name != "adapter"
        for name in cli_names(task)[one.name]
    ]
    return tuple(dict.fromkeys([*names, *(name for name, one in model_fields().items() if one.metadata["journal"])]))


# What the options of the tasks are made of, and what chooses between them; then how the input is read. Of adapters
# a digest is kept, and the seed has a place of its own.
RESULT_OPTIONS = (
    *_journal_names(),
    "chat",
    "recommended",
    "tokenizer",
    "json_columns",
    "delimiter",
    "max_cell_lines",
    "media_folder",
    "media_bytes",
    "media_pixels",
    "backend",
    "backend_option",
)
