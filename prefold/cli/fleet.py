"""Makes the fleet of a job out of its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .build import Options, llm_options
from .streams import say

__all__ = ["FleetModel", "has_fleet", "load_fleet"]


class FleetModel:
    """Stands for the LLM of a job that runs on a fleet."""

    def __init__(self, engine: Any):
        self.engine = engine

    @property
    def dtype(self) -> str:
        """Returns what the replicas compute in, "" while none is ready."""
        return "" if self.engine.facts is None else self.engine.facts.dtype

    def close(self) -> None:
        """Ends the replicas."""
        self.engine.close()


def has_fleet(o: Options) -> bool:
    """Returns whether the options ask for a fleet. Raises UsageError for those that make no sense together."""
    if o.get("ray") is None:
        if o.get("replicas"):
            raise click.UsageError("--replicas needs --ray")
        return False
    if o["ray"] and Path(o["ray"]).exists():
        raise click.UsageError(f"--ray took {o['ray']} for its address; write --ray behind it")
    return True


def load_fleet(o: Options, checkpoint: Any, tokenizer: Any) -> FleetModel:
    """Returns the fleet that the options ask for; its replicas load their models meanwhile."""
    from ..cluster.fleet import Fleet
    from ..cluster.ray_replicas import RayReplicas
    from ..job.plan import row_cost
    from ..model import config_from

    def notify(line: str) -> None:
        if not o["quiet"]:
            say(f"prefold: {line}")

    model = str(Path(o["model"]).absolute()) if Path(o["model"]).exists() else o["model"]
    options = llm_options(o) | {"load_format": o["load_format"]}
    replicas = RayReplicas(model, options, count=o["replicas"], address=o["ray"] or None, notify=notify)
    sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    cost = row_cost(config_from(checkpoint.config))
    return FleetModel(Fleet(replicas, sharing=sharing, row_cost=cost, patience=o["patience"], notify=notify))
