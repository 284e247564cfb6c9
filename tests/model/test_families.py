"""Hugging Face configs, in the forms that are about, become ModelConfigs; what is not supported is refused."""

from __future__ import annotations

import json
import math
import re

import pytest
import transformers
from looped_dense import LOOPS
from tiny import MORE, OWN, PREFIXES, SIZES
from transformers.pytorch_utils import Conv1D

from prefold.checkpoint import GEOMETRIES, read_json
from prefold.checkpoint.settings import CONTEXT
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.features.images.families import tower_of
from prefold.model import ModelConfig, config_from, families, register_family, supported_architectures
from prefold.model.families import FAMILIES, llama
from prefold.model.names import FUSED

BASE = {k: v for k, v in SIZES.items() if not k.endswith("_token_id")}


def config(architecture="LlamaForCausalLM", **overrides) -> ModelConfig:
    given = BASE | {"architectures": [architecture]} | overrides
    return config_from({k: v for k, v in given.items() if v is not ...})


def windows(**overrides):
    return [plane.window for plane in config(**overrides).planes]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_config_written_by_transformers_reads_as_transformers_reads_it(name):
    theirs = getattr(transformers, name + "Config")(**BASE)
    ours = config_from(theirs.to_dict() | {"architectures": [name + "ForCausalLM"]})
    assert (ours.vocab_size, ours.hidden, ours.layers) == (307, 36, 3)
    assert (ours.heads, ours.kv_heads, ours.intermediate) == (6, 2, 50)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 6)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.scale == ours.head_dim**-0.5


def test_biases_and_norms():
    def flags(c):
        return c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm

    assert flags(config()) == (False, False, False, False)
    assert flags(config(attention_bias=True)) == (True, True, False, False)
    assert flags(config(mlp_bias=True)) == (False, False, True, False)
    assert flags(config("MistralForCausalLM")) == (False, False, False, False)
    assert flags(config("Qwen2ForCausalLM")) == (True, False, False, False)
    assert flags(config("Qwen3ForCausalLM")) == (False, False, False, True)


def test_defaults_of_old_configs():
    assert config(num_key_value_heads=...).kv_heads == 6
    assert config("Qwen3ForCausalLM").head_dim == 128
    assert config().rope.theta == 10000.0
    assert config(rope_theta=5e5).rope.theta == 5e5
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5
    assert config(torch_dtype="float16").dtype == config(dtype="float16").dtype == "float16"
    assert config(architectures=None, model_type="qwen2").qkv_bias


def test_mistral_windows():
    assert windows(architecture="MistralForCausalLM", sliding_window=16) == [16] * 3
    assert windows(architecture="MistralForCausalLM", sliding_window=None) == [None] * 3
    assert windows(architecture="MistralForCausalLM") == [4096] * 3


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture):
    on = {"architecture": architecture, "use_sliding_window": True, "sliding_window": 16}
    assert windows(architecture=architecture, sliding_window=16) == [None] * 3
    assert windows(**on, max_window_layers=2) == [None, None, 16]
    assert windows(**on, max_window_layers=0) == [16] * 3
    assert windows(**on, max_window_layers=28) == [None] * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**on, layer_types=types) == [16, None, 16]
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        windows(**on, layer_types=["chunked_attention"] * 3)


GEMMA = {"architecture": "Gemma3ForCausalLM", "num_hidden_layers": 7}


def test_gemma3_as_transformers_writes_it():
    theirs = transformers.Gemma3TextConfig(**BASE, sliding_window=16, query_pre_attn_scalar=8)
    ours = config_from(theirs.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    assert (ours.hidden, ours.heads, ours.head_dim, ours.scale) == (36, 6, 256, 8**-0.5)
    assert (ours.activation, ours.embedding_scale, ours.norm_offset) == ("gelu_tanh", 6.0, 1.0)
    assert (ours.qk_norm, ours.out_norms, ours.tie_embeddings, ours.qkv_bias) == (True, True, True, False)
    assert [(r.kind, r.theta) for r in ours.ropes] == [("default", 1e4)] * 3
    assert ours.rope.theta == 1e6


def test_gemma3_layers_in_old_and_new_form():
    old = config(**GEMMA, sliding_window=16, sliding_window_pattern=3)
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    assert [p.window for p in old.planes] == [16, 16, None, 16, 16, None, 16]
    assert config(**GEMMA, sliding_window=16, layer_types=types) == old
    assert windows(**GEMMA, sliding_window=16) == [16] * 5 + [None, 16]
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        config(**GEMMA, layer_types=["chunked_attention"] * 7)


def test_gemma3_rope_in_old_and_new_form():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config(**GEMMA, rope_theta=5e5, rope_local_base_freq=500.0, rope_scaling=scaling)
    nested = {
        "full_attention": scaling | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    assert config(**GEMMA, rope_parameters=nested) == old
    full, local = old.ropes[5], old.ropes[0]
    assert (full.kind, full.theta, full.settings["factor"]) == ("linear", 5e5, 8.0)
    assert (local.kind, local.theta) == ("default", 500.0)
    assert [rope.theta for rope in config(**GEMMA).ropes] == [1e4] * 5 + [1e6, 1e4]
    assert config(**GEMMA, rope_parameters={"full_attention": None}).rope.theta == 1e6


def test_gemma3_heads():
    assert not config("Gemma3TextModel").lm_head
    assert not config("Gemma3TextModel", tie_word_embeddings=False).lm_head
    assert config("Gemma3TextForSequenceClassification", num_labels=3).num_labels == 3
    assert config(architectures=None, model_type="gemma3_text").out_norms


MOE = {"architecture": "GraniteMoeHybridForCausalLM", "num_local_experts": 0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
}  # fmt: skip


def test_longrope_has_the_factors_of_the_longest_sequence_that_there_may_be():
    for context, factors, said in (
        (None, [4.0, 5.0, 6.0], "more than 128 tokens, because context_length is 512"),
        (129, [4.0, 5.0, 6.0], "more than 128 tokens, because context_length is 129"),
        (128, [1.0, 2.0, 3.0], "up to 128 tokens, because context_length is 128"),
    ):
        c = config(rope_scaling=LONG, **{CONTEXT: context})
        assert (c.rope.settings["factors"], c.max_positions) == (factors, context or 512)
        assert said in c.chosen_positions
        assert c.rope.settings["attention_factor"] == pytest.approx((1 + math.log(4) / math.log(128)) ** 0.5)
    assert config(**{CONTEXT: 100}).max_positions == 100
    assert config().chosen_positions is None


# Keys that makers' own files have, and transformers' configs have not.
MAKERS = {
    "Phi3ForCausalLM": {
        "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "attention_bias": False, "sliding_window": 262144, "embd_pdrop": 0.0,
        "rope_scaling": {"long_factor": [1.0, 2.0, 3.0], "short_factor": [1.0, 1.0, 1.0], "type": "su"},
        "original_max_position_embeddings": 128,
    },
    "SmolLM3ForCausalLM": {
        "no_rope_layers": [1, 1, 1], "no_rope_layer_interval": 4, "layer_types": ["full_attention"] * 3,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "pretraining_tp": 2,
    },
    "Olmo3ForCausalLM": {
        "sliding_window": 64, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "rope_theta": 500000,
        "rope_scaling": {
            "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "factor": 8.0, "rope_type": "yarn",
            "original_max_position_embeddings": 64,
        },
    },
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention"] * 3, "mamba_n_heads": 128, "mamba_conv_bias": True, "num_local_experts": 0,
        "normalization_function": "rmsnorm", "num_experts_per_tok": 0, "position_embedding_type": "rope",
        "shared_intermediate_size": 70, "init_method": "mup", "logits_scaling": 10, "attention_multiplier": 0.015625,
    },
    "GemmaForCausalLM": {"hidden_act": "gelu", "hidden_activation": None, "head_dim": 16},
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "head_dim": 16},
    "Cohere2ForCausalLM": {
        "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0, "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": False, "sliding_window_pattern": 4, "sliding_window": 64, "logit_scale": 0.25,
    },
    "Starcoder2ForCausalLM": {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5, "use_bias": True,
        "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm", "scale_attn_weights": True,
        "scale_attention_softmax_in_fp32": True, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 64,
    },
    "Exaone4ForCausalLM": {
        "sliding_window_pattern": "LLLG", "sliding_window": 64, "head_dim": 16,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", MAKERS)
def test_files_of_the_makers(architecture):
    c = config(architecture, **MAKERS[architecture])
    windows = [plane.window for plane in c.planes]
    windowed = {"Olmo3": 64, "Cohere2": 64, "Starcoder2": 64, "Exaone4": 64, "Gemma2": 4096}
    assert windows[0] == windowed.get(architecture.removesuffix("ForCausalLM"))
    if architecture == "Phi3ForCausalLM":
        assert (c.rope.kind, c.rope.settings["is_long"], c.names.parts) == ("longrope", True, FUSED.parts)
    if architecture == "Olmo3ForCausalLM":
        assert [rope.kind for rope in c.ropes] == ["default", "default", "yarn"]
    if architecture == "GraniteMoeHybridForCausalLM":
        assert (c.intermediate, c.scale, c.logit_scale) == (70, 0.015625, 0.1)


def test_layers_that_rotate_nothing():
    def kinds(architecture, **given):
        c = config(architecture, num_hidden_layers=5, **given)
        return [(rope.kind == "default", plane.window) for rope, plane in zip(c.ropes, c.planes, strict=True)]

    turns, still = (True, None), (False, None)
    assert kinds("SmolLM3ForCausalLM") == [turns, turns, turns, still, turns]
    assert kinds("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 1, 1]) == [still, *[turns] * 4]
    near = {"sliding_window": 16}
    windowed = kinds("SmolLM3ForCausalLM", use_sliding_window=True, **near)
    assert windowed == [turns, turns, turns, (False, 16), turns]
    mixed = [(True, 16), (True, 16), (True, 16), still, (True, 16)]
    assert kinds("Cohere2ForCausalLM", **near) == kinds("Exaone4ForCausalLM", **near) == mixed
    assert kinds("Cohere2ForCausalLM", sliding_window=None) == [still] * 5
    assert kinds("Exaone4ForCausalLM", sliding_window=None) == [turns] * 5
    granite = {"num_local_experts": 0, "layer_types": ["attention"]}
    assert kinds("GraniteMoeHybridForCausalLM", **granite) == [still] * 5
    assert kinds("GraniteMoeHybridForCausalLM", **granite, position_embedding_type="rope") == [turns] * 5


GPT2 = {"architecture": "GPT2LMHeadModel", "n_embd": 36, "n_head": 6, "n_layer": 3, "n_positions": 512}


def test_gpt2():
    theirs = transformers.GPT2Config(vocab_size=307, n_embd=36, n_head=6, n_layer=3, layer_norm_epsilon=1e-3)
    ours = config_from(theirs.to_dict() | {"architectures": ["GPT2LMHeadModel"]})
    assert (ours.hidden, ours.heads, ours.kv_heads, ours.head_dim, ours.layers) == (36, 6, 6, 6, 3)
    assert (ours.intermediate, ours.max_positions, ours.norm_eps, ours.scale) == (144, 1024, 1e-3, 6**-0.5)
    assert (ours.norm, ours.rope, ours.ropes, ours.mlp, ours.activation) == ("layer", None, (), "plain", "gelu_tanh")
    assert (ours.qkv_bias, ours.o_bias, ours.mlp_bias, ours.tie_embeddings, ours.lm_head) == (True,) * 5
    assert config(**GPT2).norm_eps == 1e-5
    assert config(**GPT2, n_inner=50).intermediate == 50
    assert config(**GPT2, scale_attn_weights=False).scale == 1
    assert config(**GPT2 | {"n_embd": 35, "n_head": 5}).head_dim == 7
    assert not config(**GPT2 | {"architecture": "GPT2Model"}).lm_head
    assert config(**GPT2 | {"architecture": "GPT2ForSequenceClassification"}, num_labels=3).num_labels == 3
    assert config(**GPT2 | {"architecture": None}, architectures=None, model_type="gpt2") == config(**GPT2)


def test_rope_in_old_and_new_form():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = config(rope_theta=5e5, rope_scaling=scaling).rope
    new = config(rope_parameters=scaling | {"rope_theta": 5e5}).rope
    oldest = config(rope_theta=5e5, rope_scaling=scaling | {"type": "llama3", "rope_type": "llama3"}).rope
    assert old == new == oldest
    assert (old.kind, old.theta, old.settings["factor"]) == ("llama3", 5e5, 8.0)
    typed = config(rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert (typed.kind, typed.settings) == ("linear", {"factor": 2.0})


def test_yarn_defaults():
    rope = config(rope_scaling={"type": "yarn", "factor": None, "original_max_position_embeddings": 128}).rope
    assert rope.settings["factor"] == 4.0
    assert (rope.settings["beta_fast"], rope.settings["beta_slow"], rope.settings["truncate"]) == (32, 1, True)
    assert config(rope_scaling={"type": "yarn", "factor": 2}).rope.settings["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architecture": "NobodyForConditionalGeneration"},
            "'Nobody.*' is not supported.*prefold models.*register_family",
        ),
        ({"architecture": "BloomForCausalLM"}, "'BloomForCausalLM' is not supported.*model_type None"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'.*'silu'"),
        ({"hidden_act": "xielu"}, "xielu.* needs MLPs of the kind"),
        (
            {"rope_scaling": {"rope_type": "far"}},
            "'far' is not.*: default, linear, .*longrope, proportional$",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"no rope_scaling\.factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2, "alpha": 9}}, r"rope_scaling\.alpha is 9"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"no rope_scaling\.short_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 4}}, "4 rotary factors, but heads need 3"),
        ({CONTEXT: 513}, "context_length is 513.*512"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"no rope_scaling\.factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type are not supported"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be at most 1"),
        ({"partial_rotary_factor": 0.5}, "the rotated share of a head is 0.5, 3 of 6 elements"),
        (MOE | {"layer_types": ["attention", "mamba"]}, "mamba_n_heads is None"),
        ({"architecture": "Cohere2ForCausalLM", "use_parallel_block": False}, "use_parallel_block is False"),
        ({"architecture": "SmolLM3ForCausalLM", "no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0."),
        ({"architecture": "Exaone4ForCausalLM", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised.*'gptq'.*GGUF"),
        ({"is_causal": False}, "both directions"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map"),
        ({"hidden_size": ...}, "no hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 4}, "heads is 6; it must be a multiple of kv_heads, 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"architecture": "Qwen2ForCausalLM", "num_key_value_heads": ...}, "no num_key_value_heads"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"activation_function": "mish"}, "'mish' is not supported.*'gelu_new'"),
        (GPT2 | {"n_head": 5}, "n_embd is 36.*n_head, 5"),
        (GPT2 | {"n_positions": ...}, "no n_positions"),
        (GEMMA | {"use_bidirectional_attention": True}, "both directions"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA | {"hidden_activation": "mish"}, "'mish'.*'gelu_pytorch_tanh'"),
        (
            GEMMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "separate settings for full_attention",
        ),
        ({"architecture": "OlmoForCausalLM", "clip_qkv": 8.0}, "clip_qkv"),
        ({"architecture": "FalconForCausalLM", "alibi": True}, "alibi"),
        ({"architecture": "OPTForCausalLM", "ffn_dim": 48, "word_embed_proj_dim": 18}, "word_embed_proj_dim is 18"),
        ({"architecture": "OPTForCausalLM", "ffn_dim": 48, "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"architecture": "ApertusForCausalLM", "hidden_act": "xielu", "output_vocab_size": 9}, "output_vocab_size"),
        ({"architecture": "HunYuanDenseV1ForCausalLM", "use_cla": True}, "use_cla is True"),
        (
            {"architecture": "GraniteSWAForCausalLM", "layer_rope_theta": [1e4]},
            "layer_rope_theta is .*numbers, one per",
        ),
        ({"architecture": "IQuestCoderForCausalLM", "clip_qkv": 8.0}, "clip_qkv"),
        (GPT2 | {"architecture": "GPTJForCausalLM", "rotary_dim": 64}, "rotary_dim is 64; it must be at most 6"),
        (GPT2 | {"architecture": "CodeGenForCausalLM", "rotary_dim": 4}, "n_head is 6; for CodeGen"),
        (
            {"architecture": "GPTNeoForCausalLM", "num_layers": 3, "num_heads": 6, "attention_types": [[["far"], 3]]},
            "attention_types is .*global or local",
        ),
        ({"architecture": "RecurrentGemmaForCausalLM", "max_position_embeddings": ...}, "not supported: .*RG-LRU"),
        ({"architecture": "JambaForCausalLM", "mamba_d_state": 16}, "not supported: its layers are Mamba-1"),
        ({"architecture": "ZambaForCausalLM"}, "not supported: its layers are Mamba-1"),
        ({"architecture": "Zamba2ForCausalLM"}, "not supported: its attention blocks are shared"),
        ({"architecture": "KimiLinearForCausalLM"}, "not supported: .*KDA"),
        ({"architecture": "MiniMaxForCausalLM"}, "not supported: .*lightning attention"),
        ({"architecture": "Mamba2ForCausalLM", "num_attention_heads": ...}, "it has no attention layers"),
        ({"architecture": None, "architectures": None, "model_type": "falcon_mamba"}, "it has no attention layers"),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises(CheckpointError, match=message):
        config(**overrides)


def test_code_for_the_tokenizer_alone_is_no_model_code():
    assert config(auto_map={"AutoTokenizer": ["tok.T", None]}).hidden == 36


@pytest.mark.parametrize(
    ("architecture", "are_fixed"),
    [("HunYuanDenseV1ForCausalLM", True), ("NanoChatForCausalLM", False), ("CohereForCausalLM", False)],
)
def test_keys_that_are_normed_after_their_rotation_stay_at_their_positions(architecture, are_fixed):
    """If the norm has weights: without, it is the same before the rotation as after it."""
    more = {"use_qk_norm": True} if architecture.startswith("Cohere") else {}
    assert bool(config(architecture, **more).fixed) == are_fixed


def test_heads():
    causal, bare = config(), config("Qwen3Model")
    assert (causal.lm_head, causal.num_labels, bare.lm_head) == (True, None, False)
    assert not config("Qwen3Model", tie_word_embeddings=True).lm_head
    two = config("Qwen3ForSequenceClassification")
    assert (two.lm_head, two.num_labels, two.labels) == (False, 2, ())
    named = config("LlamaForSequenceClassification", id2label={"10": "k", "0": "a", "2": "c"})
    assert (named.num_labels, named.labels) == (3, ("a", "c", "k"))
    assert config("LlamaForSequenceClassification", num_labels=1).num_labels == 1
    reward = config("Qwen2ForRewardModel", auto_map={"AutoModel": "modeling_qwen2_rm.X"})
    assert (reward.num_labels, reward.head_layers) == (1, 2)


def test_a_family_of_ones_own():
    register_family("MyForCausalLM", lambda hf: llama(hf | {"num_attention_heads": 3, "num_key_value_heads": 3}))
    try:
        assert config("MyForCausalLM").heads == 3
        assert "MyForCausalLM" in supported_architectures()
    finally:
        del FAMILIES["MyForCausalLM"]


# Settings of text models in transformers that change what they compute without a tensor more or less.
CHANGING = {
    "no_rope_layers": [1, 1, 0], "no_rope_layer_interval": 4, "residual_multiplier": 0.22, "logits_scaling": 16.0,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0156, "logit_scale": 0.0625, "clip_qkv": 8.0,
    "use_parallel_residual": True, "parallel_attn": True, "attn_logit_softcapping": 50.0, "scale_emb": 12,
    "final_logit_softcapping": 30.0, "scale_depth": 1.4, "mup_enabled": True, "rope_interleave": True,
    "attn_temperature_tuning": True, "attention_chunk_size": 8192, "alibi": True, "query_pre_attn_scalar": 64,
    "use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"],
    "rotary_dim": 64, "rotary_pct": 0.25, "norm_type": "layer", "num_local_experts": 8,
    "swiglu_limit": 7.0, "activation_sparsity_pattern": [0.95], "gating": True,
    "num_kv_shared_layers": 15, "layer_norm_epsilon": 1e-5, "position_embedding_type": "relative_key",
    "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]},
}  # fmt: skip
# Settings of checkpoints on the hub that change nothing, or say what a model without them does.
RELICS = {
    "pretraining_tp": 2, "is_llama_config": True, "rope_interleaved": False, "unsloth_version": "2025.3.1",
    "unsloth_fixed": True, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28,
    "layer_types": ["full_attention"] * 3, "attention_dropout": 0.1, "attention_bias": False, "use_cache": True,
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "_attn_implementation": "sdpa", "use_mrope": False,
    "_attn_implementation_autoset": True, "_flash_attn_2_enabled": True, "use_flash_attn": True, "no_bias": True,
    "cache_implementation": "hybrid", "_sliding_window_pattern": 6, "qk_layer_norms": False, "pixel_shuffle_factor": 4,
    "perceiver_config": {"attention_dropout": 0.0, "qk_layer_norms_perceiver": False, "num_key_value_heads": 1},
    "transformers.js_config": {"dtype": "q4"}, "neftune_noise_alpha": 0, "attn_pdrop": 0.1, "initializer_range": 0.02,
    "auto_map": {"AutoTokenizer": ["tok.T", None]}, "torch_dtype": "bfloat16", "model_max_length": 4096,
    "task_specific_params": {"text-generation": {"max_length": 50}}, "gradient_checkpointing": False,
    "original_max_position_embeddings": 512, "rope_theta": 1e4, "logits_scaling": 1.0,
    "quantization_config": None, "output_router_logits": True, "softmax_in_fp32": True, "num_experts": 0,
    "top_k": 50, "top_p": 1.0, "temperature": 0.7, "no_repeat_ngram_size": 3, "add_cross_attention": False,
    "lora_alpha": 16, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    "cross_attention_hidden_size": 64, "finetuning_task": "mnli", "neftune_alpha": 5,
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGING)
def test_a_setting_that_changes_results_and_is_not_read_is_refused(key):
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {key}.* is .*but LlamaForCausalLM does not read"):
        config(**{key: CHANGING[key]})


WITH_TOWERS = (
    "Apertus1p5",
    "Aria",
    "Gemma3",
    "Gemma3n",
    "Gemma4",
    "Gemma4Unified",
    "Qwen3_5",
    "Qwen3_5Moe",
)  # whose text models have configs of their own


@pytest.mark.parametrize("architecture", [name for name in supported_architectures() if "Conditional" not in name])
def test_settings_that_change_nothing_are_not_refused(architecture, tmp_path):
    """Of each family: all that transformers writes, and what checkpoints on the hub have beside it."""
    family = re.match(r"(.+?)(Text)?(For\w+|LMHeadModel|Model)", architecture)[1]
    # transformers has no config of Kev, which stands on Qwen3.5, and none of Jina's reranker, and spells some names
    # otherwise.
    others = {"Kev": "Qwen3_5", "Jina": "Qwen3", "PhiMoE": "Phimoe", "ExaoneMoE": "ExaoneMoe"}
    family = others.get(family, family)
    loops = {"Ouro": "ouro", "Raven": "huginn", "PrefoldLooped": "looped"}
    if family in loops:
        theirs = LOOPS[loops[family]]
    else:
        # Granite 4 of its own accord has experts and recurrent layers.
        dense = {"num_local_experts": 0, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
        experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}  # Dots1 has none
        own = {"GraniteMoeHybrid": dense, "Bamba": {"attn_layer_indices": [1]}, "Dots1": experts}
        own = own.get(family, {"head_dim": 128} if family == "Glm4Moe" else {})
        made = getattr(transformers, f"{family}TextConfig" if family in WITH_TOWERS else f"{family}Config")(**own)
        (tmp_path / "config.json").write_text(made.to_json_string(use_diff=False))
        theirs = read_json(tmp_path / "config.json")
    relics = {key: value for key, value in RELICS.items() if key not in theirs}
    assert config_from(theirs | relics | {"architectures": [architecture]}).layers


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "smolvlm"])
def test_models_with_towers_are_not_refused_for_settings_that_change_nothing(kind):
    made = transformers.AutoConfig.for_model(kind, vision_config={"image_size": 448, "patch_size": 14})
    theirs = json.loads(made.to_json_string(use_diff=False)) | {"architectures": [families.MODEL_TYPES[kind]]}
    text = {key: value for key, value in RELICS.items() if key not in theirs["text_config"]}
    theirs["text_config"] |= text
    theirs |= {key: value for key, value in RELICS.items() if key not in theirs}
    assert tower_of(config_from(theirs)) is not None
    theirs["text_config"]["no_rope_layers"] = [1, 0]
    with pytest.raises(UnsupportedModelError, match=r"text_config\.no_rope_layers is \[1, 0\]"):
        config_from(theirs)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134515008),
        ("qwen3-0.6b", 596049920),
        ("qwen3-4b", 4022468096),
        ("qwen3-8b", 8190735360),
        ("gemma3-270m", 268098176),
        ("gpt2", 124439808),
    ],
)
def test_published_sizes(name, parameters):
    import torch

    c = config_from(GEOMETRIES[name])
    assert c.num_parameters == parameters
    theirs = transformers.AutoConfig.for_model(**{k: v for k, v in GEOMETRIES[name].items() if k != "architectures"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert sum(p.numel() for p in model.parameters()) == parameters
    linears = [m for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D)) and n != "lm_head"]
    assert c.linear_flops == 2 * sum(m.weight.numel() for m in linears)


@pytest.mark.parametrize("overrides", [{"attention_bias": True, "mlp_bias": True}, {"num_labels": 3}, {}])
def test_parameters_are_counted_with_biases_and_heads(overrides):
    import torch

    from prefold.worker.torch.model import CausalLM

    names = [
        name + head for name in ("Llama", "Qwen2", "Qwen3") for head in ("ForCausalLM", "ForSequenceClassification")
    ]
    for name in (*names, "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"):
        for given in (overrides, overrides | {"head_dim": 10}):
            c = config(name, **given)
            model = CausalLM(c, dtype=torch.float32, device=torch.device("meta"))
            assert sum(p.numel() for p in model.parameters()) == c.num_parameters
    for family in MORE:
        made = getattr(transformers, f"{PREFIXES[family]}Config")(**SIZES | OWN.get(family, {})).to_dict()
        c = config_from(made | {"architectures": [f"{PREFIXES[family]}ForCausalLM"]} | overrides)
        model = CausalLM(c, dtype=torch.float32, device=torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) == c.num_parameters
    for name in ("GPT2LMHeadModel", "GPT2ForSequenceClassification"):
        c = config(**GPT2 | {"architecture": name} | overrides)
        model = CausalLM(c, dtype=torch.float32, device=torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) == c.num_parameters
    c = config("Qwen2ForRewardModel", num_labels=2)
    model = CausalLM(c, dtype=torch.float32, device=torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == c.num_parameters
