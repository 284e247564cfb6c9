"""How the ranks of a split model come to know of each other: what each is told first, and where they meet."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from ..checkpoint import Checkpoint
from ..model import ModelConfig
from ..model.parallel import Ranks

__all__ = ["LEFT_ALONE", "Meeting", "Start"]

# The status with which a rank ends that another one has left alone in a collective.
LEFT_ALONE = 75


@dataclass(frozen=True, slots=True)
class Start:
    """A start is what a rank is told first. config: as rank 0 reads the checkpoint, for families may be the caller's
    own."""

    rank: int
    size: int
    meeting: str
    timeout: float
    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    threads: int
    seed: int
    adapters: dict[str, str]

    def join(self) -> Ranks:
        """Meets the other ranks in the default process group of torch.distributed, and returns this rank's view of
        them."""
        for name in ("lo", "lo0"):  # all ranks are on this machine; its name may lead anywhere
            if name in (interface for _, interface in socket.if_nameindex()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.FileStore(self.meeting, self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout),
        )
        return Ranks()


class Meeting:
    """A meeting is the file by which ranks find each other.

    On Linux it has no name and lies in memory, so that nothing of it stays, however this process ends; ranks inherit
    it. Elsewhere it lies in a temporary folder.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if hasattr(os, "memfd_create"):
            self.fds = [os.memfd_create("prefold-ranks")]
            self.path = f"/proc/self/fd/{self.fds[0]}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="prefold-ranks-")
            self.path = str(Path(self._folder.name) / "meeting")

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        if self._folder is not None:
            self._folder.cleanup()
