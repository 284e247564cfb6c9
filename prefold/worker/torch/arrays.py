"""The array operations of the torch executor: tensors of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...engine.schedule.steps import NOT_FINITE
from ..arrays import Arrays
from ..sampler import WORK_SIZE, bare, draw_scaled, forbid, likeliest
from .device import runs_triton, send
from .ops import entropy, log_sum_exp
from .tensors import array_of

# Rows of logits that are copied at once when ranks are counted.
RANKED_ROWS = 32


class TorchArrays(Arrays[Tensor]):
    """Tensors of one device. On a GPU with Triton, only methods that return NumPy arrays wait for the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.in_cache = device.type == "cpu"

    def send(self, array: np.ndarray) -> Tensor:
        return send(array, self.device)

    def fetch(self, *given: Tensor) -> Callable[[], tuple[np.ndarray, ...]]:
        hosts = [to_host(tensor.detach()) for tensor in given]
        event = torch.cuda.Event() if any(tensor.is_cuda for tensor in given) else None
        if event is not None:
            event.record()

        def wait() -> tuple[np.ndarray, ...]:
            if event is not None:
                event.synchronize()
            return tuple(host.numpy() for host in hosts)

        return wait

    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def put(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        copy = x.clone()
        copy[rows] = values
        return copy

    def copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))

    def beside(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts), -1)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype))

    def where(self, condition: Tensor, x: Tensor | int, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    def silu(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    def dots(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.float() * y.float()).sum(-1)

    def erf_inverse(self, x: Tensor) -> Tensor:
        return torch.erfinv(x)

    def log_sum_exp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return log_sum_exp(logits)

    def entropy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return entropy(logits)

    def largest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values, places = logits.topk(count, -1)
        return values, places

    def count_larger(self, logits: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        few = zip(rows.split(RANKED_ROWS), values.split(RANKED_ROWS), strict=True)
        return torch.cat([(logits[block] > own[:, None]).sum(-1) for block, own in few])

    def most_likely(self, logits: Tensor) -> Tensor:
        if self.in_cache:
            return torch.from_numpy(likeliest(logits.numpy()))
        ids = logits.argmax(-1)
        return torch.where(logits.gather(-1, ids[:, None])[:, 0].isfinite(), ids, NOT_FINITE)

    def likely_tokens(self, logits: Tensor, count: int, ids: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        own = torch.log_softmax(logits, -1)
        values, places = (x.cpu().numpy() for x in own.topk(count, -1))
        return own.gather(1, ids[:, None])[:, 0].cpu().numpy(), values, places

    def forbid(self, logits: Tensor, rows: np.ndarray, bits: np.ndarray) -> None:
        if self.in_cache and not runs_triton(self.device):
            forbid(logits.numpy(), rows, bits)
            return
        places, packed = self.send(rows), self.send(bits)
        forbidden = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=self.device)) & 1
        forbidden = forbidden.flatten(1)[:, : logits.shape[-1]].bool()
        logits[places] = logits[places].masked_fill_(forbidden, -torch.inf)

    def draw(self, logits: Tensor, rows: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> Tensor:
        inverses = (1.0 / filters[:, 0]).astype(np.float32)
        if runs_triton(self.device):
            from . import draw_triton

            halves = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
            draws = np.column_stack((rows, *halves, inverses, filters[:, 1:])).astype(np.float64)
            return draw_triton.draw(logits, self.send(draws))
        tokens = np.zeros(len(rows), np.int64)
        library = kernels.load() if self.in_cache else None
        has_filters = np.ones(len(rows), bool) if library is None else ~bare(filters)
        if library is not None and not has_filters.all():
            plain = np.flatnonzero(~has_filters)
            tokens[plain] = library.draw(array_of(logits), rows[plain], inverses[plain], keys[plain])
        remaining = np.flatnonzero(has_filters)
        at_once = max(1, WORK_SIZE // logits.shape[-1])
        for first in range(0, len(remaining), at_once):
            part = remaining[first : first + at_once]
            scaled = self._scaled(logits, rows[part], inverses[part])
            probs = torch.softmax(scaled, -1).cpu().numpy()
            tokens[part] = draw_scaled(scaled.cpu().numpy(), probs, filters[part], keys[part])
        return self.send(tokens)

    def _scaled(self, logits: Tensor, rows: np.ndarray, inverses: np.ndarray) -> Tensor:
        """Return (logit - the row's largest) / temperature for `rows`, float32 [rows, vocab]; 0 for the largest."""
        work = self.take(logits, self.send(rows))
        return work.sub_(work.amax(-1, keepdim=True)).mul_(self.send(inverses[:, None]))

    def bag_sums(self, x: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        return torch.nn.functional.embedding_bag(rows, x, starts, mode="sum").double()

    def sum_into(self, count: int, to: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(count, x.shape[1]).index_add_(0, to, x)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host. A copy from a GPU is asynchronous, into pinned memory."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
