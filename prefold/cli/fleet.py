"""Makes the fleet of a job out of its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..cluster.backends import backend_named, backend_names
from .build import Options, backend_name, backend_of, llm_options
from .streams import say


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
    backend, on_ray = backend_of(o), o.get("ray") is not None
    is_fleet = on_ray or bool(backend.where)
    if on_ray and not backend.on_ray:
        raise click.UsageError(f"--ray and {_asking_for(backend_name(o))} exclude each other")
    if o.get("backend") and o.get("url"):
        raise click.UsageError("--backend and --url exclude each other: a server computes as it likes")
    if is_fleet and o.get("sharing_threshold", "auto") != "auto":
        raise click.UsageError("--sharing-threshold is for one process; leave it out, or --ray, --url and --backend")
    if is_fleet and o.get("cache_reuse_shifted"):
        raise click.UsageError("--cache-reuse-shifted is for one process; leave it out, or --ray, --url and --backend")
    for option in ("backend_option", "tokenizer"):
        if o.get(option) and option not in backend.takes:
            takes = [_asking_for(name) for name in backend_names() if option in backend_named(name).takes]
            raise click.UsageError(f"--{option.replace('_', '-')} needs {', or '.join(takes)}")
    if o.get("replicas") and not on_ray:
        raise click.UsageError("--replicas needs --ray")
    if on_ray and o["ray"] and Path(o["ray"]).exists():
        raise click.UsageError(f"--ray took {o['ray']} for its address; write --ray behind it")
    if refusal := backend.refusal(o):
        raise click.UsageError(refusal)
    _own_options(o)
    return is_fleet


def _asking_for(name: str) -> str:
    """Returns the option that asks for a backend."""
    return "--url" if name == "url" else f"--backend {name}"


def load_fleet(o: Options, checkpoint: Any, tokenizer: Any, media: Any = None) -> FleetModel:
    """Returns the fleet that the options ask for; its replicas load their models meanwhile. media: the MediaTable of
    the job's tasks."""
    from ..cluster.fleet import Fleet
    from ..prefix import RowCost

    def notify(line: str) -> None:
        if not o["quiet"]:
            say(f"prefold: {line}")

    backend = backend_of(o)
    options = backend.options(o, llm_options(o), _own_options(o))
    if o.get("ray") is not None:
        from ..cluster.ray_replicas import RayReplicas

        where = {"count": o["replicas"], "address": o["ray"] or None, "backend": backend_name(o)}
        replicas: Any = RayReplicas(_model(o), options, **where, notify=notify)
    else:
        known = {"checkpoint": checkpoint, "tokenizer": tokenizer, "notify": notify}
        replicas = backend.replicas(o, options, **known)
    sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    cost = RowCost() if backend.where else _row_cost(checkpoint)
    how = {"patience": o["patience"], "notify": notify, "media": media}
    return FleetModel(Fleet(replicas, sharing=sharing, row_cost=cost, **how))


def _own_options(o: Options) -> dict[str, Any]:
    """Returns what --backend-option gives, by name."""
    own = {}
    for text in o.get("backend_option") or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise click.UsageError(f"--backend-option {text!r} is not NAME=VALUE, such as block_size=32")
        try:
            own[name] = json.loads(value)
        except ValueError:
            own[name] = value
    return own


def _row_cost(checkpoint: Any) -> Any:
    from ..job.plan import row_cost
    from ..model import config_from

    return row_cost(config_from(checkpoint.config))


def _model(o: Options) -> str:
    return str(Path(o["model"]).absolute()) if Path(o["model"]).exists() else o["model"]
