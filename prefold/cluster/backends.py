"""The table of what computes for a job: prefold itself, servers (--url), vLLM, and what others add.

An object of `Backend` says what a job's options mean to it, and makes its replicas. A plugin (--plugin) adds one by
`BACKENDS["mine"] = MyBackend()`, a distribution by an entry point:

    [project.entry-points."prefold.backends"]
    mine = "my_module:MY_BACKEND"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .replicas import Host, Replicas

__all__ = ["BACKENDS", "Backend", "backend_named", "backend_names"]

Options = Mapping[str, Any]  # of the command line, by the names of its parameters


class Backend:
    """A Backend computes a job. The base class is the backend of prefold itself, in one process or on Ray.

    where    where its models are, in words, such as "in vLLM"; "": prefold reads the weights itself
    takes    the options of the command line that not every backend has
    on_ray   whether a replica can be an actor of a Ray cluster
    """

    where = ""
    takes: frozenset[str] = frozenset()
    on_ray = True

    def refusal(self, o: Options) -> str:
        """Returns why the backend cannot do a job with these options, naming the option; "" if it can."""
        return ""

    def tokenizer(self, o: Options) -> str | None:
        """Returns the name of the tokenizer of a model that is not read here; None: its texts are sent."""
        return o.get("tokenizer")

    def options(self, o: Options, llm: Options, own_options: Options) -> dict[str, Any]:
        """Returns the options for `host`, which can be pickled.

        llm          the job's options as keywords of `LLM`: device, threads and tensor_parallel say how many CPUs and
                     GPUs a replica has on Ray, and are to be returned
        own_options  what --backend-option gave
        """
        return dict(llm)

    def host(self, model: str, options: Options) -> Host:
        """Returns a replica from the inside, in the process that computes."""
        from ..llm import LLM
        from .native_host import ReplicaHost, facts_of

        llm = LLM(model, **options)
        return ReplicaHost(llm, facts_of(llm))

    def replicas(
        self, o: Options, options: Options, *, checkpoint: Any, tokenizer: Any, notify: Callable[[str], None]
    ) -> Replicas:
        """Returns the replicas of a job without Ray: one in this process. options: those for `host`."""
        from .replicas import Replicas

        name = self.where.removeprefix("in ") or "prefold"
        return Replicas({name: lambda: self.host(o["model"], options)})


# By name: a backend, or where it lies. --url asks for that of its name, --backend for all others.
BACKENDS: dict[str, Backend | str] = {
    "prefold": Backend(),
    "url": "prefold.cluster.http_host:SERVERS",
    "vllm": "prefold.cluster.vllm_host:VLLM",
}


def backend_names() -> list[str]:
    """Returns the names of all backends that are installed."""
    return list(dict.fromkeys([*BACKENDS, *(entry.name for entry in entry_points(group="prefold.backends"))]))


def backend_named(name: str) -> Backend:
    """Returns a backend. Raises InputError for an unknown name."""
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
