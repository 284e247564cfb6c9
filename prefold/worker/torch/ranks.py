"""Ranks that exchange tensors: through shared memory on a CPU with compiled kernels, else through torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ... import kernels
from ...errors import InputError
from ...kernels import CollectiveError
from .. import tensor_parallel
from ..loaded import Load
from ..tensor_parallel import Meeting, MemoryMeeting, MemoryRanks
from .parallel import Ranks
from .tensors import ARRAY_DTYPES, array_of, tensor_of

_HERE = "127.0.0.1"  # all ranks are on this machine, whose host name may resolve to another address


class MemoryTensors(Ranks):
    """A rank that exchanges CPU tensors through the shared memory of `MemoryRanks`."""

    def __init__(self, memory: MemoryRanks):
        self.rank, self.size, self.view = memory.rank, memory.size, memory.view
        self._memory = memory

    def sum(self, x: Tensor) -> Tensor:
        summed = x.contiguous() if x.dtype in ARRAY_DTYPES else x.float().contiguous()
        return tensor_of(self._memory.sum(array_of(summed))).to(x.dtype)

    def collect(self, piece: Tensor) -> list[Tensor] | None:
        pieces = self._memory.collect(array_of(piece))
        return None if pieces is None else list(tensor_of(pieces))


class GroupRanks(Ranks):
    """The rank of this process in torch.distributed's default group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with _collective():
            dist.all_reduce(x)
        return x

    def collect(self, piece: Tensor) -> list[Tensor] | None:
        pieces = [torch.empty_like(piece) for _ in range(self.size)] if self.rank == 0 else None
        with _collective():
            dist.gather(piece, pieces, dst=0)
        return pieces


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


class TensorMeeting(MemoryMeeting):
    """A meeting through shared memory, for ranks with tensors."""

    def join(self, rank: int, size: int, pipes: Sequence[int]) -> Ranks:
        memory = super().join(rank, size, pipes)
        assert isinstance(memory, MemoryRanks)
        return MemoryTensors(memory)


class GroupMeeting(Meeting):
    """A meeting through a TCP store on this machine, where ranks join the default process group."""

    def __init__(self, size: int, device: str):
        """Raise InputError if there are too few GPUs, or if this process already has a process group."""
        self._is_gpu = torch.device(device).type == "cuda"
        if self._is_gpu and torch.cuda.device_count() < size:
            raise InputError(
                f"tensor_parallel is {size}, and torch sees {torch.cuda.device_count()} GPUs",
                field="tensor_parallel",
                remedy="use at most the number of GPUs, or --device cpu",
            )
        if dist.is_initialized():
            raise InputError(
                "torch.distributed is already in use in this process",
                field="tensor_parallel",
                remedy="close what uses it (close() of another LLM), or use another process",
            )
        listener = socket.create_server((_HERE, 0))
        self._port, self._limit = listener.getsockname()[1], timedelta(seconds=tensor_parallel.TIMEOUT_SECONDS)
        options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store: dist.Store | None = dist.TCPStore(_HERE, self._port, size, timeout=self._limit, **options)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_store": None}  # only rank 0 owns the store

    def join(self, rank: int, size: int, pipes: Sequence[int]) -> Ranks:
        if self._is_gpu and rank:
            torch.cuda.set_device(rank)
        for name in ("lo", "lo0"):
            if name in (interface for _, interface in socket.if_nameindex()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        dist.init_process_group(
            "nccl" if self._is_gpu else "gloo",
            store=self._store or dist.TCPStore(_HERE, self._port, size, timeout=self._limit),
            rank=rank,
            world_size=size,
            timeout=self._limit,
        )
        return GroupRanks()

    def end(self) -> None:
        self._store = None
        if dist.is_initialized():
            dist.destroy_process_group()


def meeting_of(wanted: Load) -> Callable[[int], Meeting]:
    """Return the function that makes the meeting for a number of ranks."""
    if wanted.device == "cpu" and kernels.load() is not None:
        return TensorMeeting
    return lambda size: GroupMeeting(size, wanted.device)
