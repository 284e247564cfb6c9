"""Enter the decision heads in the tables of the core."""

from __future__ import annotations

from . import jev, kev

__all__ = ["jev", "kev"]
