"""Make the parts that compute a job from its spec: checkpoint, tokenizer, LLM or fleet, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cluster.backends import Backend
from ..engine.protocol import Engine
from ..errors import JobError
from ..spec.job import JobSpec
from ..spec.model import ModelSpec
from ..spec.requests import Sharing
from ..spec.task import LoopedOptions, SamplerOptions, TaskSpec

Notify = Callable[[str], None]  # called with a line for the user, such as "downloading ..."


def open_model(spec: JobSpec, backend: Backend, notify: Notify, *, weights: bool = True) -> tuple[Any, Any]:
    """Return (checkpoint, tokenizer or None) of a job, without loading weights.

    Args:
        weights: Download the weights of a hub id.
    """
    if backend.where:
        from ..cluster.http_bodies import remote_model

        return remote_model(spec.model_name, backend.tokenizer(spec), backend.where, notify)
    from ..text import tokenizer_or_none

    checkpoint = find_model(spec.model_name, spec.model, notify, weights=weights)
    return checkpoint, tokenizer_or_none(checkpoint)


def find_model(name: str, model: ModelSpec, notify: Notify, *, weights: bool = True) -> Any:
    """Return the checkpoint of a name. An unsupported model is refused first, by its config."""
    from ..checkpoint import resolve
    from ..model import config_from

    checkpoint = resolve(
        name,
        load_format=model.load_format,
        weights=weights,
        mmproj=model.images.mmproj,
        context_length=model.context_length,
        notify=notify,
    )
    config_from(checkpoint.config)
    return checkpoint


def check_tokenizer(checkpoint: Any, tokenizer: Any, texts: str) -> None:
    """Raise JobError if the model has no tokenizer.

    Args:
        texts: The texts that need the tokenizer, for the error.
    """
    if tokenizer is None:
        advice = "save its tokenizer.json beside it (transformers: AutoTokenizer.from_pretrained(...).save_pretrained("
        advice += "folder))"
        if checkpoint.path is None:  # a built-in shape without a folder
            advice = "with --load-format dummy, --model may also be the folder or the hub id of a model that has one"
        ids = "or give OpenAI batch lines of token ids"
        raise JobError(f"{checkpoint.name} has no tokenizer, which {texts} need; {advice}, {ids}")


def load_llm(model: ModelSpec, checkpoint: Any, tokenizer: Any, media: Any = None, *, is_job: bool = True) -> Any:
    """Return the LLM of a checkpoint.

    Args:
        model: The options of the model.
        checkpoint: The model.
        tokenizer: Its tokenizer.
        media: The MediaTable of tasks that were made before the LLM.
        is_job: Tune for steps with many rows, as jobs have them. Servers and single texts have few rows.
    """
    from ..llm import LLM

    return LLM(checkpoint, tokenizer=tokenizer, media=media, **(model.for_job() if is_job else model).keywords())


def image_reading(spec: JobSpec) -> dict[str, Any]:
    """Return options for `ModelConfig.image_inputs`. Paths are read only inside --media-folder."""
    folder = spec.input.media_folder
    if folder is not None and not Path(folder).is_dir():
        raise JobError(f"--media-folder {folder}: there is no such folder")
    limits = {"file_bytes": spec.input.media_bytes, "pixels": spec.input.media_pixels}
    place = {"folder": None if folder is None else Path(folder), "paths": folder is not None}
    limited = {name: value for name, value in limits.items() if value is not None}
    return place | limited | {"hosts": spec.model.images.allow_media_host}


class FleetModel:
    """The stand-in for the LLM in a job on a fleet."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def dtype(self) -> str:
        """Return the dtype of the replicas, or "" until one is ready."""
        return self.engine.snapshot().dtype

    def close(self) -> None:
        """Stop the replicas."""
        self.engine.close()


def load_fleet(
    spec: JobSpec, backend: Backend, checkpoint: Any, tokenizer: Any, notify: Notify, media: Any = None
) -> FleetModel:
    """Return the fleet of a job. Its replicas load their models in the background.

    Args:
        media: The MediaTable of the job's tasks.
    """
    from ..cluster.fleet import Fleet
    from ..model import config_from
    from ..trie import RowCost
    from .plan import row_cost

    fleet, options = spec.fleet, backend.options(spec)
    if fleet.ray is not None:
        from ..cluster.ray_replicas import RayReplicas

        place: dict[str, Any] = {"count": fleet.replicas, "address": fleet.ray or None, "backend": fleet.backend_name}
        model = str(Path(spec.model_name).absolute()) if Path(spec.model_name).exists() else spec.model_name
        replicas: Any = RayReplicas(model, options, **place, notify=notify)
    else:
        inputs = {"checkpoint": checkpoint, "tokenizer": tokenizer, "notify": notify}
        replicas = backend.replicas(spec, options, **inputs)
    sharing: Sharing = "full" if spec.model.sharing == "auto" else spec.model.sharing
    cost = RowCost() if backend.where else row_cost(config_from(checkpoint.config))
    book = Fleet(replicas, sharing=sharing, row_cost=cost, patience=fleet.patience, notify=notify, media=media)
    return FleetModel(book)


class LazyTasks(Mapping[str, Any]):
    """The tasks of a batch. Each task is made when the first record needs it.

    Args:
        reading: Options for reading images; they override the spec's.
    """

    def __init__(self, names: tuple[str, ...], spec: JobSpec, checkpoint: Any, tokenizer: Any, **reading: Any):
        self._names, self._spec = names, spec
        self._checkpoint, self._tokenizer = checkpoint, tokenizer
        self._tasks: dict[str, Any] = {}
        self._reading = reading

    def __contains__(self, name: object) -> bool:
        """Return whether the batch may have this task. The task is not made, so the model may be unable to do it."""
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if name not in self._tasks:
            from ..tasks import make_task

            options = task_spec(name, self._spec, self._checkpoint)
            further = {"adapters": self.adapters, "images": self.images}
            self._tasks[name] = make_task(name, self._checkpoint, self._tokenizer, options, **further)
        return self._tasks[name]

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the model's LoRA adapters."""
        from ..tasks.make import own_adapters

        return tuple(own_adapters(self._checkpoint, self._tokenizer, self._spec.model.adapters))

    @cached_property
    def images(self) -> Any:
        """Return the ImageInputs of all tasks, or None for a model without image inputs."""
        from ..model import config_from

        config, reading = config_from(self._checkpoint.config), image_reading(self._spec) | self._reading
        return config.image_inputs(self._checkpoint, self._tokenizer, **reading)

    @property
    def media(self) -> Any:
        """Return the MediaTable of the images for the LLM that runs these tasks, or None."""
        return None if self.images is None else self.images.table

    def replace(self, name: str, task: Any) -> None:
        self._tasks[name] = task

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def task_spec(name: str, spec: JobSpec, checkpoint: Any) -> TaskSpec:
    """Return the options of a task.

    With --recommended, the checkpoint's settings replace options that were not given.
    """
    recommended = _recommended(spec, checkpoint) if name == "generate" else {}
    return replace(spec.tasks[name], **recommended)


def batch_sampling(spec: JobSpec, checkpoint: Any) -> dict[str, Any]:
    """Return {field of Sampling: value} for fields that a batch line omits.

    These are the given options (without the seed, which belongs to the job) and, with --recommended, the checkpoint's
    settings.
    """
    return _recommended(spec, checkpoint) | spec.settings("generate", SamplerOptions, LoopedOptions)


def _recommended(spec: JobSpec, checkpoint: Any) -> dict[str, Any]:
    from ..tasks import recommended_sampling

    found = recommended_sampling(checkpoint) if spec.recommended else {}
    return {name: value for name, value in found.items() if name not in spec.given}


def uses_chat(spec: JobSpec, tokenizer: Any) -> bool:
    """Return whether prompts are put into the chat template.

    Raise JobError for --chat or --system without a template.
    """
    has = tokenizer is not None and bool(tokenizer.chat_templates or spec.conversations.chat_template)
    if spec.chat and not has:
        raise JobError("--chat needs a chat template, but the model has none; leave it out, or give --chat-template")
    if spec.conversations.system and (spec.chat is False or not has) and not spec.input.messages:
        raise JobError(
            "--system needs a conversation, but prompts are plain texts here; write the system text into the prompt"
        )
    return has and spec.chat is not False
