"""How a job is shown to a person: the icicle of its trie, the report page, and progress on a terminal or in a log."""

from __future__ import annotations

from .icicle import StreamShape
from .page import Report, write_report
from .progress import Progress, open_progress

__all__ = ["Progress", "Report", "StreamShape", "open_progress", "write_report"]
