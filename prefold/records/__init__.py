"""Records: the lines of a job's input and output.

Sources read records, adapters turn a record into a task's items and its results into an output line. Never imports
torch, and opens nothing on import.
"""

from __future__ import annotations

from .adapter import Parsed, RecordAdapter
from .batch import OpenAIBatch
from .fields import Template
from .files import open_sources
from .record import FORMATS, Record, Source
from .source import TableOptions, open_source
from .tables import Columns, TableAdapter

__all__ = [
    "FORMATS",
    "Columns",
    "OpenAIBatch",
    "Parsed",
    "Record",
    "RecordAdapter",
    "Source",
    "TableAdapter",
    "TableOptions",
    "Template",
    "open_source",
    "open_sources",
]
