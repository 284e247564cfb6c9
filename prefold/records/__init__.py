"""Records are the lines of a job's input and output.

Sources read records. Adapters turn a record into a task's items, and their results into an output line. This package
never imports torch, and opens nothing on import.
"""

from __future__ import annotations

from .batch import OpenAIBatch
from .fields import Template
from .formats import TableOptions
from .record import FORMATS, ParsedRecord, Record, RecordAdapter, Source
from .source import open_source, open_sources
from .tables import Columns, TableAdapter
