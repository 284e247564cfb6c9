"""Tensor parallelism: a model's heads, MLP columns and vocabulary split over ranks (Shoeybi et al. 2019). No torch.

A rank computes its own heads and columns for every row of a step and adds its share of the residual stream to the
others': two sums over all ranks a layer, one more for the embedding, and the logits gathered on rank 0. Nothing
here, and nothing in a layer, knows which rows belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..errors import InputError, UnsupportedModelError
from .config import ModelConfig
from .program import Program, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels import RanksView

Array = TypeVar("Array", np.ndarray, "Tensor")

# Columns of an MLP that stay on one rank: kernels take so many at once.
WIDTH_UNIT = 16


@dataclass(frozen=True, slots=True)
class Split:
    """A Split says which part of each tensor of a checkpoint a rank holds.

    shapes  of the whole model's tensors, by name
    part    takes the name and the whole shape of a tensor, as `Shard.part`; None: the rank holds all
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    part: Callable[[str, tuple[int, ...]], tuple[slice, ...]] | None = None

    def of(self, weight: Weight) -> tuple[tuple[slice, ...], ...]:
        """Return the part of each tensor of a weight of the rank's program; (): all of it."""
        return tuple(self._part(tensor, (rows, *weight.inputs)) for tensor, rows in weight.parts)

    def _part(self, tensor: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        if self.part is None or (whole := self.shapes[tensor]) == shape:
            return ()
        return self.part(tensor, whole)


WHOLE = Split()


@dataclass(frozen=True, slots=True)
class Shard:
    """A Shard is what one of `size` ranks holds: slices of the heads, of the KV heads, of the MLP's columns, of the
    vocabulary.

    A KV head is on one rank with all its query heads where there are enough KV heads, perhaps more of them on
    some ranks than on others. Where there are fewer than ranks, a KV head is on several, each with some of its
    query heads; copies: on how many.
    """

    rank: int
    size: int
    heads: slice
    kv_heads: slice
    width: slice
    vocab: slice
    copies: int = 1

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Return the sizes of a rank's part of the model. Raise InputError if a rank would have nothing to do, and
        UnsupportedModelError for a model that is not split."""
        if size > 1 and config.unsplit is not None:
            raise UnsupportedModelError(f"{config.unsplit}; use tensor_parallel 1")
        most = min(config.heads, config.intermediate, config.vocab_size)
        if size > most:
            raise InputError(
                f"tensor_parallel is {size}, the model has {config.heads} heads and an MLP of {config.intermediate}",
                field="tensor_parallel",
                remedy=f"use at most {most}",
            )
        group, copies = config.heads // config.kv_heads, 1
        if size <= config.kv_heads:
            kv_heads = share(config.kv_heads, rank, size)
            heads = slice(kv_heads.start * group, kv_heads.stop * group)
        else:
            kv_head = rank * config.kv_heads // size
            owners = [r for r in range(size) if r * config.kv_heads // size == kv_head]
            copies = len(owners)
            own = share(group, owners.index(rank), copies)
            kv_heads = slice(kv_head, kv_head + 1)
            heads = slice(kv_head * group + own.start, kv_head * group + own.stop)
        return cls(
            rank,
            size,
            heads,
            kv_heads,
            _columns(config.intermediate, rank, size),
            share(config.vocab_size, rank, size),
            copies,
        )

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the sizes of this rank's part of the layers."""
        experts = config.experts
        if experts is not None:
            width, shared = (_length(_columns(size, self.rank, self.size)) for size in (experts.width, experts.shared))
            experts = replace(experts, width=width, shared=shared)
        return replace(
            config,
            heads=_length(self.heads),
            kv_heads=_length(self.kv_heads),
            intermediate=_length(self.width),
            experts=experts,
            whole=config,
        )

    def program(self, config: ModelConfig) -> Program:
        """Return what this rank computes. Its embedding and its LM head have the rank's tokens."""
        program, tokens = self.local(config).program(self.copies), _length(self.vocab)

        def own(table: Weight) -> Weight:
            return replace(table, parts=((table.parts[0][0], tokens),))

        head = None if program.head is None else own(program.head)
        return replace(program, embed=replace(program.embed, table=own(program.embed.table)), head=head)

    def split(self, config: ModelConfig) -> Split:
        """Return which part of each tensor this rank holds."""
        if self.size == 1:
            return WHOLE
        shapes = {name: shape for weight in config.program().weights for name, shape in weight.shapes.items()}
        return Split(shapes, partial(self.part, config))

    def part(self, config: ModelConfig, tensor: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return which outputs, or outputs and inputs, this rank holds of a tensor, or of a module's weight.

        shape: of the whole model's tensor
        """

        def numbers(heads: slice) -> slice:
            return slice(heads.start * config.head_dim, heads.stop * config.head_dim)

        path, _, kind = tensor.rpartition(".")
        module = (path if kind in ("weight", "bias") else tensor).rpartition(".")[2]
        q, kv, every = numbers(self.heads), numbers(self.kv_heads), slice(None)
        parts: dict[str, tuple[slice, ...]] = {
            "embed_tokens": (self.vocab,),
            "lm_head": (self.vocab,),
            "q_proj": (q,),
            "k_proj": (kv,),
            "v_proj": (kv,),
            "q_norm": (q,),  # of norms over all heads
            "k_norm": (kv,),
            "attn_sub_norm": (q,),
            "ffn_sub_norm": (_columns(shape[0], self.rank, self.size),),
            "o_proj": (every, q),
            "sinks": (self.heads,),
            "g_proj": (self.heads if config.head_gates is True else q,),
            "gate_proj": (_columns(shape[0], self.rank, self.size),),
            "up_proj": (_columns(shape[0], self.rank, self.size),),
            "down_proj": (every, _columns(shape[-1], self.rank, self.size)),
        }
        return parts[module][: len(shape)]


def share(total: int, rank: int, size: int, unit: int = 1) -> slice:
    """Return the rank's part of `total`, in whole units but for the last; parts differ by a unit at most."""
    units = -(-total // unit)
    return slice(min(total, unit * (units * rank // size)), min(total, unit * (units * (rank + 1) // size)))


def _columns(width: int, rank: int, size: int) -> slice:
    """Return the rank's columns of an MLP."""
    return share(width, rank, size, WIDTH_UNIT if width >= WIDTH_UNIT * size else 1)


def _length(part: slice) -> int:
    return part.stop - part.start


class OneRank(Generic[Array]):
    """The only process that has a model: the case without tensor parallelism. Ranks of a split model override it."""

    rank, size = 0, 1
    view: RanksView | None = None  # where ranks exchange through memory: what compiled code knows of them

    def shard(self, config: ModelConfig) -> Shard:
        """Return what this rank holds of a model."""
        return Shard.of(config, self.rank, self.size)

    def sum(self, x: Array) -> Array:
        """Return the sum of every rank's x, on every rank; may be x itself."""
        return x

    def gather(self, logits: Array, vocab_size: int) -> Array:
        """Return logits of the whole vocabulary [rows, vocab_size] on rank 0, and no rows on others; logits: this
        rank's."""
        return logits


SomeRank = OneRank[Any]  # of either executor


def own_rows(ids: Array, vocab: slice) -> tuple[Array, Array]:
    """Return ids as rows of this rank's table (0 for others'), and which are its own."""
    is_own = (ids >= vocab.start) & (ids < vocab.stop)
    return (ids - vocab.start) * is_own, is_own


def piece_width(total: int, size: int) -> int:
    """Return how many columns each rank gives of `total` when all give as many. The last one of some is filling."""
    return -(-total // size)


def columns_of(pieces: Sequence[Array], total: int) -> list[Array]:
    """Return the columns of every rank without the filling. pieces: [rows, piece_width] of each rank"""
    sizes = [_length(share(total, rank, len(pieces))) for rank in range(len(pieces))]
    return [piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)]
