"""Enters mixtures of experts in the tables of the core. No torch."""

from __future__ import annotations

from ...checkpoint.gguf_config import ARCHITECTURES, MIXTURES, OF_ARCHITECTURE
from ...model.config import MlpKind, add_mlp
from ...model.families import add_families, with_heads
from .config import MLP, other_weights
from .families import gpt_oss, granite_moe, mixtral, olmoe, qwen2_moe, qwen3_moe
from .gguf import EXPERTS_OF, GGUF_ARCHITECTURES, OWN_KEYS

add_mlp(MLP, MlpKind("prefold.features.experts.mlp:Experts", lambda config: {}, other_weights))
add_families(
    with_heads("Qwen2MoeForCausalLM", "Qwen2Moe", qwen2_moe)
    | with_heads("Qwen3MoeForCausalLM", "Qwen3Moe", qwen3_moe)
    | with_heads("OlmoeForCausalLM", "Olmoe", olmoe, classified=False)
    | with_heads("GptOssForCausalLM", "GptOss", gpt_oss)
    | with_heads("MixtralForCausalLM", "Mixtral", mixtral)
    | with_heads("GraniteMoeForCausalLM", "GraniteMoe", granite_moe, classified=False)
    | with_heads("GraniteMoeSharedForCausalLM", "GraniteMoeShared", granite_moe, classified=False),
    model_types={
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "granitemoe": "GraniteMoeForCausalLM",
        "granitemoeshared": "GraniteMoeSharedForCausalLM",
    },
    quantised={"GptOssForCausalLM": "mxfp4"},
)
ARCHITECTURES.update(GGUF_ARCHITECTURES)
MIXTURES.update(EXPERTS_OF)
OF_ARCHITECTURE.update(OWN_KEYS)
