"""Subprocess runs what cannot be trusted in a process of its own, with limits: whatever it does, it does it there.

A request is its length (8 bytes) and its bytes; an answer is the length of a JSON object (8 bytes), the object, and
where that has a "size" so many bytes. One follows the other until the input ends. `Subprocess` sends requests;
`answer_all` runs in the process, and answers. `BoundedProcess` and `answer_calls` do so for a function that takes plain
values and returns a text: a call has a limit of processor time, and the process has one of memory.
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
# Seconds that the process may take to start, the first time, on a busy machine.
START_SECONDS = 60.0
# How much longer than its processor time a call may take by the clock, on a busy machine.
PATIENCE = 20.0


class SubprocessEnded(Exception):
    """The process has ended, or does not answer in time."""


class Subprocess:
    """A Subprocess answers requests in a process of its own, one at a time: callers in several threads hold a lock. The
    process starts with the first request, and again where a request has ended it. It ends with the Subprocess."""

    def __init__(self, module: str, arguments: Sequence[str]):
        """module: the process runs its `main(arguments, source, sink)`."""
        self._command = [sys.executable, "-P", "-c", PROGRAM.format(module=module), *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process unless it runs, and returns when it is ready. Raises Ended where it is not."""
        if self.process is not None and self.process.poll() is None:
            return
        self.end()
        self.process = self._started()
        self._answer(b"", START_SECONDS)  # a process that has started well answers an empty request

    def ask(self, request: bytes, seconds: float) -> tuple[dict[str, Any], bytearray]:
        """Returns the object of the answer, and its bytes. Raises Ended where there is none in so many seconds, not
        counting the start; the process has then ended."""
        self.start()
        return self._answer(request, seconds)

    def end(self) -> None:
        """Ends the process; the next request starts another."""
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
        """Returns the process. It imports nothing from the current folder (-P)."""
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
                start_new_session=True,  # so that Ctrl-C is for the process that waits for the answer
            )

    def _answer(self, request: bytes, seconds: float) -> tuple[dict[str, Any], bytearray]:
        """Returns the answer of the process. Where the exchange is broken off, by an interrupt too, the process ends:
        the rest of its answer would be taken for the next one."""
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
    """A process for calls of one function, one at a time; calls of several threads wait for each other. The process
    starts with the first call, and again after a call has ended it."""

    def __init__(self, module: str, memory: int):
        """module: its `main` calls `answer_calls`; memory: bytes that the process may have"""
        self._lock = threading.Lock()
        self.subprocess = Subprocess(module, [str(memory)])

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """Return what the function returns. Raise its InputError, SubprocessEnded for a call that takes more than so
        many seconds of processor time or too much memory, and ValueError for arguments that are no JSON."""
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

    first: arguments of a call that is made before memory is limited, so that the function imports what it needs
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
    """Answers requests until `source` ends. answer: returns the object and the bytes of an answer."""
    while head := source.read(LENGTH.size):
        data = source.read(LENGTH.unpack(head)[0])
        fields, body = answer(data)
        text = json.dumps(fields | ({"size": len(body)} if body else {})).encode()
        sink.write(LENGTH.pack(len(text)) + text)
        sink.write(body)
        sink.flush()
        del data, body


def _limit_time(seconds: float) -> None:
    """Have the system end this process after so many seconds of processor time, within compiled code too; 0: never. On
    Windows only the caller's clock ends it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_process(memory: int) -> None:
    """Takes from this process what it does not need: memory beyond so many bytes, files, core dumps."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, hard))
