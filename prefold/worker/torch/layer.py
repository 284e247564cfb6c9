"""The operations of one layer, with their weights, as a function of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn

from ...model.program import Attend, Buffer, Linear, Norm, NormHeads, Operation, Rope, X
from ...model.shard import WHOLE, Split
from . import layers
from .layers import HeldWeight
from .lora import NO_ADAPTERS, RowAdapters
from .operations import Execution, Place, Rows, execution_of, keys_values
from .ops import Ops


class Layer(nn.Module):
    """A Layer takes rows through the operations of one layer.

    Each operation that has weights is a module here, by a name that `name_of` gives. Operations of one kind that have
    the same weights are one module.

    operations  those of the program
    held        the weights, with their parameters
    linears     those that adapters know, by their names
    attends     the operation that is attention; None: the layer has a state in its place
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        place: Place,
        *,
        split: Split = WHOLE,
        kept: Collection[Buffer] = (),
    ):
        """Make the parameters. split: as of `held_weights`; kept: as of Program"""
        super().__init__()
        self.operations, self.ranks = tuple(operations), place.ranks
        self.held: list[HeldWeight] = []
        self.linears: dict[str, layers.Linear] = {}
        self.attends = next((operation for operation in operations if isinstance(operation, Attend)), None)
        self._steps: list[tuple[Callable[..., None], Operation, nn.Module, tuple[Buffer, ...]]] = []
        made: dict[object, nn.Module] = {}
        for operation, dead in zip(operations, dead_buffers(operations, kept), strict=True):
            execution = execution_of(type(operation))
            key = (type(operation), *operation.named_weights)
            is_new = not operation.weights or key not in made
            weights = execution.hold(operation, place) if is_new else made[key]
            if operation.weights and is_new:
                made[key] = weights
                self.add_module(name_of(operation, self._modules), weights)
                self.held += held_weights(operation, weights, execution, split)
            if isinstance(operation, Linear) and operation.name:
                assert isinstance(weights, layers.Linear)
                self.linears[operation.name] = weights
            self._steps.append((execution.run, operation, weights, dead))

    @property
    def weights(self) -> Iterator[tuple[Operation, nn.Module]]:
        """Yield each operation with the module that has its weights."""
        return ((operation, weights) for _, operation, weights, _ in self._steps)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        *,
        cos_sin: Tensor | None,
        attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None,
        read: Tensor | None,
        adapters: RowAdapters,
        ops: Ops,
        states: object = None,
        positions: Tensor | None = None,
        kept: dict[Buffer, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream x + delta [rows, hidden] after this layer, as its x and delta; may write into x.

        kept: further buffers that layers hand on, which stay so; the other arguments are as of `Rows`
        """
        buffers = {X: x} | (kept or {})
        rows = Rows(buffers, delta, attend, cos_sin, read, adapters, ops, self.ranks, states, positions=positions)
        del x, delta  # so that they are free when no operation needs them any more
        buffers, heads = rows.buffers, rows.heads
        for run, operation, weights, dead in self._steps:
            run(operation, weights, rows)
            for name in dead:
                if name in buffers:
                    del buffers[name]
                if name in heads:
                    del heads[name]
        for name in kept or ():
            kept[name] = buffers[name]  # type: ignore[index]
        return buffers[X], rows.delta

    def result(
        self,
        name: Buffer,
        x: Tensor,
        delta: Tensor | None,
        ops: Ops,
        *,
        read: Tensor | None = None,
        adapters: RowAdapters = NO_ADAPTERS,
        states: object = None,
    ) -> Tensor:
        """Return what a buffer has after operations without attention, which begin with the residual stream x + delta
        [rows, hidden]; may write into x. The other arguments are as of `Rows`."""
        rows = Rows({X: x}, delta, None, None, read, adapters, ops, self.ranks, states)
        self.run(rows)
        return rows.get(name)

    def run(self, rows: Rows) -> None:
        """Take rows through all operations. Buffers stay until the rows go."""
        for run, operation, weights, _ in self._steps:
            run(operation, weights, rows)

    def keys_values(
        self, x: Tensor, cos_sin: Tensor, ops: Ops, adapters: RowAdapters = NO_ADAPTERS
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values [rows, kv_heads, dim] that this layer makes of the residual stream x [rows,
        hidden]; may write into x."""
        rows = Rows({X: x}, None, None, cos_sin, None, adapters, ops, self.ranks)
        for run, operation, weights, dead in self._steps:
            if isinstance(operation, Attend):
                return keys_values(operation, rows)
            run(operation, weights, rows)
            for name in dead:
                rows.drop(name)
        raise ValueError("the layer has no attention")


def name_of(operation: Operation, taken: Iterable[str]) -> str:
    """Return the name of an operation's module: of linears the one that adapters know, of norms and other linears that
    of the tensor, of others that of the operation."""
    if isinstance(operation, Linear) and operation.name:
        return operation.name
    if not isinstance(operation, Linear | Norm | NormHeads | Rope):
        names = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(operation).__name__).lower()]
        names.append(f"{names[0]}_{sum(name.startswith(names[0]) for name in taken)}")
    else:
        path = operation.weights[0].parts[0][0].removesuffix(".weight").split(".")
        names = ["_".join(path[-count:]) for count in range(1, len(path) + 1)]
    return next(name for name in names if name not in taken)


def held_weights(
    operation: Operation,
    module: nn.Module,
    execution: Execution,
    split: Split = WHOLE,
) -> Iterator[HeldWeight]:
    """Yield the weights of an operation that this rank has, with their parameters. split: which part of each tensor
    these are"""
    for name, weight in operation.named_weights:
        path, _, attribute = execution.names.get(name, name).rpartition(".")
        owner = module.get_submodule(path)
        if getattr(owner, attribute) is not None:
            own = split.of(weight)
            yield HeldWeight(owner, attribute, weight.parts, weight.offset, own if any(own) else ())


def dead_buffers(operations: Sequence[Operation], kept: Collection[Buffer] = ()) -> list[tuple[Buffer, ...]]:
    """Return of each operation the buffers that no operation after it reads, but for the residual stream and those that
    are kept."""
    dead, read_later = list[tuple[Buffer, ...]](), {X, *kept}
    for operation in reversed(operations):
        names = operation.buffers
        filled: str = getattr(operation, "out", X)
        dead.append(tuple(name for name in dict.fromkeys(names) if name not in read_later))
        if names.count(filled) == 1 and filled != X and filled not in kept:
            read_later.discard(filled)
            names.remove(filled)
        read_later |= {*names}
    return dead[::-1]
