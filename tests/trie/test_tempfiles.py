"""Nothing of a spool has a name on the disk, so that nothing is left of it when its process was killed."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from prefold.spec.requests import Request
from prefold.trie import Spool
from prefold.trie.tempfiles import TempFile


def test_a_spool_on_disk_has_no_file_of_a_name(tmp_path):
    with Spool(memory_bytes=1, directory=tmp_path) as spool:
        for number in range(200):
            spool.add(Request(np.arange(number % 7, 9)))
        assert len(spool._runs) == 200 and not os.listdir(tmp_path)
        assert sum(window.num_requests for window in spool.windows(max_tokens=50)) == len(spool.order()) == 200
        assert not os.listdir(tmp_path)


def test_threads_read_what_was_appended(tmp_path):
    rng, file, kept = random.Random(0), TempFile(tmp_path), {}
    for _ in range(50):
        parts = [rng.randbytes(rng.choice((0, 1, 100, 3000))) for _ in range(rng.randrange(4))]
        kept[file.append(parts)] = b"".join(parts)
    assert file.end == sum(map(len, kept.values()))

    def read(place):
        with file.reader(*place, buffering=64) as stream:
            return b"".join(iter(lambda: stream.read(rng.choice((1, 50, 5000))), b""))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, kept)) == list(kept.values())
