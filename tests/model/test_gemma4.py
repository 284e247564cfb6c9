"""Gemma 4 in GGUF files as llama.cpp's converter writes them, and in checkpoints that have towers."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
import pytest
import torch
from architectures import GEMMA4, GEMMA4_26B, checkpoint_of, config_for
from safetensors.torch import load_file, save_file

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.errors import UnsupportedModelError
from prefold.model import config_from
from prefold.text import load_tokenizer

TEXTS = ["the quick brown fox", "the quick brown dog jumps over it", "the quick", "another line, not like the others"]
# Names of gguf's tables lack these; the converter has them in its own code.
OWN = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
FORMS = {"E2B": GEMMA4, "26B": GEMMA4_26B}


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


def answers(path, folder, **options):
    """Embeddings and texts. folder: of the checkpoint, which has the tokenizer"""
    tokenizer = load_tokenizer(resolve(str(folder)))
    with LLM(str(path), cache=None, dtype="float32", tokenizer=tokenizer, **options) as llm:
        return llm.embed(TEXTS, pooling="last"), [one.text for one in llm.generate(TEXTS, max_tokens=6)]


@pytest.mark.parametrize("form", FORMS)
def test_a_gguf_file_is_the_same_model(tmp_path, form):
    folder = checkpoint_of(tmp_path / "model", "gemma4_text", FORMS[form], seed=2)
    write_gguf(folder, tmp_path / "m.gguf")
    found = answers(tmp_path / "m.gguf", folder)
    expected = answers(folder, folder)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    assert found[1] == expected[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_with_towers_reads_text(tmp_path, form):
    """It has keys and values of layers that read those of others, too, which nothing reads."""
    from transformers import Gemma4Config

    folder = checkpoint_of(tmp_path / "model", "gemma4_text", FORMS[form], seed=2)
    expected = answers(folder, folder)
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight") if form == "E2B" else ():
        named[f"model.language_model.layers.3.self_attn.{name}"] = torch.zeros(3)
    named["model.vision_tower.patch_embedder.input_proj.weight"] = torch.zeros(3, 3)
    named["model.embed_audio.embedding_projection.weight"] = torch.zeros(3, 3)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    config = Gemma4Config(text_config=text).to_dict()
    config |= {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    found = answers(folder, folder)
    assert np.array_equal(found[0], expected[0]) and found[1] == expected[1]


WRONG = {
    "num_kv_shared_layers": (3, "no layer with keys and values of full_attention"),
    "use_bidirectional_attention": ("all", "both directions"),
    "vocab_size_per_layer_input": (300, "must have vocab_size rows, 307"),
    "per_layer_config": ({"0": {"head_dim": 16}}, "layers of full attention alone"),
}


@pytest.mark.parametrize("key", WRONG)
def test_settings_that_cannot_be(key):
    hf = config_for("gemma4_text", GEMMA4).to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    value, message = WRONG[key]
    with pytest.raises(UnsupportedModelError, match=message):
        config_from(hf | {key: value})
    assert config_from(hf).kv_layers == (0, 1, 0, 1)
