"""Renders the chat templates of requests in a subprocess, with limits of time and memory. A template is a program, and
Jinja's sandbox (`sandbox.py`) bounds neither. The system ends the subprocess after its processor time, within compiled
code too, and bounds its memory. Only Linux reliably bounds memory: elsewhere such templates are refused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..errors import InputError
from .subprocesses import BoundedProcess, SubprocessEnded, answer_calls

# Bytes that the process may have. Python and what it imports take about a tenth of them.
MEMORY = 1 << 30
# Letters that a template may write. No conversation that fits a model has a tenth of them.
LONGEST = 1 << 26


class TemplateProcess(BoundedProcess):
    """A TemplateProcess renders conversations in a subprocess."""

    def __init__(self, memory: int = MEMORY):
        """memory: bytes that the process may have."""
        super().__init__(__name__, memory)

    def write(self, name: str, source: str, values: Mapping[str, Any], seconds: float) -> str:
        """Returns the text of `sandbox.write`, and raises its errors; also InputError for a template that takes more
        than so many seconds of processor time, or too much memory."""
        if sys.platform != "linux":
            message = f"chat templates of requests are refused on {sys.platform}: their memory could not be limited"
            remedy = "name one of the model's templates, or run prefold on Linux"
            raise InputError(message, field="chat_template", remedy=remedy, code="unsupported")
        try:
            return self.call({"name": name, "source": source, "values": values}, seconds)
        except InputError:
            raise
        except ValueError as error:  # Python writes no number of more than 4,300 digits
            remedy = "give it as a text"
            raise InputError(f"a value of the chat is no JSON: {error}", field="messages", remedy=remedy) from None
        except SubprocessEnded:
            remedy = "correct it, or allow it more time with template_seconds (--template-seconds)"
            reason = f"it ran for more than {seconds:g} s, or ended its process"
            message = f"the chat template {name} was stopped: {reason}"
            raise InputError(message, field="chat_template", remedy=remedy, code="template_limit") from None


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until `source` ends. argv: bytes of memory."""
    answer_calls(written, {"name": "", "source": "", "values": {}}, argv, source, sink)


def written(longest: int = LONGEST, **fields: Any) -> str:
    """Return the text of `sandbox.write` with these fields, and try once more if memory is short."""
    from .sandbox import TooLong, compile_template, write  # Jinja takes a while to import; only this process needs it

    try:
        return write(**fields, longest=longest)
    except InputError as error:
        if error.code != "template_limit" or isinstance(error, TooLong):
            raise
    compile_template.cache_clear()  # programs of other templates may hold the memory that this one lacks
    gc.collect()  # a program's functions and their globals hold each other
    return write(**fields, longest=longest)
