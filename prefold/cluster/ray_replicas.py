"""Replicas on Ray. Each is an actor whose process has its own model. Ray places and starts the actors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..errors import JobError, MissingExtraError, PrefoldError
from ..spec.environment import plugins
from ..spec.plugins import add_plugins
from .backends import backend_named
from .replicas import ReplicaDown, ReplicaFacts, ReplicaReport, Replicas

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError
except ImportError:
    raise MissingExtraError("ray", "ray", "a fleet on Ray") from None

_POLL = 0.25  # seconds between two checks whether a replica is still needed
_SHOWN_NODES = 4  # maximum number of nodes in a message
_START_SECONDS = 180.0  # timeout for starting Ray or connecting to it
_DOUBT = 15.0  # a replica that does not answer for this many seconds counts as dead


class _Actor:
    """A replica's process.

    Orders run in one thread, in the order of sending. Reports run in another thread, while the engine runs.
    """

    def __init__(self) -> None:
        self._host: Any = None
        self._reporting = threading.Lock()

    def load(self, model: str, options: dict[str, Any], backend: str, own: list[str]) -> ReplicaFacts:
        """Load the model unless it is loaded, and end its run."""
        add_plugins(own)
        if self._host is None:
            self._host = backend_named(backend).host(model, options)
        self._host.end()
        with self._reporting:  # a report that no caller waits for any more must not take later answers
            return self._host.facts

    def order(self, method: str, *arguments: Any) -> None:
        getattr(self._host, method)(*arguments)

    def report(self, wait: float) -> ReplicaReport:
        with self._reporting:
            return self._host.report(wait)


class _ActorHost:
    """The driver's proxy of a replica's actor.

    Args:
        load: arguments of `_Actor.load`
        stopping: returns whether the replica is no longer needed
    """

    def __init__(self, actor: Any, load: Sequence[Any], stopping: Callable[[], bool]):
        self._actor, self._load, self._stopping = actor, load, stopping
        self._pending: Any = None  # the reference of a requested report

    @property
    def facts(self) -> ReplicaFacts:
        """Return the replica's facts after its model is loaded."""
        return self._loaded()

    def order(self, method: str, *arguments: Any) -> None:
        self._actor.order.options(concurrency_group="orders").remote(method, *arguments)

    def report(self, wait: float) -> ReplicaReport:
        """Return the actor's report, or an empty one if it takes too long."""
        if self._pending is None:
            self._pending = self._actor.report.options(concurrency_group="reports").remote(wait)
        if not ray.wait([self._pending], timeout=2 * wait)[0]:
            return ReplicaReport()
        pending, self._pending = self._pending, None
        try:
            return self._get("report", pending)
        except ActorUnavailableError as error:
            self._loaded(time.monotonic() + _DOUBT)
            raise ReplicaDown(_first_lines(error), died=False) from None

    def close(self) -> None:
        ray.kill(self._actor)

    def _loaded(self, deadline: float | None = None) -> ReplicaFacts:
        """Return the actor's facts when it has loaded the model.

        If the actor cannot be reached, only the connection may be broken, so the call is repeated until the deadline,
        or for `_DOUBT` seconds. The call runs after all earlier orders.
        """
        while not self._stopping():
            pending = self._actor.load.options(concurrency_group="orders").remote(*self._load)
            try:
                while not ray.wait([pending], timeout=_POLL)[0]:
                    if self._stopping() or (deadline is not None and time.monotonic() > deadline):
                        raise ReplicaDown("it does not answer")
                return self._get("load", pending)
            except ActorUnavailableError as error:
                deadline = time.monotonic() + _DOUBT if deadline is None else deadline
                if time.monotonic() > deadline:
                    raise ReplicaDown(_first_lines(error)) from None
                time.sleep(_POLL)
        raise ReplicaDown("it is no longer needed")

    def _get(self, action: str, reference: Any) -> Any:
        """Return the result of a method of the actor.

        Raise ActorUnavailableError if the process may still live. Raise ReplicaDown if it does not, or if the method
        failed.
        """
        try:
            return ray.get(reference)
        except ActorUnavailableError:
            raise
        except RayActorError as error:
            raise ReplicaDown(_first_lines(error)) from None
        except (RayError, PrefoldError) as error:
            cause = getattr(error, "cause", None) or error
            raise ReplicaDown(f"it cannot {action}: {_first_lines(cause)}", returns=False) from None


class RayReplicas(Replicas):
    """Replicas that are actors of a Ray cluster.

    Raises JobError without a cluster at the address, or if this machine is too small for one replica.

    Args:
        model: a name or path that every node can resolve
        backend: name of a backend (see `backends.py`)
        options: options for the backend's `host`; for prefold, keywords of `LLM`. `threads`, `tensor_parallel` and
            `device` determine how many CPUs and GPUs a replica gets. Without `threads`, a replica gets as many as let
            all replicas fit on the cluster, each on one node.
        count: number of replicas; None: as many as fit on the cluster
        address: address of a cluster; None: the cluster of RAY_ADDRESS, else a new cluster on this machine,
            which `close` ends
        notify: receives messages for the user
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        *,
        backend: str = "prefold",
        count: int | None = None,
        address: str | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ):
        self._model, self._options, self._backend = model, dict(options), backend
        self._connection = None if ray.is_initialized() else _connect(address)
        try:
            needs = self._needs(count)
            count = self._check_room(count, needs, notify)
        except JobError:
            self._disconnect()
            raise
        self._actor = ray.remote(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_restarts=0, max_task_retries=0,
            concurrency_groups={"orders": 1, "reports": 1},
        )(_Actor)  # fmt: skip
        names = [f"replica {number}" for number in range(1, count + 1)]
        super().__init__({name: partial(self._host, name) for name in names})

    def _host(self, name: str) -> Any:
        """Return the host of a replica's new actor."""
        load = self._model, self._options, self._backend, plugins()
        return _ActorHost(self._actor.remote(), load, lambda: self.is_closed)

    def order(self, name: str, method: str, *arguments: Any) -> None:
        host: Any = self._hosts.get(name)
        if host is not None:
            host.order(method, *arguments)

    def close(self) -> None:
        super().close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            ray.shutdown()
            self._connection.set()
            self._connection = None

    def _needs(self, count: int | None) -> dict[str, int]:
        """Return the CPUs and GPUs of a replica, and set its number of threads."""
        nodes, device = _nodes(), self._options.get("device", "auto")
        ranks, threads = self._options.get("tensor_parallel", 1), self._options.get("threads")
        if ":" in device:
            raise JobError(f"Ray chooses the GPUs of a replica; use cuda instead of {device}")
        if device == "cuda" or (device == "auto" and any(node.get("GPU", 0) for node in nodes)):
            return {"CPU": 1, "GPU": ranks}
        if threads is None:
            largest = max((int(node.get("CPU", 0)) for node in nodes), default=0) // ranks
            fitting = (n for n in range(largest, 1, -1) if _num_that_fit(nodes, {"CPU": n * ranks}) >= (count or 1))
            threads = self._options["threads"] = next(fitting, 1)
        return {"CPU": threads * ranks, "GPU": 0}

    def _check_room(self, count: int | None, needs: Mapping[str, int], notify: Callable[[str], None]) -> int:
        """Return how many replicas to start. Notify the user if not all of them fit on the cluster now."""
        nodes = _nodes()
        fits = _num_that_fit(nodes, needs)
        share = " and ".join(f"{need} {kind}" for kind, need in needs.items() if need)
        resources = "; ".join(", ".join(f"{node.get(kind, 0):g} {kind}" for kind, need in needs.items() if need)
                          for node in nodes[:_SHOWN_NODES])  # fmt: skip
        resources += "; ..." if len(nodes) > _SHOWN_NODES else ""
        if fits < 1 and len(nodes) == 1:
            raise JobError(f"a replica needs {share}, and the machine has {resources}; ask for less, or name a cluster")
        if fits < (count or 1):
            message = f"the job needs {count or 1} replicas with {share} each, and the cluster has {resources}"
            message += " on its nodes" if len(nodes) > 1 else ""
            notify(f"{message}: {fits} start now" + ("" if fits else ", the first when a node has enough resources"))
        return max(1, fits) if count is None else count


def _connect(address: str | None) -> threading.Event:
    """Connect this process to a cluster, or start one. Raise JobError if that fails or times out.

    Return the event that ends the thread of the connection after `ray.shutdown`. A thread calls `ray.init` for three
    reasons. The call may wait forever for a stalled process of Ray. In the main thread it would replace the handler of
    SIGTERM. And Linux ends Ray's processes with the thread that started them.
    """
    outcome, is_over = Future[Any](), threading.Event()

    def connect() -> None:
        try:
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            outcome.set_result(ray.init(address=address, **options))
            is_over.wait()
        except Exception as error:  # Ray raises a bare Exception if a node does not start in time
            ray.shutdown()  # ends the processes that have started
            outcome.set_exception(error)

    threading.Thread(target=connect, name="prefold-ray", daemon=True).start()
    try:
        outcome.result(_START_SECONDS)
    except Exception as error:
        named = address or os.environ.get("RAY_ADDRESS")
        problem = f"there is no Ray cluster at {named}" if named else "Ray does not start on this machine"
        reason = _first_lines(error) if outcome.done() else f"it has not answered for {_START_SECONDS:.0f} s"
        raise JobError(f"{problem}: {reason or type(error).__name__}") from None
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        # Ray installed a C++ handler in front of Python's. It walks the stack first, and sometimes crashes the process.
        signal.signal(signal.SIGTERM, handler)
    return is_over


def _first_lines(error: BaseException) -> str:
    """Return the first lines of an error of Ray, without its advice about logs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]


def _nodes() -> list[dict[str, float]]:
    """Return the free resources of each node. A replica is one actor, so it must fit on one node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _num_that_fit(nodes: Sequence[Mapping[str, float]], needs: Mapping[str, int]) -> int:
    """Return how many replicas fit on the nodes."""
    return sum(min(int(node.get(kind, 0) // need) for kind, need in needs.items() if need) for node in nodes)
