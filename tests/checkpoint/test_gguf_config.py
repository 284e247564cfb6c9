"""GGUF metadata becomes a Hugging Face config; what has no equivalent is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.model import config_from


@pytest.fixture
def write(tmp_path):
    """write(arch, extra metadata, extra tensors, drop) -> a .gguf file of one layer, or the config read from it."""

    def write(arch="llama", metadata=None, tensors=(), drop=()):
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, arch)
        values = {
            "block_count": 1,
            "context_length": 128,
            "embedding_length": 32,
            "feed_forward_length": 64,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 5000.0,
        } | (metadata or {})
        for key, value in values.items():
            if key in drop:
                continue
            name = key if key.startswith("split.") else f"{arch}.{key}"
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
            getattr(writer, f"add_{kind}")(name, value)
        shapes = {"token_embd.weight": (50, 32), "blk.0.attn_q.weight": (32, 32)} | dict(tensors)
        for name, shape in shapes.items():
            if name not in drop:
                writer.add_tensor(name, np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def config(path):
    return config_from(resolve(str(path)).config)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sizes(write, arch):
    c = config(write(arch))
    assert (c.vocab_size, c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim) == (50, 32, 1, 4, 2, 8)
    assert (c.intermediate, c.max_positions, c.rope.theta) == (64, 128, 5000.0)
    assert c.norm_eps == pytest.approx(1e-5)
    assert c.tie_embeddings
    assert c.qk_norm == (arch == "qwen3")
    assert c.qkv_bias == (arch == "qwen2")
    assert c.dtype == "float32"


def test_options_seen_from_the_tensors(write):
    c = config(write(tensors={"output.weight": (50, 32), "blk.0.attn_q.bias": (32,)}))
    assert not c.tie_embeddings
    assert c.qkv_bias


def test_key_length_is_head_dim(write):
    assert config(write("qwen3", {"attention.key_length": 16, "attention.value_length": 16})).head_dim == 16
    with pytest.raises(UnsupportedModelError, match="value_length"):
        config(write("qwen3", {"attention.key_length": 16, "attention.value_length": 8}))
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count"):
        config(write("llama", {"rope.dimension_count": 4}))


def test_rope_scaling(write):
    rope = config(write(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})).rope
    assert (rope.kind, rope.settings["factor"]) == ("linear", 4.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 64}
    rope = config(write("qwen3", yarn)).rope
    assert (rope.kind, rope.settings["original_max_position_embeddings"]) == ("yarn", 64)
    rope = config(write(tensors={"rope_freqs.weight": (4,)})).rope
    assert (rope.kind, rope.settings["factors"]) == ("factors", [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(UnsupportedModelError, match="longrope"):
        config(write(metadata={"rope.scaling.type": "longrope"}))
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight must have 4 numbers"):
        config(write("phi3", tensors={"rope_factors_long.weight": (4,), "blk.0.attn_qkv.weight": (64, 32)}))


def test_linear_rope_scaling_of_files_without_a_type(write):
    for given in ({"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):
        rope = config(write(metadata=given)).rope
        assert (rope.kind, rope.settings["factor"]) == ("linear", 4.0)
        with pytest.raises(UnsupportedModelError, match=r"both rope_freqs\.weight and rope scaling 'linear'"):
            config(write(metadata=given, tensors={"rope_freqs.weight": (4,)}))
    neutral = ({"rope.scaling.factor": 1.0}, {"rope.scale_linear": 0.0}, {"rope.scaling.type": "linear"})
    for given in (*neutral, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}):
        assert config(write(metadata=given)).rope.kind == "default"


def test_settings_of_yarn(write):
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 64}
    settings = config(write(metadata=yarn)).rope.settings
    assert (settings["beta_fast"], settings["beta_slow"]) == (32.0, 1.0)
    betas = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    settings = config(write(metadata=yarn | betas)).rope.settings
    assert (settings["beta_fast"], settings["beta_slow"]) == (16.0, 2.0)
    names = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
    keys = [f"rope.scaling.{name}" for name in names]
    for given in ((1.0, 1.0, 1.0, 0.0), (1.0, 1.0, -1.0, 0.0)):
        assert config(write(metadata=yarn | dict(zip(keys, given, strict=True)))).rope.kind == "yarn"
    for key in keys:
        for kind in ({}, yarn):
            with pytest.raises(UnsupportedModelError, match=rf"llama\.{key} is 0\.5, which is not supported"):
                config(write(metadata=kind | {key: 0.5}))


def test_lists_of_one_value_a_layer(write):
    assert config(write(metadata={"attention.head_count_kv": [2, 2]})).kv_heads == 2
    with pytest.raises(UnsupportedModelError, match=r"head_count_kv differs"):
        config(write(metadata={"attention.head_count_kv": [2, 1]}))


def test_gemma3(write):
    window = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 64}
    c = config(write("gemma3", window | {"block_count": 7}))
    assert [p.window for p in c.planes] == [64] * 5 + [None, 64]
    assert (c.rope.theta, c.ropes[0].theta, c.query_scalar, c.head_dim) == (5000.0, 10000.0, 16, 16)
    assert (c.out_norms, c.norm_offset, c.activation) == (True, 1.0, "gelu_tanh")
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 300.0}
    c = config(write("gemma3", window | scaling | {"block_count": 2, "attention.sliding_window_pattern": 2}))
    assert [p.window for p in c.planes] == [64, None]
    assert [(r.kind, r.theta) for r in c.ropes] == [("default", 300.0), ("linear", 5000.0)]
    # The 27B model, by its number of layers.
    assert config(write("gemma3", window | {"block_count": 62})).query_scalar == 8


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("bloom", {}, "'bloom' is not supported.*llama, qwen2, qwen3, gemma3"),
        ("granite", {"attention.sliding_window": 64}, "sliding window"),
        ("llama", {"split.count": 3}, "one of several parts"),
        ("qwen3", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, "expert_gating_func 2"),
        ("qwen3", {"attention.causal": False}, "both directions"),
        ("qwen2", {"attention.sliding_window": 64}, "sliding window"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "soft capping"),
    ],
)
def test_refusals(write, arch, metadata, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config(write(arch, metadata))


def test_sliding_window_of_a_llama_file_is_mistrals(write):
    assert [p.window for p in config(write(metadata={"attention.sliding_window": 64})).planes] == [64]


@pytest.mark.parametrize("what", ["block_count", "attention.layer_norm_rms_epsilon", "token_embd.weight"])
def test_what_is_missing_is_named(write, what):
    with pytest.raises(CheckpointError, match=what):
        config(write(drop=[what]))
