"""Enter hybrids in the tables of the core, with their keys and names of tensors in GGUF files. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...checkpoint import gguf_config
from ...checkpoint.settings import Settings
from ...engine.schedule.parts import EnginePart, add_engine_part
from ...errors import UnsupportedModelError
from ...model.families import add_families, with_heads
from ...model.names import GGUF, GGUF_OF
from ...spec.requests import FeatureCounter, add_counter
from ...worker.parts import WorkerPart, add_part
from .config import HybridConfig, granite4, lfm2, qwen3_5, qwen3_5_with_images

NAMES = {
    "lfm2": replace(
        GGUF,
        parts={
            **GGUF.parts,
            "token_embd_norm": ("norm",),  # the norm behind the layers
            "shortconv.in_proj": ("conv.in_proj",),
            "shortconv.conv": ("conv.conv",),
            "shortconv.out_proj": ("conv.out_proj",),
        },
    ),
    "qwen35": replace(
        GGUF,
        parts={
            **GGUF.parts,
            "post_attention_norm": ("post_attention_layernorm",),
            "attn_qkv": ("linear_attn.in_proj_qkv",),
            "attn_gate": ("linear_attn.in_proj_z",),
            "ssm_beta": ("linear_attn.in_proj_b",),
            "ssm_alpha": ("linear_attn.in_proj_a",),
            "ssm_conv1d": ("linear_attn.conv1d",),
            "ssm_a": ("linear_attn.A_log",),
            "ssm_dt.bias": ("linear_attn.dt_bias",),
            "ssm_norm": ("linear_attn.norm",),
            "ssm_out": ("linear_attn.out_proj",),
        },
        negative_exponentials=("linear_attn.A_log",),
    ),
}


def _lfm2(gguf: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config keys that LFM2 alone has. Layers without KV heads have a convolution."""
    kv_heads = gguf.get("attention.head_count_kv")
    layers = config["num_hidden_layers"]
    is_list = isinstance(kv_heads, list) and all(isinstance(heads, int) for heads in kv_heads)
    if not is_list or len(kv_heads) != layers or len({*kv_heads} - {0}) != 1:
        raise gguf.wrong("attention.head_count_kv", f"a list of {layers} numbers, each 0 or the same one")
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": gguf.size("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,  # files have the width itself
    }


def _qwen35(gguf: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config keys that Qwen3.5 alone has."""
    if gguf.size("nextn_predict_layers", 0, least=0):
        raise UnsupportedModelError(
            f"{gguf.file} has layers that predict further tokens ({gguf.prefix}nextn_predict_layers), which are not "
            "supported; convert the checkpoint without them (--no-mtp)"
        )
    keys, values = gguf.size("ssm.group_count"), gguf.size("ssm.time_step_rank")
    if keys != values:
        raise UnsupportedModelError(
            f"{gguf.file} has {values} heads of values and {keys} of keys ({gguf.prefix}ssm.group_count), which GGUF "
            "files have in another order; use the folder with safetensors"
        )
    return {
        "model_type": "qwen3_5_text",
        "full_attention_interval": gguf.size("full_attention_interval", 4),
        "linear_conv_kernel_dim": gguf.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": gguf.size("ssm.state_size"),
        "linear_value_head_dim": gguf.size("ssm.inner_size") // values,
    }


ARCHITECTURES = {"lfm2": "Lfm2ForCausalLM", "qwen35": "Qwen3_5ForCausalLM"}
OF_ARCHITECTURE = {"lfm2": _lfm2, "qwen35": _qwen35}


_MIXTURE = "its layers are mixtures of experts beside layers of states; its dense relatives are supported"

_STATES = "its layers keep recurrent states that prefold does not compute; Qwen3.5, LFM2 and Granite 4 hybrids work"
_WITH_STATES = {
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "falcon_mamba": "FalconMamba",
    "jamba": "Jamba",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "nemotron_h": "NemotronH",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv": "Rwkv",
    "xlstm": "xLSTM",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
}


def _held(count: int) -> str:
    from ...jobs.report.progress import format_bytes

    return f"{format_bytes(count)} held at peak"


add_counter(FeatureCounter("state_bytes_peak", title="states", text=_held))
add_families(
    with_heads("GraniteMoeHybridForCausalLM", "GraniteMoeHybrid", granite4, classified=False)
    | with_heads("Qwen3_5ForCausalLM", "Qwen3_5Text", qwen3_5, classified=False)
    | {
        "Lfm2ForCausalLM": lfm2,
        "Qwen3_5ForConditionalGeneration": qwen3_5_with_images,
    },
    model_types={
        "lfm2": "Lfm2ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        **{model_type: f"{name}ForCausalLM" for model_type, name in _WITH_STATES.items()},
    },
    refused={
        **{
            f"{name}For{head}": _STATES
            for name in _WITH_STATES.values()
            for head in ("CausalLM", "SequenceClassification")
        },
        **{f"{name}Model": _STATES for name in _WITH_STATES.values()},
        "Lfm2MoeForCausalLM": _MIXTURE,
        "Qwen3NextForCausalLM": _MIXTURE,
        "Qwen3_5MoeForCausalLM": _MIXTURE,
        "Qwen3_5MoeForConditionalGeneration": _MIXTURE,
    },
)

gguf_config.ARCHITECTURES.update(ARCHITECTURES)
gguf_config.OF_ARCHITECTURE.update(OF_ARCHITECTURE)
GGUF_OF.update(NAMES)


def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart | None:
    if not isinstance(model.config, HybridConfig):
        return None
    from .worker import state_part

    return state_part(model)


def _native_part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .native import state_part

    return state_part(model)


add_part(_part, native=_native_part, concerns=lambda config: isinstance(config, HybridConfig))


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, resources: Any) -> EnginePart | None:
    from .steps import StateFacts

    if worker.facts.of(StateFacts) is None:
        return None
    from .stream import engine_part

    return engine_part(worker, options, meter)
