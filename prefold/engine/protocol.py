"""What callers know of an engine, be it of one model or a fleet of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Sharing


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An EngineFacts is what a caller knows of an engine, and chooses by how it sends requests.

    sharing      how requests share rows in a run that does not set `sharing`
    divides      whether a run takes a whole spool or live input, and divides it among replicas
    is_ready     whether requests would be computed now; otherwise the replicas still load the model
    replicas     what became of the replicas, in words; empty for an engine of one model
    max_rows     of an engine of one model: the most rows of a step now
    max_running  of an engine of one model: the most sequences that run at once
    depth        of an engine of one model: steps of a row stream that may be in flight
    """

    sharing: Sharing
    divides: bool = False
    is_ready: bool = True
    replicas: str = ""
    max_rows: int = 0
    max_running: int = 0
    depth: int = 1
