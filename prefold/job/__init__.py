"""Jobs: records in, one line for each out, whatever happens in between.

Sources and sinks, the journal, progress, the report, planning and verifying. Never imports torch
at import time; whoever runs a job brings an LLM along.
"""

from __future__ import annotations

from .adapter import Adapter, Parsed
from .fields import Template
from .icicle import StreamShape
from .openai import OpenAIBatch
from .output import OutputOptions, open_output
from .plan import JobPlan, plan_job
from .progress import Progress, open_progress
from .report import Report, write_report
from .rows import FORMATS, Row, Source
from .run import Interrupted, Job, Summary, run_job
from .source import open_source
from .tables import Columns, TableAdapter

__all__ = [
    "FORMATS",
    "Adapter",
    "Columns",
    "Interrupted",
    "Job",
    "JobPlan",
    "OpenAIBatch",
    "OutputOptions",
    "Parsed",
    "Progress",
    "Report",
    "Row",
    "Source",
    "StreamShape",
    "Summary",
    "TableAdapter",
    "Template",
    "open_output",
    "open_progress",
    "open_source",
    "plan_job",
    "run_job",
    "write_report",
]
