"""Every option that is declared for a task is read by code: one that is not would do nothing, without a word."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from task_inputs import FakeCheckpoint, chatty

import prefold
from prefold import InputError
from prefold.spec.fields import option as declare
from prefold.spec.task import OPTIONS, EmbedOptions
from prefold.tasks import make_task

ITEMS = {
    "decide": [{"state": "yes"}],
    "rerank": [{"query": "yes", "document": "no"}], "score": [{"prompt": "yes", "continuation": " no"}, "yes no"],
    "generate": [{"prompt": "yes"}, {"messages": [{"role": "user", "content": "no"}]}],
}  # fmt: skip


def options_read(kind, values, spec_folder=str(Path(prefold.__file__).parent / "spec")):
    """(options of a task that note by whom they are read, the names that were read outside of prefold/spec/)."""
    names, read = {one.name for one in fields(kind)}, set()

    class Noting(kind):
        def __getattribute__(self, name):
            reader = sys._getframe(1).f_code.co_filename
            declares = reader.startswith(spec_folder) and not reader.endswith("requests.py")
            if name in names and reader != "<string>" and not declares:
                read.add(name)
            return super().__getattribute__(name)

    return Noting(**values), read


def read_by_code(kind, values=None):
    """The names of the options of a task that making it, and preparing items with it, reads."""
    options, read = options_read(kind, values or {})
    task = make_task(kind.task, FakeCheckpoint(), chatty(), options)
    for work in task.prepare(ITEMS.get(kind.task, ["yes no"])):
        assert not isinstance(work, InputError), work
    return read


@pytest.mark.parametrize("task", OPTIONS)
def test_every_option_of_a_task_is_read(task):
    """An option that is declared, and that no code reads, would be on the command line and do nothing."""
    questions = {"y": {"type": "score", "criteria": ["low", "high"]}}
    values = {"classify": {"labels": ["yes", "no"]}, "decide": {"questions": questions}}.get(task, {})
    left = {one.name for one in fields(OPTIONS[task])} - read_by_code(OPTIONS[task], values)
    assert left == set(), f"no code reads {', '.join(left)} of {task}"


def test_an_option_that_no_code_reads_is_found():
    @dataclass(frozen=True, kw_only=True)
    class WithTop(EmbedOptions):
        top: int | None = declare(None, "Give only so many.", least=1)

    assert {one.name for one in fields(WithTop)} - read_by_code(WithTop) == {"top"}
