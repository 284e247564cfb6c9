"""Tensor parallelism: a model split over processes (ranks) that act as one worker. Rank 0 is this process. No torch.

Every rank has its own worker, builds its arrays from the same messages, and makes the same collective calls in the same
order. So only messages are sent. If one rank fails, all ranks end with one error, which names the failed rank. Ranks
on one machine exchange data through shared memory; `worker.torch.ranks` adds PyTorch's process groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_int32
from dataclasses import dataclass, replace
from mmap import mmap
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from .. import kernels
from ..engine.schedule.steps import EndStream, Message
from ..engine.worker import Ticket, Worker
from ..errors import InputError, OutOfMemoryError, RankError
from ..kernels import CollectiveError, RanksView
from ..kernels.program import parts_begin
from ..model.shard import OneRank, Shard, SomeRank, columns_of, piece_width
from .loaded import Load

# Bytes that a rank contributes per round. Memory in use is at most twice the largest exchange.
PART = 8 << 20


def memory_file(size: int, part: int = PART) -> int:
    """Return the descriptor of an unnamed file in memory for `size` ranks; its last user frees it.

    Args:
        part: Bytes that a rank contributes per round.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("prefold-ranks")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.truncate(file, parts_begin(size) + 2 * size * part)
    return file


class MemoryRanks(OneRank[np.ndarray]):
    """This process's rank of a model that is split over processes of one machine.

    Args:
        file: From `memory_file`; may be closed afterwards.
        pipes: Descriptors of pipes to other ranks. One of them hangs up if its rank ends.
        patience: Seconds to wait for another rank.
        part: As given to `memory_file`.
    """

    view: RanksView

    def __init__(self, rank: int, size: int, file: int, pipes: Sequence[int], patience: float, part: int = PART):
        self.rank, self.size = rank, size
        compiled = kernels.load()
        assert compiled is not None
        self._kernels, memory = compiled, mmap(file, 0)
        # References that keep the memory alive.
        self._buffers = (c_char * len(memory)).from_buffer(memory), (c_int32 * len(pipes))(*pipes)
        self.view = RanksView(
            memory=addressof(self._buffers[0]), first=parts_begin(size), part=part, rank=rank, size=size,
            pipes=addressof(self._buffers[1]), num_pipes=len(pipes), patience=patience,
        )  # fmt: skip

    def sum(self, x: np.ndarray) -> np.ndarray:
        summed = np.ascontiguousarray(x)
        self._kernels.sum_ranks(self.view, summed)
        return summed

    def collect(self, piece: np.ndarray) -> np.ndarray | None:
        """Return every rank's piece, [ranks, *shape of a piece], on rank 0. All pieces have one shape."""
        return self._kernels.gather_ranks(self.view, np.ascontiguousarray(piece))

    def gather(self, logits: np.ndarray, vocab_size: int) -> np.ndarray:
        width = piece_width(vocab_size, self.size)
        pieces = self.collect(np.pad(logits, ((0, 0), (0, width - logits.shape[1]))))
        if pieces is None:
            return np.empty((0, vocab_size), logits.dtype)
        return np.concatenate(columns_of(list(pieces), vocab_size), 1)


# Exit status of a rank whose partner left it alone in a collective.
LEFT_ALONE = 75

# A rank that does not answer for this long, within a step or between steps, counts as dead.
TIMEOUT_SECONDS = 300
# Time for all ranks to start: they all import modules at once, maybe on a busy machine.
START_SECONDS = 300
# After a failure: time for the failed rank to report its error.
LAST_WORD_SECONDS = 5


class Meeting(ABC):
    """The meeting point of ranks. Rank 0 creates it and sends a copy to each other rank.

    Attributes:
        descriptors: Descriptors of files that the other ranks inherit.
    """

    descriptors: tuple[int, ...] = ()

    @abstractmethod
    def join(self, rank: int, size: int, pipes: Sequence[int]) -> SomeRank:
        """Meet the other ranks, and return this rank's view of them.

        Args:
            pipes: Descriptors of pipes to other ranks.
        """

    @abstractmethod
    def end(self) -> None:
        """Free this process's share of it."""


class MemoryMeeting(Meeting):
    """A meeting of the ranks of one machine, through shared memory.

    Attributes:
        patience: Seconds after which a silent rank is an error.
    """

    def __init__(self, size: int):
        self.patience, self._file = TIMEOUT_SECONDS, memory_file(size)
        self.descriptors = (self._file,)

    def join(self, rank: int, size: int, pipes: Sequence[int]) -> SomeRank:
        ranks = MemoryRanks(rank, size, self._file, pipes, self.patience)
        self.end()
        return ranks

    def end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank: the model to load and the meeting with other ranks."""

    load: Load
    rank: int
    meeting: Meeting

    def join(self, pipes: Sequence[Connection]) -> SomeRank:
        """Meet the other ranks, and return this rank's view of them.

        Args:
            pipes: Pipes to other ranks.
        """
        return self.meeting.join(self.rank, self.load.options.tensor_parallel, [pipe.fileno() for pipe in pipes])


class TensorParallelWorker(Worker):
    """The worker of rank 0, which sends each message to all ranks on this machine.

    It is created before the model is loaded, so that all ranks load at once. Then call `join` with this rank's worker.

    Attributes:
        ranks: This rank's view of the others.
        patience: Seconds after which a silent rank is an error.
        last_word_seconds: Seconds to wait for the error of a failed rank.
    """

    def __init__(self, load: Load, meet: Callable[[int], Meeting]):
        """Start the other ranks and meet them.

        Args:
            load: The model to load, with the options of each rank.
            meet: Makes the meeting for a number of ranks.

        Raises:
            InputError: The model cannot be split over this number of ranks.
            RankError: A rank does not start.
        """
        size = load.options.tensor_parallel
        for rank in range(size):
            Shard.of(load.config, rank, size)
        _check_system()
        self.patience, self.last_word_seconds = TIMEOUT_SECONDS, LAST_WORD_SECONDS
        self._turn = threading.RLock()
        self._ended_streams: deque[int] = deque()
        self._failure: BaseException | None = None
        meeting = meet(size)
        start = Start(replace(load, checkpoint=replace(load.checkpoint)), 0, meeting)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        self._end = weakref.finalize(self, _end, self.processes, self.pipes, meeting)
        try:
            for rank in range(1, size):
                self._launch(replace(start, rank=rank))
            self._hear("up")
            self.ranks = start.join(self.pipes)
        except BaseException as error:
            self.fail(error)

    def join(self, worker: Worker) -> None:
        """Set this rank's worker, and wait until every rank has one.

        Raise RankError with the error of a rank that cannot load.
        """
        self.local, self.facts = worker, worker.facts
        try:
            self._hear("ready")
        except BaseException as error:
            self.fail(error)

    def prepare(self, message: Message) -> Any:
        return self.local.prepare(message)

    def start(self, message: Message, prepared: Any = None) -> Ticket:
        """Start a step on all ranks and return rank 0's ticket.

        Raise RankError if a rank fails. All ranks then end, the results of running steps are lost, and every later call
        raises RankError.
        """
        with self._turn:
            if self._failure is not None:
                raise RankError(f"the ranks of this model have ended: {self._failure}") from self._failure
            try:
                while self._ended_streams:
                    self._tell(EndStream(self._ended_streams.popleft()))
                self._tell(message)
                return self.local.start(message, prepared)
            except OutOfMemoryError as error:  # other ranks ran the step, so it cannot be repeated in parts
                self.fail(RankError(f"rank 0 failed: {error}"))
            except BaseException as error:  # ranks that stopped in the middle of a step are unusable
                self.fail(error)

    def forget(self, stream: int) -> None:
        # Sent with the next message, because `forget` may be called in the middle of one.
        self._ended_streams.append(stream)
        self.local.forget(stream)

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        return self.local.kv_slots(kv_memory, slot_bytes)

    def compile_seconds(self) -> float:
        return self.local.compile_seconds()

    def _tell(self, message: Message) -> None:
        data = ForkingPickler.dumps(message)
        for pipe in self.pipes:
            pipe.send_bytes(data)

    def close(self) -> None:
        """End the other ranks. The model cannot be used afterwards."""
        with self._turn:
            self._failure = self._failure or RankError("the model was closed")
            self._end()

    def _launch(self, start: Start) -> None:
        host_end, rank_end = Pipe()
        limit = struct.pack("ll", TIMEOUT_SECONDS, 0)  # a rank that does not read must not block this one for ever
        with socket.socket(fileno=os.dup(host_end.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-P", "-m", "prefold.worker.rank", str(rank_end.fileno())]
        descriptors = [rank_end.fileno(), *start.meeting.descriptors]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        with rank_end:
            # Standard output may carry results, so no rank writes there.
            process = subprocess.Popen(
                command, pass_fds=descriptors, stdout=subprocess.DEVNULL, env=environment, close_fds=True
            )
        self.processes.append(process)
        self.pipes.append(host_end)
        host_end.send(start)

    def _hear(self, word: Literal["up", "ready"]) -> None:
        """Wait for the word from every rank. Raise RankError if a rank sends an error or nothing."""
        for rank, pipe in enumerate(self.pipes, 1):
            if not pipe.poll(START_SECONDS):
                raise RankError(f"rank {rank} did not start within {START_SECONDS} s")
            answer = pipe.recv()
            if answer != word:
                raise RankError(f"rank {rank}: {answer}")

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks, and raise the error: of the rank that failed, else `error`."""
        failure: RankError | None = None
        if isinstance(error, (OSError, EOFError, CollectiveError)):
            failure = self._blame(error)
        self._failure = failure or error
        for process in self.processes:
            process.kill()
        self._end()
        if failure is not None:
            raise failure from error
        raise error

    def _blame(self, error: BaseException) -> RankError:
        """Return an error with the last message of the failed rank, or its exit status, or a note that it is silent.

        Ranks that waited for it in a collective end too, without a message and with status LEFT_ALONE.
        """
        until = time.monotonic() + self.last_word_seconds
        while time.monotonic() < until:
            for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True), 1):
                exit_code = process.poll()  # before reading the pipe: an ended process has sent its last message
                if word := _last_word(pipe):
                    return RankError(f"rank {rank} failed: {word}")
                if exit_code not in (None, LEFT_ALONE):
                    return RankError(f"rank {rank} {_ending(exit_code)}")
            time.sleep(0.05)
        silent = [rank for rank, process in enumerate(self.processes, 1) if process.poll() is None]
        if silent and (isinstance(error, BlockingIOError) or "timed out" in str(error).lower()):
            return RankError(f"rank {silent[0]} has not answered for {self.patience} s")
        return RankError(f"the ranks cannot reach each other: {error}")


def _last_word(pipe: Connection) -> str | None:
    try:
        while pipe.poll():
            word = pipe.recv()
            if word not in ("up", "ready"):
                return word
    except (OSError, EOFError):
        pass
    return None


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    return f"was ended by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def _check_system() -> None:
    if sys.platform == "win32":
        raise InputError(
            "Windows cannot split a model over processes",
            field="tensor_parallel",
            remedy="leave it out, or use WSL 2",
        )


def _end(processes: list[subprocess.Popen[bytes]], pipes: list[Connection], meeting: Meeting) -> None:
    """Close the pipes, so that the ranks end. Kill ranks that do not."""
    for pipe in pipes:
        pipe.close()
    with contextlib.suppress(Exception):
        meeting.end()
    for process in processes:
        try:
            process.wait(LAST_WORD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
