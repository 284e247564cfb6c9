"""Wire formats: the bodies of OpenAI-style requests and responses, as items and results.

`endpoints.py` says which URL is answered by which task. Never imports torch, and knows nothing of files or sockets.
"""

from __future__ import annotations

from .endpoints import ENDPOINTS, KINDS, TASKS, Kind, error_body, response_body

__all__ = ["ENDPOINTS", "KINDS", "TASKS", "Kind", "error_body", "response_body"]
