"""What a device affords: how many rows a step may have, and how much memory K/V, where nobody says."""

from __future__ import annotations

import torch

from ..attention import Heads, KVStore
from ..device import available_memory
from ..errors import InputError
from ..model import CausalLM
from ..model.parallel import Shard

# On a CPU larger steps hardly gain, and their intermediates are held in memory.
ROWS_ON_CPU = 4096
# A GPU is at its best from some thousand rows on; beyond these only the baselines gain, which share within a step.
MOST_ROWS, LEAST_ROWS = 65_536, 1024
# Of the memory that is free: the rest is for K/V, and for what the allocator cannot use.
SHARE = 0.25
# The same of K/V; and what it may take at most.
KV_SHARE = 0.5
KV_MOST_ON_CPU = 4 << 30


def batch_rows(model: CausalLM) -> int:
    """Returns how many rows a step of this model may have, on the memory that its device has free now."""
    if model.device.type == "cpu":
        return ROWS_ON_CPU
    local = model.local
    # At its fullest in the MLP: the residual stream, its norm, gate and up, and their product.
    row = model.dtype.itemsize * (2 * local.hidden + 3 * local.intermediate + local.q_size + 2 * local.kv_size)
    rows = int(available_memory(model.device) * SHARE) // row
    return max(LEAST_ROWS, min(MOST_ROWS, rows // 1024 * 1024))


def slot_bytes(model: CausalLM) -> int:
    """Returns the bytes of a slot in all planes, of all ranks together."""
    config, size = model.config, model.ranks.size
    parts = [Shard.of(config, rank, size).local(config) for rank in range(size)]
    heads = [Heads(part.heads, part.kv_heads, part.head_dim, model.dtype) for part in parts]
    return sum(KVStore.bytes_per_slot(len(config.planes), one, model.device) for one in heads)


def kv_bytes(wanted: int | None, device: torch.device, ranks: int = 1) -> int:
    """Returns how many bytes K/V may take, of all ranks together: on a CPU they share its memory, GPUs have each their
    own.

    wanted: bytes; None: what the device affords. Raises InputError where more is wanted than is free.
    """
    free = available_memory(device) * (1 if device.type == "cpu" else ranks)
    if wanted is None:
        share = int(free * KV_SHARE)
        return min(share, KV_MOST_ON_CPU) if device.type == "cpu" else share
    if wanted > free:
        raise InputError(
            f"kv_memory is {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            field="kv_memory",
            remedy="give less",
        )
    return wanted
