"""Rebuilds a SentencePiece BPE tokenizer as a `tokenizers` model, out of its pieces.

SentencePiece joins, again and again, the two neighbours whose joined piece ranks best, however that
piece came about. The BPE of `tokenizers` joins listed pairs in the order of the list: so every pair
that joins to a piece is listed, best piece first. Spaces are the letter "▁" (U+2581), and a character
without a piece is its UTF-8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"


def sentencepiece_backend(
    pieces: Sequence[str], ranks: Sequence[float | None], *, unknown: str | None, prefix_space: bool
) -> tokenizers.Tokenizer:
    """Returns a tokenizer without added tokens.

    pieces        the pieces in the order of their ids, spaces as "▁"
    ranks         the rank of each piece: the lower, the sooner it is joined; -inf: before all others, and it is a part
                  of no other piece; None: text is never joined to it
    unknown       the piece for a character that has neither a piece nor byte pieces
    prefix_space  whether a text is encoded as if a space stood before it
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [(left, right) for *_, left, right in sorted(_pairs(pieces, ranks))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_letters, to_spaces = normalizers.Replace(" ", SPACE), decoders.Replace(SPACE, " ")
    before = [normalizers.Prepend(SPACE)] if prefix_space else []
    after = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*before, to_letters])
    backend.decoder = decoders.Sequence([to_spaces, decoders.ByteFallback(), decoders.Fuse(), *after])
    return backend


def _pairs(pieces: Sequence[str], ranks: Sequence[float | None]) -> Iterator[tuple[float, int, int, str, str]]:
    """Yields (rank, ..., left, right) for every pair that joins to a piece; for one rank the longest left part sorts
    first."""
    joined = {piece: rank for piece, rank in zip(pieces, ranks, strict=True) if rank is not None}
    open_ones = {piece for piece, rank in joined.items() if rank > -math.inf}
    for piece, rank in joined.items():
        parts = open_ones if rank > -math.inf else joined
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in parts and right in parts:
                yield rank, -cut, cut - len(piece), left, right
