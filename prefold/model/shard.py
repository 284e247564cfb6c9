"""Tensor parallelism: split a model's heads, MLP columns and vocabulary over ranks (Shoeybi et al. 2019). No torch.

A rank computes its own heads and columns for every row of a step. The results are summed over all ranks: twice per
layer, and once for the embedding. The logits are gathered on rank 0. This does not depend on which rows share a prefix.
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

# Ranks get MLP columns in units of this size, because kernels process this many at once.
WIDTH_UNIT = 16


@dataclass(frozen=True, slots=True)
class Split:
    """The part of each tensor of a checkpoint that a rank holds."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # {name: shape} of the whole model's tensors
    # Takes a tensor's name and whole shape, and returns the rank's part, as `Shard.part`. None: the rank holds all.
    part: Callable[[str, tuple[int, ...]], tuple[slice, ...]] | None = None

    def of(self, weight: Weight) -> tuple[tuple[slice, ...], ...]:
        """Return the part of each tensor of a weight; () for a whole tensor."""
        return tuple(self._part(tensor, (rows, *weight.inputs)) for tensor, rows in weight.parts)

    def _part(self, tensor: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        if self.part is None or (whole := self.shapes[tensor]) == shape:
            return ()
        return self.part(tensor, whole)


WHOLE = Split()


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one of `size` ranks holds: slices of heads, KV heads, MLP columns and vocabulary.

    If there are at least as many KV heads as ranks, each KV head is on one rank with all its query heads. Some ranks
    may have more KV heads than others. If there are fewer KV heads than ranks, a KV head is on several ranks, each with
    some of its query heads.
    """

    rank: int
    size: int
    heads: slice
    kv_heads: slice
    width: slice
    vocab: slice
    copies: int = 1  # ranks that hold each KV head

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Return a rank's part of the model.

        Raise InputError if a rank would have nothing to compute, and UnsupportedModelError if the model cannot be
        split.
        """
        if size > 1 and config.unsplit is not None:
            raise UnsupportedModelError(f"{config.unsplit}; use tensor_parallel 1")
        most = min(config.heads, config.intermediate, config.vocab_size)
        if size > most:
            raise InputError(
                f"tensor_parallel is {size}, but the model has {config.heads} heads and an MLP width of "
                f"{config.intermediate}",
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
        """Return this rank's program. Its embedding and its LM head cover the rank's part of the vocabulary."""
        program, tokens = self.local(config).program(self.copies), _length(self.vocab)

        def own(table: Weight) -> Weight:
            return replace(table, parts=((table.parts[0][0], tokens),))

        head = None if program.head is None else own(program.head)
        return replace(program, embed=replace(program.embed, table=own(program.embed.table)), head=head)

    def split(self, config: ModelConfig) -> Split:
        """Return the part of each tensor that this rank holds."""
        if self.size == 1:
            return WHOLE
        shapes = {name: shape for weight in config.program().weights for name, shape in weight.shapes.items()}
        return Split(shapes, partial(self.part, config))

    def part(self, config: ModelConfig, tensor: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return this rank's slices of a tensor: of its outputs, or of its outputs and inputs.

        Args:
            config: the whole model.
            tensor: name of a tensor or module.
            shape: the whole tensor's shape.
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
            "q_norm": (q,),  # norms over all heads
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
    """Return the rank's part of `total`, in whole units except for the last. Parts differ by at most one unit."""
    units = -(-total // unit)
    return slice(min(total, unit * (units * rank // size)), min(total, unit * (units * (rank + 1) // size)))


def _columns(width: int, rank: int, size: int) -> slice:
    """Return the rank's columns of an MLP."""
    return share(width, rank, size, WIDTH_UNIT if width >= WIDTH_UNIT * size else 1)


def _length(part: slice) -> int:
    return part.stop - part.start


class OneRank(Generic[Array]):
    """The only rank of a model without tensor parallelism. Ranks of a split model override its methods."""

    rank, size = 0, 1
    view: RanksView | None = None  # for kernels, if ranks exchange data through shared memory

    def shard(self, config: ModelConfig) -> Shard:
        """Return the part of a model that this rank holds."""
        return Shard.of(config, self.rank, self.size)

    def sum(self, x: Array) -> Array:
        """Return the sum of x over all ranks, on every rank. It may be x itself."""
        return x

    def gather(self, logits: Array, vocab_size: int) -> Array:
        """Return the logits of the whole vocabulary [rows, vocab_size] on rank 0, and no rows on other ranks.

        `logits` are this rank's logits.
        """
        return logits


SomeRank = OneRank[Any]  # for either executor


def own_rows(ids: Array, vocab: slice) -> tuple[Array, Array]:
    """Return ids as rows of this rank's table (0 for other ranks' ids), and a mask of the rank's own ids."""
    is_own = (ids >= vocab.start) & (ids < vocab.stop)
    return (ids - vocab.start) * is_own, is_own


def piece_width(total: int, size: int) -> int:
    """Return the number of columns that each rank sends of `total`.

    All ranks send equally many, so the last columns of some ranks are padding.
    """
    return -(-total // size)


def columns_of(pieces: Sequence[Array], total: int) -> list[Array]:
    """Return the columns of every rank without padding. Each piece is [rows, piece_width]."""
    sizes = [_length(share(total, rank, len(pieces))) for rank in range(len(pieces))]
    return [piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)]
