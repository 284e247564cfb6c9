"""Reads the records of Parquet files; needs pyarrow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, JobError, MissingExtraError
from .record import Record, Source

_BATCH_BYTES = 4 << 20


class ParquetSource(Source):
    """Reads the records of a Parquet file.

    Raises MissingExtraError without pyarrow, and JobError where the file is no Parquet file.
    """

    def __init__(self, name: str, path: Path, identity: dict[str, Any]):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("pyarrow", "parquet", f"reading {name}") from None
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
        except pa.ArrowInvalid as error:
            raise JobError(f"{name} is not a Parquet file: {error}") from error
        super().__init__(name, "parquet", identity, schema.names)
        self.types = dict(zip(schema.names, schema.types, strict=True))
        self._path = path

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        assert self.columns is not None
        names = self.columns if columns is None else [name for name in self.columns if name in columns]
        names = names or self.columns[:1]  # one column is read in any case, as its rows have to be counted
        number = 0
        try:
            with pq.ParquetFile(self._path) as file:
                for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), columns=names):
                    yield from _batch_records(batch, number)
                    number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise JobError(f"cannot read {self.name} after record {number}: {error}") from error


def _batch_rows(metadata: Any) -> int:
    """Returns how many rows are read at once: 512, or fewer where they are large."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(512, _BATCH_BYTES * metadata.num_rows // max(1, size)))


def _batch_records(batch: Any, number: int) -> Iterator[Record]:
    size = batch.nbytes // max(1, batch.num_rows)
    try:
        for index, data in enumerate(batch.to_pylist(), number + 1):
            yield Record(index, data, size=size)
    except Exception:  # of one of the values
        names = batch.schema.names
        for index in range(batch.num_rows):
            data, bad = {}, None
            for place, name in enumerate(names):
                try:
                    data[name] = batch.column(place)[index].as_py()
                except UnicodeDecodeError as error:
                    message = f"a text is not valid UTF-8: {error}"
                    bad = InputError(message, field=name, remedy="re-encode it", code="invalid_utf8")
                except (ValueError, OverflowError, KeyError, ImportError) as error:  # as of a year beyond 9999
                    kind = batch.schema.field(place).type
                    message = f"{name!r} is a {kind} that Python has no value for: {error}"
                    bad = InputError(message, field=name, remedy="write it as a text", code="invalid_value")
            yield Record(number + index + 1, error=bad) if bad else Record(number + index + 1, data, size=size)
