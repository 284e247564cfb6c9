"""Makes the tasks of a model, once for each set of options, and runs them over what a caller gave."""

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


KEPT_TASKS = 64
_process: int | None = None  # the process that made the first LLM


def check_process() -> None:
    """Raises ForkedError in a process that was forked from one that had made an LLM.

    The threads of OpenMP, of PyTorch and of prefold do not exist in the child, and whatever waited for them would wait
    for ever.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise ForkedError(
            f"this process was forked from process {_process}, which had made an LLM, and cannot compute; start it with"
            ' multiprocessing.get_context("spawn"), or fork before the first LLM is made (gunicorn: without --preload)'
        )


@dataclass(frozen=True, slots=True)
class CallForm:
    """A CallForm says how a method was called.

    argument  the argument that holds the items; it is named in errors
    single    whether the caller passed a single item, and gets a single answer
    back      whether bad items are returned as InputErrors
    progress  whether to show a bar
    """

    argument: str = ""
    single: bool = False
    back: bool = False
    progress: bool = False


def read_call(
    argument: str, items: list[Any], single: bool, errors: str, options: Mapping[str, Any]
) -> tuple[CallForm, list[Any], dict[str, Any]]:
    """Returns how a method was called, its items, each with its adapter where there is a list of them, and the options
    of the task."""
    task_options = dict(options)
    call = CallForm(argument, single, check_errors(errors), task_options.pop("progress", False))
    return call, *take_adapters(items, single, task_options)


class TaskRunner:
    """A TaskRunner runs tasks on one model, for the methods of LLM. A subclass sets the attributes:

    engine      computes
    checkpoint  where the model came from
    tokenizer   None for a model of token ids
    config      the model's shapes and settings
    images      the reader of images (`ImageInputs`); None for a model that takes only text
    kept        keeps answers for later calls; None: nothing is kept
    """

    engine: ModelEngine
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    config: ModelConfig
    images: Any
    kept: KeptAnswers | None = None

    def __init__(self) -> None:
        self._tasks: dict[object, Task] = {}

    def task(self, name: str, **options: object) -> Task:
        """Returns the task `name` with these options, as `prefold.tasks.make_task` makes it for this checkpoint.

        Tasks are kept by their options, so that a method which is called again reads no file of the checkpoint again.
        """
        check_process()
        try:
            key = (name, _frozen(options))
            task = self._tasks.get(key)
        except (TypeError, RecursionError):  # an option without a hash, or one that is very deep: not kept
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
        """Runs a task over items and returns a dict for each, in their order. Raises the InputError of a bad item."""
        return [answer.line() for answer in self._answers(task, items_of(items), CallForm())]

    def _answers(self, task: Task, items: Sequence[Any], call: CallForm) -> list[Any]:
        """Return the task's answer to each item; for a bad item its InputError, if the call wants it back."""
        answers = finish_items(task, *self._results(task, items, call))
        return answers if call.back else first_error(answers, call.argument, single=call.single)

    def _results(self, task: Task, items: Sequence[Any], call: CallForm) -> tuple[list[Any], list[Any]]:
        """Returns two lists: for each item its Work or InputError, and the results of its requests or None.

        Items may be InputErrors themselves. Raises the first InputError, before anything is computed, unless the call
        wants them back.
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
    """Warns the caller of prefold about the images of the items."""
    for note in [note for work in works if isinstance(work, Work) for note in (work.note or {}).get("image_notes", ())]:
        warn_caller(note)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[], None] | None]:
    """Shows a progress bar of `total` prompts on standard error, and yields a function that moves it on by one prompt.

    For a total of 0 it shows nothing and yields None.
    """
    if not total:
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=label, total=total) as bar:
        yield bar.update


def _frozen(value: Any) -> Any:
    """Returns a key that is equal for equal options: the types and contents of `value`, without a reference to it."""
    if isinstance(value, Mapping):
        return ("mapping", *((key, _frozen(element)) for key, element in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(item) for item in value))
    if isinstance(value, np.ndarray):
        return ("array", value.shape, str(value.dtype), value.tobytes())
    return (type(value), value)
