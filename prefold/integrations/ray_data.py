"""A class for Ray Data's `map_batches`.

    import ray
    from prefold.integrations.ray_data import PrefoldBatches

    ds = ds.map_batches(
        PrefoldBatches,
        fn_constructor_kwargs={"task": "generate", "column": "question", "model": "smollm2-135m", "max_tokens": 64},
        compute=ray.data.ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=4),
        batch_size=64,
    )

Batches that an actor processes at the same time run together. The result has the columns of the input, the columns of
the results, and a column `error`: null, or why a row has no result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

import numpy as np

from ..errors import InputError
from ..tasks.base import attempt
from ..tasks.results import Answer, Decision
from ..text.fields import without_filler
from ..text.valid import check_said
from .shared import SharedModel, split_options

__all__ = ["PrefoldBatches"]

TASKS = ("generate", "embed", "classify", "decide", "score")
# Tables often have their own column `text`.
_RENAMED = {"text": "generated_text"}


class PrefoldBatches:
    """A task on the rows of batches, which are dicts of NumPy arrays.

    Args:
        task: "generate", "embed", "classify", "decide" or "score"
        column: the column of texts or lists of messages; for "score" a text as a whole, for "decide" the state
        model: as for `LLM`: hub id, folder, .gguf file or built-in name
        chat: "generate" puts a text into the model's chat template, as a user message
        error: name of the column of errors
        prefix: prefix of the new columns' names
        scores: for "classify" and "decide": "all" adds one column with the probability of each label or option
        options: options of `LLM` and of the task

    Raises:
        InputError: if `column` is missing, or if the batch already has a column with the name of a new one

    Example:
        ds = ds.map_batches(PrefoldBatches, fn_constructor_kwargs={"task": "embed", "column": "text"}, concurrency=1)
    """

    def __init__(
        self,
        task: str,
        column: str,
        *,
        model: str = "smollm2-135m",
        chat: bool = True,
        error: str = "error",
        prefix: str = "",
        scores: Literal["label", "all"] = "label",
        **options: Any,
    ):
        if task not in TASKS:
            raise InputError(f"task is {task!r}", field="task", remedy=f"use one of {', '.join(TASKS)}")
        llm, self._options = split_options(options)
        self._task, self._column, self._chat = task, column, chat
        self._model = SharedModel.of(model, llm)
        self._every = scores == "all"
        columns = self._model.example(task, self._options).columns(self._every)
        self._error, self._names = error, {name: prefix + _RENAMED.get(name, name) for name in columns}

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the batch with its results."""
        import pyarrow  # Ray Data depends on it

        if self._column not in batch:
            message = f"there is no column {self._column!r}"
            raise InputError(message, field=self._column, remedy=f"the columns are {', '.join(batch)}")
        for name in {*self._names.values(), self._error} & set(batch):
            raise InputError(f"the batch has a column {name!r} already", field=name, remedy="give prefix=, or error=")
        answers = await self._answers(list(batch[self._column]))
        errors = [_error_of(answer) for answer in answers]
        # With an explicit type: a column of only nulls would get another type, and blocks could not be joined.
        out = {**batch, self._error: pyarrow.array(errors, pyarrow.string())}
        rows = [{} if isinstance(a, InputError) else a.columns(self._every) for a in answers]
        for name, column in self._names.items():
            out[column] = _array([row.get(name) for row in rows])
        yield out

    async def _answers(self, values: list[Any]) -> list[Any]:
        if self._task == "generate":
            return list(await asyncio.gather(*map(self._answer, values)))
        places = [i for i, value in enumerate(values) if value is not None]
        field = "state" if self._task == "decide" else "text"
        items = [{field: values[i]} for i in places]
        answers = await asyncio.to_thread(self._model.run_many, self._task, self._options, items)
        out: list[Any] = [_null(self._column)] * len(values)
        for i, answer in zip(places, answers, strict=True):
            out[i] = answer
        return out

    async def _answer(self, value: Any) -> Any:
        if value is None:
            return _null(self._column)
        if not isinstance(value, str):
            item: dict[str, Any] = {"messages": [without_filler(dict(message)) for message in value]}
        else:
            if isinstance(error := attempt(partial(check_said, blank=True), value, self._column), InputError):
                return error
            item = {"messages": [{"role": "user", "content": value}]} if self._chat else {"prompt": value}
        return await self._model.run_one("generate", self._options, item)


def _error_of(answer: Answer | InputError) -> str | None:
    """Return why a row, or one of its questions, has no answer; None if all have one."""
    if isinstance(answer, Decision):
        return "; ".join(map(str, answer.errors.values())) or None
    return str(answer) if isinstance(answer, InputError) else None


def _null(column: str) -> InputError:
    return InputError(f"{column!r} is null", field=column, remedy="give it a value, or drop the row", code="null")


def _array(values: list[Any]) -> np.ndarray:
    """Return values as a column: a matrix if all values are vectors, else an array of objects."""
    if values and all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values)
    out = np.empty(len(values), object)
    out[:] = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    return out
