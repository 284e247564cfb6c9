"""A rank other than 0, in a process of its own: `python -m prefold.worker.rank FD`, started by `tensor_parallel`.

It gets the messages that rank 0 gets and starts each; what they give is rank 0's. No torch, unless the executor is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection

from ..errors import PrefoldError
from ..kernels import CollectiveError
from ..spec.plugins import load_plugins
from .loading import load_part
from .tensor_parallel import LEFT_ALONE, Start


def main(pipe: Connection) -> None:
    """Run a rank until rank 0 closes the pipe; what goes wrong it says there, and ends the process."""
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
    load_plugins()  # the config names classes that features and plugins add
    worker = load_part(start.load, start.join([pipe])).worker
    pipe.send("ready")
    while True:
        worker.start(pipe.recv())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
