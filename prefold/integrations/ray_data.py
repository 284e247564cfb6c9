"""`PrefoldBatches`, a class for Ray Data's `map_batches`.

    import ray
    from prefold.integrations.ray_data import PrefoldBatches

    ds = ds.map_batches(
        PrefoldBatches,
        fn_constructor_kwargs={"task": "generate", "column": "question", "model": "smollm2-135m", "max_tokens": 64},
        compute=ray.data.ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=4),
        batch_size=64,
    )

An actor computes its concurrent batches together, so they share prefixes. The output has the input's columns, columns
with results, and a column `error`: null, or the reason why a row has no result.
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
    """A task that runs on a column of each batch. Batches are dicts of NumPy arrays.

    Args:
        task: "generate", "embed", "classify", "decide" or "score".
        column: The column to read. It contains texts; for "generate", it may also contain lists of messages. "score"
            returns the log-probability of each text, and "decide" reads each text as a state.
        model: A hub id, folder, .gguf file or built-in name, as for `LLM`.
        chat: Whether "generate" puts each text into the model's chat template, as a user message.
        error: Name of the column of errors.
        prefix: Prefix of the names of the result columns.
        scores: For "classify" and "decide": "all" adds columns with the probability of each label or option.
        options: Options of `LLM` and of the task.

    Raises:
        InputError: `task` is unknown, a batch lacks `column`, or a batch already has a column with the name of a result
            column.

    Example:
        >>> constructor = {"task": "embed", "column": "text"}
        >>> ds = ds.map_batches(PrefoldBatches, fn_constructor_kwargs=constructor, concurrency=1)
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
        """Yield the batch with the result columns and the column of errors."""
        import pyarrow  # Ray Data depends on it

        if self._column not in batch:
            message = f"there is no column {self._column!r}"
            raise InputError(message, field=self._column, remedy=f"the columns are {', '.join(batch)}")
        for name in {*self._names.values(), self._error} & set(batch):
            raise InputError(f"the batch already has a column {name!r}", field=name, remedy="give prefix=, or error=")
        answers = await self._answers(list(batch[self._column]))
        errors = [_error_of(answer) for answer in answers]
        # Without an explicit type, a column of only nulls would have another type, and Ray could not join the blocks.
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
    """Return the message of a failed row, or the messages of its failed questions; None if nothing failed."""
    if isinstance(answer, Decision):
        return "; ".join(map(str, answer.errors.values())) or None
    return str(answer) if isinstance(answer, InputError) else None


def _null(column: str) -> InputError:
    return InputError(f"{column!r} is null", field=column, remedy="give it a value, or drop the row", code="null")


def _array(values: list[Any]) -> np.ndarray:
    """Return the values of a column: a matrix if all values are vectors, else an array of objects."""
    if values and all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values)
    out = np.empty(len(values), object)
    out[:] = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    return out
