"""Render the chat templates of requests in a subprocess with limits on time and memory.

A template is a program, and Jinja's sandbox (`sandbox.py`) limits neither. The operating system ends the subprocess
when its CPU time is used up, even inside compiled code, and limits its memory. Only Linux limits memory reliably, so
other systems refuse such templates.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..errors import InputError
from .subprocesses import BoundedProcess, SubprocessEnded, answer_calls

# Limit on the memory of the process, in bytes. Python and its imports need about a tenth of this.
MEMORY = 1 << 30
# Maximum number of characters that a template may write. No conversation that fits a model has a tenth of this.
LONGEST = 1 << 26


class TemplateProcess(BoundedProcess):
    """Renders conversations in a subprocess."""

    def __init__(self, memory: int = MEMORY):
        """Create the process with a memory limit in bytes."""
        super().__init__(__name__, memory)

    def write(self, name: str, source: str, values: Mapping[str, Any], seconds: float) -> str:
        """Return the text of `sandbox.write`, or raise its errors.

        Raise InputError if the template needs more than `seconds` of CPU time or too much memory.
        """
        if sys.platform != "linux":
            message = f"chat templates of requests are refused on {sys.platform}, which cannot limit their memory"
            remedy = "name one of the model's templates, or run prefold on Linux"
            raise InputError(message, field="chat_template", remedy=remedy, code="unsupported")
        try:
            return self.call({"name": name, "source": source, "values": values}, seconds)
        except InputError:
            raise
        except ValueError as error:  # Python refuses to write integers of more than 4,300 digits
            remedy = "give it as a text"
            raise InputError(f"a value of the chat is no JSON: {error}", field="messages", remedy=remedy) from None
        except SubprocessEnded:
            remedy = "correct it, or allow it more time with template_seconds (--template-seconds)"
            reason = f"it ran for more than {seconds:g} s, or ended its process"
            message = f"the chat template {name} was stopped: {reason}"
            raise InputError(message, field="chat_template", remedy=remedy, code="template_limit") from None


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until `source` ends. `argv` has the memory limit in bytes."""
    answer_calls(written, {"name": "", "source": "", "values": {}}, argv, source, sink)


def written(longest: int = LONGEST, **fields: Any) -> str:
    """Return the text of `sandbox.write` with these fields. If memory runs out, free some and try once more."""
    from .sandbox import TooLong, compile_template, write  # Jinja is slow to import, and only this process needs it

    try:
        return write(**fields, longest=longest)
    except InputError as error:
        if error.code != "template_limit" or isinstance(error, TooLong):
            raise
    compile_template.cache_clear()  # cached programs of other templates may use the memory
    gc.collect()  # a program's functions and globals form reference cycles
    return write(**fields, longest=longest)
