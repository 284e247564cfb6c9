"""Puts the requests of a job in order and cuts them into windows of one row stream. NumPy only."""

from __future__ import annotations

from .order import Order
from .spool import Spool
from .window import Window, Windows

__all__ = ["Order", "Spool", "Window", "Windows"]
