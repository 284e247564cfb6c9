"""GGUF files of mixtures of experts, as llama.cpp's converter writes them: tensors under the names of the gguf
package's table, with the experts of a layer in one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from running import prompts
from safetensors.torch import load_file
from tiny import reference

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError
from prefold.model import config_from
from prefold.model.config import ModelConfig

BY_SIGMOIDS = {
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip
# Of latent attention: the sizes of heads over latents, and the model's own.
LATENT: dict[str, Any] = {
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank", "attention.head_count_kv": 1,
    "attention.key_length": 24, "attention.value_length": "kv_lora_rank", "attention.key_length_mla": 18,
    "attention.value_length_mla": "v_head_dim",
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "rope_theta": 1e4,
    }
}
LATENT_SIZES = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14}
# By architecture, and a variant: the model_type, settings, and the keys of a file with the config's or their values.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm4moe": ("glm4_moe", {"num_nextn_predict_layers": 1}, BY_SIGMOIDS | {"expert_gating_func": 2}),
    "dots1": ("dots1", {"attention_bias": False, "max_window_layers": 62}, BY_SIGMOIDS | {"expert_gating_func": 2}),
    "minimax-m2": ("minimax_m2", {}, {"expert_gating_func": 2}),
    "ernie4_5-moe": ("ernie4_5_moe", {"use_bias": False, "moe_norm_min": 1e-12}, {
        "expert_shared_count": "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    }),
    "hunyuan-moe": ("hunyuan_v1_moe", {"tie_word_embeddings": True}, {
        "expert_shared_count": 1, "expert_shared_feed_forward_length": "intermediate_size",
    }),
    "afmoe": ("afmoe", {"num_hidden_layers": 5, "layer_types": None, "attention_bias": False, "route_scale": 1.5}, {
        "expert_shared_count": "num_shared_experts", "leading_dense_block_count": "num_dense_layers",
        "expert_weights_scale": "route_scale", "expert_weights_norm": True, "expert_gating_func": 2,
        "attention.sliding_window": "sliding_window",
    }),
    "deepseek2": ("glm4_moe_lite", LATENT_SIZES | {
        "rope_interleave": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    }, LATENT | BY_SIGMOIDS | {"expert_gating_func": 2}),
    "deepseek2 yarn": ("deepseek_v3", LATENT_SIZES | YARN, LATENT | BY_SIGMOIDS | {
        "expert_gating_func": 2, "rope.scaling.type": {"yarn"}, "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.0707,
    }),
    "deepseek2 old": ("deepseek_v2", LATENT_SIZES | {"q_lora_rank": None}, BY_SIGMOIDS | {
        "attention.kv_lora_rank": "kv_lora_rank", "attention.key_length": 18, "attention.value_length": "v_head_dim",
        "expert_weights_norm": False,
    }),
    "exaone-moe": ("exaone_moe", {}, BY_SIGMOIDS | {
        "expert_shared_count": "num_shared_experts", "expert_gating_func": 2,
        "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": [True, False, True],
    }),
}  # fmt: skip


def folder_of(path: Path, arch: str) -> Path:
    name, settings, _ = CASES[arch]
    return checkpoint_of(path, name, PROGRAMS[name] | settings)


def write(folder: Path, path: Path, arch: str, more: dict[str, Any]) -> None:
    """The checkpoint of a folder as a GGUF file. more: further keys, with the config's or with their values"""
    hf, (arch, *variant) = resolve(str(folder)).config, arch.split()
    config = config_from(hf)
    assert config.experts is not None
    writer = gguf.GGUFWriter(path, arch)
    further = hf.get("num_nextn_predict_layers") or 0
    values = {
        "block_count": config.layers + further, "nextn_predict_layers": further,
        "context_length": config.max_positions, "embedding_length": config.hidden,
        "feed_forward_length": config.intermediate, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope.theta), "rope.dimension_count": config.turned,
        "expert_count": config.experts.count, "expert_used_count": config.experts.chosen,
        "expert_feed_forward_length": config.experts.width,
    }  # fmt: skip
    values |= {key: hf[value] if isinstance(value, str) else value for key, value in more.items()}
    for key, value in values.items():
        if isinstance(value, set):
            writer.add_string(f"{arch}.{key}", *value)
            continue
        kind = {bool: "bool", int: "uint32", float: "float32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(f"{arch}.{key}", value)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, stacks = gguf.get_tensor_name_map(number, config.layers + further), dict[str, dict[int, np.ndarray]]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".kv_b_proj." in name and "old" not in variant:
            add_up(writer, name, tensor.numpy(), config)
            continue
        name, values = re.sub("(e_score_correction)_bias|(?<=expert_bias)$", r"\1.bias", name), tensor.numpy()
        if ".experts." in name:
            stacks.setdefault(re.sub(r"experts\.\d+", "experts", name), {})[int(name.split(".")[5])] = values
            continue
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored, name
        writer.add_tensor(stored, values[0] if len(values) == 1 else values)
    for name, matrices in stacks.items():
        stored = names.get_name(name, (".weight",))
        assert stored, name
        writer.add_tensor(stored, np.stack([matrices[number] for number in range(len(matrices))]))
    if further:
        writer.add_tensor(f"blk.{config.layers}.nextn.eh_proj.weight", np.ones((3, 5), np.float32))
    writer.add_tokenizer_model("no_vocab")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_up(writer: gguf.GGUFWriter, name: str, values: np.ndarray, config: ModelConfig) -> None:
    """The matrix of keys and values over latents as newer files have it: two stacks, of which one is turned"""
    latent = config.latent
    assert latent is not None
    every = values.reshape(config.heads, latent.dim + latent.value_dim, latent.rank)
    layer = f"blk.{name.split('.')[2]}"
    writer.add_tensor(f"{layer}.attn_k_b.weight", np.ascontiguousarray(every[:, : latent.dim].swapaxes(1, 2)))
    writer.add_tensor(f"{layer}.attn_v_b.weight", np.ascontiguousarray(every[:, latent.dim :]))


@pytest.mark.parametrize("arch", CASES)
@pytest.mark.parametrize("executor", ["native", "torch"])
def test_a_file_gives_what_its_checkpoint_does(tmp_path, arch, executor):
    folder, path, asked = folder_of(tmp_path / "model", arch), tmp_path / "m.gguf", prompts(4, count=5)
    write(folder, path, arch, CASES[arch][2])
    ours, theirs = (config_from(resolve(str(one)).config) for one in (path, folder))
    assert (ours.experts, ours.mlp, ours.planes) == (theirs.experts, theirs.mlp, theirs.planes)
    with torch.inference_mode():
        expected = [reference(folder).base_model(input_ids=torch.tensor([tokens]))[0][0, -1] for tokens in asked]
    with LLM(str(path), dtype="float32", executor=executor) as llm:
        for vector, states in zip(llm.embed(asked, normalize=False), expected, strict=True):
            np.testing.assert_allclose(vector, states.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "more", "message"),
    [
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func 1; for this architecture only 2 is supported"),
        ("minimax-m2", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5; factors on experts are not"),
        ("ernie4_5-moe", {"expert_shared_feed_forward_length": 40}, "length is 40; it must be 2 times the width of an"),
        ("hunyuan-moe", {"expert_shared_count": 2}, "num_shared_expert is 2; Hunyuan needs 1"),
        ("deepseek2 old", {"expert_weights_norm": True}, "expert_weights_norm is True; it must be false: routers with"),
        ("deepseek2 yarn", {"rope.scaling.yarn_log_multiplier": {"x"}}, "yarn_log_multiplier is 'x'"),
        ("afmoe", {"expert_weights_norm": False}, "route_norm is False; AFMoE needs True"),
    ],
)
def test_keys_that_are_refused(tmp_path, arch, more, message):
    folder, path = folder_of(tmp_path / "model", arch), tmp_path / "m.gguf"
    write(folder, path, arch, CASES[arch][2] | more)
    with pytest.raises(CheckpointError, match=message):
        config_from(resolve(str(path)).config)
