"""Binds the address, loads the model in a thread, serves, and drains when the process is to end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from ..errors import JobError
from ..spec.server import ServerSpec
from .app import make_app
from .http import Refusal
from .metrics import AccessLog
from .protocol import protocol_with
from .state import AppState

_log = logging.getLogger("prefold.serve")
CLOSE_SECONDS = 5  # in which clients must read the rest of their responses after draining


def run(load: Callable[[], Any], options: ServerSpec) -> None:
    """Serves until the process is told to end; see `prefold.serve.serve`."""
    options.check()
    stamp = "" if sys.stderr is not None and sys.stderr.isatty() else "%(asctime)s "
    logging.basicConfig(format=f"{stamp}prefold: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z", level=logging.WARNING)
    for name in ("prefold.serve", "prefold.access"):
        logging.getLogger(name).setLevel(logging.INFO)
    if options.access_log == "json":  # its lines are objects, without the head that other lines have
        plain, access = logging.StreamHandler(), logging.getLogger("prefold.access")
        plain.setFormatter(logging.Formatter("%(message)s"))
        access.addHandler(plain)
        access.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients that send no HTTP must not fill the log
    sys.setswitchinterval(1e-3)  # a step plans in Python, and a request should not wait 5 ms for its turn
    state = AppState(options)
    bound = bind(options)
    server = Server(state, bound)
    loading = threading.Thread(target=server.load, args=(load,), name="prefold-load", daemon=True)
    server.say(f"listening on {server.url}; the model is being loaded")
    loading.start()
    server.run_bound()
    if state.handler is not None:
        state.handler.llm.close()
    if server.error is not None:
        raise server.error


def bind(options: ServerSpec) -> socket.socket:
    """Returns a socket that is bound to the address. Raises JobError."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((options.host, options.port))
        bound.listen(2048)
    except OSError as error:
        message = f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        raise JobError(f"{message}; choose another with --host and --port (--port 0: one that is free)") from None
    bound.setblocking(False)
    return bound


class Server(uvicorn.Server):
    """A Server serves the application on a bound socket. error: why the model could not be loaded"""

    def __init__(self, state: AppState, bound: socket.socket):
        self.state, self.bound = state, bound
        self.error: BaseException | None = None
        self.bound_at = host, port = bound.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        app, options, logs = make_app(state), state.options, None
        if options.access_log != "off":
            logs = AccessLog(app, as_json=options.access_log == "json", probes=options.access_log_probes)
        config = uvicorn.Config(
            logs or app,
            http=protocol_with(options, logs.refused if logs else lambda status: None),
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client's address is not used
            timeout_keep_alive=30,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            backlog=2048,
        )
        super().__init__(config)
        self._asked_to_end = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def say(self, line: str) -> None:
        """Writes a line to the log."""
        _log.info(line)

    def load(self, load: Callable[[], Any]) -> None:
        """Loads the model; if that fails, the server ends."""
        started_at = time.perf_counter()
        try:
            llm = load()
        except BaseException as error:
            self.error, self.state.status = error, "failed"
            self.should_exit = True
            return
        # The loaded objects stay. Searching them for garbage again and again would stop all threads for 0.1 s.
        gc.collect()
        gc.freeze()
        self.state.ready(llm)
        self.say(f"ready after {time.perf_counter() - started_at:.1f} s: {', '.join(self.state.names)} on {self.url}")
        if passes := getattr(llm, "passes", ""):
            self.say(passes)

    def run_bound(self) -> None:
        """Serves until told to end."""
        self.run(sockets=[self.bound])
        self.state.close()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self.reload_keys)
        await super().serve(sockets)

    def reload_keys(self) -> None:
        """Reads the file of keys again; if it is wrong, the keys stay."""
        try:
            self.state.reload_keys()
            self.say("the keys have been read again")
        except JobError as error:
            self.say(f"{error}; the keys stay as they were")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain at the first signal, and ends at the second."""
        self._asked_to_end += 1
        if self._asked_to_end > 1 or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Stops accepting requests, waits at most `drain_seconds` for those that run, and ends the server."""
        if self.state.status != "failed":
            self.state.status = "draining"
        if self.state.batches is not None:
            self.state.batches.begin_to_stop()
        until = time.monotonic() + self.state.options.drain_seconds
        if self.state.busy:
            self.say(f"draining: {self.state.busy} requests, {self.state.options.drain_seconds:g} s at most")
        while self.state.busy and time.monotonic() < until:
            await asyncio.sleep(0.05)
        outcome = f"{self.state.busy} requests are given up" if self.state.busy else "all requests have been answered"
        self.say(f"the server ends; {outcome}")
        if self.state.handler is not None:
            message, remedy = "the server is being shut down", "send the request to another"
            self.state.handler.give_up(Refusal(503, message, remedy=remedy, code="unavailable"))
        self.should_exit = True
