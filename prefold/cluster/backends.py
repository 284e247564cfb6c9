"""The table of what computes for a job: prefold itself, servers (--url), vLLM, and what others add.

An object of `Backend` says what the spec of a job means to it, and makes its replicas. A plugin (--plugin) adds one by
`BACKENDS["mine"] = MyBackend()`, a distribution by an entry point:

    [project.entry-points."prefold.backends"]
    mine = "my_module:MY_BACKEND"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..spec.fields import SpecError
from ..spec.job import JobSpec

if TYPE_CHECKING:
    from .replicas import Host, Replicas

__all__ = ["BACKENDS", "Backend", "backend_for", "backend_named", "backend_names"]


class Backend:
    """A Backend computes a job. The base class is the backend of prefold itself, in one process or on Ray.

    where    where its models are, in words, such as "in vLLM"; "": prefold reads the weights itself
    takes    the fields of FleetSpec that not every backend has
    on_ray   whether a replica can be an actor of a Ray cluster
    """

    where = ""
    takes: frozenset[str] = frozenset()
    on_ray = True

    def refusal(self, spec: JobSpec) -> str:
        """Return why the backend cannot do a job, naming the option; "" if it can."""
        return ""

    def tokenizer(self, spec: JobSpec) -> str | None:
        """Return the name of the tokenizer of a model that is not read here; None: its texts are sent."""
        return spec.fleet.tokenizer

    def options(self, spec: JobSpec) -> dict[str, Any]:
        """Return the options for `host`, which can be pickled. On Ray device, threads and tensor_parallel among them
        say how many CPUs and GPUs a replica has."""
        return spec.model.for_job().keywords()

    def host(self, model: str, options: Mapping[str, Any]) -> Host:
        """Return a replica from the inside, in the process that computes."""
        from ..llm import LLM
        from .native_host import ReplicaHost, facts_of

        llm = LLM(model, **options)
        return ReplicaHost(llm, facts_of(llm))

    def replicas(
        self,
        spec: JobSpec,
        options: Mapping[str, Any],
        *,
        checkpoint: Any,
        tokenizer: Any,
        notify: Callable[[str], None],
    ) -> Replicas:
        """Return the replicas of a job without Ray: one in this process. options: those for `host`"""
        from .replicas import Replicas

        name = self.where.removeprefix("in ") or "prefold"
        return Replicas({name: lambda: self.host(spec.model_name, options)})


# By name: a backend, or where it lies. --url asks for that of its name, --backend for all others.
BACKENDS: dict[str, Backend | str] = {
    "prefold": Backend(),
    "url": "prefold.cluster.http_host:SERVERS",
    "vllm": "prefold.integrations.vllm:VLLM",
}


def backend_names() -> list[str]:
    """Return the names of all backends that are installed."""
    return list(dict.fromkeys([*BACKENDS, *(entry.name for entry in entry_points(group="prefold.backends"))]))


def backend_named(name: str) -> Backend:
    """Return a backend. Raise InputError for an unknown name."""
    backend: Any = BACKENDS.get(name)
    if backend is None:
        backend = next((entry.load() for entry in entry_points(group="prefold.backends") if entry.name == name), None)
    elif isinstance(backend, str):
        module, _, attribute = backend.partition(":")
        backend = getattr(import_module(module), attribute)
    if backend is None:
        names = ", ".join(name for name in backend_names() if name != "url")
        raise InputError(f"there is no backend {name!r}", field="backend", remedy=f"use {names}, or add it by --plugin")
    return backend


def backend_for(spec: JobSpec) -> Backend:
    """Return the backend of a job. Raise SpecError for an unknown one, and for options that it does not take."""
    fleet, on_ray = spec.fleet, spec.fleet.ray is not None
    try:
        backend = backend_named(fleet.backend_name)
    except InputError as error:
        raise SpecError(f"--backend: {error}", field="backend") from None
    if on_ray and not backend.on_ray:
        raise SpecError(f"--ray and {_asking_for(fleet.backend_name)} exclude each other", field="ray")
    if fleet.backend and fleet.urls:
        raise SpecError("--backend and --url exclude each other: a server computes as it likes", field="backend")
    for option in ("cache_reuse_shifted", "answers"):
        if (on_ray or backend.where) and option in spec.given:
            flag = option.replace("_", "-")
            message = f"--{flag} is for one process; leave it out, or --ray, --url and --backend"
            raise SpecError(message, field=option)
    for option in ("backend_option", "tokenizer"):
        if getattr(fleet, option) and option not in backend.takes:
            takes = [_asking_for(name) for name in backend_names() if option in backend_named(name).takes]
            raise SpecError(f"--{option.replace('_', '-')} needs {', or '.join(takes)}", field=option)
    if fleet.replicas and not on_ray:
        raise SpecError("--replicas needs --ray", field="replicas")
    if fleet.ray and Path(fleet.ray).exists():
        raise SpecError(f"--ray took {fleet.ray} for its address; write --ray behind it", field="ray")
    if refusal := backend.refusal(spec):
        raise SpecError(refusal)
    _ = fleet.backend_options  # raises SpecError for a text that is no option
    return backend


def _asking_for(name: str) -> str:
    """Return the flag that selects a backend."""
    return "--url" if name == "url" else f"--backend {name}"
