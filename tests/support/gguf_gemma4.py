"""Checkpoints of Gemma 4, a text model, as GGUF files that llama.cpp's converter writes."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
from safetensors.torch import load_file

# Names of gguf's tables lack these; the converter has them in its own code.
OWN = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def write_gguf(folder, path, kind=gguf.GGMLQuantizationType.F32):
    """The checkpoint as a file. kind: of matrices whose rows are whole blocks of it"""
    hf = json.loads((folder / "config.json").read_text())
    layers, types = hf["num_hidden_layers"], hf["layer_types"]
    far = next((one for one in hf["per_layer_config"].values()), {})
    shared, width = hf["num_kv_shared_layers"], hf["intermediate_size"]
    is_near = [name == "sliding_attention" for name in types]
    writer, arch = gguf.GGUFWriter(path, "gemma4"), gguf.MODEL_ARCH.GEMMA4
    writer.add_block_count(layers)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_head_count(hf["num_attention_heads"])
    wide = hf["use_double_wide_mlp"]
    writer.add_feed_forward_length([width * (1 + (wide and n >= layers - shared)) for n in range(layers)])
    heads = far.get("num_key_value_heads", hf["num_key_value_heads"])
    writer.add_head_count_kv([hf["num_key_value_heads"] if near else heads for near in is_near])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    for add, dim in ((writer.add_key_length, far["head_dim"]), (writer.add_value_length, far["head_dim"])):
        add(dim)
    writer.add_rope_dimension_count(far["head_dim"])
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        writer.add_uint32(f"gemma4.{key}", hf["head_dim"])
    writer.add_sliding_window(hf["sliding_window"])
    writer.add_sliding_window_pattern(is_near)
    writer.add_uint32("gemma4.attention.shared_kv_layers", shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", hf["hidden_size_per_layer_input"] or 0)
    rope = hf["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if hf["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(hf["final_logit_softcapping"])
    if hf["enable_moe_block"]:
        writer.add_expert_count(hf["num_experts"])
        writer.add_expert_used_count(hf["top_k_experts"])
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    turned = int(far["head_dim"] * rope["full_attention"]["partial_rotary_factor"] / 2)
    still = far["head_dim"] // 2 - turned
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * still, np.float32))
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            number, own = match[1], OWN.get(match[2])
            if own is not None:
                writer.add_tensor(f"blk.{number}.{own}", tensor.numpy())
                continue
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        values = tensor.numpy()
        stored = stored if stored.endswith(".weight") else f"{stored}.weight"
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if values.ndim > 1 and values.shape[-1] % block == 0 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
