"""Gemma 3n in GGUF files as llama.cpp's converter writes them, in checkpoints that have towers, and with adapters."""

from __future__ import annotations

import json
import re
from statistics import NormalDist

import gguf
import numpy as np
import pytest
import torch
from adapters import merged, write_adapter
from architectures import GEMMA3N, checkpoint_of, config_for
from safetensors.torch import load_file, save_file

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.model import config_from
from prefold.text import load_tokenizer

TEXTS = ["the quick brown fox", "the quick brown dog jumps over it", "the quick", "another line, not like the others"]
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
TABLE = "model.embed_tokens_per_layer.weight"
# Rows of whole blocks.
WIDE = GEMMA3N | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": [64, 96, 64, 64]}


def write_gguf(folder, path, kind=F32, *, rounded=False, rows=None):
    """The checkpoint as a file. kind: of matrices whose rows are whole blocks of it; rounded: to numbers of that kind;
    rows: of the embedding of layers, whose further ones are the first one"""
    hf = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "gemma3n")
    writer.add_block_count(layers := hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_rope_freq_base(hf["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_sliding_window(hf["sliding_window"])
    writer.add_sliding_window_pattern([name == "sliding_attention" for name in hf["layer_types"]])
    writer.add_altup_active_idx(hf["altup_active_idx"])
    writer.add_altup_num_inputs(hf["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(hf["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(hf["num_kv_shared_layers"])
    shares = hf["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(one) if one else -np.inf for one in shares])
    writer.add_final_logit_softcapping(hf["final_logit_softcapping"])
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in ("model.altup_projections", "model.altup_unembed_projections"):
        every = [tensors.pop(f"{name}.{number}.weight") for number in range(hf["altup_num_inputs"] - 1)]
        tensors[f"{name}.weight"] = np.stack(every)
    if rows is not None:
        table = tensors[TABLE]
        tensors[TABLE] = np.concatenate((table, np.repeat(table[:1], rows - len(table), 0)))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, layers)
    for name, values in tensors.items():
        stored = names.get_name(re.sub(r"_scale$", "_scale.weight", name), try_suffixes=(".weight",))
        assert stored is not None, name
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if kind == F32 or values.ndim < 2 or values.shape[-1] % block:
            writer.add_tensor(stored, values.astype(np.float32))
            continue
        packed = gguf.quants.quantize(values, kind)
        if rounded:
            writer.add_tensor(stored, gguf.quants.dequantize(packed, kind).astype(np.float32))
        else:
            writer.add_tensor(stored, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answers(path, folder, **options):
    """Embeddings and texts. folder: of the checkpoint, which has the tokenizer"""
    tokenizer = load_tokenizer(resolve(str(folder)))
    with LLM(str(path), cache=None, dtype="float32", tokenizer=tokenizer, **options) as llm:
        return llm.embed(TEXTS, pooling="last"), [one.text for one in llm.generate(TEXTS, max_tokens=6)]


def assert_same(found, expected) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    assert found[1] == expected[1]


@pytest.mark.parametrize("rows", [None, 307])
def test_a_gguf_file_is_the_same_model(tmp_path, rows):
    folder = checkpoint_of(tmp_path / "model", "gemma3n_text", GEMMA3N, seed=2)
    write_gguf(folder, tmp_path / "m.gguf", rows=rows)
    assert_same(answers(tmp_path / "m.gguf", folder), answers(folder, folder))


def test_blocks_are_the_numbers_that_they_stand_for(tmp_path):
    folder = checkpoint_of(tmp_path / "model", "gemma3n_text", WIDE, seed=2)
    write_gguf(folder, tmp_path / "blocks.gguf", Q8_0)
    write_gguf(folder, tmp_path / "numbers.gguf", Q8_0, rounded=True)
    found = answers(tmp_path / "blocks.gguf", folder, weights="file")
    assert_same(found, answers(tmp_path / "numbers.gguf", folder))


def test_a_checkpoint_with_towers_reads_text(tmp_path):
    """It has keys and values of layers that read those of others, too, which nothing reads."""
    from transformers import Gemma3nConfig

    folder = checkpoint_of(tmp_path / "model", "gemma3n_text", GEMMA3N, seed=2)
    expected = answers(folder, folder)
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        named[f"model.language_model.layers.3.self_attn.{name}"] = torch.zeros(3)
    named["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(3, 3)
    named["model.embed_audio.embedding_projection.weight"] = torch.zeros(3, 3)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    config = Gemma3nConfig(text_config=text).to_dict()
    config |= {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    found = answers(folder, folder)
    assert np.array_equal(found[0], expected[0]) and found[1] == expected[1]


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_an_adapter_of_layers_with_gates_of_both_kinds(tmp_path, executor):
    folder = checkpoint_of(tmp_path / "model", "gemma3n_text", GEMMA3N, seed=2)
    adapter, asked = write_adapter(tmp_path / "adapter", folder, layers=range(4)), [5, 9, 200, 7, 31, 8, 12]
    with torch.inference_mode():
        expected = merged(folder, adapter).base_model(torch.tensor([asked])).last_hidden_state[0, -1].numpy()
    with LLM(str(folder), dtype="float32", executor=executor, adapters={"a": str(adapter)}) as llm:
        found = llm.embed([asked], pooling="last", normalize=False, adapter="a")[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


WRONG = {
    "altup_active_idx": (1, UnsupportedModelError, "altup_active_idx is 1; only 0, the first stream"),
    "altup_num_inputs": (9, CheckpointError, "altup_num_inputs is 9; it must be at most 8"),
    "activation_sparsity_pattern": ([0.5, 1.0, 0, 0], CheckpointError, "numbers from 0 to less than 1"),
    "intermediate_size": ([64, 64], CheckpointError, "a list of 4, one per layer"),
    "num_kv_shared_layers": (3, UnsupportedModelError, "no full_attention layer with its own keys"),
    "use_bidirectional_attention": (True, UnsupportedModelError, "both directions"),
}


@pytest.mark.parametrize("key", WRONG)
def test_settings_that_cannot_be(key):
    hf = config_for("gemma3n_text", GEMMA3N).to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    value, kind, message = WRONG[key]
    with pytest.raises(kind, match=message):
        config_from(hf | {key: value})
    assert config_from(hf).kv_layers == (0, 1, 0, 1)
