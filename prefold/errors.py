"""The errors of prefold.

PrefoldError
├── InputError          one record, prompt or argument is wrong; names the field and the remedy
├── CheckpointError     a model cannot be found or read
│   └── UnsupportedModelError   an architecture, tensor or setting that prefold does not support
├── OutOfMemoryError    a model or a request does not fit in memory; raised before anything is loaded
├── RankError           with tensor parallelism: a rank has failed, and all ranks have ended
├── ForkedError         this process was forked after a model was loaded, and cannot compute
├── MissingExtraError   an optional dependency is not installed; names the extra
└── JobError            a job cannot start or continue (output exists, journal of another job, ...)
    └── FleetError          all replicas have failed
"""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn_caller(message: str) -> None:
    """Warn at the caller's line: the first frame outside this package."""
    level = 1
    while sys._getframe(level).f_code.co_filename.startswith(_PACKAGE):
        level += 1
    warnings.warn(message, stacklevel=level + 1)


class PrefoldError(Exception):
    """Base of all errors that prefold raises."""


class InputError(PrefoldError, ValueError):
    """One record, prompt or argument is wrong. A job writes the error to the record's output line and continues.

    Attributes:
        message: What is wrong.
        field: The wrong column, option or argument, under the name that the user gave it; None: no single field.
        remedy: What to do.
        code: A short stable identifier for programs, such as "missing_field" or "too_long".

    Example:
        >>> try:
        ...     llm.embed(["fine", None])
        ... except InputError as error:
        ...     print(error.message, error.remedy)
    """

    def __init__(self, message: str, *, field: str | None = None, remedy: str = "", code: str = "invalid_input"):
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.field = field
        self.remedy = remedy
        self.code = code

    def renamed(self, field: str | None, remedy: str | None = None) -> InputError:
        """Return a copy of this error for another field. If the message quotes the old name, the new name replaces it.

        Args:
            field: The new field.
            remedy: The new remedy; None: keep the remedy.
        """
        message = self.message if self.field is None else self.message.replace(repr(self.field), repr(field))
        renamed = InputError(message, field=field, remedy=self.remedy if remedy is None else remedy, code=self.code)
        renamed.__cause__ = self.__cause__
        return renamed

    def to_dict(self) -> dict[str, str]:
        """Return the error as in an output line: code and message, and field and remedy if they are set."""
        parts = {"code": self.code, "message": self.message, "field": self.field, "remedy": self.remedy}
        return {name: part for name, part in parts.items() if part}


class CheckpointError(PrefoldError):
    """A model cannot be found or read."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint has an architecture, a tensor or a setting that prefold does not support."""


class OutOfMemoryError(PrefoldError, MemoryError):
    """A model or a request does not fit in memory. Raised before anything is loaded."""


class RankError(PrefoldError):
    """With tensor parallelism: a rank has died, hangs or cannot start, and all ranks have ended."""


class ForkedError(PrefoldError, RuntimeError):
    """This process was forked from a process that had loaded a model, and cannot compute.

    The model's threads do not exist in the child, so a step would never end. Start processes with "spawn" or
    "forkserver", or fork before the first LLM is made.
    """


class MissingExtraError(PrefoldError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        extra: The extra that installs it: pip install 'prefold[EXTRA]'.
    """

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'prefold[{extra}]'")
        self.extra = extra
        self._arguments = (package, extra, purpose)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments


class JobError(PrefoldError):
    """A job cannot start or continue."""


class FleetError(JobError):
    """All replicas have failed. The message has the reason for each."""


def not_invariant(what: str) -> InputError:
    """Return the error for a model that cannot be batch-invariant, because `what` depends on the batch."""
    message = f"this model cannot be batch-invariant here: {what} depend on the rest of the batch"
    return InputError(message, field="invariant", remedy="leave --invariant out, or use the executor auto on a CPU")


def no_lm_head() -> InputError:
    """Return the error for logits of a model without an LM head."""
    return InputError(
        "this checkpoint has no LM head, so it has no logits",
        field="model",
        remedy="use it to embed, or load a ...ForCausalLM checkpoint that contains lm_head.weight",
        code="no_lm_head",
    )


def record_error(error: Exception) -> InputError:
    """Convert an exception that was raised while a record was processed to the record's InputError.

    An InputError is returned unchanged. Any other exception becomes an InputError with code "unexpected" that names its
    type. This includes MemoryError: the record needed more memory than is free, and the memory is free again.

    Raises:
        OSError, ImportError, PrefoldError: `error` itself, if it is one of these but not an InputError. A record cannot
            cause them.
    """
    if isinstance(error, InputError):
        return error
    if isinstance(error, (OSError, ImportError, PrefoldError)):
        raise error
    reason = f": {error!s:.300}" if str(error) else ""
    message = f"the record cannot be processed ({type(error).__name__}{reason})"
    wrapped = InputError(message, remedy="check its values", code="unexpected")
    wrapped.__cause__ = error
    return wrapped
