"""The table of backends: prefold itself, servers (--url), vLLM, and backends of plugins.

A `Backend` interprets the spec of a job and creates its replicas. A plugin (--plugin) adds one with `BACKENDS["mine"] =
MyBackend()`. A distribution adds one with an entry point:

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
    """The system that computes a job. The base class is prefold itself, in one process or on Ray.

    Example:
        Serve a model of your own under `--backend mine`::

            class MyBackend(Backend):
                where = "in my system"

                def host(self, model, options):
                    return MyHost(model, **options)  # a subclass of `prefold.cluster.replicas.Host`

            BACKENDS["mine"] = MyBackend()
    """

    where = ""  # location of the model, such as "in vLLM"; "": prefold reads the weights itself
    takes: frozenset[str] = frozenset()  # the fields of FleetSpec that it accepts and other backends may not
    on_ray = True  # whether a replica can be an actor of a Ray cluster

    def refusal(self, spec: JobSpec) -> str:
        """Return why the backend cannot run a job, naming the option; "" if it can."""
        return ""

    def tokenizer(self, spec: JobSpec) -> str | None:
        """Return the name of the tokenizer of a model whose files are not read here; None: send texts."""
        return spec.fleet.tokenizer

    def options(self, spec: JobSpec) -> dict[str, Any]:
        """Return the options for `host`. They can be pickled.

        On Ray, `device`, `threads` and `tensor_parallel` among them determine how many CPUs and GPUs a replica gets.
        """
        return spec.model.for_job().keywords()

    def host(self, model: str, options: Mapping[str, Any]) -> Host:
        """Return a host, which runs requests in the process of the replica."""
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
        """Return the replicas of a job without Ray: one, in this process.

        Args:
            options: for `host`
        """
        from .replicas import Replicas

        name = self.where.removeprefix("in ") or "prefold"
        return Replicas({name: lambda: self.host(spec.model_name, options)})


# {name: a backend, or its "module:attribute"}. --url selects the backend "url", --backend all others.
BACKENDS: dict[str, Backend | str] = {
    "prefold": Backend(),
    "url": "prefold.cluster.http_host:SERVERS",
    "vllm": "prefold.integrations.vllm:VLLM",
}


def backend_names() -> list[str]:
    """Return the names of all installed backends."""
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
    """Return the backend of a job. Raise SpecError for an unknown backend, and for options that it does not accept."""
    fleet, on_ray = spec.fleet, spec.fleet.ray is not None
    try:
        backend = backend_named(fleet.backend_name)
    except InputError as error:
        raise SpecError(f"--backend: {error}", field="backend") from None
    if on_ray and not backend.on_ray:
        raise SpecError(f"--ray and {_asking_for(fleet.backend_name)} exclude each other", field="ray")
    if fleet.backend and fleet.urls:
        raise SpecError("--backend and --url exclude each other: the server chooses how to compute", field="backend")
    for option in ("cache_reuse_shifted", "answers"):
        if (on_ray or backend.where) and option in spec.given:
            flag = option.replace("_", "-")
            message = f"--{flag} works only in one process; remove it, or remove --ray, --url and --backend"
            raise SpecError(message, field=option)
    for option in ("backend_option", "tokenizer"):
        if getattr(fleet, option) and option not in backend.takes:
            takes = [name for name in backend_names() if option in backend_named(name).takes]
            jobs = " or ".join("on servers (--url)" if name == "url" else f"with {_asking_for(name)}" for name in takes)
            raise SpecError(f"--{option.replace('_', '-')} is for jobs {jobs}", field=option)
    if fleet.replicas and not on_ray:
        raise SpecError("--replicas needs --ray", field="replicas")
    if fleet.ray and Path(fleet.ray).exists():
        raise SpecError(f"--ray reads {fleet.ray} as its address; write --ray after it", field="ray")
    if refusal := backend.refusal(spec):
        raise SpecError(refusal)
    _ = fleet.backend_options  # raises SpecError for an invalid option
    return backend


def _asking_for(name: str) -> str:
    """Return the flag that selects a backend."""
    return "--url" if name == "url" else f"--backend {name}"
