"""A rank other than 0, in a process of its own: `python -m prefold.worker.rank FD`, started by `engine.Team`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch

from ..attention import KVStore
from ..errors import PrefoldError
from ..model import Adapter, CausalLM, load_adapter, load_model
from ..model.parallel import CollectiveError
from .attend import Path, heads_of
from .batch import prepare
from .runner import Runner, head_blocks
from .slots import SlotAttend, SlotBatch, make_store, prepare_slots
from .team import LEFT_ALONE, Generate, MakeStore, Message, Prefill, Start

__all__ = ["Follower"]


class Follower:
    """Does of every step what takes all ranks; results are rank 0's."""

    def __init__(self, model: CausalLM, adapters: Mapping[str, Adapter]):
        self.model = model
        self.adapters = adapters
        self._runner = Runner(model)
        self._path = Path()
        self._store: KVStore | None = None

    def do(self, message: Message) -> None:
        planes, device = self.model.config.planes, self.model.device
        if isinstance(message, Prefill):
            batch = prepare(message.step, planes, device, heads_of(self.model))
            self._path = self._runner.follow(batch, self._path.truncate(message.carried), message.readout)
        elif isinstance(message, MakeStore):
            self._store = make_store(self.model, message.slots)
        elif isinstance(message, Generate):
            batch = prepare_slots(message.step, planes, heads_of(self.model), device, self.adapters)
            self._generate(batch, message.head)

    @torch.inference_mode()
    def _generate(self, batch: SlotBatch, head: bool) -> None:
        config = self.model.config
        assert self._store is not None
        attend = SlotAttend(self._store, batch, config.planes, config.scale)
        hidden = self.model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters)
        for rows in head_blocks(len(hidden) if head else 0):
            self.model.logits(hidden[rows])


def main(pipe: Connection) -> None:
    # Ctrl-C reaches every process of a terminal: rank 0 says what is to be done about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start: Start = pipe.recv()
    pipe.send("up")
    try:
        _follow(pipe, start)
    except (EOFError, BrokenPipeError):
        pass  # rank 0 has ended, or wants us to
    except CollectiveError:
        os._exit(LEFT_ALONE)  # whose fault it is rank 0 finds out
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error) if isinstance(error, PrefoldError) else f"{type(error).__name__}: {error}")
        os._exit(1)  # at once: other ranks wait for us in a collective


def _follow(pipe: Connection, start: Start) -> None:
    if start.device.type == "cuda":
        torch.cuda.set_device(start.device)
    ranks = start.join()
    torch.set_num_threads(start.threads)
    place = {"dtype": start.dtype, "device": start.device}
    model = load_model(start.checkpoint, **place, seed=start.seed, config=start.config, ranks=ranks)
    adapters = {
        name: load_adapter(folder, start.config, **place, name=name, ranks=ranks)
        for name, folder in start.adapters.items()
    }
    follower = Follower(model, adapters)
    pipe.send("ready")
    while True:
        follower.do(pipe.recv())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
