"""What is made of logits: log-sum-exps, entropies and drawn tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .interface import Family


class LogitKernels(Family):
    """Reads rows of float32 logits on the CPU."""

    def can_log_sum_exp(self, x: Tensor) -> bool:
        """Returns whether `log_sum_exp` and `entropy` take this tensor: float32 on the CPU, its rows contiguous."""
        return x.is_cpu and x.dtype == torch.float32 and x.dim() == 2 and x.stride()[-1] == 1

    def log_sum_exp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-sum-exp of each row of float32 logits [rows, columns], and the place of its largest (int64).

        A NaN makes the sum NaN and is not the largest.
        """
        rows, columns = logits.shape
        sums, largest = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        self._calls["log_sum_exp"](
            logits.data_ptr(),
            rows,
            columns,
            logits.stride()[0],
            sums.data_ptr(),
            largest.data_ptr(),
            torch.get_num_threads(),
        )
        return sums, largest

    def entropy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `log_sum_exp` does, and the entropy of each row's probabilities in nats, float32 [rows].

        A NaN or an infinity that is the largest makes the entropy NaN; a logit of -inf adds nothing to it.
        """
        rows, columns = logits.shape
        sums, entropies = torch.empty(2, rows, dtype=torch.float32)
        largest = torch.empty(rows, dtype=torch.int64)
        self._calls["entropy"](
            logits.data_ptr(),
            rows,
            columns,
            logits.stride()[0],
            *(result.data_ptr() for result in (sums, largest, entropies)),
            torch.get_num_threads(),
        )
        return sums, largest, entropies

    def draw(self, logits: Tensor, rows: np.ndarray, inverses: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns a token drawn for each of `rows` of float32 logits [r, vocab], int64 [n]; -1 where a row's largest
        number is not finite.

        rows int64 [n]; inverses float32 [n]: 1 / temperature; keys uint64 [n]: of the noise. Raises ValueError for
        other logits, and for rows that are not there.
        """
        if logits.dtype != torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
            raise ValueError(f"no draw from {logits.dtype} {list(logits.shape)} on {logits.device}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
            raise ValueError(f"rows {rows} of {len(logits)}")
        rows, tokens = np.ascontiguousarray(rows, np.int64), np.empty(len(rows), np.int64)
        inverses, keys = np.ascontiguousarray(inverses, np.float32), np.ascontiguousarray(keys, np.uint64)
        self._calls["draw"](
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            *(array.ctypes.data for array in (rows, inverses, keys)),
            len(rows),
            tokens.ctypes.data,
            torch.get_num_threads(),
        )
        return tokens
