"""What features add to a worker: handlers of their messages, facts, and rows in place of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..engine.schedule.steps import Message, StreamStep
from ..engine.worker import Ticket
from ..spec.plugins import load_plugins
from ..trie import MEDIA_BASE

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..model import MediaRows, ModelConfig
    from .native.model import NativeModel
    from .torch.model import CausalLM


CallFields = Mapping[str, Any]  # of a call of the kernels, beside those that each call has


class LayerCarry(Protocol):
    """What a feature carries through the rows of a stream beside K/V, while each layer runs over several steps before
    the next layer does."""

    def run(self, layer: int, step: StreamStep) -> AbstractContextManager[CallFields]:
        """Return a context in which a layer runs over the rows of a step, with further fields of the kernels' call. The
        steps come in order, for each layer anew."""

    def commit(self) -> None:
        """Let later steps of the stream go on from here. Until then they would go on from where they did before."""


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A WorkerPart is what a feature adds to a worker.

    handlers  by the type of a message the function that takes the worker and such a message, and returns its ticket
    facts     what the host knows of the part; None: nothing
    media     takes the tokens of a step, and returns the rows among them that are given in place of embeddings; None
              where the step has none. None: the feature gives no rows
    forget    takes the number of a stream that has ended, at any time and in any thread; None: the part keeps nothing
    varies    what of it depends on the batch, so that a batch-invariant model cannot have it; "": nothing
    passes    in words what computes a forward pass, of the native worker; "": the worker's own program
    carry     takes the number of a stream, and returns what the feature carries through its layers; None: nothing
    """

    handlers: Mapping[type[Message], Callable[[Any, Any], Ticket]]
    facts: object = None
    media: Callable[[np.ndarray], MediaRows[Any] | None] | None = None
    forget: Callable[[int], object] | None = None
    varies: str = ""
    passes: str = ""
    carry: Callable[[int], LayerCarry] | None = None


def in_vocabulary(tokens: np.ndarray, media_token: int) -> np.ndarray:
    """Return the ids of a step's rows with a token of the vocabulary in place of those of media, which no embedding
    has. media_token: as of ModelConfig"""
    return np.where(tokens >= MEDIA_BASE, np.int32(media_token), tokens)


MakePart = Callable[["CausalLM", "Checkpoint | None", int], "WorkerPart | None"]
MakeNativePart = Callable[["NativeModel", "Checkpoint | None", int], "WorkerPart | None"]


@dataclass(frozen=True, slots=True)
class PartMaker:
    """A PartMaker makes a feature's part of each worker; its fields are the arguments of `add_part`."""

    make: MakePart
    native: MakeNativePart | None
    concerns: Callable[[ModelConfig], bool]


MAKERS: list[PartMaker] = []


def add_part(
    make: MakePart,
    *,
    native: MakeNativePart | None = None,
    concerns: Callable[[ModelConfig], bool] = lambda config: True,
) -> None:
    """Registers functions that make a feature's WorkerPart for each worker from now on.

    make      takes the model, the checkpoint from which the part loads further weights (None: there is no checkpoint)
              and the seed of random weights, and returns the part, or None where the model lacks the feature
    native    the same for the native executor; None: PyTorch runs the models that the feature concerns
    concerns  takes a model's config, and returns whether the feature concerns the model
    """
    MAKERS.append(PartMaker(make, native, concerns))


def parts_of(model: CausalLM, checkpoint: Checkpoint | None = None, seed: int = 0) -> list[WorkerPart]:
    """Returns the parts of a worker for a model; the arguments are those of `add_part`."""
    load_plugins()
    return [part for maker in MAKERS if (part := maker.make(model, checkpoint, seed)) is not None]


def native_parts(model: NativeModel, checkpoint: Checkpoint | None = None, seed: int = 0) -> list[WorkerPart]:
    """Returns the parts of a native worker for a model; the arguments are those of `add_part`."""
    load_plugins()
    makers = [maker.native for maker in MAKERS if maker.native is not None and maker.concerns(model.config)]
    return [part for make in makers if (part := make(model, checkpoint, seed)) is not None]


def without_native(config: ModelConfig) -> str | None:
    """Returns the first feature of a model that the native executor lacks, by the module that adds it; None: it has
    all."""
    load_plugins()
    lacking = (maker.make for maker in MAKERS if maker.native is None and maker.concerns(config))
    return next((f"the part of {make.__module__}" for make in lacking), None)
