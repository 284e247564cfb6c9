"""Tiny random checkpoints, written by transformers, with a byte-level tokenizer: the models of the tests.

    folder = tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)      # config.json, model.safetensors, tokenizer
    oracle = reference(folder)                                            # the transformers model, float32, eager

Weights are scaled so that attention is far from uniform and logits differ by several units; norms and
biases are random too, so that leaving one out shows.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2")
MIXTURES = ("qwen2-moe", "qwen3-moe", "olmoe", "mixtral", "granite-moe", "granite-moe-shared", "gpt-oss")
# Families that most tests meet where slow ones run alone: what others have tested, they put together in other ways.
MORE = (
    "smollm3", "olmo2", "olmo3", "phi3", "phi3-long", "granite", "granite4", "gemma", "gemma2", "cohere2",
    "starcoder2", "exaone4",
    *MIXTURES,
)  # fmt: skip
# Those of which transformers has no classifier.
UNCLASSIFIED = ("granite", "granite4", "cohere2", "olmoe", "granite-moe", "granite-moe-shared")
EVERY = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE)]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("y", "e"), ("ye", "s"), ("n", "o"), ("t", "h"), ("th", "e"), ("Ġ", "the"))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Odd sizes on purpose: nothing may depend on multiples of 16.
SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 50,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3": "Gemma3Text",
    "gpt2": "GPT2",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi3": "Phi3",
    "phi3-long": "Phi3",
    "granite": "Granite",
    "granite4": "GraniteMoeHybrid",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "cohere2": "Cohere2",
    "starcoder2": "Starcoder2",
    "exaone4": "Exaone4",
    "qwen2-moe": "Qwen2Moe",
    "qwen3-moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "mixtral": "Mixtral",
    "granite-moe": "GraniteMoe",
    "granite-moe-shared": "GraniteMoeShared",
    "gpt-oss": "GptOss",
}
HEADS = {"causal": "ForCausalLM", "classifier": "ForSequenceClassification", "bare": "Model"}
CAUSAL = {"gemma3": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel"}  # where it is not the prefix and the head
# Settings without which a family would look like another.
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 10},
    "gemma3": {
        "head_dim": 10,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {"n_inner": 50},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo3": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "phi3": {"hidden_size": 48, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    # All are longer than it was trained on, so that transformers takes the factors of long sequences for all.
    "phi3-long": {
        "hidden_size": 48,
        "sliding_window": 9,
        "original_max_position_embeddings": 1,
        "rope_parameters": {
            "rope_type": "longrope", "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [1.0, 2.5, 6.0], "attention_factor": 1.2,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0,
    },
    "granite4": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0,
        "num_local_experts": 0, "shared_intermediate_size": 50, "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope", "mamba_n_heads": 6,
    },
    "gemma": {"head_dim": 10},
    "gemma2": {
        "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "cohere2": {
        "sliding_window": 5, "logit_scale": 0.6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "starcoder2": {"sliding_window": 7},
    "qwen2-moe": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "shared_expert_intermediate_size": 34,
    },
    "qwen3-moe": {
        "head_dim": 10, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite-moe": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0,
        "num_local_experts": 4, "num_experts_per_tok": 3,
    },
    "granite-moe-shared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 26},
    "gpt-oss": {
        "head_dim": 10, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 128, "rope_theta": 1e4,
        },
    },
    "exaone4": {
        "head_dim": 10, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
_numbers = itertools.count()


def tiny_checkpoint(
    tmp_path: Path,
    family: str = "llama",
    *,
    head: str = "causal",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """A folder under `tmp_path` with a random checkpoint of `family`; `overrides` are keys of its config.

    head: "causal", "classifier" (num_labels=...) or "bare" (tensors without the prefix "model.").
    """
    import transformers

    sizes = SIZES | OWN.get(family, {}) | overrides
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    config = getattr(transformers, PREFIXES[family] + "Config")(**sizes)
    own = CAUSAL.get(family) if head == "causal" else None
    architecture = own or PREFIXES[family] + HEADS[head]
    model = getattr(transformers, architecture)(config)
    randomise(model, seed, norm=0 if family.startswith("gemma") else 1)
    folder = Path(tmp_path) / f"{family}-{next(_numbers)}"
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def randomise(model: torch.nn.Module, seed: int, norm: float = 1) -> None:
    """norm: the weight of a norm that changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if re.search(r"(norm|ln_\w)\.weight$", name):
                parameter.copy_(norm + 0.2 * values)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * values)
            else:
                # GPT-2's linears are stored transposed; those of experts are stacks.
                inputs = parameter.shape[0 if ".c_" in name else 2 if parameter.ndim == 3 else 1]
                parameter.copy_(1.5 * values / inputs**0.5)


def write_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE of 256 bytes, six merges ("yes", "no" and " the" are words) and the special tokens: 265 ids.

    Ids 0 to 2 are <|endoftext|> (padding), <|im_start|> (BOS) and <|im_end|> (EOS). Adds no special tokens by itself.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": SIZES["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return tokenizer


def reference(folder: Path, head: str = "causal", attention: str = "eager") -> torch.nn.Module:
    """The checkpoint as transformers loads it, float32, in evaluation mode."""
    import transformers

    loaders = {
        "causal": transformers.AutoModelForCausalLM,
        "classifier": transformers.AutoModelForSequenceClassification,
        "bare": transformers.AutoModel,
    }
    options = {"attn_implementation": attention, "experts_implementation": "eager"}  # others want sizes to be multiples
    model = loaders[head].from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()


class DenseAttend:
    """Causal attention of one sequence, by the book: every plane's window, and the rows that are read."""

    def __init__(self, config: Any, read_rows: torch.Tensor | None = None):
        self.config = config
        self.read_rows = read_rows
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, plane: int, q, k, v, sinks=None):
        rows = len(k)
        read_only = len(q) < rows
        self.calls.append((plane, read_only))
        query = torch.arange(rows) if not read_only else self.read_rows
        assert q.shape == (len(query), self.config.heads, self.config.head_dim)
        assert k.shape == v.shape == (rows, self.config.kv_heads, self.config.head_dim)
        distance = query[:, None] - torch.arange(rows)
        window = self.config.planes[plane].window
        visible = (distance >= 0) & (distance < (window or rows))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).float() for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * self.config.scale
        if (cap := self.config.attention_cap) is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(query), 1)), -1)
        weights = scores.softmax(-1)[..., :rows]
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
