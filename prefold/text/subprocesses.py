"""Run untrusted work in a subprocess with limits, so that a failure stays there.

A request is its length (8 bytes) and its bytes. An answer is the length of a JSON object (8 bytes), the object, and, if
the object has a "size", that many bytes. Requests and answers alternate until the input ends. `Subprocess` sends
requests; `answer_all` runs in the process and answers. `BoundedProcess` and `answer_calls` do the same for a function
of plain values that returns a text: each call has a CPU time limit, and the process has a memory limit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError

LENGTH = struct.Struct("<Q")
PROGRAM = "import sys; from {module} import main; main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)"
# Seconds that the process may need to start, the first time, on a busy machine.
START_SECONDS = 60.0
# Limit on a call's wall time, as a multiple of its CPU time limit, for busy machines.
PATIENCE = 20.0


class SubprocessEnded(Exception):
    """The process has ended or did not answer in time."""


class Subprocess:
    """Answers requests in a subprocess, one at a time. Callers in several threads must use a lock.

    The process starts with the first request, and again after a request ended it. It ends with this object.
    """

    def __init__(self, module: str, arguments: Sequence[str]):
        """Prepare the command. The process runs `main(arguments, source, sink)` of `module`."""
        self._command = [sys.executable, "-P", "-c", PROGRAM.format(module=module), *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process unless it runs, and return when it is ready. Raise SubprocessEnded on failure."""
        if self.process is not None and self.process.poll() is None:
            return
        self.end()
        self.process = self._started()
        self._answer(b"", START_SECONDS)  # a process that has started answers an empty request

    def ask(self, request: bytes, seconds: float) -> tuple[dict[str, Any], bytearray]:
        """Return the object of the answer, and its bytes.

        Raise SubprocessEnded if no answer comes within `seconds`, not counting the start. The process is then ended.
        """
        self.start()
        return self._answer(request, seconds)

    def end(self) -> None:
        """End the process; the next request starts a new one."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        self._socket.close()
        process.wait()

    def __del__(self) -> None:
        if getattr(self, "process", None) is not None:
            self.end()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start and return the process. It imports nothing from the current folder (-P)."""
        root = str(Path(__file__).parents[1])
        variables = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in variables if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._socket, child_end = socket.socketpair()
        with child_end:
            return subprocess.Popen(
                self._command,
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach only the waiting process
            )

    def _answer(self, request: bytes, seconds: float) -> tuple[dict[str, Any], bytearray]:
        """Return the answer of the process.

        If the exchange is interrupted in any way, the process ends: otherwise the next call would read the rest of this
        answer.
        """
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(LENGTH.pack(len(request)) + request)
            (size,) = LENGTH.unpack(self.receive(LENGTH.size, deadline))
            answer = json.loads(self.receive(size, deadline))
            return answer, self.receive(answer.get("size", 0), deadline)
        except OSError as error:
            self.end()
            raise SubprocessEnded from error
        except BaseException:
            self.end()
            raise

    def receive(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            count = self._socket.recv_into(rest)
            if not count:
                raise SubprocessEnded
            rest = rest[count:]
        return data


class BoundedProcess:
    """A subprocess for calls of one function, one at a time; calls from several threads wait for each other.

    The process starts with the first call, and again after a call ended it.
    """

    def __init__(self, module: str, memory: int):
        """Prepare the process. `main` of `module` calls `answer_calls`; `memory` is the limit in bytes."""
        self._lock = threading.Lock()
        self.subprocess = Subprocess(module, [str(memory)])

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """Return the result of the function, or raise its InputError.

        Raise SubprocessEnded if the call needs more than `seconds` of CPU time or too much memory. Raise ValueError if
        the arguments are not JSON.
        """
        request = json.dumps({"arguments": arguments, "seconds": seconds}).encode()
        with self._lock:
            answer, text = self.subprocess.ask(request, PATIENCE * seconds)
        if "error" in answer:
            raise InputError(answer["error"], field=answer["field"], remedy=answer["remedy"], code=answer["code"])
        return text.decode()


def answer_calls(
    function: Callable[..., str], first: Mapping[str, Any], argv: list[str], source: BinaryIO, sink: BinaryIO
) -> None:
    """Answer the calls of a BoundedProcess until `source` ends.

    `first` are the arguments of a call that runs before memory is limited, so that the function can do its imports.
    """

    def answer(request: bytes) -> tuple[dict[str, Any], bytes]:
        if not request:
            return {}, b""
        call = json.loads(request)
        _limit_time(call["seconds"])
        try:
            return {}, function(**call["arguments"]).encode()
        except InputError as error:
            return {"error": error.message, "field": error.field, "remedy": error.remedy, "code": error.code}, b""
        finally:
            _limit_time(0)

    answer(json.dumps({"arguments": first, "seconds": 60}).encode())
    limit_process(int(argv[0]))
    answer_all(answer, source, sink)


def answer_all(answer: Callable[[bytes], tuple[dict[str, Any], bytes]], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until `source` ends. `answer` returns the object and the bytes of an answer."""
    while head := source.read(LENGTH.size):
        data = source.read(LENGTH.unpack(head)[0])
        fields, body = answer(data)
        text = json.dumps(fields | ({"size": len(body)} if body else {})).encode()
        sink.write(LENGTH.pack(len(text)) + text)
        sink.write(body)
        sink.flush()
        del data, body


def _limit_time(seconds: float) -> None:
    """Let the system end this process after this much CPU time, even inside compiled code; 0 removes the limit.

    On Windows there is no such limit; the caller's timeout ends the process.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_process(memory: int) -> None:
    """Limit this process to `memory` bytes, and forbid writing files and core dumps."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, hard))
