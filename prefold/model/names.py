"""What checkpoints call the parts of a model, where it is not what they are called here: the names of Llama."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .config import ModelConfig

__all__ = ["NAMES", "Names", "fused_sizes"]


@dataclass(frozen=True, slots=True)
class Names:
    """The names in a checkpoint.

    prefix      before the names of all but the heads; checkpoints may leave it out
    layers      the list of layers
    parts       what modules are called there, with the names here; with several of these, their outputs lie side by
                side in one tensor, in this order
    transposed  whether weights of the layers' linears are [inputs, outputs]
    """

    prefix: str = "model."
    layers: str = "layers"
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False

    def of_module(self, stored: str) -> tuple[str, ...]:
        """The names here of a checkpoint's module; an unknown name is kept as it is, without the prefix."""
        stored = stored.removeprefix(self.prefix)
        if stored in self.parts:
            return self.parts[stored]
        in_layer = re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", stored)
        if in_layer and in_layer[2] in self.parts:
            return tuple(f"layers.{in_layer[1]}.{name}" for name in self.parts[in_layer[2]])
        return (stored,)

    def of_tensor(self, stored: str) -> tuple[str, ...]:
        """The names here of a checkpoint's tensor."""
        module, dot, kind = stored.rpartition(".")
        return tuple(name + dot + kind for name in self.of_module(module))


# By ModelConfig.names.
NAMES = {
    "llama": Names(),
    "gpt2": Names(
        prefix="transformer.",
        layers="h",
        parts={
            "wte": ("embed_tokens",),
            "wpe": ("embed_positions",),
            "ln_f": ("norm",),
            "ln_1": ("input_layernorm",),
            "ln_2": ("post_attention_layernorm",),
            "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn.c_proj": ("self_attn.o_proj",),
            "mlp.c_fc": ("mlp.up_proj",),
            "mlp.c_proj": ("mlp.down_proj",),
        },
        transposed=True,  # transformers' Conv1D
    ),
}


def fused_sizes(names: Sequence[str], config: ModelConfig) -> list[int]:
    """Outputs of each of the modules q_proj, k_proj and v_proj, by their names here or those of their tensors."""
    return [config.q_size if ".q_proj" in name else config.kv_size for name in names]
