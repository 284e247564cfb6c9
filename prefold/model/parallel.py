"""Tensor parallelism: a model's heads, MLP columns and vocabulary split over ranks (Shoeybi et al. 2019).

A rank computes its own heads and columns for every row of a step and adds its share of the residual stream to the
others': two sums over all ranks a layer, one more for the embedding, and the logits gathered on rank 0. Nothing
here, and nothing in a layer, knows which rows belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from .. import kernels
from ..errors import InputError
from ..kernels import CollectiveError
from .config import ModelConfig
from .device import send
from .products import Panels

# Columns of an MLP that stay on one rank: kernels take so many at once.
WIDTH_UNIT = 16


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
        """Returns the sizes of a rank's part of the model. Raises InputError where a rank would have nothing to do."""
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
        """Returns the config with the sizes of this rank's part of the layers."""
        of_features: dict[str, Any] = {
            name: _length(_columns(getattr(config, name), self.rank, self.size)) for name in config.split_mlps
        }
        return replace(
            config,
            heads=_length(self.heads),
            kv_heads=_length(self.kv_heads),
            intermediate=_length(self.width),
            whole=config,
            **of_features,
        )

    def parts(self, config: ModelConfig) -> dict[str, tuple[slice, ...]]:
        """Returns, by the last parts of a module's name, which outputs, or outputs and inputs, of its weight this rank
        holds."""

        def numbers(heads: slice) -> slice:
            return slice(heads.start * config.head_dim, heads.stop * config.head_dim)

        def of_mlp(prefix: str, columns: slice) -> dict[str, tuple[slice, ...]]:
            return {
                f"{prefix}gate_proj": (columns,),
                f"{prefix}up_proj": (columns,),
                f"{prefix}down_proj": (every, columns),
            }

        q, kv, every = numbers(self.heads), numbers(self.kv_heads), slice(None)
        split: dict[str, tuple[slice, ...]] = {}
        for width, module in config.split_mlps.items():
            split |= of_mlp(f"{module}.", _columns(getattr(config, width), self.rank, self.size))
        return {
            "q_proj": (q,),
            "k_proj": (kv,),
            "v_proj": (kv,),
            "q_norm": (q,),  # of norms over all heads
            "k_norm": (kv,),
            "o_proj": (every, q),
            "sinks": (self.heads,),
            **of_mlp("", self.width),
            **split,
        }


def share(total: int, rank: int, size: int, unit: int = 1) -> slice:
    """Returns the rank's part of `total`, in whole units but for the last; parts differ by a unit at most."""
    units = -(-total // unit)
    return slice(min(total, unit * (units * rank // size)), min(total, unit * (units * (rank + 1) // size)))


def _columns(width: int, rank: int, size: int) -> slice:
    """Returns the rank's columns of an MLP."""
    return share(width, rank, size, WIDTH_UNIT if width >= WIDTH_UNIT * size else 1)


def _length(part: slice) -> int:
    return part.stop - part.start


class Alone:
    """An Alone is one rank that holds everything: the case without tensor parallelism, and what `Ranks` does the work
    of."""

    rank, size = 0, 1
    view: kernels.RanksView | None = None  # where ranks exchange through memory: what compiled code knows of them

    def shard(self, config: ModelConfig) -> Shard:
        return Shard.of(config, self.rank, self.size)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x, on every rank; may be x itself."""
        return x

    def agree(self, own: bool) -> bool:
        """Returns whether `own` is true on every rank."""
        return own

    def embed(self, tokens: Tensor, weight: Tensor | Panels, vocab: slice) -> Tensor:
        """Returns rows of the whole embedding [tokens, hidden]; weight: this rank's, of the ids in `vocab`."""
        return weight.rows(tokens) if isinstance(weight, Panels) else F.embedding(tokens, weight)

    def pick(self, weight: Tensor | Panels, ids: Sequence[int] | Tensor, vocab: slice) -> Tensor:
        """Returns rows of the LM head, [ids, hidden]: those this rank holds, zeros for others; products are to be
        summed."""
        return weight.rows(torch.as_tensor(ids)) if isinstance(weight, Panels) else weight[_on(ids, weight.device)]

    def gather(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Returns logits of the whole vocabulary [rows, vocab_size] on rank 0, and no rows on others; logits: this
        rank's."""
        return logits


ALONE = Alone()


class Ranks(Alone):
    """A Ranks is this process's rank among those of torch.distributed's default group; every rank makes the same calls.

    On a CPU with compiled kernels `worker.tensor_parallel.MemoryRanks` takes its place.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with _collective():
            dist.all_reduce(x)
        return x

    def collect(self, piece: Tensor) -> list[Tensor] | None:
        """Returns every rank's piece, on rank 0; all are of one shape."""
        pieces = [torch.empty_like(piece) for _ in range(self.size)] if self.rank == 0 else None
        with _collective():
            dist.gather(piece, pieces, dst=0)
        return pieces

    def embed(self, tokens: Tensor, weight: Tensor | Panels, vocab: slice) -> Tensor:
        assert not isinstance(weight, Panels)  # as `stored_weights` says
        own_ids, is_own = _own(tokens, vocab)
        return self.sum(F.embedding(own_ids, weight).masked_fill_(~is_own[:, None], 0))

    def pick(self, weight: Tensor | Panels, ids: Sequence[int] | Tensor, vocab: slice) -> Tensor:
        assert not isinstance(weight, Panels)
        own_ids, is_own = _own(_on(ids, weight.device), vocab)
        return weight[own_ids].masked_fill_(~is_own[:, None], 0)

    def gather(self, logits: Tensor, vocab_size: int) -> Tensor:
        # All pieces have one size, as the collective wants it: the last column of some is no logit.
        width = -(-vocab_size // self.size)
        pieces = self.collect(F.pad(logits, (0, width - logits.shape[1])).contiguous())
        if pieces is None:
            return logits.new_empty(0, vocab_size)
        sizes = [_length(share(vocab_size, rank, self.size)) for rank in range(self.size)]
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], 1)


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


def _on(ids: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    return ids.to(device) if isinstance(ids, Tensor) else send(np.asarray(ids), device)


def _own(ids: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Returns ids as rows of this rank's weight (0 for others'), and which are its own."""
    is_own = (ids >= vocab.start) & (ids < vocab.stop)
    return torch.where(is_own, ids - vocab.start, 0), is_own
