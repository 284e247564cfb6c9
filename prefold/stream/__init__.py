"""Puts the requests of a job in order and cuts them into windows of one row stream. NumPy only."""

from __future__ import annotations

from .spool import Spool
from .window import Window

__all__ = ["Spool", "Window"]
