"""Reads and writes wire formats: the bodies of OpenAI-style requests become items, and results become responses.

`endpoints.py` says which URL is answered by which task. Nothing here imports torch, or knows of files or sockets.
"""

from __future__ import annotations

from .endpoints import ENDPOINTS, KINDS, TASKS, RequestKind, openai_error, response_body

__all__ = ["ENDPOINTS", "KINDS", "TASKS", "RequestKind", "openai_error", "response_body"]
