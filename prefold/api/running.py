"""Make each task once per set of options, and run it over the caller's items."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import ForkedError, InputError, warn_caller
from ..model import ModelConfig
from ..tasks import Task, Work, make_task
from ..tasks.kept import KeptAnswers
from ..tasks.run import calibrated, finish_items, run_works
from ..text import Tokenizer
from .arguments import check_errors, first_error, items_of, take_adapters

if TYPE_CHECKING:
    from ..engine import ModelEngine


KEPT_TASKS = 64  # maximum number of tasks to keep for later calls
_process: int | None = None  # the process that made the first LLM


def check_process() -> None:
    """Raise ForkedError if this process was forked from a process that had made an LLM.

    The threads of OpenMP, PyTorch and prefold do not exist in the child, so waiting for them would never end.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise ForkedError(
            f"this process was forked from process {_process}, which had made an LLM, so it cannot compute; start it"
            ' with multiprocessing.get_context("spawn"), or fork before the first LLM is made (gunicorn: without'
            " --preload)"
        )


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a method was called."""

    argument: str = ""  # name of the argument with the items, for errors
    single: bool = False  # whether the caller passed a single item, and gets a single answer
    back: bool = False  # whether to return the InputErrors of bad items instead of raising them
    progress: bool = False  # whether to show a bar


def read_call(
    argument: str, items: list[Any], single: bool, errors: str, options: Mapping[str, Any]
) -> tuple[CallForm, list[Any], dict[str, Any]]:
    """Return (how the method was called, its items, the options of the task).

    If `adapter` is a list, each item gets its own adapter.
    """
    task_options = dict(options)
    call = CallForm(argument, single, check_errors(errors), task_options.pop("progress", False))
    return call, *take_adapters(items, single, task_options)


class TaskRunner:
    """Base of LLM that runs tasks on one model. LLM sets the attributes."""

    engine: ModelEngine
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None  # None: the model accepts only token ids
    config: ModelConfig
    images: Any  # the model's `ImageInputs`; None: it accepts only text
    kept: KeptAnswers | None = None  # keeps answers for later calls

    def __init__(self) -> None:
        self._tasks: dict[object, Task] = {}

    def task(self, name: str, **options: object) -> Task:
        """Return a task for this model, for use with `run`.

        Tasks are kept by their options, so that a repeated call of a method does not reread the checkpoint's files.

        Args:
            name: "embed", "rerank", "classify", "decide", "score" or "generate".
            **options: Options of the task.

        Returns:
            The Task, as `prefold.tasks.make_task` makes it.

        Raises:
            InputError: An option is wrong, or the model cannot do the task.

        Example:
            >>> task = llm.task("embed", dimensions=64)
        """
        check_process()
        try:
            key = (name, _frozen(options))
            task = self._tasks.get(key)
        except (TypeError, RecursionError):  # an option that cannot be hashed, or is nested too deeply: not kept
            return self._make_task(name, options)
        if task is None:
            task = self._make_task(name, options)
            while len(self._tasks) >= KEPT_TASKS:
                self._tasks.pop(next(iter(self._tasks)), None)
            self._tasks[key] = task
        return task

    def _make_task(self, name: str, options: Mapping[str, Any]) -> Task:
        further: dict[str, Any] = {"adapters": self.engine.facts.adapters, "images": self.images, "config": self.config}
        task = make_task(name, self.checkpoint, self.tokenizer, options, **further)
        return cast(Task, calibrated(self.engine, task))

    def run(self, task: Task, items: Iterable[object]) -> list[dict[str, object]]:
        """Run a task over items.

        Args:
            task: A task of `task`.
            items: The items of the task, such as records of a job.

        Returns:
            A dict for each item, in order, as in the output lines of a job.

        Raises:
            InputError: An item is bad.

        Example:
            >>> llm.run(llm.task("embed"), [{"text": "a"}, {"text": "b"}])
        """
        return [answer.line() for answer in self._answers(task, items_of(items), CallForm())]

    def _answers(self, task: Task, items: Sequence[Any], call: CallForm) -> list[Any]:
        """Return the answer to each item. A bad item has its InputError if `call.back` is set; else this is raised."""
        answers = finish_items(task, *self._results(task, items, call))
        return answers if call.back else first_error(answers, call.argument, single=call.single)

    def _results(self, task: Task, items: Sequence[Any], call: CallForm) -> tuple[list[Any], list[Any]]:
        """Return two lists: the Work or InputError of each item, and the results of its requests or None.

        Items may already be InputErrors. Unless `call.back` is set, raise the first InputError before computing.
        """
        good = iter(task.prepare([item for item in items if not isinstance(item, InputError)]))
        works: list[Work | InputError] = [item if isinstance(item, InputError) else next(good) for item in items]
        if not call.back:
            first_error(works, call.argument, single=call.single)
        return works, self._run_works(task, works, call)

    def _run_works(self, task: Task, works: Sequence[Work | InputError], call: CallForm) -> list[list[Any] | None]:
        warn_of_images(works)
        total = sum(len(work.requests) for work in works if not isinstance(work, InputError))
        with _bar(task.name, total if call.progress else 0) as advance:
            return run_works(self.engine, task, works, on_done=advance, kept=self.kept)


def warn_of_images(works: Iterable[Work | InputError]) -> None:
    """Pass the notes on images to the caller as warnings."""
    for note in [note for work in works if isinstance(work, Work) for note in (work.note or {}).get("image_notes", ())]:
        warn_caller(note)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[], None] | None]:
    """Show a progress bar on standard error, and yield a function that advances it by one prompt.

    With a total of 0, show no bar and yield None.
    """
    if not total:
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=label, total=total) as bar:
        yield bar.update


def _frozen(value: Any) -> Any:
    """Return a key that is equal for equal values: types and contents, without a reference to `value`."""
    if isinstance(value, Mapping):
        return ("mapping", *((key, _frozen(element)) for key, element in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(item) for item in value))
    if isinstance(value, np.ndarray):
        return ("array", value.shape, str(value.dtype), value.tobytes())
    return (type(value), value)
