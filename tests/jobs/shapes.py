"""The shape of a stream, of prompts that are given."""

from __future__ import annotations

import numpy as np

from prefold.jobs.report.icicle import StreamShape


def shape_of(prompts, pieces=1, **options):
    """The shape of sorted prompts that come in as several windows of one stream."""
    prompts = sorted(prompts)
    shape = StreamShape(**options)
    last = None
    for piece in np.array_split(np.arange(len(prompts)), pieces):
        if not len(piece):
            continue
        window = [prompts[i] for i in piece]
        common = 0
        while last and common < min(len(last), len(window[0])) and last[common] == window[0][common]:
            common += 1
        offsets = np.cumsum([0, *map(len, window)])
        shape.add(np.concatenate(window).astype(np.int32), offsets, common=common)
        last = window[-1]
    return shape
