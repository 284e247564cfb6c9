"""Config keys of further dense models, from GGUF metadata. Missing metadata has the defaults of llama.cpp."""

from __future__ import annotations

from ..errors import UnsupportedModelError
from .gguf_config import ARCHITECTURES, BY_TENSOR, FUSED_QUERIES, LAYER_NORM, OF_ARCHITECTURE, PARTLY_TURNED, Keys
from .settings import Settings


def _command_r(gguf: Settings, config: Keys) -> Keys:
    return {"layer_norm_eps": config["rms_norm_eps"], "logit_scale": gguf.number("logit_scale")}


def _stablelm(gguf: Settings, config: Keys) -> Keys:
    if config["qk_layernorm"]:
        raise UnsupportedModelError(
            f"{gguf.file} has norms of heads in one tensor (attn_q_norm), which is not supported; use the folder with "
            "safetensors"
        )
    gguf.get("use_parallel_residual")  # the converter writes true if the model's config has no such key
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": not config.pop("has_mlp_norm"),
    }


def _falcon(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys of Falcon."""
    return {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "activation": "gelu",
        "ffn_hidden_size": config["intermediate_size"],
        "new_decoder_architecture": True,
        "num_kv_heads": config["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if config.pop("has_two_norms") else 1,
    }


def _gptneox(gguf: Settings, config: Keys) -> Keys:
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "hidden_act": "gelu",
        "use_parallel_residual": gguf.flag("use_parallel_residual", True),
    }


ARCHITECTURES |= {
    "command-r": "CohereForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "falcon": "FalconForCausalLM",
    "gptneox": "GPTNeoXForCausalLM",
    "phi2": "PhiForCausalLM",
}
LAYER_NORM |= {"command-r", "nemotron", "stablelm", "falcon", "gptneox", "phi2"}
PARTLY_TURNED |= {"glm4", "nemotron", "stablelm", "gptneox", "phi2"}
FUSED_QUERIES |= {"falcon", "gptneox"}
BY_TENSOR |= {
    "command-r": {"use_qk_norm": "attn_q_norm.weight"},
    "seed_oss": {"attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"},
    "ernie4_5": {"use_bias": "attn_q.bias"},
    "stablelm": {"qk_layernorm": "attn_q_norm.weight", "has_mlp_norm": "ffn_norm.weight"},
    "falcon": {"has_two_norms": "attn_norm_2.weight", "bias": "attn_output.bias"},
    "arcee": {"mlp_bias": "ffn_up.bias"},
    "nemotron": {"mlp_bias": "ffn_up.bias"},
}
OF_ARCHITECTURE |= {
    "command-r": _command_r,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "gptneox": _gptneox,
    "arcee": lambda gguf, config: {"hidden_act": "relu2"},
    "nemotron": lambda gguf, config: {"hidden_act": "relu2", "norm_eps": config["rms_norm_eps"]},
    "phi2": lambda gguf, config: {"hidden_act": "gelu_new", "layer_norm_eps": config["rms_norm_eps"]},
}
