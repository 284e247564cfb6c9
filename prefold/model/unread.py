"""Refuses a config with a setting that changes results and that the model's family has not read. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..checkpoint.settings import Settings
from ..errors import UnsupportedModelError

# What the names of settings contain that change what a model computes, most of them without a tensor more or less:
# positions, what attention sees and how it weighs, factors, norms, activations, experts, and which layers these are of.
# The text models of transformers have such keys under these names, and later ones are likely to.
CHANGES = re.compile(
    r"rope|rotary|alibi|position_(bias|embedding)|relative|window|chunk|layer_(types|ids|idx|ind)|layers_block|"
    r"_(pattern|period|interval|offset)|layers_per|_every_n|attention|attn|causal|bidirectional|prefix_lm|"
    r"scal|multiplier|alpha|(^|_)mup|softcap|soft_cap|clip|clamp|limit|temperature|floor|sink|tuning|"
    r"norm|_eps|epsilon|residual|parallel|activation|(^|_)act($|_)|glu|sparsity|gat(e|ing)|"
    r"expert|moe|router|routed|topk|top_k|mamba|ssm|conv_|recurren|shared_layers|sharing|altup|"
    r"block_types|indexer|hc_|ngram|embedding_fraction|early_exit|loop|ut_steps"
)
# What those of these names contain that change nothing: of training; of the precision in which, and by what code, the
# same is computed; of what is returned; of tokens, and of how text is drawn; of biases, which are tensors and so are
# missed where they are not read; and of settings that say nothing without another one.
NEUTRAL = re.compile(
    r"drop|init|loss|jitter|checkpoint|lora_|neftune|^finetuning|ngram_size|cross_attention|^(top_k|temperature)$|^sbert_|"
    r"flash|implementation|attn_impl|kernel|memory_efficient|fp32|in_float32|"
    r"^output_(attentions|hidden|router)|^return_|token|^summary_|^reorder_and_upcast|^chunk_size_feed|"
    r"(?<!position)_bias$|^max_position|"
    r"^(max_window_layers|_?sliding_window_pattern|original_max_position_embeddings|rope_theta)$"
)
# Values of a key with which it says nothing else than a model without it does.
PLAIN: Mapping[str, Any] = {
    "layer_types": "full_attention",
    "use_rope": True,
    "scale_attn_weights": True,
    "rotary_pct": 1,
    "position_embedding_type": "rope",
}


def check_read(hf: Settings, architecture: str) -> None:
    """Raises UnsupportedModelError for a setting that changes results, was not read, and does not say "off"."""
    for key, value in unread(hf, hf):
        raise UnsupportedModelError(
            f"{key} is {_shown(value)}, which is a setting that changes results, and {architecture} does not read it; "
            "a family of your own has to read each such key (docs/families.md), and for any other model take the key "
            "out of the file if transformers gives the same results without it"
        )


def unread(hf: Settings, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each setting that changes results and was not read, as (its name with what it lies in, its value)."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in hf.reads:
            if CHANGES.search(key.lower()) and not NEUTRAL.search(key.lower()) and not _is_off(key, value, values):
                yield name, value
        elif isinstance(value, Mapping) and any(read.startswith(f"{name}.") for read in hf.reads):
            yield from unread(hf, value, f"{name}.")


def _is_off(key: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Returns whether a value says what a model without the key does."""
    if key == "sliding_window" and values.get("use_sliding_window") is False:
        return True
    each = value if isinstance(value, list) else [value]
    if key in PLAIN:
        return all(one == PLAIN[key] for one in each)
    # A factor of 1 changes nothing, and of nothing there is none.
    return all(not one or (isinstance(one, float) and one == 1) for one in each)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
