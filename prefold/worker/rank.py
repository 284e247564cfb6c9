"""Run a rank other than 0: `python -m prefold.worker.rank FD`, in a process of its own. `tensor_parallel` starts it.

The rank gets the messages that rank 0 gets and starts each; only rank 0's results are used. It imports torch only if
the torch executor runs the model.
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
    """Run until rank 0 closes the pipe. On failure, send the error through the pipe and end the process."""
    # Ctrl-C reaches every process of a terminal. Only rank 0 handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start: Start = pipe.recv()
    pipe.send("up")
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):  # rank 0 has ended, or closed the pipe
            _follow(pipe, start)
    except CollectiveError:
        os._exit(LEFT_ALONE)  # another rank failed; rank 0 finds out which
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error) if isinstance(error, PrefoldError) else f"{type(error).__name__}: {error}")
        os._exit(1)  # without cleanup, because other ranks wait for this one in a collective


def _follow(pipe: Connection, start: Start) -> None:
    load_plugins()  # the config names classes that features and plugins add
    worker = load_part(start.load, start.join([pipe])).worker
    pipe.send("ready")
    while True:
        worker.start(pipe.recv())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
