"""Every way to extend prefold without changing it. A plugin (`--plugin FILE.py`, PREFOLD_PLUGINS) calls these functions
when it is imported; every process that loads a model imports it.

    register_family   a model family: config.json becomes a ModelConfig                     docs/families.md
    register_mlp      an MLP of layers: the operations of which it consists                 docs/families.md
    register_mixer    a layer with a state (linear attention, convolution, ...)             docs/hybrids.md
    register_operation   what such an operation computes with tensors                       docs/families.md
    register_head     a decision head: what reads the options of a question                 docs/decide.md
    register_ranker   a listwise reranker: how its prompt is written, and what scores its rows  tasks/listwise.py
    register_backend  what computes a job: servers, another engine, a cluster               docs/scale.md
    register_worker   what a feature adds to each worker: handlers of messages, media rows  worker/parts.py
    register_engine   what a feature adds to each engine: hooks before and after a step     engine/schedule/parts.py
    register_dialect  routes of an HTTP API                                                 serve/dialects.py

A task and a record format are not extension points: CONTRIBUTING.md lists the files that a new one needs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .cluster.backends import Backend
    from .engine.schedule.parts import MakePart as MakeEnginePart
    from .model.builders import MixerKind, MlpKind
    from .model.families import Family
    from .model.program import Operation
    from .tasks.listwise import ListReader
    from .tasks.readers import Reader
    from .worker.parts import MakePart as MakeWorkerPart

__all__ = [
    "register_backend",
    "register_dialect",
    "register_engine",
    "register_family",
    "register_head",
    "register_mixer",
    "register_mlp",
    "register_operation",
    "register_ranker",
    "register_worker",
]


def register_family(architecture: str, family: Family) -> None:
    """Let a function make the ModelConfig of an architecture.

    `family` takes the Settings of config.json and returns a ModelConfig. It replaces a family of the same name.
    """
    from .model import register_family as register

    register(architecture, family)


def register_mlp(name: str, kind: MlpKind) -> None:
    """Let configs name an MLP. `kind` has the function that adds its operations to a layer."""
    from .model.builders import add_mlp

    add_mlp(name, kind)


def register_mixer(name: str, kind: MixerKind) -> None:
    """Let configs of hybrids name a kind of layer with a state. `kind` adds operations to a layer, and knows the shapes
    of the state."""
    from .model.builders import add_mixer

    add_mixer(name, kind)


def register_operation(kind: type[Operation], function: Callable[[Any, Any, Any], None]) -> None:
    """Let models have an operation, a frozen dataclass. `function` takes the operation, the module that has its weights
    by the names of its fields, and the `prefold.worker.torch.operations.Rows`, of which it reads and fills buffers."""
    from .model import add_operation

    add_operation(kind, function)


def register_head(name: str, make: Callable[[Checkpoint], Reader | None]) -> None:
    """Let a decision head read the answers of models. `name` is an architecture, or a file beside the weights; `make`
    takes the checkpoint and returns its Reader, or None if the file belongs to another head."""
    from .tasks.readers import HEADS

    HEADS[name] = make


def register_ranker(name: str, make: Callable[[Checkpoint], ListReader | None]) -> None:
    """Let checkpoints rank lists of documents in one prompt. `name` is an architecture, or a file beside the weights;
    `make` takes the checkpoint and returns its ListReader, or None if the file belongs to another reader."""
    from .tasks.listwise import RANKERS

    RANKERS[name] = make


def register_backend(name: str, backend: Backend) -> None:
    """Let `--backend NAME` compute jobs. A distribution can also have an entry point in `prefold.backends`."""
    from .cluster.backends import BACKENDS

    BACKENDS[name] = backend


def register_worker(make: MakeWorkerPart) -> None:
    """Let a function make a part of each worker: it takes the model, its checkpoint and a seed, and returns a
    WorkerPart, or None if the model lacks the feature."""
    from .worker.parts import add_part

    add_part(make)


def register_engine(make: MakeEnginePart) -> None:
    """Let a function make a part of each engine: it takes the worker, the options, the meter and the resources, and
    returns an EnginePart, or None if the engine lacks the feature."""
    from .engine.schedule.parts import add_engine_part

    add_engine_part(make)


def register_dialect(module: ModuleType) -> None:
    """Let a server answer the routes in `module.ENTRIES`. Call it before the server starts."""
    from .serve import app

    app.DIALECTS.append(module)
