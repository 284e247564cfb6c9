"""Threads for which tenants take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

__all__ = ["TurnPool"]


class TurnPool:
    """A TurnPool calls functions in a few threads. Each tenant has a line of its own, and of those whose functions wait
    the tenant is next whose last turn is longest ago."""

    def __init__(self, num_threads: int, name: str):
        """name: with which those of the threads begin."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._lines: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: Hashable, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Returns what will hold the result of a function, called when it is the tenant's turn."""
        future: Future[Any] = Future()
        with self._lock:
            self._lines.setdefault(tenant, deque()).append((future, partial(function, *arguments)))
        self._threads.submit(self._call_next)
        return future

    def _call_next(self) -> None:
        with self._lock:
            tenant, line = self._lines.popitem(last=False)
            future, function = line.popleft()
            if line:
                self._lines[tenant] = line
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """Calls nothing more, and does not wait for what is being called."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            lines = [*self._lines.values()]
            self._lines.clear()
        for line in lines:
            for future, _ in line:
                future.cancel()
