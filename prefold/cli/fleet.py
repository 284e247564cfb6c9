"""Makes the fleet of a job out of its options."""

from __future__ import annotations

from collections.abc import Callable
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
    on_ray, urls = o.get("ray") is not None, o.get("url")
    if on_ray and urls:
        raise click.UsageError("--ray and --url exclude each other")
    for name in ("replicas",) if not on_ray else ("tokenizer",) if not urls else ():
        if o.get(name):
            raise click.UsageError(f"--{name} needs {'--url' if on_ray else '--ray'}")
    if on_ray and o["ray"] and Path(o["ray"]).exists():
        raise click.UsageError(f"--ray took {o['ray']} for its address; write --ray behind it")
    return on_ray or bool(urls)


def load_fleet(o: Options, checkpoint: Any, tokenizer: Any) -> FleetModel:
    """Returns the fleet that the options ask for; its replicas load their models meanwhile."""
    from ..cluster.fleet import Fleet
    from ..prefix import RowCost

    def notify(line: str) -> None:
        if not o["quiet"]:
            say(f"prefold: {line}")

    replicas = _servers(o, tokenizer) if o.get("url") else _on_ray(o, notify)
    sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    cost = RowCost() if o.get("url") else _row_cost(checkpoint)
    return FleetModel(Fleet(replicas, sharing=sharing, row_cost=cost, patience=o["patience"], notify=notify))


def _row_cost(checkpoint: Any) -> Any:
    from ..job.plan import row_cost
    from ..model import config_from

    return row_cost(config_from(checkpoint.config))


def _on_ray(o: Options, notify: Callable[[str], None]) -> Any:
    from ..cluster.ray_replicas import RayReplicas

    model = str(Path(o["model"]).absolute()) if Path(o["model"]).exists() else o["model"]
    options = llm_options(o) | {"load_format": o["load_format"]}
    return RayReplicas(model, options, count=o["replicas"], address=o["ray"] or None, notify=notify)


def _servers(o: Options, tokenizer: Any) -> Any:
    from ..cluster.http_replicas import HttpReplicas
    from ..cluster.remote_model import is_of_bytes

    takes_ids = not is_of_bytes(tokenizer)
    most = {} if o.get("max_running") is None else {"most": o["max_running"]}
    return HttpReplicas(o["url"], o["model"], tokenizer, takes_ids=takes_ids, patience=o["patience"], **most)
