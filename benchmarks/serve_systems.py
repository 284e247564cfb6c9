"""Holds what cases of serve.py share that compare servers: servers in processes of their own, and a client of threads.

A server is started on a free port, in a session of its own; `/health` is asked for up to 180 seconds; where it fails,
the end of its log is in the error. Between its turns it is stopped, so that it takes no processor. Nothing is ended
but what was started here.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
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

READY_SECONDS = 180
KV_GIB = 2  # memory for keys and values, of each server that is compared with another


class ServedModel:
    """A server in a process of its own, which is ready. A context manager.

    forget  the path that empties its cache
    key     of an admin, where it has keys
    """

    key = ""

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
        except BaseException:  # also where this process is told to end meanwhile
            self.close()
            raise
        self.pause()

    def _wait(self) -> None:
        started = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - started > READY_SECONDS:
                raise RuntimeError(f"{self.name} did not come up:\n{self.log_end}")
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
        """Stops it, so that it takes no processor."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets it run."""
        os.killpg(self._process.pid, signal.SIGCONT)

    @property
    def log_end(self) -> str:
        """Returns the end of what it has written."""
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def forget(self) -> None:
        """Makes it forget what it keeps of earlier prompts. Raises RuntimeError where it does not."""
        answer = self.asked("POST", self._forget)
        if answer.get("success") is False:
            raise RuntimeError(f"{self.name} kept what it had: {answer}")

    def counted(self, name: str) -> dict[str, float]:
        """Returns the values of one of its counters, as /metrics has them, by their labels."""
        lines = self._ask("GET", "/metrics").decode().splitlines()
        found = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name))
        return {labels: float(value) for labels, _, value in found}

    def asked(self, method: str, path: str) -> Any:
        """Returns what it answers to an admin, from JSON."""
        return json.loads(self._ask(method, path))

    def _ask(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers=_headers(self.key))
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path} of {self.name} was answered with {response.status}: {answer[:500]!r}")
        return answer

    @property
    def peak_mib(self) -> float:
        """Returns the most memory that its processes have had, each at its own time, in MiB."""
        with suppress(psutil.Error):
            processes = [psutil.Process(self._process.pid)]
            processes += processes[0].children(recursive=True)
            return sum(_peak_kib(process.pid) for process in processes) / 1024
        return float("nan")

    def close(self) -> None:
        """Ends it."""
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
    """Returns `prefold serve`, of this Python."""
    command = [sys.executable, "-m", "prefold", "serve", "-m", model, "--dtype", dtype, "--port", "{port}", *options]
    return ServedModel(name, command, "/cache/clear")


def vllm_server(name: str, environment: str, model: str, *options: str, dtype: str = "bfloat16") -> ServedModel:
    """Returns `vllm serve` of a virtual environment, on all cores."""
    command = [str(Path(environment, "bin", "python")), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--port", "{port}", "--host", "127.0.0.1", "--dtype", dtype, *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    settings |= {"VLLM_SERVER_DEV_MODE": "1"}  # with which its cache can be emptied
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    return ServedModel(name, command, "/reset_prefix_cache", settings | quiet)


class Clients:
    """Connections to a server, each used by one thread at a time."""

    def __init__(self, port: int, count: int):
        self._connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=300) for _ in range(count)]
        self._free = list(self._connections)
        self._pool = ThreadPoolExecutor(count)

    def ask(self, path: str, body: bytes, key: str = "") -> tuple[float, Any]:
        """Returns the seconds that a request took, and its answer."""
        connection = self._free.pop()
        started = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"} | _headers(key))
        response = connection.getresponse()
        answer = response.read()
        seconds = time.perf_counter() - started
        self._free.append(connection)
        if response.status != 200:
            raise RuntimeError(f"{path} was answered with {response.status}: {answer[:500]!r}")
        return seconds, json.loads(answer)

    def ask_all(
        self, path: str, bodies: Sequence[bytes], keys: Sequence[str] = ()
    ) -> tuple[float, list[float], list[Any]]:
        """Returns the seconds that all of these took, with one request at a time on each connection, those of each, and
        their answers. keys: of each, where the server has them."""
        started = time.perf_counter()
        found = list(self._pool.map(self.ask, [path] * len(bodies), bodies, keys or [""] * len(bodies)))
        return time.perf_counter() - started, [one for one, _ in found], [answer for _, answer in found]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _headers(key: str) -> dict[str, str]:
    return {"x-api-key": key} if key else {}


def p(values: Sequence[float], percent: float) -> float:
    """Returns a percentile."""
    return float(np.percentile(values, percent))


def interval_of_ratio(
    first: Sequence[float], second: Sequence[float], rounds: int = 2000
) -> tuple[float, float, float]:
    """Returns (mean of the first over mean of the second, and its 95 % interval), by drawing pairs again and again."""
    pairs, draw = np.array([first, second]), np.random.default_rng(0)
    drawn = [pairs[:, draw.integers(pairs.shape[1], size=pairs.shape[1])].mean(axis=1) for _ in range(rounds)]
    ratios = [one[0] / one[1] for one in drawn]
    return statistics.fmean(first) / statistics.fmean(second), *np.percentile(ratios, [2.5, 97.5]).tolist()
