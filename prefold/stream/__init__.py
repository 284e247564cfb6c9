"""Puts the requests of a job in order and cuts them into windows of one row stream. NumPy only."""

from __future__ import annotations

from .live_windows import Feed, LiveInput, LiveWindows
from .order import Order
from .spool import Spool
from .window import Window, Windows

__all__ = ["Feed", "LiveInput", "LiveWindows", "Order", "Spool", "Window", "Windows"]
