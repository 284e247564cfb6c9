"""Jobs read records and write exactly one line for each record, even after a crash.

Sources read records. Adapters turn a record into items of a task, and the task's answers into an output line. The
package also has the reader, the journal, the output and the report of a job, and the commands that plan and verify one.
`opening` and `models` make these from a JobSpec. There is no torch here, and importing this package opens no files.
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
