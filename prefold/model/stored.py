"""Matrices that stay as the checkpoint stores them while rows are multiplied with them, on a CPU: which do, and how
they are packed. Results are the same, with few rows but for rounding; what changes is memory, and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .. import kernels
from ..errors import InputError
from .device import available_memory
from .layers import HeldWeight, Linear
from .parallel import Alone
from .products import Panels, product_kernels
from .sources import StoredSource
from .transformer import CausalLM

# Of the memory that is free, the part that weights may take before they stay as stored although that is slower.
COMFORTABLE = 0.5
# Bytes of a packed matrix to those of its file: scales of six bits have bytes of their own.
PACKED = 1.03


class StoredWeights:
    """A StoredWeights has the weights of a model that stay as they are stored.

    sizes  their bytes, by their places among `CausalLM.held`
    """

    def __init__(self, sizes: Mapping[int, int], source: StoredSource | None, compiled: kernels.Kernels | None):
        self._sizes, self._source, self._compiled = sizes, source, compiled
        self._types: set[str] = set()

    def size(self, number: int, weight: HeldWeight) -> int:
        """Returns the bytes that a weight takes. number: its place among the model's weights"""
        return self._sizes.get(number, weight.parameter.nbytes)

    def is_whole(self, weight: HeldWeight) -> bool:
        """Returns whether the numbers of a weight are whole ones as they are stored."""
        source = self._source
        return source is not None and all(
            source.stored_type(name)[0] in kernels.WHOLE_TYPES for name, _ in weight.parts
        )

    def use(self, number: int, weight: HeldWeight, pool: kernels.PanelPool) -> bool:
        """Lets the model multiply with a weight as it is stored, and returns whether it does. Where a panel would have
        columns of two types it does not."""
        if number not in self._sizes:
            return False
        assert self._source is not None and self._compiled is not None
        parts = [rows for name, _ in weight.parts if (rows := self._source.stored(name)) is not None]
        owner = weight.owner
        if isinstance(owner, Linear):
            is_used = owner.use_stored(parts, self._compiled, pool)
        else:
            assert isinstance(owner, CausalLM)
            blocks = self._compiled.pack_blocks(parts, weight.parameter.shape[1], pool)
            if is_used := blocks is not None:
                owner.keep_stored(weight.attribute, Panels(blocks, self._compiled))
        if is_used:
            self._types |= {part.type for part in parts}
        return is_used

    @property
    def words(self) -> str:
        """Returns a sentence about the weights that `use` has taken; "" where there are none."""
        return f"weights lie in memory as stored ({', '.join(sorted(self._types))})" if self._types else ""


NOTHING = StoredWeights({}, None, None)


def stored_weights(
    wish: str,
    weights: Iterable[HeldWeight],
    source: StoredSource,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Alone,
    *,
    invariant: bool = False,
) -> StoredWeights:
    """Returns which weights stay as they are stored.

    wish       "dtype": none; "auto" and "file": all that there is code for; "fast": the same, but none in bfloat16 if
               memory is plenty
    invariant  whether few rows are multiplied as many are, for which the dtype is faster: "auto" and "fast" keep none
               as stored if memory is plenty

    Measured with SmolLM2-135M as Q4_1, beside packed weights of the dtype. In float32 one sequence decodes 2 to 2.5
    times as fast, eight 1.2 to 1.8 times, 32 and rows of prompts as fast (AVX2, AVX-512). In bfloat16 with AMX one
    sequence decodes 2.2 times as fast, eight 0.94 times, 64 0.88 times, and rows of prompts 0.91 times; with AVX-512
    alone one sequence 0.7 to 1.5 times, eight 0.7 to 0.9 times. Raises InputError if "file" is asked for and there is
    no code for it.
    """
    compiled = product_kernels(torch.empty(1, 2, dtype=dtype, device=device))
    if wish == "dtype" or compiled is None or ranks.size > 1:
        if wish == "file":
            place = (
                "a GPU" if device.type != "cpu" else "several ranks" if ranks.size > 1 else "this CPU, or this dtype"
            )
            message = f"weights are to stay as the checkpoint stores them, and there is no code for that on {place}"
            raise InputError(message, field="weights", remedy="leave --weights out")
        return NOTHING
    every = list(weights)
    sizes = {i: size for i, weight in enumerate(every) if (size := _stored_size(weight, source, dtype, compiled))}
    if (wish == "fast" and dtype == torch.bfloat16) or (wish != "file" and invariant):
        total = sum(weight.parameter.nbytes for weight in every)
        if total <= COMFORTABLE * available_memory(device):
            return NOTHING
    return StoredWeights(sizes, source, compiled)


def _stored_size(weight: HeldWeight, source: StoredSource, dtype: torch.dtype, compiled: kernels.Kernels) -> int:
    """Returns the bytes of a weight as it is stored; 0 where it does not stay so."""
    owner, shape = weight.owner, weight.parameter.shape
    is_linear = isinstance(owner, Linear) and owner.panels is not None and weight.attribute == "weight"
    is_table = isinstance(owner, CausalLM) and weight.attribute in ("embedding", "lm_head")
    if not (is_linear or is_table) or weight.offset or weight.places:
        return 0
    total = 0
    for name, rows in weight.parts:
        kind, row = source.stored_type(name)
        if not compiled.has_blocks(kind, shape[1]) or row >= shape[1] * dtype.itemsize:
            return 0
        total += rows * row
    return int(total * PACKED)
