"""Runs jobs: a job reads records and writes exactly one line for each, whatever happens in between.

Here are the reader, the gathering, the journal and the output of a job, and planning and verifying. `opening`, `inputs`
and `models` make these from a JobSpec. Importing this package does not import torch.
"""

from __future__ import annotations

from .columns import TableForm
from .flow import Job, run_beside
from .output import OutputOptions, open_output
from .plan import JobPlan, plan_job
from .run import Interrupted, Summary, run_job
