"""Random checkpoints of every family against transformers: odd sizes, sliding windows, rotary kinds, all read-outs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from running import as_request, run
from tiny import FAMILIES, MIXTURES, MORE, reference, tiny_checkpoint

from prefold import LLM
from prefold.spec.requests import Readout

# Of float32, relative to the largest number of what is compared. The worst of thousands is a twentieth of it.
TOLERANCE = 1e-4
KINDS = ("last", "mean", "logits", "logprobs")


def random_rope(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["default", "linear", "llama3", "yarn"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([100.0, 1e4, 5e5, 1e6])}
    trained = {"original_max_position_embeddings": rng.choice([16, 32, 64])}
    if kind == "linear":
        rope["factor"] = rng.choice([0.5, 2.0, 8.0])
    elif kind == "llama3":
        low, high = rng.choice([1.0, 2.0]), rng.choice([3.0, 4.0])
        rope |= trained | {"factor": rng.choice([2.0, 8.0]), "low_freq_factor": low, "high_freq_factor": high}
    elif kind == "yarn":
        rope |= trained | {"factor": rng.choice([1.0, 2.0, 4.0])}
        if rng.random() < 0.3:
            rope["attention_factor"] = rng.choice([1.0, 1.3])
        if rng.random() < 0.3:
            rope |= {"beta_fast": 16, "beta_slow": 2}
        if rng.random() < 0.3:
            rope |= {"mscale": 0.7, "mscale_all_dim": rng.choice([0.5, 1.0])}
    return rope


def random_config(rng: random.Random, family: str) -> dict[str, Any]:
    """Settings of a small checkpoint of `family`."""
    heads = rng.choice([1, 2, 3, 4, 5, 6, 7, 9, 12])
    head_dim = rng.choice([2, 4, 6, 8, 10, 14, 16, 18, 32, 34, 64, 66, 80, 96, 128])
    layers = rng.choice([1, 2, 3])
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": rng.choice([97, 128, 307, 331, 513, 1000]),
        "intermediate_size": rng.choice([8, 17, 31, 50, 64, 100]),
        "max_position_embeddings": rng.choice([64, 128, 512]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family == "gpt2":
        config |= {"hidden_size": heads * rng.choice([2, 3, 5, 7, 8, 16]), "n_inner": config.pop("intermediate_size")}
        config |= {"layer_norm_epsilon": rng.choice([1e-12, 1e-5, 1e-1]), "scale_attn_weights": rng.random() < 0.8}
        return config
    shared = rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
    hidden = heads * rng.choice([head_dim, 2, 5, 8, 10, 14])
    config |= {"num_key_value_heads": shared, "hidden_size": hidden, "head_dim": head_dim}
    config |= {"rms_norm_eps": rng.choice([1e-12, 1e-6, 1e-5, 1e-2]), "rope_parameters": random_rope(rng)}
    window = rng.choice([None, 1, 2, 3, 5, 8, 16, 40])
    if family in ("llama", "qwen3"):
        config["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        config["mlp_bias"] = rng.random() < 0.5
    if family == "mistral":
        config["sliding_window"] = window
    if family == "qwen2":
        config["hidden_size"] = heads * config.pop("head_dim")
    if family in ("qwen2", "qwen3") and window:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": rng.randint(0, layers)}
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": rng.choice([100.0, 1e4])}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        config |= {"sliding_window": window or 4, "query_pre_attn_scalar": rng.choice([1, 7, 64, 256])}
        config["layer_types"] = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return config


def random_config_of_more(rng: random.Random, family: str) -> dict[str, Any]:
    """The same of the families in MORE."""
    config = random_config(rng, "llama")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    window = rng.choice([None, 1, 2, 3, 5, 8, 16, 40])
    types = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    factors = {
        "embedding_multiplier": rng.choice([1, 3.5, 12.0]), "residual_multiplier": rng.choice([1.0, 0.22, 0.9]),
        "attention_multiplier": rng.choice([1, 0.1, 0.0156]), "logits_scaling": rng.choice([1, 3.0, 8.0]),
    }  # fmt: skip
    if family not in ("smollm3", "granite", "granite-moe", "granite-moe-shared"):
        config.pop("mlp_bias")
    if family == "smollm3":
        config["no_rope_layers"] = [rng.randint(0, 1) for _ in range(layers + rng.randint(0, 1))]
        config |= {"use_sliding_window": window is not None, "sliding_window": window}
    if family in ("phi3", "phi3-long", "starcoder2"):
        config.pop("attention_bias")
        config["hidden_size"] = heads * config.pop("head_dim")
        config["sliding_window"] = window
    if family.startswith("phi3"):
        dim = config["hidden_size"] // heads
        turned = rng.choice(range(2, dim + 1, 2))
        rope = {"rope_type": "default", "partial_rotary_factor": turned / dim}
        config["original_max_position_embeddings"] = 1
        if family == "phi3-long":
            short, long = ([rng.uniform(1, most) for _ in range(turned // 2)] for most in (2, 30))
            rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 1.3}
        config["rope_parameters"] = rope | {"rope_theta": rng.choice([100.0, 1e4])}
    if family.startswith("granite"):
        config |= factors
    if family in MIXTURES:
        experts = rng.choice([1, 2, 3, 8, 20])
        config |= {"num_experts": experts, "num_local_experts": experts, "num_experts_per_tok": rng.randint(1, experts)}
    if family in ("qwen2-moe", "qwen3-moe"):
        config |= {"moe_intermediate_size": rng.choice([1, 9, 16, 40]), "norm_topk_prob": rng.random() < 0.5}
    if family == "qwen2-moe":
        config |= {"shared_expert_intermediate_size": rng.choice([3, 32, 50]), "qkv_bias": rng.random() < 0.5}
    if family == "olmoe":
        config["norm_topk_prob"] = rng.random() < 0.5
    if family == "granite-moe-shared":
        config["shared_intermediate_size"] = rng.choice([0, 3, 32, 50])
    if family in ("qwen2-moe", "granite-moe", "granite-moe-shared", "olmoe"):
        config["hidden_size"] = heads * config.pop("head_dim")
    if family == "granite4":
        config |= {"num_local_experts": 0, "shared_intermediate_size": config.pop("intermediate_size")}
        config |= {"layer_types": ["full_attention"] * layers, "mamba_n_heads": 1}
        config["position_embedding_type"] = rng.choice(["rope", None])
    if family in ("olmo3", "gemma2", "cohere2", "exaone4"):
        config |= {"sliding_window": window or 4, "layer_types": types}
    if family == "olmo3":
        local = {"rope_type": "default", "rope_theta": rng.choice([100.0, 1e4])}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    if family == "gemma2":
        config |= {"query_pre_attn_scalar": rng.choice([1, 7, 64, 256])}
        config |= {"attn_logit_softcapping": rng.choice([None, 1.0, 50.0])}
        config |= {"final_logit_softcapping": rng.choice([None, 2.0, 30.0])}
    if family == "cohere2":
        config |= {"hidden_size": heads * config.pop("head_dim"), "layer_norm_eps": config.pop("rms_norm_eps")}
        config["logit_scale"] = rng.choice([1.0, 0.0625, 2.0])
    if family == "starcoder2":
        config |= {"norm_epsilon": config.pop("rms_norm_eps"), "use_bias": rng.random() < 0.5}
    if family == "exaone4":
        config.pop("attention_bias")
        if rng.random() < 0.3:
            config |= {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    if family == "olmo2":
        config.pop("head_dim")
        config["hidden_size"] = heads * rng.choice([2, 8, 10, 14])
    return config


def random_prompts(rng: random.Random, vocab: int, longest: int) -> list[list[int]]:
    """Prompts that share beginnings; some are the same, some the beginning of another."""
    found: list[list[int]] = []
    for _ in range(rng.choice([1, 2, 3, 8, 20])):
        stem = rng.choice(found) if found and rng.random() < 0.7 else []
        stem = stem[: rng.randint(0, len(stem))] if rng.random() < 0.8 else stem
        new = rng.choice([0, 1, 2, 3, 5, 9, 17, 33]) if stem else rng.choice([1, 2, 9, 33])
        found.append((stem + [rng.randrange(vocab) for _ in range(new)])[:longest])
    return found


@torch.inference_mode()
def oracle(folder, prompts: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Hidden states after the final norm and logits of every prompt, by transformers with eager attention."""
    model = reference(folder)
    outputs = [model(torch.tensor([tokens]), output_hidden_states=True) for tokens in prompts]
    return [(out.hidden_states[-1][0].numpy(), out.logits[0].numpy()) for out in outputs]


def expected(kind: str, hidden: np.ndarray, logits: np.ndarray, targets: list[int]) -> np.ndarray:
    """What a read-out gives. targets: the ids whose logits, or log-probabilities at the last rows, are read."""
    if kind == "logits":
        return logits[-1][targets]
    if kind == "logprobs":
        rows = torch.from_numpy(logits[len(logits) - len(targets) :]).double().log_softmax(-1)
        return rows[range(len(targets)), targets].numpy()
    return {"last": hidden[-1], "mean": hidden.mean(0)}[kind]


def compare(tmp_path, seed: int, more: str | None = None) -> None:
    """more: the family, of those in MORE"""
    rng = random.Random(seed)
    family = more or FAMILIES[seed % len(FAMILIES)]
    config = random_config(rng, family) if more is None else random_config_of_more(rng, family)
    folder = tiny_checkpoint(tmp_path, family, seed=seed, **config)
    llm = LLM(str(folder), dtype="float32", device="cpu")
    vocab = config["vocab_size"]
    prompts = random_prompts(rng, vocab, min(config["max_position_embeddings"], 100))
    wanted = oracle(folder, prompts)
    largest = max(1.0, *(np.abs(numbers).max() for pair in wanted for numbers in pair))
    for kind in rng.sample(KINDS, 3):
        sharing, rows = rng.choice(["full", "mlp", "off"]), rng.choice([1, 2, 3, 7, 16, 50, 4096])
        ids = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5]))]
        if kind == "logprobs":
            targets = [[rng.randrange(vocab) for _ in range(rng.randint(1, len(p)))] for p in prompts]
            requests = list(map(as_request, prompts, targets))
        else:
            targets = [ids] * len(prompts)
            requests = list(map(as_request, prompts))
        readout = Readout(kind, tuple(ids) if kind == "logits" else ())
        results = run(llm, requests, readout, sharing=sharing, rows=rows)
        for result, (hidden, logits), target in zip(results, wanted, targets, strict=True):
            difference = np.abs(result.values - expected(kind, hidden, logits, target)).max() / largest
            assert difference < TOLERANCE, (seed, family, config, kind, sharing, rows)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_checkpoint(tmp_path, seed):
    compare(tmp_path, seed)


@pytest.mark.parametrize("family", MORE)
def test_a_random_checkpoint_of_more_families(tmp_path, family):
    compare(tmp_path, 0, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_many_random_checkpoints_of_more_families(tmp_path, family):
    for seed in range(1, 31):
        compare(tmp_path, seed, family)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(12, 312, 50)], ids=str)
def test_many_random_checkpoints(tmp_path, seeds):
    for seed in seeds:
        compare(tmp_path, seed)
