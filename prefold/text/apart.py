"""Writes conversations by templates of strangers in a process of its own, which has limits of its own.

The sandbox bounds what a template does (`sandbox.py`). Where it has a hole, or Jinja or Python has, the process is
ended by its system after the processor time that the template is allowed, and gets no more memory; nobody else
notices. A short conversation took 0.09 ms in place of 0.02, and the first one 0.11 s.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..errors import InputError
from ..helper import Ended, Helper, answer_all, limit_process
from .writing import stopped, write

__all__ = ["Apart", "main"]

# Bytes that the process may have. Python and what it imports take about a twentieth of them.
MEMORY = 2 << 30
# Seconds of processor time between the sandbox's own limit and the end of the process.
GRACE = 0.5
# How much longer than its processor time a template may take by the clock, on a busy machine.
PATIENCE = 20.0


class Apart:
    """An Apart writes conversations in a process of its own, one at a time; calls from several threads wait for each
    other. Its process starts with the first conversation, and again where a template has ended it."""

    def __init__(self, memory: int = MEMORY):
        """memory: bytes that the process may have."""
        self._lock = threading.Lock()
        self._helper = Helper(__name__, [str(memory)])

    def write(self, name: str, source: str, values: Mapping[str, Any], seconds: float) -> str:
        """Returns what `writing.write` returns for the same arguments, and raises what it raises; also InputError for
        a template that ends the process."""
        asked = {"name": name, "source": source, "values": values, "seconds": seconds}
        try:
            request = json.dumps(asked).encode()
        except ValueError as error:  # Python writes no number of more than 4,300 digits
            remedy = "give it as a text"
            raise InputError(f"a value of the chat is no JSON: {error}", field="messages", remedy=remedy) from None
        with self._lock:
            try:
                said, text = self._helper.ask(request, PATIENCE * (seconds + GRACE))
            except Ended:
                raise stopped(name, f"it ran for more than {seconds:g} s, or ended its process") from None
        if "error" in said:
            raise InputError(said["error"], field=said["field"], remedy=said["remedy"], code=said["code"])
        return text.decode()


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until `source` ends. argv: bytes of memory."""
    write("", "", {}, 1.0)  # what this imports is there before memory is limited
    limit_process(int(argv[0]))
    answer_all(_answer, source, sink)


def _answer(request: bytes) -> tuple[dict[str, Any], bytes]:
    if not request:
        return {}, b""
    asked = json.loads(request)
    try:
        _end_after(asked["seconds"] + GRACE)
        return {}, write(**asked).encode()
    except InputError as error:
        return {"error": error.message, "field": error.field, "remedy": error.remedy, "code": error.code}, b""
    finally:
        _end_after(0)


def _end_after(seconds: float) -> None:
    """Ends this process after so many seconds of its processor time, also within compiled code; 0: never."""
    if hasattr(signal, "setitimer"):  # not on Windows, where it ends after PATIENCE
        signal.setitimer(signal.ITIMER_PROF, seconds)
