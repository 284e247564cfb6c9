"""The provider "prefold" for Daft's AI functions, and `generate`, which returns errors row by row.

    import daft, prefold.integrations.daft
    from daft.functions import prompt

    df.with_column("answer", prompt(df["question"], provider="prefold", model="smollm2-135m", max_tokens=64))

The import attaches the provider to Daft's session. Rows of all partitions of a process run together, on one model. On
Ray the rows of all processes run on `replicas` of the model (default: 1), behind a named actor. `prompt`, `embed_text`
and `classify_text` accept the options of `LLM` and of the task. With `on_error` "raise" an error is raised; with "log"
and "ignore" it becomes a null. A null in the input gives a null in the output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, MissingExtraError
from ..tasks.base import attempt
from ..text.fields import without_filler
from ..text.valid import check_said
from .shared import RayModel, SharedModel, split_options

try:
    import daft
    from daft import DataType
    from daft.ai.protocols import PrompterDescriptor, TextClassifierDescriptor, TextEmbedderDescriptor
    from daft.ai.provider import Provider
    from daft.ai.typing import EmbeddingDimensions, UDFOptions
except ImportError:
    raise MissingExtraError("daft", "daft", "the provider for Daft") from None

__all__ = ["PrefoldProvider", "generate", "stats"]

DEFAULT_MODEL = "smollm2-135m"
_UDF_OPTIONS = ("concurrency", "num_gpus", "max_retries", "batch_size", "on_error")
_ON_ERROR = ("raise", "log", "ignore")
_log = logging.getLogger(__name__)


class PrefoldProvider(Provider):
    """The provider of Daft's AI functions that run on prefold.

    Args:
        options: options of `LLM` for all of its models
    """

    def __init__(self, **options: Any):
        self.options = options

    @property
    def name(self) -> str:
        return "prefold"

    def get_prompter(
        self, model: str | None = None, return_format: Any = None, system_message: str | None = None, **options: Any
    ) -> PrompterDescriptor:
        """Return the descriptor of `prompt`.

        Args:
            return_format: a Pydantic model; answers follow its JSON schema
        """
        if system_message is not None:
            options["system"] = system_message
        return _PrompterDescriptor(_FunctionCall.of("generate", model, {**self.options, **options}), return_format)

    def get_text_embedder(
        self, model: str | None = None, dimensions: int | None = None, **options: Any
    ) -> TextEmbedderDescriptor:
        """Return the descriptor of `embed_text`."""
        if dimensions is not None:
            options["dimensions"] = dimensions
        return _EmbedderDescriptor(_FunctionCall.of("embed", model, {**self.options, **options}))

    def get_text_classifier(self, model: str | None = None, **options: Any) -> TextClassifierDescriptor:
        """Return the descriptor of `classify_text`."""
        return _ClassifierDescriptor(_FunctionCall.of("classify", model, {**self.options, **options}))


@dataclass(frozen=True)
class _FunctionCall:
    """A task on a model, which the driver describes and workers run."""

    task: str
    model: str
    llm: Mapping[str, Any]
    options: Mapping[str, Any]
    on_error: str = "raise"
    on_ray: bool = False
    batch_size: int | None = None
    replicas: int = 1
    owner: Any = field(default=None, compare=False, repr=False)  # keeps the actor alive, in the driver

    @classmethod
    def of(cls, task: str, model: str | None, options: Mapping[str, Any]) -> _FunctionCall:
        """Return the call for a function's options. On Ray, the driver makes the actor here and owns it."""
        options = dict(options)
        udf = {name: options.pop(name) for name in _UDF_OPTIONS if name in options}
        for name in ("concurrency", "num_gpus"):
            if udf.get(name) is not None:
                message = f"{name} is {udf[name]!r}, but all rows of a process run together, on one model"
                remedy = "leave it out; `replicas` makes more models on Ray, `device` chooses the device"
                raise InputError(message, field=name, remedy=remedy)
        on_error = udf.get("on_error", "raise")
        if on_error not in _ON_ERROR:
            remedy = f"use one of {', '.join(_ON_ERROR)}"
            raise InputError(f"on_error is {on_error!r}", field="on_error", remedy=remedy)
        replicas = options.pop("replicas", 1)
        llm, own = split_options(options)
        on_ray = daft.daft.get_or_infer_runner_type() == "ray"
        if not isinstance(replicas, int) or replicas < 1 or (replicas > 1 and not on_ray):
            remedy = "give 1 or more; more than one needs Daft's Ray runner (daft.set_runner_ray())"
            raise InputError(f"replicas is {replicas!r}", field="replicas", remedy=remedy)
        call = cls(task, model or DEFAULT_MODEL, llm, own, on_error, on_ray, udf.get("batch_size"), replicas)
        if on_ray:
            object.__setattr__(call, "owner", call.client())
        return call

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "owner": None}

    def client(self) -> Any:
        """Return the model of this process, or the cluster's."""
        if self.on_ray:
            return RayModel.of(self.model, self.llm, self.replicas)
        return SharedModel.of(self.model, self.llm)

    def udf_options(self) -> UDFOptions:
        """Return options that leave error handling to prefold. Daft would retry or null all rows of a batch."""
        return UDFOptions(max_retries=0, on_error="raise", batch_size=self.batch_size)

    def value(self, answer: Any) -> Any:
        """Return an answer, or None for an error. With on_error="raise", raise the error."""
        if not isinstance(answer, InputError):
            return answer
        if self.on_error == "raise":
            raise answer
        if self.on_error == "log":
            _log.warning("a row has no result: %s", answer)
        _failed[self.task] = _failed.get(self.task, 0) + 1
        return None


_failed: dict[str, int] = {}  # number of rows without a result in this process, by task


class _Descriptor:
    call: _FunctionCall

    def get_provider(self) -> str:
        return "prefold"

    def get_model(self) -> str:
        return self.call.model

    def get_options(self) -> dict[str, Any]:
        return {**self.call.llm, **self.call.options}

    def get_udf_options(self) -> UDFOptions:
        return self.call.udf_options()


@dataclass
class _PrompterDescriptor(_Descriptor, PrompterDescriptor):
    call: _FunctionCall
    return_format: Any = None

    def instantiate(self) -> Any:
        return _Prompter(self.call, self.return_format)


class _ListDimensions(EmbeddingDimensions):
    """Dimensions of embeddings as lists.

    PyArrow before 26, which Daft 0.7 needs, cannot read Parquet files with Daft's own embedding type and nulls.
    """

    def as_dtype(self) -> DataType:
        return DataType.list(self.dtype)


@dataclass
class _EmbedderDescriptor(_Descriptor, TextEmbedderDescriptor):
    call: _FunctionCall

    def get_dimensions(self) -> EmbeddingDimensions:
        from ..checkpoint import resolve
        from ..model import config_from

        size = self.call.options.get("dimensions") or config_from(resolve(self.call.model).config).hidden
        return _ListDimensions(size, DataType.float32())

    def is_async(self) -> bool:
        return True

    def instantiate(self) -> Any:
        return _Embedder(self.call)


@dataclass
class _ClassifierDescriptor(_Descriptor, TextClassifierDescriptor):
    call: _FunctionCall

    def instantiate(self) -> Any:
        return _Classifier(self.call)


class _Runner:
    def __init__(self, call: _FunctionCall):
        self._call, self._model = call, call.client()


class _Prompter(_Runner):
    """Answers one row per call. Concurrent calls run together."""

    def __init__(self, call: _FunctionCall, return_format: Any):
        super().__init__(call)
        self._format = return_format
        self._options = dict(call.options)
        if return_format is not None:
            self._options["grammar"] = {"json_schema": return_format.model_json_schema()}

    async def prompt(self, messages: tuple[Any, ...]) -> Any:
        if any(message is None for message in messages):
            return None
        item = attempt(_item, messages)
        answer = item if isinstance(item, InputError) else await self._model.run_one("generate", self._options, item)
        if self._format is not None and not isinstance(answer, InputError):
            try:
                return self._format.model_validate_json(answer.choices[0].text)
            except ValueError as error:
                remedy = "give a larger max_tokens"
                answer = InputError(
                    f"the answer does not fit the format: {error!s:.200}", field="prompt", remedy=remedy
                )
        result = self._call.value(answer)
        return None if result is None else result.choices[0].text


class _Embedder(_Runner):
    async def embed_text(self, text: list[str]) -> list[Any]:
        items, places = _items(text)
        answers = await self._model.run_many_async(self._call.task, self._call.options, items)
        results = _in_place(self._call, len(text), places, answers)
        return [None if result is None else result.embedding for result in results]


class _Classifier(_Runner):
    def classify_text(self, text: list[str], labels: Any) -> list[Any]:
        options = {**self._call.options, "labels": [labels] if isinstance(labels, str) else list(labels)}
        items, places = _items(text)
        results = _in_place(self._call, len(text), places, self._model.run_many(self._call.task, options, items))
        return [None if result is None else result.label for result in results]


def _items(texts: list[str]) -> tuple[list[Any], list[int]]:
    """Return (the items of the texts that are not null, their indices)."""
    places = [i for i, text in enumerate(texts) if text is not None]
    return [{"text": texts[i]} for i in places], places


def _in_place(call: _FunctionCall, count: int, places: list[int], answers: list[Any]) -> list[Any]:
    """Return a result for each of `count` texts: None for a null or an error."""
    out: list[Any] = [None] * count
    for i, answer in zip(places, answers, strict=True):
        out[i] = call.value(answer)
    return out


def _item(messages: tuple[Any, ...]) -> dict[str, Any]:
    """Return the item of a row's messages. Raise InputError for empty texts.

    Texts become parts of one user message. A list of messages is used as it is. Other values become parts that the task
    refuses by their type.
    """
    if len(messages) == 1 and isinstance(messages[0], (list, tuple)):
        return {"messages": without_filler(messages[0])}
    if all(isinstance(message, str) for message in messages):
        check_said("".join(messages), "prompt", blank=True)
    parts = [{"type": "text", "text": m} if isinstance(m, str) else {"type": type(m).__name__} for m in messages]
    return {"messages": [{"role": "user", "content": parts}]}


_STRUCT = {
    "text": DataType.string(),
    "finish_reason": DataType.string(),
    "num_tokens": DataType.int64(),
    "num_generated": DataType.int64(),
    "cached_tokens": DataType.int64(),
    "error": DataType.string(),
}


def generate(prompt: Any, *, model: str = DEFAULT_MODEL, chat: bool = True, **options: Any) -> Any:
    """Return an expression with a struct per row: text, finish_reason, token counts, and `error`.

    Args:
        prompt: an expression of texts, or of lists of messages
        model: as for `LLM`: hub id, folder, .gguf file or built-in name
        chat: put a text into the model's chat template, as a user message
        options: options of `LLM` and of the task "generate"

    Returns:
        A Daft expression. A row with an error has only `error`; a row without one has a null there.

    Raises:
        InputError: for `concurrency` or `num_gpus`, for `replicas` without Ray, or for a cache with approximate results

    Example:
        df.with_column("answer", generate(df["question"], max_tokens=64))
    """
    call = _FunctionCall.of("generate", model, {**options, "on_error": "ignore"})
    return daft.cls(_Generate, max_retries=0)(call, chat).answer(prompt)


class _Generate(_Runner):
    def __init__(self, call: _FunctionCall, chat: bool):
        super().__init__(call)
        self._chat = chat

    @daft.method(return_dtype=DataType.struct(_STRUCT))
    async def answer(self, prompt: Any) -> Any:
        if prompt is None:
            return {name: "the prompt is null" if name == "error" else None for name in _STRUCT}
        in_chat = self._chat or not isinstance(prompt, str)
        answer = attempt(_item, (prompt,)) if in_chat else {"prompt": prompt}
        if not isinstance(answer, InputError):
            answer = await self._model.run_one("generate", self._call.options, answer)
        if isinstance(answer, InputError):
            return {name: str(answer) if name == "error" else None for name in _STRUCT}
        line = answer.line()
        return {name: line.get(name) for name in _STRUCT}


def stats(model: str = DEFAULT_MODEL, **options: Any) -> dict[str, Any]:
    """Return the counters of a model with these options of `LLM`, and the numbers of failed rows of this process."""
    return _FunctionCall.of("generate", model, options).client().stats() | {"failed": dict(_failed)}


daft.attach_provider(PrefoldProvider())
