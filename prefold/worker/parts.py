"""Contributions of features to a worker: message handlers, facts, and rows that replace embeddings."""

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


CallFields = Mapping[str, Any]  # extra fields of a kernel call


class LayerCarry(Protocol):
    """Data that a feature carries along a stream beside K/V, in layerwise execution.

    Layerwise means that one layer runs over several steps before the next layer starts.
    """

    def run(self, layer: int, step: StreamStep) -> AbstractContextManager[CallFields]:
        """Return a context in which a layer runs over the rows of a step. It yields extra fields for the kernel call.

        The steps come in order, and start again for each layer.
        """

    def commit(self) -> None:
        """Make the carried data the starting point of later steps. Until then, they start from the last commit."""


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """What one feature adds to one worker.

    Attributes:
        handlers: For each message type, a function of (worker, message) that returns a ticket.
        facts: Facts about the part for the host. None: there are none.
        media: Takes the tokens of a step and returns the rows that replace embeddings, or None if the step has no such
            rows. None: the feature provides no rows.
        forget: Takes the number of a stream that has ended. It may be called at any time and in any thread. None: the
            part stores nothing per stream.
        varies: The computation that depends on the batch, in words; a batch-invariant model then rejects the part.
            "": nothing depends on the batch.
        passes: For people: the code that computes a forward pass of the native worker. "": the worker's own program.
        carry: Takes the number of a stream and returns the data that the feature carries through the layers. None: the
            feature carries nothing.
    """

    handlers: Mapping[type[Message], Callable[[Any, Any], Ticket]]
    facts: object = None
    media: Callable[[np.ndarray], MediaRows[Any] | None] | None = None
    forget: Callable[[int], object] | None = None
    varies: str = ""
    passes: str = ""
    carry: Callable[[int], LayerCarry] | None = None


def in_vocabulary(tokens: np.ndarray, media_token: int) -> np.ndarray:
    """Return the token ids of a step, with media ids replaced by `media_token` (as in ModelConfig).

    Media ids are at or above MEDIA_BASE and have no embedding.
    """
    return np.where(tokens >= MEDIA_BASE, np.int32(media_token), tokens)


MakePart = Callable[["CausalLM", "Checkpoint | None", int], "WorkerPart | None"]
MakeNativePart = Callable[["NativeModel", "Checkpoint | None", int], "WorkerPart | None"]


@dataclass(frozen=True, slots=True)
class PartMaker:
    """A feature's functions that make its WorkerPart; the fields are the arguments of `add_part`."""

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
    """Register functions that make a feature's WorkerPart for every worker created from now on.

    Args:
        make: Takes the model, its checkpoint (to load more weights; None if there is no checkpoint) and the seed of
            random weights. Returns the part, or None if the model lacks the feature.
        native: The same for the native executor. None: models that the feature concerns run on PyTorch.
        concerns: Takes a model's config and returns True if the feature concerns the model.
    """
    MAKERS.append(PartMaker(make, native, concerns))


def parts_of(model: CausalLM, checkpoint: Checkpoint | None = None, seed: int = 0) -> list[WorkerPart]:
    """Return the parts of a PyTorch worker; the arguments are passed to `make` of `add_part`."""
    load_plugins()
    return [part for maker in MAKERS if (part := maker.make(model, checkpoint, seed)) is not None]


def native_parts(model: NativeModel, checkpoint: Checkpoint | None = None, seed: int = 0) -> list[WorkerPart]:
    """Return the parts of a native worker; the arguments are passed to `native` of `add_part`."""
    load_plugins()
    makers = [maker.native for maker in MAKERS if maker.native is not None and maker.concerns(model.config)]
    return [part for make in makers if (part := make(model, checkpoint, seed)) is not None]


def without_native(config: ModelConfig) -> str | None:
    """Name the first feature of a model that the native executor lacks, by the module that adds the feature.

    None: the native executor has all features of the model.
    """
    load_plugins()
    lacking = (maker.make for maker in MAKERS if maker.native is None and maker.concerns(config))
    return next((f"the part of {make.__module__}" for make in lacking), None)
