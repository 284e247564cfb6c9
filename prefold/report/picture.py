"""Draws a stream's trie on the terminal: a column stands for some prompts, a line for some tokens of depth."""

from __future__ import annotations

import numpy as np

from .icicle import StreamShape

_SHADES = "░▒▓█"  # rows that are computed for one prompt, for a few, for many, for most prompts


def trie_picture(shape: StreamShape, *, width: int = 64, height: int = 12) -> list[str]:
    """Returns lines of block characters: the more prompts share a token, the darker; blank where prompts have ended.

    Where there is room, a thin line separates neighbouring branches.
    """
    lengths, shared = (a.astype(np.int64) for a in shape.arrays())
    count = len(lengths)
    if not count:
        return []
    each = max(1, width // count)  # columns of a prompt
    columns = np.arange(min(width, each * count)) * count // min(width, each * count)
    deepest = int(np.quantile(lengths, 0.97))
    height = min(height, deepest)
    lines = []
    for line in range(height):
        depth = (2 * line + 1) * deepest // (2 * height)
        group = np.cumsum(shared <= depth)
        members = np.bincount(group)[group]
        lines.append(_line(columns, group, members, lengths > depth, count, each).rstrip())
    return lines


def _line(columns: np.ndarray, group: np.ndarray, members: np.ndarray, alive: np.ndarray, count: int, each: int) -> str:
    out = []
    for i, prompt in enumerate(columns):
        if not alive[prompt]:
            out.append(" ")
        elif each > 1 and i and columns[i - 1] != prompt and group[columns[i - 1]] != group[prompt]:
            out.append("▏" if members[prompt] == 1 else "▐")
        else:
            out.append(_SHADES[_shade(int(members[prompt]), count)])
    return "".join(out)


def _shade(members: int, count: int) -> int:
    if members == 1:
        return 0
    return 3 if 2 * members > count else 2 if 8 * members > count else 1
