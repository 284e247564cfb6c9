"""Makes what computes out of a command's options: the files of a model, its LLM, or the fleet of a job."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..cluster.backends import Backend, backend_named, backend_names
from ..errors import InputError, JobError
from ..model_options import GROUPS, CacheOptions, ModelOptions, model_fields, model_keywords
from .process import say

Options = dict[str, Any]


def backend_name(o: Options) -> str:
    """Returns the name of what computes a job."""
    return "url" if o.get("url") else o.get("backend") or "prefold"


def backend_of(o: Options) -> Backend:
    """Returns the backend that computes a job. Raises UsageError where there is no such backend."""
    try:
        return backend_named(backend_name(o))
    except InputError as error:
        raise click.UsageError(f"--backend: {error}") from None


def open_model(o: Options, *, weights: bool = True) -> tuple[Any, Any]:
    """Returns (checkpoint, tokenizer or None) of --model. Reads no weights.

    weights  whether those of a hub id are downloaded, as they are going to be read
    """
    if (backend := backend_of(o)).where:
        from ..cluster.http_bodies import remote_model

        notify = partial(click.echo, err=True)
        return remote_model(o["model"], backend.tokenizer(o), backend.where, notify)
    from ..text import tokenizer_or_none

    checkpoint = find_model(o, weights=weights)
    return checkpoint, tokenizer_or_none(checkpoint)


def find_model(o: Options, *, weights: bool) -> Any:
    """Returns the checkpoint of --model, after a look at its config: a model that is not supported is refused before
    anything is read."""
    from ..checkpoint import resolve
    from ..model import config_from

    checkpoint = resolve(
        o["model"],
        load_format=o["load_format"],
        weights=weights,
        mmproj=o.get("mmproj"),
        notify=lambda line: click.echo(line, err=True),
    )
    config_from(checkpoint.config)
    return checkpoint


def check_tokenizer(checkpoint: Any, tokenizer: Any, texts: str) -> None:
    """Raises JobError where the model has no tokenizer for `texts` (what they are, in words)."""
    if tokenizer is None:
        beside = "save its tokenizer.json beside it (transformers: AutoTokenizer.from_pretrained(...).save_pretrained("
        beside += "folder))"
        if checkpoint.path is None:  # a shape, which is no folder
            beside = "with --load-format dummy, --model may also be the folder or the hub id of a model that has one"
        ids = "or give OpenAI batch lines of token ids"
        raise JobError(f"{checkpoint.name} has no tokenizer, which {texts} need; {beside}, {ids}")


def load_llm(o: Options, checkpoint: Any, tokenizer: Any, media: Any = None) -> Any:
    """Returns the LLM of the options. media: the MediaTable of tasks that were made before. Imports torch."""
    from ..llm import LLM

    return LLM(checkpoint, tokenizer=tokenizer, media=media, **llm_options(o))


def image_reading(o: Options) -> dict[str, Any]:
    """Returns how images are read, as of `ModelConfig.image_inputs`. Paths are read in --media-folder alone."""
    folder = o.get("media_folder")
    if folder is not None and not Path(folder).is_dir():
        raise JobError(f"--media-folder {folder}: there is no such folder")
    limits = {"file_bytes": o.get("media_bytes"), "pixels": o.get("media_pixels")}
    place = {"folder": None if folder is None else Path(folder), "paths": folder is not None}
    limited = {name: value for name, value in limits.items() if value is not None}
    return place | limited | {"hosts": o.get("allow_media_host") or ()}


def llm_options(o: Options) -> dict[str, Any]:
    """Returns the keywords for `LLM`, but its checkpoint and tokenizer, out of the options that were given."""
    keywords: dict[str, Any] = {}
    for name, option in model_fields(ModelOptions, *GROUPS.values()).items():
        value = o.get(name)
        if value is not None and value is not False and value != ():
            keywords[option.name] = value
    if o.get("adapter"):
        keywords["adapters"] = adapter_folders(o)
    if o.get("task") and not (o.get("image") or o.get("messages")):
        keywords["tower"] = False  # the table has texts alone
    if not isinstance(o.get("cache"), CacheOptions):
        options = model_fields(CacheOptions)
        settings = {option.name: o[name] for name, option in options.items() if o.get(name) is not None}
        # A sorted job never comes back to a prefix that it has left; a stream may.
        keywords["cache"] = o.get("cache") or ("lru" if settings or o.get("stream") else "off")
        if keywords["cache"] == "off" and "shifted" in settings:
            raise click.UsageError("--cache-reuse-shifted needs a cache; leave out --cache off")
        if keywords["cache"] != "off" and settings:
            keywords["cache"] = CacheOptions(policy=keywords["cache"], **settings)
    return model_keywords(keywords)


def adapter_folders(o: Options) -> dict[str, str]:
    """Returns {name: folder} of --adapter."""
    out = {}
    for text in o.get("adapter") or ():
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise click.UsageError(f"--adapter {text!r}: write NAME=FOLDER")
        if not Path(folder).is_dir():
            raise JobError(f"--adapter {name}: there is no folder {folder}")
        out[name] = folder
    return out


class FleetModel:
    """Stands for the LLM of a job that runs on a fleet."""

    def __init__(self, engine: Any):
        self.engine = engine

    @property
    def dtype(self) -> str:
        """Returns the dtype of the replicas, "" while none is ready."""
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
    from ..job.plan import row_cost
    from ..model import config_from
    from ..prefix import RowCost

    def notify(line: str) -> None:
        if not o["quiet"]:
            say(f"prefold: {line}")

    backend = backend_of(o)
    options = backend.options(o, llm_options(o), _own_options(o))
    if o.get("ray") is not None:
        from ..cluster.ray_replicas import RayReplicas

        where = {"count": o["replicas"], "address": o["ray"] or None, "backend": backend_name(o)}
        model = str(Path(o["model"]).absolute()) if Path(o["model"]).exists() else o["model"]
        replicas: Any = RayReplicas(model, options, **where, notify=notify)
    else:
        known = {"checkpoint": checkpoint, "tokenizer": tokenizer, "notify": notify}
        replicas = backend.replicas(o, options, **known)
    sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    cost = RowCost() if backend.where else row_cost(config_from(checkpoint.config))
    how = {"patience": o["patience"], "notify": notify, "media": media}
    return FleetModel(Fleet(replicas, sharing=sharing, row_cost=cost, **how))


def _own_options(o: Options) -> dict[str, Any]:
    """Returns the values of --backend-option by name."""
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
