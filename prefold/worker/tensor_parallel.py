"""The ranks of a model that is split over processes, as one worker: rank 0 is this process. No torch.

Every rank has a worker of its own, makes its arrays from the same messages and makes the same collective calls in the
same order, so nothing but messages has to be sent. Whatever goes wrong on a rank ends all of them with one error that
says on which. Ranks of one machine exchange through memory that all of them map; `worker.torch.ranks` adds PyTorch's
process groups.
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

# Bytes that a rank gives at once. No more memory is taken than the largest exchange needs, and that twice.
PART = 8 << 20


def memory_file(size: int, part: int = PART) -> int:
    """Return the descriptor of a file in memory for `size` ranks, which has no name and goes with its last user.
    part: bytes that a rank gives at once"""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("prefold-ranks")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.truncate(file, parts_begin(size) + 2 * size * part)
    return file


class MemoryRanks(OneRank[np.ndarray]):
    """A MemoryRanks is this process's rank of a model that is split over processes of one machine.

    file      of `memory_file`, which may be closed afterwards
    pipes     descriptors of which one is hung up where a rank ends
    patience  seconds for which another rank is waited for
    part      of `memory_file`
    """

    view: RanksView

    def __init__(self, rank: int, size: int, file: int, pipes: Sequence[int], patience: float, part: int = PART):
        self.rank, self.size = rank, size
        compiled = kernels.load()
        assert compiled is not None
        self._kernels, memory = compiled, mmap(file, 0)
        # These hold the memory.
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
        """Return every rank's piece, [ranks, *shape of a piece], on rank 0; all are of one shape."""
        return self._kernels.gather_ranks(self.view, np.ascontiguousarray(piece))

    def gather(self, logits: np.ndarray, vocab_size: int) -> np.ndarray:
        width = piece_width(vocab_size, self.size)
        pieces = self.collect(np.pad(logits, ((0, 0), (0, width - logits.shape[1]))))
        if pieces is None:
            return np.empty((0, vocab_size), logits.dtype)
        return np.concatenate(columns_of(list(pieces), vocab_size), 1)


# The status with which a rank ends that another one has left alone in a collective.
LEFT_ALONE = 75

# A rank that has not answered for so long, within a step or between two, is taken for dead.
TIMEOUT_SECONDS = 300
# How long ranks have to come up: the imports of all at once, on a busy machine.
START_SECONDS = 300
# After a failure: how long the rank that caused it may take to say so.
LAST_WORD_SECONDS = 5


class Meeting(ABC):
    """A Meeting is where ranks find each other. Rank 0 makes it, and the other ranks get a copy.

    descriptors: of files that the other ranks inherit
    """

    descriptors: tuple[int, ...] = ()

    @abstractmethod
    def join(self, rank: int, size: int, pipes: Sequence[int]) -> SomeRank:
        """Meet the other ranks, and return this rank's view of them. pipes: descriptors of those to other ranks"""

    @abstractmethod
    def end(self) -> None:
        """Free what this process has of it."""


class MemoryMeeting(Meeting):
    """A MemoryMeeting is memory that the ranks of one machine map.

    patience: seconds after which a silent rank is an error
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
    """A Start is the first message to a rank: what to load, and where the other ranks are."""

    load: Load
    rank: int
    meeting: Meeting

    def join(self, pipes: Sequence[Connection]) -> SomeRank:
        """Meet the other ranks, and return this rank's view of them. pipes: to other ranks"""
        return self.meeting.join(self.rank, self.load.options.tensor_parallel, [pipe.fileno() for pipe in pipes])


class TensorParallelWorker(Worker):
    """A TensorParallelWorker is made of `size` ranks on this machine, this process among them, and gives each message
    to all of them.

    It is made before the model is loaded, so that all load at once; then `join` is called with this rank's worker.

    ranks              this process among them
    patience           seconds after which a silent rank is an error
    last_word_seconds  what a failed rank says is waited for so long
    """

    def __init__(self, load: Load, meet: Callable[[int], Meeting]):
        """load: with the options of each rank; meet: makes the meeting of so many ranks.

        Raise InputError for a size that does not fit the model, RankError when a rank does not come up.
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
        """Take this rank's worker, and wait until every rank has one. Raise RankError with what kept a rank from
        it."""
        self.local, self.facts = worker, worker.facts
        try:
            self._hear("ready")
        except BaseException as error:
            self.fail(error)

    def prepare(self, message: Message) -> Any:
        return self.local.prepare(message)

    def start(self, message: Message, prepared: Any = None) -> Ticket:
        """Begins a step on all ranks, and returns the ticket of rank 0.

        Raises RankError when a rank fails, and ever after: what was being computed is lost, and the ranks end.
        """
        with self._turn:
            if self._failure is not None:
                raise RankError(f"the ranks of this model have ended: {self._failure}") from self._failure
            try:
                while self._ended_streams:
                    self._tell(EndStream(self._ended_streams.popleft()))
                self._tell(message)
                return self.local.start(message, prepared)
            except OutOfMemoryError as error:  # others have run the step: it cannot be given again in parts
                self.fail(RankError(f"rank 0 failed: {error}"))
            except BaseException as error:  # ranks that were left in the middle of a step are of no more use
                self.fail(error)

    def forget(self, stream: int) -> None:
        # Told with the next message: this may be called in the middle of one.
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
        """Ends the other ranks. The model cannot be used any more."""
        with self._turn:
            self._failure = self._failure or RankError("the model was closed")
            self._end()

    def _launch(self, start: Start) -> None:
        host_end, rank_end = Pipe()
        limit = struct.pack("ll", TIMEOUT_SECONDS, 0)  # a rank that does not read must not hold us for ever
        with socket.socket(fileno=os.dup(host_end.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-P", "-m", "prefold.worker.rank", str(rank_end.fileno())]
        descriptors = [rank_end.fileno(), *start.meeting.descriptors]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        with rank_end:
            # Results may go to standard output: no rank writes there.
            process = subprocess.Popen(
                command, pass_fds=descriptors, stdout=subprocess.DEVNULL, env=environment, close_fds=True
            )
        self.processes.append(process)
        self.pipes.append(host_end)
        host_end.send(start)

    def _hear(self, word: Literal["up", "ready"]) -> None:
        """Waits for the word of every rank; raises RankError where one says something else, or nothing."""
        for rank, pipe in enumerate(self.pipes, 1):
            if not pipe.poll(START_SECONDS):
                raise RankError(f"rank {rank} has not come up within {START_SECONDS} s")
            answer = pipe.recv()
            if answer != word:
                raise RankError(f"rank {rank}: {answer}")

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all ranks, and raises what is wrong: which rank did not do its part, or what failed here."""
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
        """Returns what the rank that failed said last, or how it ended, or that it is silent.

        Those that waited for it in a collective end too, without a word and with LEFT_ALONE.
        """
        until = time.monotonic() + self.last_word_seconds
        while time.monotonic() < until:
            for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True), 1):
                exit_code = process.poll()  # before it is listened to: what it word last is there then
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
            "a model is not split over processes on Windows",
            field="tensor_parallel",
            remedy="leave it out, or use WSL 2",
        )


def _end(processes: list[subprocess.Popen[bytes]], pipes: list[Connection], meeting: Meeting) -> None:
    """Close the pipes, at which ranks end; those that do not are made to."""
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
