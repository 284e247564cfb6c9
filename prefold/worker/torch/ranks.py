"""Ranks whose arrays are tensors: they exchange through memory on a CPU with compiled kernels, otherwise through
PyTorch's process groups."""

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

_HERE = "127.0.0.1"  # all ranks are on this machine; its name may lead anywhere


class MemoryTensors(Ranks):
    """A MemoryTensors exchanges tensors of a CPU as `memory` does arrays."""

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
    """A GroupRanks is this process's rank among those of torch.distributed's default group."""

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
    """The memory that ranks with tensors map."""

    def join(self, rank: int, size: int, pipes: Sequence[int]) -> Ranks:
        memory = super().join(rank, size, pipes)
        assert isinstance(memory, MemoryRanks)
        return MemoryTensors(memory)


class GroupMeeting(Meeting):
    """A GroupMeeting is a store, at a port of this machine, by which ranks come into the default process group."""

    def __init__(self, size: int, device: str):
        """Raise InputError if there are too few GPUs, and if this process has a group."""
        self._is_gpu = torch.device(device).type == "cuda"
        if self._is_gpu and torch.cuda.device_count() < size:
            raise InputError(
                f"tensor_parallel is {size}, and torch sees {torch.cuda.device_count()} GPUs",
                field="tensor_parallel",
                remedy="use as many as there are, or --device cpu",
            )
        if dist.is_initialized():
            raise InputError(
                "torch.distributed is in use in this process",
                field="tensor_parallel",
                remedy="end what uses it (close() of another LLM), or use a process of its own",
            )
        listener = socket.create_server((_HERE, 0))
        self._port, self._limit = listener.getsockname()[1], timedelta(seconds=tensor_parallel.TIMEOUT_SECONDS)
        options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store: dist.Store | None = dist.TCPStore(_HERE, self._port, size, timeout=self._limit, **options)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_store": None}  # it is rank 0's own

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
    """Return what makes the meeting of so many ranks."""
    if wanted.device == "cpu" and kernels.load() is not None:
        return TensorMeeting
    return lambda size: GroupMeeting(size, wanted.device)
