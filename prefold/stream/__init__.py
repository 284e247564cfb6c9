"""The requests of a job, put in order, as windows of one row stream. NumPy only."""

from __future__ import annotations

from .spool import Spool
from .window import Window

__all__ = ["Spool", "Window"]
