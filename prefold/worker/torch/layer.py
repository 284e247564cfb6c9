"""The operations of one layer with their weights, as a function of rows."""

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
    """The operations of one layer, with their weights.

    Each operation that has weights is a submodule, named by `name_of`. Operations of one kind with the same weights
    share a submodule.

    Attributes:
        operations: The program's operations.
        held: The weights with their parameters.
        linears: The linears that adapters can modify, by name.
        attends: The attention operation. None: a recurrent layer, with a state instead.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        place: Place,
        *,
        split: Split = WHOLE,
        kept: Collection[Buffer] = (),
    ):
        """Allocate the parameters.

        Args:
            split: As in `held_weights`.
            kept: As in Program.
        """
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
        """Yield each operation with the module of its weights."""
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
        """Return the residual stream x + delta [rows, hidden] after this layer, as x and delta. It may overwrite x.

        Args:
            kept: Other buffers that pass from layer to layer; updated in place. Other arguments are as in `Rows`.
        """
        buffers = {X: x} | (kept or {})
        rows = Rows(buffers, delta, attend, cos_sin, read, adapters, ops, self.ranks, states, positions=positions)
        del x, delta  # lets operations free them early
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
        """Run operations without attention on the residual stream x + delta [rows, hidden], and return one buffer.

        It may overwrite x. Other arguments are as in `Rows`.
        """
        rows = Rows({X: x}, delta, None, None, read, adapters, ops, self.ranks, states)
        self.run(rows)
        return rows.get(name)

    def run(self, rows: Rows) -> None:
        """Run rows through all operations, without freeing buffers in between."""
        for run, operation, weights, _ in self._steps:
            run(operation, weights, rows)

    def keys_values(
        self, x: Tensor, cos_sin: Tensor, ops: Ops, adapters: RowAdapters = NO_ADAPTERS
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values [rows, kv_heads, dim] that this layer computes from the residual stream x.

        Args:
            x: [rows, hidden]; it may be overwritten.
        """
        rows = Rows({X: x}, None, None, cos_sin, None, adapters, ops, self.ranks)
        for run, operation, weights, dead in self._steps:
            if isinstance(operation, Attend):
                return keys_values(operation, rows)
            run(operation, weights, rows)
            for name in dead:
                rows.drop(name)
        raise ValueError("the layer has no attention")


def name_of(operation: Operation, taken: Iterable[str]) -> str:
    """Return the module name of an operation.

    A linear that adapters can modify has their name for it; other linears and norms have the name of the tensor; the
    rest has the name of the operation.
    """
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
    """Yield this rank's weights of an operation, with their parameters.

    Args:
        split: The rank's part of each tensor.
    """
    for name, weight in operation.named_weights:
        path, _, attribute = execution.names.get(name, name).rpartition(".")
        owner = module.get_submodule(path)
        if getattr(owner, attribute) is not None:
            own = split.of(weight)
            yield HeldWeight(owner, attribute, weight.parts, weight.offset, own if any(own) else ())


def dead_buffers(operations: Sequence[Operation], kept: Collection[Buffer] = ()) -> list[tuple[Buffer, ...]]:
    """Return, for each operation, the buffers that no later operation reads.

    The residual stream and `kept` buffers are never among them.
    """
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
