"""The thread of a `Service`, and what wakes it. It does not keep the service: it ends with it."""

from __future__ import annotations

import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .service import Service

__all__ = ["ServiceInbox", "run_service"]

# After an error of its own the thread tries again so much later.
FAILED_SECONDS = 0.1


class ServiceInbox:
    """What the thread and its service have together. close: ends the thread; requests that still run stay."""

    thread: threading.Thread

    def __init__(self) -> None:
        self.came: SimpleQueue[Any] = SimpleQueue()  # numbers to read, or None
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.came.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(10.0)


def run_service(service_of: weakref.ref[Service], inbox: ServiceInbox) -> None:
    """Lets the service work whenever something comes, until it ends."""
    while not inbox.is_closed:  # else what woke the thread at its end was taken from the inbox while it worked
        came = inbox.came.get()
        service = service_of()
        if service is None or inbox.is_closed:
            return
        try:
            service.work(came)
        except Exception as error:  # without this thread every request would wait for ever
            service.end_all(error)
            time.sleep(FAILED_SECONDS)
            service.wake()  # batches that run go on
        del service, came
