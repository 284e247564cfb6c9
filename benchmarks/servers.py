"""Servers in their own processes, and a client with threads: the counterpart of the harness's `Peer` over HTTP.

A server starts on a free port, in its own session. The client polls `/health` for at most 600 seconds. If the server
fails, the error has the end of its log. A server is stopped while another server runs.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import clocked

READY_SECONDS = 600
KV_GIB = 2  # K/V memory of each server


class ServedModel:
    """A server in its own process, ready for requests. A context manager. The path `forget` empties its cache."""

    def __init__(self, name: str, command: Sequence[str], forget: str, environment: dict[str, str] | None = None):
        self.name, self.port, self._forget = name, free_port(), forget
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (it lives as long as the server)
        self._process = subprocess.Popen(
            [part.replace("{port}", str(self.port)) for part in command],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
            | (environment or {}),
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:  # also on a signal to this process
            self.close()
            raise
        self.pause()

    def _wait(self) -> None:
        started = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - started > READY_SECONDS:
                raise RuntimeError(f"{self.name} did not start:\n{self.log_end}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def pause(self) -> None:
        """Stop the server's processes, so that they use no processor time."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    @property
    def log_end(self) -> str:
        """Return the end of the server's log."""
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def forget(self) -> None:
        """Empty the server's cache. Raise RuntimeError if the server refuses."""
        answer = json.loads(self._ask("POST", self._forget))
        if answer.get("success") is False:
            raise RuntimeError(f"{self.name} did not empty its cache: {answer}")

    def counted(self, name: str) -> dict[str, float]:
        """Return the values of a counter in /metrics, by their labels."""
        lines = self._ask("GET", "/metrics").decode().splitlines()
        found = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name))
        return {labels: float(value) for labels, _, value in found}

    def _ask(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path} of {self.name} was answered with {response.status}: {answer[:500]!r}")
        return answer

    @property
    def peak_mib(self) -> float:
        """Return the sum of the peak memory of the server's processes, in MiB."""
        with suppress(psutil.Error):
            processes = [psutil.Process(self._process.pid)]
            processes += processes[0].children(recursive=True)
            return sum(_peak_kib(process.pid) for process in processes) / 1024
        return float("nan")

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.go_on()
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _peak_kib(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def prefold_server(name: str, model: str, *options: str, dtype: str = "bfloat16") -> ServedModel:
    """Start `prefold serve` with this Python."""
    command = [sys.executable, "-m", "prefold", "serve", "-m", model, "--dtype", dtype, "--port", "{port}", *options]
    return ServedModel(name, command, "/cache/clear")


def vllm_server(name: str, environment: str, model: str, *options: str, dtype: str = "bfloat16") -> ServedModel:
    """Start the vLLM server of a virtual environment, on all cores."""
    command = [str(Path(environment, "bin", "python")), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--port", "{port}", "--host", "127.0.0.1", "--dtype", dtype, *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    settings |= {"VLLM_SERVER_DEV_MODE": "1"}  # allows emptying its cache
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    return ServedModel(name, command, "/reset_prefix_cache", settings | quiet)


class Clients:
    """Connections to a server, each used by one thread at a time."""

    def __init__(self, port: int, count: int):
        self._connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=300) for _ in range(count)]
        self._free = list(self._connections)
        self._pool = ThreadPoolExecutor(count)

    def ask(self, path: str, body: bytes) -> tuple[float, Any]:
        """Return the seconds of a request, and its answer."""
        connection = self._free.pop()

        def once() -> tuple[http.client.HTTPResponse, bytes]:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response, response.read()

        seconds, (response, answer) = clocked(once)
        self._free.append(connection)
        if response.status != 200:
            raise RuntimeError(f"{path} was answered with {response.status}: {answer[:500]!r}")
        return seconds, json.loads(answer)

    def ask_all(self, path: str, bodies: Sequence[bytes]) -> tuple[float, list[float], list[Any]]:
        """Return the seconds of all requests together, the seconds of each request, and the answers."""
        whole, found = clocked(lambda: list(self._pool.map(self.ask, [path] * len(bodies), bodies)))
        return whole, [one for one, _ in found], [answer for _, answer in found]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def p(values: Sequence[float], percent: float) -> float:
    """Return a percentile."""
    return float(np.percentile(values, percent))
