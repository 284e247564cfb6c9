"""Replicas on Ray: each is an actor, whose process holds a model of its own. Ray places, starts and restarts them."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import JobError, MissingExtraError, PrefoldError
from ..plugins import add_plugins, plugins
from .backends import backend_named
from .replicas import (
    LONGEST_WAIT,
    RESTARTS,
    ReplicaEvent,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
)

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError
except ImportError:
    raise MissingExtraError("ray", "ray", "a fleet on Ray") from None

_POLL = 0.25
_PAUSE = 2.0  # seconds before a replica that has died is asked for again
_SHOWN_NODES = 4  # in a message
_DOUBT = 15.0  # seconds after which a replica that does not answer is taken for dead


class _Actor:
    """A replica's process. Orders have a thread of their own, so they come in the order of sending; so do reports,
    which are asked for while the engine runs."""

    def __init__(self) -> None:
        self._host: Any = None
        self._life = uuid.uuid4().hex

    def life(self) -> str:
        """Returns the name of this process: one that was started anew has another."""
        return self._life

    def load(self, model: str, options: dict[str, Any], backend: str, own: list[str]) -> ReplicaFacts:
        add_plugins(own)
        if self._host is None:
            self._host = backend_named(backend).host(model, options)
        self._host.end()  # where only the connection was lost, the process has its model still
        return self._host.facts

    def order(self, method: str, *arguments: Any) -> None:
        getattr(self._host, method)(*arguments)

    def report(self, wait: float) -> ReplicaReport:
        return self._host.report(wait)


@dataclass(slots=True)
class _RayMember:
    """An actor, as it is known here.

    life    name of the process that loads the model, or has it; None: it is not known
    doubt   since when it is not known whether that process lives, and why; None: there is no doubt
    ask_at  when it is asked again which process it is
    """

    handle: Any
    restarts: int = RESTARTS
    life: str | None = None
    doubt: tuple[float, Exception] | None = None
    ask_at: float | None = None


class RayReplicas(Replicas):
    """Actors of a Ray cluster.

    model     what the LLM of each is made of: a name or path that every node can resolve
    backend   the name of a backend (see `backends.py`)
    options   what its `host` takes, of prefold keywords of `LLM`. threads, tensor_parallel and device say how many
              CPUs and GPUs a replica has; without threads as many as let all replicas lie on the cluster's nodes, each
              on one
    count     replicas; None: as many as the cluster has room for
    address   of a cluster; None: the one that RAY_ADDRESS names, else one is started on this machine, and ended by
              `close`
    notify    called with what a person should know

    Raises JobError where there is no cluster at the address, or no room for a single replica on this machine.
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
        self._connected = not ray.is_initialized()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._members: dict[str, _RayMember] = {}
        self._pending: dict[Any, tuple[str, str]] = {}  # what is waited for: reference to (name, what)
        if self._connected:
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            except Exception as error:  # a bare Exception where a node does not come up in time
                ray.shutdown()  # ends what has started of it
                named = address or os.environ.get("RAY_ADDRESS")
                where = f"there is no Ray cluster at {named}" if named else "Ray does not start on this machine"
                raise JobError(f"{where}: {_first_lines(error) or type(error).__name__}") from None
        needs = self._needs(count)
        count = self._check_room(count, needs, notify)
        self.names = [f"replica {number}" for number in range(1, count + 1)]
        actor = ray.remote(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_restarts=-1, max_task_retries=0,
            concurrency_groups={"orders": 1, "reports": 1},
        )(_Actor)  # fmt: skip
        self._members = {name: _RayMember(actor.remote()) for name in self.names}

    def _needs(self, count: int | None) -> dict[str, int]:
        """Returns the CPUs and GPUs of a replica, and sets its threads."""
        nodes, device = _nodes(), self._options.get("device", "auto")
        ranks, threads = self._options.get("tensor_parallel", 1), self._options.get("threads")
        if ":" in device:
            raise JobError(f"Ray chooses the GPUs of a replica; give cuda in place of {device}")
        if device == "cuda" or (device == "auto" and any(node.get("GPU", 0) for node in nodes)):
            return {"CPU": 1, "GPU": ranks}
        if threads is None:
            largest = max((int(node.get("CPU", 0)) for node in nodes), default=0) // ranks
            fitting = (n for n in range(largest, 1, -1) if _num_that_fit(nodes, {"CPU": n * ranks}) >= (count or 1))
            threads = self._options["threads"] = next(fitting, 1)
        return {"CPU": threads * ranks, "GPU": 0}

    def _check_room(self, count: int | None, needs: Mapping[str, int], notify: Callable[[str], None]) -> int:
        """Returns how many replicas there shall be; says so where the cluster has no room for all of them now."""
        nodes = _nodes()
        fits = _num_that_fit(nodes, needs)
        each = " and ".join(f"{one} {what}" for what, one in needs.items() if one)
        resources = "; ".join(", ".join(f"{node.get(what, 0):g} {what}" for what, one in needs.items() if one)
                          for node in nodes[:_SHOWN_NODES])  # fmt: skip
        resources += "; ..." if len(nodes) > _SHOWN_NODES else ""
        if fits < 1 and len(nodes) == 1:
            self.close()
            raise JobError(f"a replica needs {each}, and the machine has {resources}; ask for less, or name a cluster")
        if fits < (count or 1):
            message = f"{count or 1} replicas of {each} each were asked for, and the cluster has {resources}"
            message += " on its nodes" if len(nodes) > 1 else ""
            notify(f"{message}: {fits} start now" + ("" if fits else ", none before there is a node with room for one"))
        return max(1, fits) if count is None else count

    def start(self, tell: Callable[[str, ReplicaEvent], None]) -> None:
        self._tell = tell
        for name in self.names:
            self._ask(name)
        self._thread = threading.Thread(target=self._pump, name="prefold-ray", daemon=True)
        self._thread.start()

    def _ask(self, name: str) -> None:
        method = self._members[name].handle.life.options(concurrency_group="orders")
        self._pending[method.remote()] = (name, "life")

    def _report(self, name: str) -> None:
        method = self._members[name].handle.report.options(concurrency_group="reports")
        self._pending[method.remote(LONGEST_WAIT)] = (name, "report")

    def order(self, name: str, method: str, *arguments: Any) -> None:
        self._members[name].handle.order.options(concurrency_group="orders").remote(method, *arguments)

    def kill(self, name: str) -> None:
        ray.kill(self._members[name].handle, no_restart=self._members[name].restarts < 1)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(5)
        for member in self._members.values():
            ray.kill(member.handle)
        self._members = {}
        if self._connected:
            self._connected = False
            ray.shutdown()

    def _pump(self) -> None:
        """Waits for what replicas say, and tells of it."""
        while not self._closing.is_set():
            if not self._pending:
                self._closing.wait(_POLL)
                self._look_at_the_clock()
                continue
            done, _ = ray.wait(list(self._pending), num_returns=1, timeout=_POLL)
            if done:
                done, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
            for reference in done:
                name, what = self._pending.pop(reference)
                try:
                    self._take(name, what, ray.get(reference))
                except RayActorError as error:
                    self._doubt(name, what, error)
                except (RayError, PrefoldError) as error:
                    cause = getattr(error, "cause", None) or error
                    self._members[name].restarts = 0
                    ray.kill(self._members[name].handle)
                    self._tell(name, ReplicaLost(f"it cannot {what}: {_first_lines(cause)}"))
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for name, member in self._members.items():
            if member.ask_at is not None and now > member.ask_at:
                member.ask_at = None
                self._ask(name)
            if member.doubt is not None and now - member.doubt[0] > _DOUBT:
                self._lose(name, member.doubt[1], died=True)

    def _take(self, name: str, what: str, answer: Any) -> None:
        member = self._members[name]
        if what == "life":
            self._found(name, answer)
            return
        if what == "load":
            answer = ReplicaReady(answer)
        elif answer.answers:
            member.restarts = RESTARTS
        self._tell(name, answer)
        self._report(name)

    def _doubt(self, name: str, what: str, error: Exception) -> None:
        """Asks a replica whose answer did not come whether its process is the same as before; where Ray is about to
        start another, until that one answers."""
        member = self._members[name]
        now = time.monotonic()
        if not isinstance(error, ActorUnavailableError):
            self._lose(name, error, died=True)
            member.ask_at = now + _PAUSE if member.restarts >= 0 else None
        elif what == "life":
            member.ask_at = now + _POLL
        else:
            member.doubt = now, error
            self._ask(name)

    def _found(self, name: str, life: str) -> None:
        """Loads the model in the process that has answered. What it did not answer before is lost, and so is its model
        where the process is another."""
        member = self._members[name]
        died = member.life is not None and member.life != life
        if member.doubt is not None:
            self._lose(name, member.doubt[1], died=died)
        if member.restarts >= 0:
            member.life = life
            load = member.handle.load.remote(self._model, self._options, self._backend, plugins())
            self._pending[load] = (name, "load")

    def _lose(self, name: str, error: Exception, *, died: bool) -> None:
        member = self._members[name]
        member.restarts, member.doubt, member.life = member.restarts - 1, None, None
        returns = member.restarts >= 0
        self._tell(name, ReplicaLost(_first_lines(error), returns, died))
        if not returns:
            ray.kill(member.handle)


def _first_lines(error: BaseException) -> str:
    """Returns the first lines of what Ray says, which goes on with where logs are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]


def _nodes() -> list[dict[str, float]]:
    """Returns what each node of the cluster has. A replica is an actor, and lies on one of them."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _num_that_fit(nodes: Sequence[Mapping[str, float]], needs: Mapping[str, int]) -> int:
    """Returns how many replicas the nodes have room for."""
    return sum(min(int(node.get(what, 0) // one) for what, one in needs.items() if one) for node in nodes)
