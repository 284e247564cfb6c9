"""Jobs: read records, and write exactly one line for each, whatever happens in between.

Sources read records. Adapters turn a record into a task's items, and the task's answers into an output line. Here are
also the reader, the journal, the output and the report of a job, and the commands that plan and verify one. `opening`,
`inputs` and `models` make these from a JobSpec. No torch; importing this package opens nothing.
"""

from __future__ import annotations

from ..tasks.rows import Columns
from ..text.fields import Template
from .batch import OpenAIBatch
from .columns import TableForm
from .formats import TableOptions
from .output import FileOutput, OutputOptions, open_output
from .plan import JobPlan, plan_job
from .record import FORMATS, ParsedRecord, Record, RecordAdapter, Source
from .run import Interrupted, Job, Summary, run_beside, run_job, write_errors
from .source import open_source, open_sources
from .tables import TableAdapter
