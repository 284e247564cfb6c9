"""Decoder makes Images out of files, in a process of its own: whatever a file does to a decoder, it does it there."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .decoding import LENGTH
from .image import Image, pillow

__all__ = ["Allowance", "Decoded", "Decoder", "Limits"]

CHUNK = 1 << 20
PROGRAM = "import sys; from prefold.media.decoding import main; main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)"
# Seconds that the process may take to start, the first time, on a busy machine.
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits bound what one image file may cost.

    file_bytes  of the file
    pixels      height times width, which is read before anything is decoded
    seconds     that decoding may take
    memory      bytes that the decoding process may have
    """

    file_bytes: int = 20_000_000
    pixels: int = 64_000_000
    seconds: float = 10.0
    memory: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Decoded:
    """A Decoded is an image out of a file. animated: whether the file has more frames, of which this is the first."""

    image: Image
    animated: bool


@dataclass(slots=True)
class Allowance:
    """An Allowance is the time that the files of one item have together.

    seconds  of decoding, not of waiting for one's turn
    left     of them
    """

    seconds: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.seconds


class _Ended(Exception):
    """The decoding process has ended, or does not answer in time."""


class Decoder:
    """A Decoder decodes files of JPEG, PNG, WebP and GIF, one at a time; calls from several threads wait for each
    other. Its process starts with the first file, and again where a file has ended it."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes, field: str = "image", allowance: Allowance | None = None) -> Decoded:
        """Returns the image of a file. field: what errors call it; allowance: of the item that the file is part of.

        Raises InputError for a file that is too large, of another kind, damaged, or that a decoder fails on, also where
        nothing is left of the allowance, and MissingExtraError where Pillow is not installed.
        """
        pillow()
        limits = self.limits
        if len(data) > limits.file_bytes:
            raise _error(
                field,
                f"has {len(data):,} bytes, more than {limits.file_bytes:,}",
                "make it smaller, or allow more with media_bytes (--media-bytes)",
                "image_too_large",
            )
        with self._lock:
            others = allowance is not None and allowance.left < limits.seconds  # have taken some of it
            try:
                said, pixels = self._asked(data, allowance)
            except _Ended:
                if allowance is not None and others and allowance.left <= 0:
                    what = f"and the images before it could not be decoded in {allowance.seconds:g} s"
                    raise _error(field, what, "give fewer or smaller images", "image_too_large") from None
                what = f"could not be decoded in {limits.seconds:g} s, or ended the decoder"
                raise _error(field, what, "save it again with another program", "image_damaged") from None
        if "error" in said:
            raise _error(field, said["error"], said["remedy"], said["code"])
        shape = said["height"], said["width"], 3
        return Decoded(Image(np.frombuffer(pixels, np.uint8).reshape(shape)), said["animated"])

    def close(self) -> None:
        """Ends the process; the next file starts another."""
        with self._lock:
            self._end()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self._end()

    def _asked(self, data: bytes, allowance: Allowance | None) -> tuple[dict[str, Any], bytearray]:
        """Returns what the process answers to a file. Where that is broken off, by an interrupt too, the process ends:
        what it has still to say would be taken for the answer to the next file."""
        try:
            return self._answer_of(self._started(), data, allowance)
        except BaseException:
            self._end()
            raise

    def _answer_of(
        self, process: subprocess.Popen[bytes], data: bytes, allowance: Allowance | None
    ) -> tuple[dict[str, Any], bytearray]:
        began = time.monotonic()
        deadline = began + (self.limits.seconds if allowance is None else min(self.limits.seconds, allowance.left))
        try:
            self._send(process, LENGTH.pack(len(data)) + data, deadline)
            (size,) = LENGTH.unpack(self._receive(process, LENGTH.size, deadline))
            said = json.loads(self._receive(process, size, deadline))
            pixels = 3 * said.get("height", 0) * said.get("width", 0)
            return said, self._receive(process, pixels, deadline)
        except OSError as error:
            raise _Ended from error
        finally:
            if allowance is not None:
                allowance.left -= time.monotonic() - began

    def _started(self) -> subprocess.Popen[bytes]:
        """Returns the process, which has said that it is ready. It imports nothing from the current folder (-P)."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        root = str(Path(__file__).parents[2])
        environment = {
            name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ
        }
        environment |= {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(self.limits.pixels), str(self.limits.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,  # so that Ctrl-C is for the one who asked
        )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        # An empty file is answered by whoever has started well.
        deadline = time.monotonic() + START_SECONDS
        self._send(process, LENGTH.pack(0), deadline)
        (size,) = LENGTH.unpack(self._receive(process, LENGTH.size, deadline))
        self._receive(process, size, deadline)
        return process

    def _send(self, process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        assert process.stdin is not None
        left = memoryview(data)
        while left:
            self._wait(process.stdin, selectors.EVENT_WRITE, deadline)
            left = left[os.write(process.stdin.fileno(), left[:CHUNK]) :]

    def _receive(self, process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
        assert process.stdout is not None
        found = bytearray(size)
        left = memoryview(found)
        while left:
            self._wait(process.stdout, selectors.EVENT_READ, deadline)
            chunk = os.read(process.stdout.fileno(), min(len(left), CHUNK))
            if not chunk:
                raise _Ended
            left[: len(chunk)] = chunk
            left = left[len(chunk) :]
        return found

    @staticmethod
    def _wait(pipe: Any, event: int, deadline: float) -> None:
        """Returns when a pipe is ready. Raises _Ended where it is not before the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _Ended

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


def _error(field: str, what: str, remedy: str, code: str) -> InputError:
    return InputError(f"{field!r} {what}", field=field, remedy=remedy, code=code)
