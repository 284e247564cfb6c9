"""Register the decision heads and listwise rerankers in the core's tables."""

from __future__ import annotations

from . import clef, decision2, jev, jina, kev

__all__ = ["clef", "decision2", "jev", "jina", "kev"]
