"""Check grammars in a subprocess with limits on time and memory.

The library may take minutes for a short schema. The operating system ends the subprocess when its CPU time is used up,
even inside compiled code.
"""

from __future__ import annotations

from typing import BinaryIO

from .subprocesses import BoundedProcess, SubprocessEnded, answer_calls

# CPU seconds that a grammar may use. No schema of JSONSchemaBench needs a tenth of this.
SECONDS = 2.0
# Limit on the memory of the process, in bytes.
MEMORY = 1 << 30
# Start of the error text for a grammar that exceeded a limit.
TOO_MUCH = "it takes too long to compile, or too much memory"


class GrammarProcess(BoundedProcess):
    """Checks grammars in a subprocess."""

    def __init__(self, memory: int = MEMORY):
        super().__init__(__name__, memory)

    def fault(self, source: str) -> str:
        """Return the error message for a grammar in the library's form; "" if the grammar is valid."""
        try:
            return self.call({"source": source}, SECONDS)
        except SubprocessEnded:
            return f"{TOO_MUCH} (more than {SECONDS:g} s of processor time, or {MEMORY >> 30} GiB)"


def fault_of(source: str) -> str:
    """Return the library's first error for a grammar; "" for a valid one."""
    import llguidance

    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source)
    return messages[0] if is_error else ""


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until `source` ends. `argv` has the memory limit in bytes."""
    answer_calls(fault_of, {"source": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'}, argv, source, sink)
