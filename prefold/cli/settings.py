"""Makes the tasks of a command, and their settings, out of its options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from ..errors import InputError, JobError
from ..options import OPTIONS, ConversationOptions, LoopedOptions, SamplerOptions, cli_names, kind_of
from .model import Options, adapter_folders, image_reading

# ---------------------------------------------------------------------------------------------- tasks


class LazyTasks(Mapping[str, Any]):
    """Holds the tasks of a batch, each of which is made when the first record asks for it."""

    def __init__(self, names: tuple[str, ...], o: Options, checkpoint: Any, tokenizer: Any, **reading: Any):
        """Keeps what tasks are made of. reading: how images are read, where it is not as the options say."""
        self._names, self._options = names, o
        self._checkpoint, self._tokenizer = checkpoint, tokenizer
        self._tasks: dict[str, Any] = {}
        self._reading = reading

    def __contains__(self, name: object) -> bool:
        """Returns whether the batch has a task of this name, and makes no task: the model may not be made for it."""
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if name not in self._tasks:
            from ..tasks import make_task

            settings = task_settings(name, self._options, self._checkpoint, self._tokenizer)
            adapters = tuple(adapter_folders(self._options))
            beside = {"adapters": adapters, "images": self.images}
            self._tasks[name] = make_task(name, self._checkpoint, self._tokenizer, settings, **beside)
        return self._tasks[name]

    @cached_property
    def images(self) -> Any:
        """Returns the reader of the images of all tasks; None for a model that takes text alone."""
        from ..model import config_from

        config, how = config_from(self._checkpoint.config), image_reading(self._options) | self._reading
        return config.image_inputs(self._checkpoint, self._tokenizer, **how)

    @property
    def media(self) -> Any:
        """Returns the MediaTable with the ids of rows of images, for the LLM that runs these tasks; or None."""
        return None if self.images is None else self.images.table

    def replace(self, name: str, task: Any) -> None:
        self._tasks[name] = task

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def given_options(task: str, o: Options, *kinds: type) -> dict[str, Any]:
    """Returns {option: value} of those options of some dataclasses that were given and that the command line has as
    they are: numbers, flags, words, routes, and texts, which @FILE reads."""
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
    """Returns the keyword arguments for `make_task` out of the options that were given."""
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
    if o.get("labels") and o.get("labels_file"):
        raise click.UsageError("--labels and --labels-file exclude each other")
    if o.get("labels"):
        return {"labels": [label.strip() for label in o["labels"].split(",") if label.strip()]}
    if not o.get("labels_file"):
        return {}
    text = read_text(o["labels_file"])
    if text.lstrip()[:1] in ("[", "{"):
        return {"labels": _json_option(text, o["labels_file"])}
    return {"labels": [line.strip() for line in text.split("\n") if line.strip()]}


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
    return out


def read_text(name: str, data: bytes | None = None) -> str:
    """Returns the text of a file, or `data` as a text. Raises JobError."""
    try:
        return (read_bytes(name) if data is None else data).decode("utf-8")
    except UnicodeDecodeError:
        raise JobError(f"{name} is not valid UTF-8") from None


def read_bytes(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise JobError(f"cannot read {name}: {error.strerror}") from None


# ----------------------------------------------------------------------------------------- generation

FORMATS = ("json_schema", "json_object", "regex", "choice", "grammar")


def conversation_settings(o: Options) -> dict[str, Any]:
    """Returns {field of Conversations: value} of the options that were given, but tools, which only generation has."""
    settings = given_options("generate", o, ConversationOptions)
    if o.get("chat_template_kwargs"):
        settings["chat_template_kwargs"] = _json_option(o["chat_template_kwargs"], "--chat-template-kwargs", dict)
    return settings


def sampling_settings(o: Options, checkpoint: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns {field of Sampling: value} of the options that were given, but the seed, which belongs to the job.

    With --recommended the checkpoint's own settings fill in for options that were not given.
    """
    from ..tasks import generation_settings

    settings: dict[str, Any] = generation_settings(checkpoint, tokenizer)[1] if o.get("recommended") else {}
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
    """Returns whether a prompt is put into the chat template. Raises JobError where --chat or --system lack one."""
    has = tokenizer is not None and bool(tokenizer.chat_templates or o.get("chat_template"))
    if o.get("chat") and not has:
        raise JobError("--chat needs a chat template, and the model has none; leave it out, or give --chat-template")
    if o.get("system") and (o.get("chat") is False or not has) and not o.get("messages"):
        raise JobError("--system is for conversations, and prompts are taken as they are; write it into the prompt")
    return has and o.get("chat") is not False
