"""Jobs: records in, one line for each out, whatever happens in between.

Reader, journal, gather and output of a job, planning and verifying. Never imports torch at import time; whoever runs
a job brings an LLM along.
"""

from __future__ import annotations

from .columns import TableForm
from .output import OutputOptions, open_output
from .plan import JobPlan, plan_job
from .run import Interrupted, Job, Summary, run_job

__all__ = ["Interrupted", "Job", "JobPlan", "OutputOptions", "Summary", "TableForm"]
__all__ += ["open_output", "plan_job", "run_job"]
