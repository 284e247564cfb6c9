"""Prompts of which only the last row is read, in the steps of generation: so what is kept of earlier calls serves
them as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..model import CausalLM
from ..model.ops import log_sum_exp
from ..types import Readout, Request, Result

__all__ = ["Probe", "read_probes"]


@dataclass(eq=False, slots=True)
class Probe:
    """A prompt on its way, and what is read at its last row; "logprobs" of one target."""

    request: Request
    readout: Readout
    on_done: Callable[[Result | InputError], None]
    result: Result | None = None

    @property
    def needs_logits(self) -> bool:
        return self.readout.kind in ("logits", "logprobs")


def read_probes(model: CausalLM, probes: Sequence[tuple[Probe, int]], hidden: Tensor, logits: Tensor | None) -> None:
    """Give each probe its result. Beside it: its row in hidden [rows, hidden] and, where one needs them, in logits
    [rows, vocabulary]."""
    by_readout: dict[Readout, list[tuple[Probe, int]]] = {}
    for probe, row in probes:
        by_readout.setdefault(probe.readout, []).append((probe, row))
    for readout, found in by_readout.items():
        rows, which = np.unique([row for _, row in found], return_inverse=True)
        at = torch.from_numpy(rows).to(hidden.device)
        greedy = None
        if readout.kind == "logprobs":
            assert logits is not None
            values, greedy = _logprobs(logits[at], which, [int(probe.request.targets[0]) for probe, _ in found])
        else:
            if readout.kind == "logits":
                assert logits is not None
                read = logits[at][:, torch.as_tensor(readout.ids, device=logits.device)]
            else:
                read = model.head(hidden[at]) if readout.kind == "head" else hidden[at].float()
            values = read.cpu().numpy()[which]
        for i, (probe, _) in enumerate(found):
            one = values[i : i + 1] if greedy is not None else values[i]
            probe.result = Result(one.copy(), None if greedy is None else greedy[i : i + 1].copy())


def _logprobs(logits: Tensor, which: np.ndarray, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of each target at logits[which]: its log-probability, and whether it is the arg-max."""
    sums, largest = log_sum_exp(logits)
    row, ids = torch.from_numpy(which).to(logits.device), torch.tensor(targets, device=logits.device)
    return (logits[row, ids] - sums[row]).cpu().numpy(), (largest[row] == ids).cpu().numpy()
