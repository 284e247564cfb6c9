"""A rank other than 0, in a process of its own: `python -m prefold.worker.rank FD`, started by `tensor_parallel`.

It gets the messages that rank 0 gets and starts each; what they give is rank 0's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from ..errors import PrefoldError
from ..model import load_adapter, load_model
from ..model.device import settle_threads
from ..model.parallel import CollectiveError
from ..spec.plugins import load_plugins
from .local import LocalWorker
from .parts import parts_of
from .tensor_parallel import LEFT_ALONE, Start


def main(pipe: Connection) -> None:
    """Runs a rank until rank 0 closes the pipe; what goes wrong it says there, and ends the process."""
    # Ctrl-C reaches every process of a terminal: rank 0 says what is to be done about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start: Start = pipe.recv()
    pipe.send("up")
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):  # rank 0 has ended, or wants us to
            _follow(pipe, start)
    except CollectiveError:
        os._exit(LEFT_ALONE)  # whose fault it is rank 0 finds out
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error) if isinstance(error, PrefoldError) else f"{type(error).__name__}: {error}")
        os._exit(1)  # at once: other ranks wait for us in a collective


def _follow(pipe: Connection, start: Start) -> None:
    if start.device.type == "cuda":
        torch.cuda.set_device(start.device)
    load_plugins()  # the config names classes that features and plugins add
    ranks = start.join([pipe])
    if start.memory is not None:
        os.close(start.memory)
    settle_threads(start.threads)
    place = {"dtype": start.dtype, "device": start.device}
    model = load_model(start.checkpoint, **place, seed=start.seed, config=start.config, ranks=ranks)
    adapters = {
        name: load_adapter(folder, start.config, **place, name=name, ranks=ranks)
        for name, folder in start.adapters.items()
    }
    worker = LocalWorker(model, adapters, parts=parts_of(model, start.checkpoint, start.seed))
    pipe.send("ready")
    while True:
        worker.start(pipe.recv())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
