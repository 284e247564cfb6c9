"""Replicas on Ray: each is an actor, whose process holds a model of its own. Ray places, starts and restarts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import JobError, MissingExtraError, PrefoldError
from ..stream import Window
from .replicas import Call, Event, Facts, Lost, Ready, Replicas, Report

__all__ = ["RayReplicas"]

try:
    import ray
    from ray.exceptions import RayActorError, RayError
except ImportError:
    raise MissingExtraError("ray", "ray", "a fleet on Ray") from None

_RESTARTS = 3
_POLL = 0.25
_LONGEST_WAIT = 0.5  # that a report is waited for


class _Actor:
    """A replica's process. `give`, `begin` and `end` have a thread of their own, so they come in the order of sending;
    so do reports, which are asked for while the engine runs."""

    def __init__(self) -> None:
        self._host: Any = None

    def load(self, model: str, options: dict[str, Any]) -> Facts:
        from ..llm import LLM
        from .host import ReplicaHost, facts_of

        llm = LLM(model, **options)
        self._host = ReplicaHost(llm, facts_of(llm))
        return self._host.facts

    def begin(self, call: Call) -> None:
        self._host.begin(call)

    def give(self, windows: list[Window]) -> None:
        self._host.give(windows)

    def end(self) -> None:
        self._host.end()

    def report(self, wait: float) -> Report:
        return self._host.report(wait)


@dataclass(slots=True)
class _Member:
    handle: Any
    restarts: int = _RESTARTS


class RayReplicas(Replicas):
    """Actors of a Ray cluster.

    model     what the LLM of each is made of: a name or path that every node can resolve
    options   keywords of `LLM`
    count     replicas
    address   of a cluster; None: one is started on this machine, and ended by `close`
    cpus      CPUs of each replica
    gpus      GPUs of each replica
    notify    called with what a person should know
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        *,
        count: int,
        address: str | None = None,
        cpus: float = 1,
        gpus: float = 0,
        notify: Callable[[str], None] = lambda line: None,
    ):
        self.names = [f"replica {number}" for number in range(1, count + 1)]
        self._model, self._options = model, dict(options)
        self._owns_cluster = False
        if not ray.is_initialized():
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or "this machine"
                raise JobError(f"there is no Ray cluster at {where} ({error}); leave the address out") from None
            self._owns_cluster = True
        self._check_room(count, cpus, gpus, notify)
        actor = ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_restarts=_RESTARTS, max_task_retries=0,
            concurrency_groups={"orders": 1, "reports": 1},
        )(_Actor)  # fmt: skip
        self._members = {name: _Member(actor.options(name=None).remote()) for name in self.names}
        self._pending: dict[Any, tuple[str, str]] = {}  # what is waited for: reference to (name, what)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def _check_room(self, count: int, cpus: float, gpus: float, notify: Callable[[str], None]) -> None:
        """Says so where the cluster has less than was asked for; raises JobError where one replica does not fit."""
        has = ray.cluster_resources()
        needs = {"CPU": cpus, "GPU": gpus}
        fits = min((int(has.get(what, 0) // one) for what, one in needs.items() if one), default=count)
        each = " and ".join(f"{one:g} {what}" for what, one in needs.items() if one)
        found = ", ".join(f"{has.get(what, 0):g} {what}" for what, one in needs.items() if one)
        if fits < 1 and self._owns_cluster:
            self.close()
            raise JobError(f"a replica needs {each}, and this machine has {found}; give fewer --threads")
        if fits < count:
            notify(f"{count} replicas of {each} were asked for; the cluster has {found}: {fits} of them start now")

    def start(self, tell: Callable[[str, Event], None]) -> None:
        self._tell = tell
        for name in self.names:
            self._load(name)
        self._thread = threading.Thread(target=self._pump, name="prefold-ray", daemon=True)
        self._thread.start()

    def _load(self, name: str) -> None:
        self._pending[self._members[name].handle.load.remote(self._model, self._options)] = (name, "load")

    def _report(self, name: str) -> None:
        method = self._members[name].handle.report.options(concurrency_group="reports")
        self._pending[method.remote(_LONGEST_WAIT)] = (name, "report")

    def _order(self, name: str, method: str, *arguments: Any) -> None:
        getattr(self._members[name].handle, method).options(concurrency_group="orders").remote(*arguments)

    def begin(self, name: str, call: Call) -> None:
        self._order(name, "begin", call)

    def give(self, name: str, windows: list[Window]) -> None:
        self._order(name, "give", windows)

    def end(self, name: str) -> None:
        self._order(name, "end")

    def kill(self, name: str) -> None:
        ray.kill(self._members[name].handle, no_restart=self._members[name].restarts < 1)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(5)
        for member in self._members.values() if self._thread is not None else ():
            ray.kill(member.handle)
        if self._owns_cluster:
            self._owns_cluster = False
            ray.shutdown()

    def _pump(self) -> None:
        """Waits for what replicas say, and tells of it."""
        while not self._closing.is_set():
            if not self._pending:
                self._closing.wait(_POLL)
                continue
            found, _ = ray.wait(list(self._pending), num_returns=1, timeout=_POLL)
            if found:
                found, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
            for reference in found:
                name, what = self._pending.pop(reference)
                try:
                    self._take(name, ray.get(reference))
                except RayActorError as error:
                    self._lose(name, error)
                except (RayError, PrefoldError) as error:
                    cause = getattr(error, "cause", None) or error
                    self._members[name].restarts = 0
                    ray.kill(self._members[name].handle)
                    self._tell(name, Lost(f"it cannot {what}: {_first_lines(cause)}"))

    def _take(self, name: str, said: Facts | Report) -> None:
        self._tell(name, Ready(said) if isinstance(said, Facts) else said)
        self._report(name)

    def _lose(self, name: str, error: Exception) -> None:
        member = self._members[name]
        member.restarts -= 1
        returns = member.restarts >= 0
        self._tell(name, Lost(_first_lines(error), returns))
        if returns:
            self._load(name)


def _first_lines(error: BaseException) -> str:
    """Returns the first lines of what Ray says, which goes on with where logs are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]
