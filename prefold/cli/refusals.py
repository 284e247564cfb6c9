"""Refuses options that mean nothing to what is to be done, so that nobody believes that they were heeded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from ..options import ConversationOptions
from .options import TASKS, options_for

_CONVERSATION = [one.name for one in fields(ConversationOptions) if one.name != "tools"]  # which is a column


def refuse_other_tasks_options(tasks: Collection[str], what: str) -> None:
    """Raises UsageError where an option was given to the command that runs now which is for other tasks than these.

    what    in words what has these tasks, for the error
    """
    context = click.get_current_context()
    of_task = {task: options_for(task) for task in TASKS}
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name is None:
            continue
        # `verify --seed` is another option than the --seed of sampling, as its help says.
        known = {task: options.get(option.name) for task, options in of_task.items()}
        of = [task for task, same in known.items() if same is not None and same.help == option.help]
        if of and not {*of} & {*tasks} and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            written = "/".join((*option.opts, *option.secondary_opts))
            raise click.UsageError(f"{written} is for {_listed(of)}, and not for {what}")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def refuse_conversation_options(o: dict[str, Any], remedy: str) -> None:
    """Raises UsageError where an option was given that says how conversations are written, though there are none.

    remedy  in words how there would be some, for the error
    """
    for name in _CONVERSATION:
        if o.get(name) not in (None, False):
            raise click.UsageError(f"--{name.replace('_', '-')} is for conversations; {remedy}")
