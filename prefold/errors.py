"""The errors that prefold raises on purpose.

PrefoldError
├── InputError          one record, prompt or argument is wrong; names the field and the remedy
├── CheckpointError     a model cannot be found or read
│   └── UnsupportedModelError   an architecture, tensor or setting we do not know
├── OutOfMemoryError    what was asked for does not fit; raised before it is loaded
├── RankError           a rank of a model that is split over processes has failed; all of them have ended
├── ForkedError         a process that was forked after a model was loaded cannot compute
├── MissingExtraError   an optional dependency is not installed; names the extra
└── JobError            a job cannot start or go on (output exists, journal of another job, ...)
    └── FleetError          no replica of a fleet is left
"""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn_caller(message: str) -> None:
    """Warn with the line that called prefold as the place: the first frame that is not in this package."""
    level = 1
    while sys._getframe(level).f_code.co_filename.startswith(_PACKAGE):
        level += 1
    warnings.warn(message, stacklevel=level + 1)


class PrefoldError(Exception):
    """PrefoldError is the base of every error that prefold raises on purpose."""


class InputError(PrefoldError, ValueError):
    """One record, prompt or argument is wrong.

    message  what is wrong
    field    the name of what is wrong, as the user wrote it: a column, an option, an argument
    remedy   what to do about it
    code     a short stable word for machines ("missing_field", "too_long", ...)

    A job turns the error into that record's error line and goes on.
    """

    def __init__(self, message: str, *, field: str | None = None, remedy: str = "", code: str = "invalid_input"):
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.field = field
        self.remedy = remedy
        self.code = code

    def renamed(self, field: str | None, remedy: str | None = None) -> InputError:
        """Return this error with `field` in place of its own field, also where its message quotes that.

        remedy  replaces its remedy; None: the remedy stays
        """
        message = self.message if self.field is None else self.message.replace(repr(self.field), repr(field))
        renamed = InputError(message, field=field, remedy=self.remedy if remedy is None else remedy, code=self.code)
        renamed.__cause__ = self.__cause__
        return renamed

    def to_dict(self) -> dict[str, str]:
        """Return the error as an output line has it: code and message, and field and remedy if there are any."""
        parts = {"code": self.code, "message": self.message, "field": self.field, "remedy": self.remedy}
        return {name: part for name, part in parts.items() if part}


class CheckpointError(PrefoldError):
    """A model cannot be found or read."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is of an architecture, or has a setting, that prefold does not know."""


class OutOfMemoryError(PrefoldError, MemoryError):
    """What was asked for does not fit into memory; raised before anything is loaded."""


class RankError(PrefoldError):
    """A rank of a model that is split over processes has died, hangs or cannot start; all of them have ended."""


class ForkedError(PrefoldError, RuntimeError):
    """This process was forked from one that had loaded a model. The model's threads are not here, so no step would end.

    Start processes with "spawn" or "forkserver", or fork before the first LLM is made.
    """


class MissingExtraError(PrefoldError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'prefold[{extra}]'")
        self.extra = extra
        self._arguments = (package, extra, purpose)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments


class JobError(PrefoldError):
    """A job cannot start, or cannot go on."""


class FleetError(JobError):
    """No replica of a fleet is left; the message says what became of each."""


def not_invariant(what: str) -> InputError:
    """Return the error of a model that cannot be batch-invariant. what: the part of it that depends on the batch"""
    message = f"this model cannot be batch-invariant here: {what} depend on what else is in the batch"
    return InputError(message, field="invariant", remedy="leave --invariant out, or use the executor auto on a CPU")


def no_lm_head() -> InputError:
    """Return the error for logits of a model without an LM head."""
    return InputError(
        "this checkpoint has no LM head, so it gives no logits",
        field="model",
        remedy="use it to embed, or load a checkpoint ...ForCausalLM whose files have lm_head.weight",
        code="no_lm_head",
    )


def record_error(error: Exception) -> InputError:
    """Returns the InputError that a record gets for `error`, which was raised while that record was worked on.

    An InputError is returned as it is. For any other exception an InputError of code "unexpected" names its type. A
    MemoryError is such an exception: the record asked for more memory than there is, and it is free again.
    Raises `error` itself where no record can be at fault: an OSError, a module that cannot be imported, and all of
    prefold's own errors but InputError.
    """
    if isinstance(error, InputError):
        return error
    if isinstance(error, (OSError, ImportError, PrefoldError)):
        raise error
    reason = f": {error!s:.300}" if str(error) else ""
    message = f"the record cannot be processed ({type(error).__name__}{reason})"
    wrapped = InputError(message, remedy="see whether its values are what they should be", code="unexpected")
    wrapped.__cause__ = error
    return wrapped
