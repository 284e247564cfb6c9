"""Fits the constants of a machine of the simulator to steps that were measured on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from prefold.errors import InputError
from prefold.simulate.costs import WEIGHT_BYTES, Machine, ModelShape, StepRows

__all__ = ["fit"]

_ROUNDS = 40


def fit(machine: Machine, model: ModelShape, steps: Iterable[tuple[StepRows, float]]) -> Machine:
    """Returns the machine with overhead, bandwidth and rate that explain measured steps best.

    The sum of relative errors is made least, so that short steps count as long ones do, and a step that something else
    disturbed counts little. The larger of two terms is not linear: each step is given to the term that was larger at
    the last of some rounds. Raises InputError for fewer than 8 steps.
    """
    measured = list(steps)
    if len(measured) < 8:
        raise InputError(f"{len(measured)} steps were measured", field="calibrate", remedy="give at least 8")
    seconds = np.array([time for _, time in measured])
    weights = (model.linear + model.vocab * model.hidden) * WEIGHT_BYTES
    linear = np.array(
        [2 * (model.linear * (s.prefill + s.decode) + model.vocab * model.hidden * s.reads) for s, _ in measured]
    )
    attention = np.array([4 * model.layers * model.heads * model.head_dim * s.pairs for s, _ in measured])
    read = np.array([float(s.keys * model.kv_bytes) for s, _ in measured])
    trust = np.ones(len(measured))
    for _ in range(_ROUNDS):
        is_compute = linear / machine.flops >= weights / machine.bandwidth
        moved, computed = np.where(is_compute, 0.0, weights) + read, np.where(is_compute, linear, 0.0) + attention
        columns = np.stack([np.ones(len(seconds)), moved, computed]).T
        scale = columns.max(axis=0)
        scale[scale == 0] = 1.0
        found = _nonnegative(columns / scale * (trust / seconds)[:, None], trust) / scale
        trust = np.maximum(np.abs(columns @ found / seconds - 1), 1e-3) ** -0.5
        machine = replace(
            machine,
            overhead=float(found[0]),
            bandwidth=1 / float(found[1]) if found[1] > 0 else machine.bandwidth,
            flops=1 / float(found[2]) if found[2] > 0 else machine.flops,
        )
    return machine


def _nonnegative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the least-squares solution without negative parts: those are left out, one after the other."""
    used = list(range(columns.shape[1]))
    while used:
        found = np.linalg.lstsq(columns[:, used], values, rcond=None)[0]
        if (found >= 0).all():
            solution = np.zeros(columns.shape[1])
            solution[used] = found
            return solution
        del used[int(np.argmin(found))]
    return np.zeros(columns.shape[1])
