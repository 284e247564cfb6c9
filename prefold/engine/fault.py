"""Finds the requests that a step fails for, so that the others can go on."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OutOfMemoryError, RankError
from .generate import Generator


def find_fault(generator: Generator, error: Exception) -> dict[int, Exception]:
    """Returns {key of an open request: the error of a step that worked for it alone}, after a step has raised `error`.

    The open requests run in halves, and halves of these, until each step that fails works for one of them. All are open
    afterwards; those at fault should be ended before the next step. Where no request can be at fault, because the
    worker is gone or memory is too small for a single row, all are returned at once.
    """
    generator.take_in()
    keys = generator.open_keys
    if isinstance(error, (RankError, OutOfMemoryError)):
        return dict.fromkeys(keys, error)
    found: dict[int, Exception] = {}
    with generator.undisturbed():  # else whoever comes would be a suspect, too, and the search might never end
        generator.hold(*keys)
        groups: list[Sequence[int]] = [keys]
        while groups:
            group = groups.pop()
            generator.release(*group)
            try:
                _advance(generator, group)
            except Exception as failure:
                group = [key for key in group if key in generator.open_keys]
                if len(group) == 1:
                    found[group[0]] = failure
                else:
                    half = len(group) // 2
                    groups += [part for part in (group[:half], group[half:]) if part]
            generator.hold(*generator.open_keys)
        generator.release()
    return found


def _advance(generator: Generator, group: Sequence[int]) -> None:
    """Makes steps until each request of the group that runs has one token more."""
    before = generator.progress(group)
    while generator.step():
        running = {sequence.key for sequence in generator.scheduler.running}
        now = generator.progress(key for key in group if key in running)
        if all(count is None or before[key] is None or count > before[key] for key, count in now.items()):
            return
