"""Enter the decision heads in the tables of the core."""

from __future__ import annotations

from . import clef, decision2, jev, kev

__all__ = ["clef", "decision2", "jev", "kev"]
