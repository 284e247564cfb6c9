"""Checks grammars in a subprocess, with limits of time and memory: the library may take minutes for a short schema. The
system ends the subprocess after its processor time, within compiled code too."""

from __future__ import annotations

from typing import BinaryIO

from .subprocesses import BoundedProcess, SubprocessEnded, answer_calls

# Processor seconds that a grammar may take. No schema of JSONSchemaBench takes a tenth of them.
SECONDS = 2.0
# Bytes that the process may have.
MEMORY = 1 << 30
# How the fault of a grammar that was ended begins.
TOO_MUCH = "it takes too long to compile, or too much memory"


class GrammarProcess(BoundedProcess):
    """Checks grammars in a subprocess."""

    def __init__(self, memory: int = MEMORY):
        super().__init__(__name__, memory)

    def fault(self, source: str) -> str:
        """Return what is wrong with a grammar in the library's form; "" if nothing is."""
        try:
            return self.call({"source": source}, SECONDS)
        except SubprocessEnded:
            return f"{TOO_MUCH} (more than {SECONDS:g} s of processor time, or {MEMORY >> 30} GiB)"


def fault_of(source: str) -> str:
    """Return what the library finds wrong with a grammar; "" if nothing is."""
    import llguidance

    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source)
    return messages[0] if is_error else ""


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until `source` ends. argv: bytes of memory"""
    answer_calls(fault_of, {"source": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'}, argv, source, sink)
