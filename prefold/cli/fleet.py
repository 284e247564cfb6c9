"""Makes the fleet of a job out of its options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import JobError
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
    on_ray, urls, in_vllm = o.get("ray") is not None, o.get("url"), o.get("backend") == "vllm"
    if on_ray and urls:
        raise click.UsageError("--ray and --url exclude each other")
    if in_vllm and urls:
        raise click.UsageError("--backend and --url exclude each other: a server computes as it likes")
    if (on_ray or urls or in_vllm) and o.get("sharing_threshold", "auto") != "auto":
        raise click.UsageError("--sharing-threshold is for one process; leave it out, or --ray, --url and --backend")
    if (on_ray or urls or in_vllm) and o.get("cache_reuse_shifted"):
        raise click.UsageError("--cache-reuse-shifted is for one process; leave it out, or --ray, --url and --backend")
    if o.get("backend_option") and not in_vllm:
        raise click.UsageError("--backend-option needs --backend vllm")
    if o.get("pooling") and urls:
        raise click.UsageError("--pooling cannot be asked of a server, which pools as its model does; leave it out")
    if o.get("replicas") and not on_ray:
        raise click.UsageError("--replicas needs --ray")
    if o.get("tokenizer") and not urls and not in_vllm:
        raise click.UsageError("--tokenizer needs --url, or --backend vllm")
    if on_ray and o["ray"] and Path(o["ray"]).exists():
        raise click.UsageError(f"--ray took {o['ray']} for its address; write --ray behind it")
    return on_ray or bool(urls) or in_vllm


def load_fleet(o: Options, checkpoint: Any, tokenizer: Any, media: Any = None) -> FleetModel:
    """Returns the fleet that the options ask for; its replicas load their models meanwhile. media: the MediaTable of
    the job's tasks."""
    from ..cluster.fleet import Fleet
    from ..prefix import RowCost

    def notify(line: str) -> None:
        if not o["quiet"]:
            say(f"prefold: {line}")

    in_vllm = o.get("backend") == "vllm"
    if o.get("url"):
        replicas = _servers(o, checkpoint, tokenizer, notify)
    elif o.get("ray") is not None:
        replicas = _on_ray(o, notify)
    else:
        replicas = _in_vllm(o)
    sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    cost = RowCost() if o.get("url") or in_vllm else _row_cost(checkpoint)
    how = {"patience": o["patience"], "notify": notify, "media": media}
    return FleetModel(Fleet(replicas, sharing=sharing, row_cost=cost, **how))


def _row_cost(checkpoint: Any) -> Any:
    from ..job.plan import row_cost
    from ..model import config_from

    return row_cost(config_from(checkpoint.config))


def _on_ray(o: Options, notify: Callable[[str], None]) -> Any:
    from ..cluster.ray_replicas import RayReplicas

    options = llm_options(o) | {"load_format": o["load_format"]}
    if o.get("backend") == "vllm":
        options = {name: options[name] for name in ("device", "threads", "tensor_parallel") if name in options}
        options |= _vllm_options(o)
    where = {"count": o["replicas"], "address": o["ray"] or None}
    return RayReplicas(_model(o), options, backend=o.get("backend") or "prefold", **where, notify=notify)


def _model(o: Options) -> str:
    return str(Path(o["model"]).absolute()) if Path(o["model"]).exists() else o["model"]


def _in_vllm(o: Options) -> Any:
    from ..cluster.local_replicas import LocalReplicas

    options = _vllm_options(o)

    def make() -> Any:
        from ..cluster.vllm_host import VllmHost

        return VllmHost(_model(o), options["engine"], caching=options["caching"])

    return LocalReplicas(make, name="vLLM")


# Our options that vLLM has too, under other names.
_VLLM_NAMES = {
    "dtype": "dtype", "tensor_parallel": "tensor_parallel_size", "max_running": "max_num_seqs",
    "max_batch_rows": "max_num_batched_tokens", "kv_memory": "kv_cache_memory_bytes", "tokenizer": "tokenizer",
}  # fmt: skip


def _vllm_options(o: Options) -> dict[str, Any]:
    """Returns `engine` and `caching` of `VllmHost`. Raises JobError for what vLLM has not."""
    if o["sharing"] == "mlp" or o.get("adapter"):
        what = "--adapter" if o.get("adapter") else "--sharing mlp"
        raise JobError(f"vLLM cannot be asked for {what}; leave it out, or leave out --backend vllm")
    engine = {theirs: o[ours] for ours, theirs in _VLLM_NAMES.items() if o.get(ours) is not None}
    for text in o.get("backend_option") or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise click.UsageError(f"--backend-option {text!r} is not NAME=VALUE, such as block_size=32")
        try:
            engine[name] = json.loads(value)
        except ValueError:
            engine[name] = value
    return {"engine": engine, "caching": o["sharing"] != "off"}


def _servers(o: Options, checkpoint: Any, tokenizer: Any, notify: Callable[[str], None]) -> Any:
    from ..cluster.http_replicas import HttpReplicas
    from ..cluster.remote_model import context_of, is_of_bytes

    how = {} if o.get("max_running") is None else {"most": o["max_running"]}
    how |= {"takes_ids": not is_of_bytes(tokenizer), "context": context_of(checkpoint), "patience": o["patience"]}
    return HttpReplicas(o["url"], o["model"], tokenizer, notify=notify, **how)
