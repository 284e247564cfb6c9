"""Enter the decision heads and listwise rerankers in the tables of the core."""

from __future__ import annotations

from . import clef, decision2, jev, jina, kev

__all__ = ["clef", "decision2", "jev", "jina", "kev"]
