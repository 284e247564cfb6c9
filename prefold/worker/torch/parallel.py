"""Tensor operations of a split model: on one rank, and with sums and gathers between several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...model.shard import OneRank, columns_of, own_rows, piece_width
from .device import send


class Alone(OneRank[Tensor]):
    """The only rank of a model that is not split, and the base class of `Ranks`."""

    def embed(self, tokens: Tensor, weight: Tensor, vocab: slice) -> Tensor:
        """Return rows of the embedding [tokens, hidden].

        Args:
            weight: This rank's rows, for the ids in `vocab`.
        """
        return F.embedding(tokens, weight)

    def pick(self, weight: Tensor, ids: Sequence[int] | Tensor, vocab: slice) -> Tensor:
        """Return rows of the LM head, [ids, hidden]; zeros for ids of other ranks. Sum the products over ranks."""
        return weight[_on(ids, weight.device)]


ALONE = Alone()


class Ranks(Alone, ABC):
    """This process's rank of a split model. Every rank makes the same calls.

    `worker.torch.ranks` has one class for each way to exchange data.
    """

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def collect(self, piece: Tensor) -> list[Tensor] | None:
        """Return every rank's piece, on rank 0. All pieces have one shape."""

    def embed(self, tokens: Tensor, weight: Tensor, vocab: slice) -> Tensor:
        rows, is_own = own_rows(tokens, vocab)
        return self.sum(F.embedding(rows, weight).masked_fill_(~is_own[:, None], 0))

    def pick(self, weight: Tensor, ids: Sequence[int] | Tensor, vocab: slice) -> Tensor:
        rows, is_own = own_rows(_on(ids, weight.device), vocab)
        return weight[rows].masked_fill_(~is_own[:, None], 0)

    def gather(self, logits: Tensor, vocab_size: int) -> Tensor:
        width = piece_width(vocab_size, self.size)
        pieces = self.collect(F.pad(logits, (0, width - logits.shape[1])).contiguous())
        return logits.new_empty(0, vocab_size) if pieces is None else torch.cat(columns_of(pieces, vocab_size), 1)


def _on(ids: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    return ids.to(device) if isinstance(ids, Tensor) else send(np.asarray(ids), device)
