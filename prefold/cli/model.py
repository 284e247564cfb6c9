"""Makes a checkpoint, an LLM, or the fleet of a job from a command's options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click

from ..cluster.backends import Backend, backend_named, backend_names
from ..engine.protocol import Engine
from ..errors import InputError, JobError
from ..files import read_text
from ..spec.fields import kind_of
from ..spec.model import GROUPS, CacheOptions, ModelSpec, model_fields, model_keywords
from ..spec.task import OPTIONS, ConversationOptions, LoopedOptions, SamplerOptions, cli_names
from ..types import Sharing
from .process import say

Options = dict[str, Any]


def backend_name(o: Options) -> str:
    """Returns the name of a job's backend."""
    return "url" if o.get("url") else o.get("backend") or "prefold"


def backend_of(o: Options) -> Backend:
    """Returns the backend of a job. Raises UsageError for an unknown one."""
    try:
        return backend_named(backend_name(o))
    except InputError as error:
        raise click.UsageError(f"--backend: {error}") from None


def open_model(o: Options, *, weights: bool = True) -> tuple[Any, Any]:
    """Returns (checkpoint, tokenizer or None) of --model, without reading weights. weights: whether the weights of a
    hub id are downloaded"""
    if (backend := backend_of(o)).where:
        from ..cluster.http_bodies import remote_model

        notify = partial(click.echo, err=True)
        return remote_model(o["model"], backend.tokenizer(o), backend.where, notify)
    from ..text import tokenizer_or_none

    checkpoint = find_model(o, weights=weights)
    return checkpoint, tokenizer_or_none(checkpoint)


def find_model(o: Options, *, weights: bool) -> Any:
    """Returns the checkpoint of --model, and checks its config first, so that an unsupported model is refused before
    anything is read."""
    from ..checkpoint import resolve
    from ..model import config_from

    checkpoint = resolve(
        o["model"],
        load_format=o["load_format"],
        weights=weights,
        mmproj=o.get("mmproj"),
        context_length=o.get("context_length"),
        notify=lambda line: click.echo(line, err=True),
    )
    config_from(checkpoint.config)
    return checkpoint


def check_tokenizer(checkpoint: Any, tokenizer: Any, texts: str) -> None:
    """Raises JobError if the model has no tokenizer. texts: what needs it, for the error"""
    if tokenizer is None:
        advice = "save its tokenizer.json beside it (transformers: AutoTokenizer.from_pretrained(...).save_pretrained("
        advice += "folder))"
        if checkpoint.path is None:  # a shape, which is no folder
            advice = "with --load-format dummy, --model may also be the folder or the hub id of a model that has one"
        ids = "or give OpenAI batch lines of token ids"
        raise JobError(f"{checkpoint.name} has no tokenizer, which {texts} need; {advice}, {ids}")


def load_llm(o: Options, checkpoint: Any, tokenizer: Any, media: Any = None) -> Any:
    """Returns the LLM of the options. media: the MediaTable of tasks that were made before. Imports torch."""
    from ..llm import LLM

    return LLM(checkpoint, tokenizer=tokenizer, media=media, **llm_options(o))


def image_reading(o: Options) -> dict[str, Any]:
    """Returns options of `ModelConfig.image_inputs`. Paths are read in --media-folder only."""
    folder = o.get("media_folder")
    if folder is not None and not Path(folder).is_dir():
        raise JobError(f"--media-folder {folder}: there is no such folder")
    limits = {"file_bytes": o.get("media_bytes"), "pixels": o.get("media_pixels")}
    place = {"folder": None if folder is None else Path(folder), "paths": folder is not None}
    limited = {name: value for name, value in limits.items() if value is not None}
    return place | limited | {"hosts": o.get("allow_media_host") or ()}


def llm_options(o: Options) -> dict[str, Any]:
    """Returns the keywords for `LLM`, except checkpoint and tokenizer, from the options on the command line."""
    keywords: dict[str, Any] = {}
    for name, option in model_fields(ModelSpec, *GROUPS.values()).items():
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
    """A FleetModel takes the place of the LLM in a job on a fleet."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def dtype(self) -> str:
        """Returns the dtype of the replicas, "" while none is ready."""
        return self.engine.snapshot().dtype

    def close(self) -> None:
        """Ends the replicas."""
        self.engine.close()


def has_fleet(o: Options) -> bool:
    """Returns whether the options need a fleet. Raises UsageError for options that contradict each other."""
    backend, on_ray = backend_of(o), o.get("ray") is not None
    is_fleet = on_ray or bool(backend.where)
    if on_ray and not backend.on_ray:
        raise click.UsageError(f"--ray and {_asking_for(backend_name(o))} exclude each other")
    if o.get("backend") and o.get("url"):
        raise click.UsageError("--backend and --url exclude each other: a server computes as it likes")
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
    """Returns the flag that selects a backend."""
    return "--url" if name == "url" else f"--backend {name}"


def load_fleet(o: Options, checkpoint: Any, tokenizer: Any, media: Any = None) -> FleetModel:
    """Returns the fleet of the options, whose replicas load their models meanwhile. media: the MediaTable of the job's
    tasks"""
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

        place = {"count": o["replicas"], "address": o["ray"] or None, "backend": backend_name(o)}
        model = str(Path(o["model"]).absolute()) if Path(o["model"]).exists() else o["model"]
        replicas: Any = RayReplicas(model, options, **place, notify=notify)
    else:
        inputs = {"checkpoint": checkpoint, "tokenizer": tokenizer, "notify": notify}
        replicas = backend.replicas(o, options, **inputs)
    sharing: Sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    cost = RowCost() if backend.where else row_cost(config_from(checkpoint.config))
    fleet = Fleet(replicas, sharing=sharing, row_cost=cost, patience=o["patience"], notify=notify, media=media)
    return FleetModel(fleet)


def _own_options(o: Options) -> dict[str, Any]:
    """Returns the values of --backend-option by name."""
    own_options = {}
    for text in o.get("backend_option") or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise click.UsageError(f"--backend-option {text!r} is not NAME=VALUE, such as block_size=32")
        try:
            own_options[name] = json.loads(value)
        except ValueError:
            own_options[name] = value
    return own_options


# ---------------------------------------------------------------------------------------------- tasks


class LazyTasks(Mapping[str, Any]):
    """A LazyTasks holds the tasks of a batch, each of which is made when the first record needs it."""

    def __init__(self, names: tuple[str, ...], o: Options, checkpoint: Any, tokenizer: Any, **reading: Any):
        """Keeps the arguments of the tasks. reading: options of reading images that replace those of the command"""
        self._names, self._options = names, o
        self._checkpoint, self._tokenizer = checkpoint, tokenizer
        self._tasks: dict[str, Any] = {}
        self._reading = reading

    def __contains__(self, name: object) -> bool:
        """Returns whether the batch may have a task of this name, without making it: the model may not be able to do
        it."""
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if name not in self._tasks:
            from ..tasks import make_task

            settings = task_settings(name, self._options, self._checkpoint, self._tokenizer)
            adapters = tuple(adapter_folders(self._options))
            further = {"adapters": adapters, "images": self.images}
            self._tasks[name] = make_task(name, self._checkpoint, self._tokenizer, settings, **further)
        return self._tasks[name]

    @cached_property
    def images(self) -> Any:
        """Returns the ImageInputs of all tasks; None for a model that takes text alone."""
        from ..model import config_from

        config, reading = config_from(self._checkpoint.config), image_reading(self._options) | self._reading
        return config.image_inputs(self._checkpoint, self._tokenizer, **reading)

    @property
    def media(self) -> Any:
        """Returns the MediaTable of the images, for the LLM that runs these tasks; or None."""
        return None if self.images is None else self.images.table

    def replace(self, name: str, task: Any) -> None:
        self._tasks[name] = task

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def given_options(task: str, o: Options, *kinds: type) -> dict[str, Any]:
    """Returns {option: value} of those options of some dataclasses that are on the command line and need no conversion:
    numbers, flags, words, routes, and texts, which @FILE reads."""
    from ..records.fields import read_argument

    parameters, settings = cli_names(task), {}
    for option in (option for kind in kinds for option in fields(kind)):
        value, kind = o.get(option.name), kind_of(option)
        is_none = value is None or (value == "" and hasattr(ConversationOptions, option.name))
        simple = kind is not None or option.metadata["one_of"] or option.name == "route"
        if simple and not is_none and parameters[option.name] == (option.name,):
            settings[option.name] = read_argument(value) if kind is str else value
    return settings


def task_settings(task: str, o: Options, checkpoint: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `make_task`, from the options on the command line."""
    from ..records.fields import read_argument

    settings = given_options(task, o, OPTIONS[task])
    if o.get("truncate_side") or o.get("truncate"):
        settings["truncate"] = o.get("truncate_side") or True
    folders = adapter_folders(o)
    if len(folders) == 1 and not o.get("adapter_column"):
        settings["adapter"] = next(iter(folders))
    if task == "generate":
        settings |= sampling_settings(o, checkpoint, tokenizer) | conversation_settings(o)
        if (o.get("tools") or "").startswith("@"):
            settings["tools"] = _json_option(read_argument(o["tools"]), "--tools", list)
    if task == "rerank" and o.get("words"):
        settings["words"] = tuple(word.strip() for word in o["words"].split(","))
    if task == "classify":
        settings |= _labels(o)
        if o.get("examples"):
            settings["examples"] = _examples(o["examples"])
    return settings


def _labels(o: Options) -> dict[str, Any]:
    from ..records.fields import as_utf8

    if o.get("labels") and o.get("labels_file"):
        raise click.UsageError("--labels and --labels-file exclude each other")
    if o.get("labels"):
        return {"labels": [label.strip() for label in as_utf8(o["labels"]).split(",") if label.strip()]}
    if not o.get("labels_file"):
        return {}
    text = read_text(o["labels_file"])
    if text.lstrip()[:1] in ("[", "{"):
        return {"labels": _json_option(text, o["labels_file"])}
    labels = [line.strip() for line in text.split("\n") if line.strip()]
    if not labels:
        raise JobError(f"{o['labels_file']} holds no labels; write one a line")
    return {"labels": labels}


def _examples(name: str) -> list[tuple[str, str]]:
    from ..records.fields import as_text, lookup
    from ..records.source import open_source

    out = []
    for row in open_source(name).records():
        try:
            if row.error is not None:
                raise row.error
            data = row.data or {}
            out.append((as_text(lookup(data, "text"), "text"), as_text(lookup(data, "label"), "label")))
        except InputError as error:
            raise JobError(f"example {row.number} of {name}: {error}") from None
    if not out:
        raise JobError(f"{name} holds no examples; write rows with the columns text and label, or leave --examples out")
    return out


# ----------------------------------------------------------------------------------------- generation

FORMATS = ("json_schema", "json_object", "regex", "choice", "grammar")


def conversation_settings(o: Options) -> dict[str, Any]:
    """Returns {field of Conversations: value} of the options on the command line, except tools, which only generation
    has."""
    settings = given_options("generate", o, ConversationOptions)
    if o.get("chat_template_kwargs"):
        settings["chat_template_kwargs"] = _json_option(o["chat_template_kwargs"], "--chat-template-kwargs", dict)
    return settings


def sampling_settings(o: Options, checkpoint: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns {field of Sampling: value} of the options on the command line, except the seed, which belongs to the job.

    With --recommended the checkpoint's own settings fill in for options that were not given.
    """
    from ..tasks import recommended_sampling

    settings: dict[str, Any] = recommended_sampling(checkpoint) if o.get("recommended") else {}
    settings |= given_options("generate", o, SamplerOptions, LoopedOptions)
    if o.get("max_tokens") is not None:
        settings["max_tokens"] = o["max_tokens"] or None
    if o.get("stop"):
        settings["stop"] = o["stop"]
    if o.get("stop_id"):
        settings["stop_ids"] = o["stop_id"]
    if o.get("logit_bias"):
        settings["logit_bias"] = [_bias(text) for text in o["logit_bias"]]
    grammar = _grammar(o)
    return settings if grammar is None else settings | {"grammar": grammar}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.UsageError(f"--logit-bias {text!r} is not a token id and a number, such as 42=-5") from None


def _grammar(o: Options) -> Any:
    from ..records.fields import read_argument

    formats = [name for name in FORMATS if o.get(name)]
    if not formats:
        return None
    if len(formats) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in formats[:2])
        raise click.UsageError(f"{first} and {second} exclude each other")
    value = o[formats[0]]
    if formats[0] == "json_schema":
        schema = value if value.lstrip()[:1] == "{" else read_text(value.removeprefix("@"))
        return {"json_schema": _json_option(schema, "--json-schema", dict)}
    if formats[0] == "json_object":
        return {"json": True}
    if formats[0] == "choice":
        return {"choice": value}
    return {"regex" if formats[0] == "regex" else "lark": read_argument(value)}


def _json_option(text: str, option: str, kind: type | None = None) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise JobError(f"{option} is not valid JSON: {error}") from None
    if kind is not None and not isinstance(value, kind):
        raise JobError(f"{option} is not a JSON {'object' if kind is dict else 'list'}")
    return value


def uses_chat(o: Options, tokenizer: Any) -> bool:
    """Returns whether a prompt is put into the chat template. Raises JobError for --chat or --system without one."""
    has = tokenizer is not None and bool(tokenizer.chat_templates or o.get("chat_template"))
    if o.get("chat") and not has:
        raise JobError("--chat needs a chat template, and the model has none; leave it out, or give --chat-template")
    if o.get("system") and (o.get("chat") is False or not has) and not o.get("messages"):
        raise JobError("--system is for conversations, and prompts are taken as they are; write it into the prompt")
    return has and o.get("chat") is not False
