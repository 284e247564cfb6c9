"""The input file of a batch, which a client has uploaded: what is wrong with it is the client's, not the server's."""

from __future__ import annotations

from pathlib import Path

from ..errors import JobError
from ..records.identity import file_identity, is_gzip
from ..records.record import Source
from ..records.textual import LineSource, TableOptions


def open_input(path: Path, name: str, most_bytes: int) -> Source:
    """Returns the source of the lines of an uploaded file.

    name        by which its client knows it, for errors
    most_bytes  of a line; a longer one is a record with an error

    Raises JobError where the file itself is at fault, and OSError where the disk is.
    """
    try:
        if is_gzip(path):
            raise JobError(f"{name} is compressed; upload it as plain JSONL: gunzip {name}")
        identity = file_identity(path)
        with path.open("rb") as file:
            head = file.readline(most_bytes)
    except FileNotFoundError:
        raise JobError(f"the input file {name} is gone; upload it again") from None
    source = LineSource.make(name, "jsonl", identity, head, lambda: path.open("rb"), TableOptions())
    assert isinstance(source, LineSource)
    source.most_bytes = most_bytes
    source.paths = (path,)
    return source
