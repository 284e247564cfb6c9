"""All extension points of prefold. A plugin (`--plugin FILE.py`, PREFOLD_PLUGINS) calls these functions on import.

Every process that loads a model imports the plugins first.

    register_family      a model family: config.json becomes a ModelConfig               docs/families.md
    register_mlp         an MLP kind: its operations                                     docs/families.md
    register_mixer       a layer with a state (linear attention, convolution, ...)       docs/hybrids.md
    register_operation   an operation: its computation with tensors                      docs/families.md
    register_head        a decision head: reads the options of a question                docs/decide.md
    register_ranker      a listwise reranker: its prompt format and its scores           tasks/listwise.py
    register_backend     an engine for jobs: servers, another library, a cluster         docs/scale.md
    register_worker      a feature's part of each worker: message handlers, media rows   worker/parts.py
    register_engine      a feature's part of each engine: hooks before and after a step  engine/schedule/parts.py
    register_dialect     routes of an HTTP API                                           serve/dialects.py

Tasks and record formats are not extension points. CONTRIBUTING.md lists the files that a new one needs.
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
    """Register a model family. It replaces a registered family of the same architecture.

    Args:
        architecture: Name in `architectures` of config.json, such as "LlamaForCausalLM".
        family: Converts config.json to a ModelConfig. An unread key is an error if it would change results.

    Example:
        >>> register_family("MyForCausalLM", my_family)
    """
    from .model import register_family as register

    register(architecture, family)


def register_mlp(name: str, kind: MlpKind) -> None:
    """Register an MLP kind, which `ModelConfig.mlp` can then name.

    Args:
        name: The name.
        kind: Its `build` adds the operations of the MLP to a layer.

    Example:
        >>> register_mlp("squared", MlpKind(build_squared))
    """
    from .model.builders import add_mlp

    add_mlp(name, kind)


def register_mixer(name: str, kind: MixerKind) -> None:
    """Register a layer kind with a state instead of attention, which `ModelConfig.mixers` can then name.

    Args:
        name: The name.
        kind: Its `build` adds the operations to a layer; its `states` returns the shapes of the state for a config.

    Example:
        >>> register_mixer("my_convolution", MixerKind(build_convolution, states_of))
    """
    from .model.builders import add_mixer

    add_mixer(name, kind)


def register_operation(kind: type[Operation], function: Callable[[Any, Any, Any], None]) -> None:
    """Register an operation for the programs of models.

    Args:
        kind: The class of the operation, a frozen dataclass.
        function: Called with the operation, the module with its weights, and a `prefold.worker.torch.operations.Rows`.
            It reads and fills buffers of the Rows. Each weight is an attribute of the module, under its field's name.

    Example:
        >>> register_operation(Squared, run_squared)
    """
    from .model import add_operation

    add_operation(kind, function)


def register_head(name: str, make: Callable[[Checkpoint], Reader | None]) -> None:
    """Register a decision head, for `LLM.decide`.

    Args:
        name: An architecture, or the name of a file beside the weights.
        make: Returns the Reader of a checkpoint, or None if the file belongs to another head.

    Example:
        >>> register_head("my_head.json", read_my_head)
    """
    from .tasks.readers import HEADS

    HEADS[name] = make


def register_ranker(name: str, make: Callable[[Checkpoint], ListReader | None]) -> None:
    """Register a listwise reranker, which ranks a list of documents in one prompt.

    Args:
        name: An architecture, or the name of a file beside the weights.
        make: Returns the ListReader of a checkpoint, or None if the file belongs to another reader.

    Example:
        >>> register_ranker("MyForRanking", read_my_ranker)
    """
    from .tasks.listwise import RANKERS

    RANKERS[name] = make


def register_backend(name: str, backend: Backend) -> None:
    """Register a backend for `--backend NAME`. A package may instead have an entry point in `prefold.backends`.

    Args:
        name: The name.
        backend: The backend.

    Example:
        >>> register_backend("mirror", MirrorBackend())
    """
    from .cluster.backends import BACKENDS

    BACKENDS[name] = backend


def register_worker(make: MakeWorkerPart) -> None:
    """Register a feature's part of workers. Only workers that are made afterwards get it.

    Args:
        make: Called with the model, its checkpoint (None: dummy weights) and the seed of dummy weights. Returns a
            WorkerPart, or None if the model lacks the feature.

    Example:
        >>> register_worker(lambda model, checkpoint, seed: MyPart(model))
    """
    from .worker.parts import add_part

    add_part(make)


def register_engine(make: MakeEnginePart) -> None:
    """Register a feature's part of engines. Only engines that are made afterwards get it.

    Args:
        make: Called with the worker, the EngineOptions, the Meter and the engine's resources. Returns an EnginePart, or
            None if the engine lacks the feature. Raises InputError if the feature is requested but impossible.

    Example:
        >>> register_engine(lambda worker, options, meter, resources: MyPart(options))
    """
    from .engine.schedule.parts import add_engine_part

    add_engine_part(make)


def register_dialect(module: ModuleType) -> None:
    """Register the routes of an HTTP API. Call it before the server starts.

    Args:
        module: Its `ENTRIES` lists the routes.

    Example:
        >>> register_dialect(my_api)
    """
    from .serve import app

    app.DIALECTS.append(module)
