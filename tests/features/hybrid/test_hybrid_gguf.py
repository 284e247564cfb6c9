"""GGUF files of hybrids, as llama.cpp's converter writes them: tensors under the names of the gguf package's table."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hybrids import hidden_states, hybrid_checkpoint
from running import as_request, prompts, run
from safetensors.torch import load_file
from tiny import reference

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.model import config_from
from prefold.spec.requests import SHARING_MODES, Readout

ARCHITECTURES = {"lfm2": "LFM2", "qwen3_5": "QWEN35"}


def write_hybrid_gguf(folder: Path, path: Path, **metadata: int) -> None:
    """The checkpoint of `folder` as a GGUF file. metadata: further keys of the architecture"""
    config = config_from(resolve(str(folder)).config)
    kind = gguf.MODEL_ARCH[ARCHITECTURES[folder.name]]
    arch, names = gguf.MODEL_ARCH_NAMES[kind], gguf.get_tensor_name_map(kind, config.layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    sizes = config.sizes
    if arch == "lfm2":
        writer.add_head_count_kv([config.kv_heads if mixer == "attention" else 0 for mixer in config.mixers])
        writer.add_shortconv_l_cache(sizes["taps"])
    else:
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.rotated_dim)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
        writer.add_ssm_conv_kernel(sizes["taps"])
        writer.add_ssm_state_size(sizes["key_dim"])
        writer.add_ssm_group_count(sizes["key_heads"])
        writer.add_ssm_time_step_rank(sizes["value_heads"])
        writer.add_ssm_inner_size(sizes["value_dim"] * sizes["value_heads"])
        writer.add_uint32(f"{arch}.full_attention_interval", config.mixers.index("attention") + 1)
    for key, value in metadata.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if "conv.conv" in name or "conv1d" in name:
            values = values[:, 0]
        elif name.endswith("A_log"):
            values = -np.exp(values)
        elif name.endswith("norm.weight") and arch == "qwen35" and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
        name = name.replace(".dt_bias", ".dt_proj.bias")
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored, name
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request, tmp_path_factory):
    return hybrid_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **OF_FILES[request.param])


OF_FILES = {"lfm2": {"conv_bias": False}, "qwen3_5": {"linear_num_key_heads": 2, "linear_num_value_heads": 2}}


def test_a_file_gives_what_its_checkpoint_does(folder, tmp_path):
    path = tmp_path / "m.gguf"
    write_hybrid_gguf(folder, path)
    ours, theirs = (config_from(resolve(str(one)).config) for one in (path, folder))
    assert (ours.mixers, ours.sizes, ours.rotated_dim) == (theirs.mixers, theirs.sizes, theirs.rotated_dim)
    llm, texts = LLM(str(path), dtype="float32"), prompts(6)
    expected = hidden_states(reference(folder), texts)
    for sharing in SHARING_MODES:
        for result, states in zip(
            run(llm, list(map(as_request, texts)), Readout("last"), sharing=sharing, rows=9), expected, strict=True
        ):
            assert np.abs(result.values - states[-1]).max() < 1e-4


def test_what_a_file_cannot_have_is_refused_by_name(tmp_path):
    folder = hybrid_checkpoint(tmp_path, "qwen3_5", linear_num_key_heads=2, linear_num_value_heads=4)
    write_hybrid_gguf(folder, tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"4 heads of values and 2 of keys \(qwen35.ssm.group_count\)"):
        resolve(str(tmp_path / "m.gguf"))
    write_hybrid_gguf(folder, tmp_path / "n.gguf", nextn_predict_layers=1)
    with pytest.raises(UnsupportedModelError, match="nextn_predict_layers"):
        resolve(str(tmp_path / "n.gguf"))


@pytest.mark.parametrize("heads", [[2, 0, 3, 0], [2, 0], 2, [0, 0, 0, 0]])
def test_heads_of_layers_are_one_number_or_none(tmp_path, heads):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "lfm2")
    for key, value in {"block_count": 4, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
                       "attention.head_count": 4, "shortconv.l_cache": 3}.items():  # fmt: skip
        writer.add_uint32(f"lfm2.{key}", value)
    writer.add_float32("lfm2.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_head_count_kv(heads)
    for name in ("token_embd.weight", "blk.1.attn_q.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"lfm2\.attention\.head_count_kv"):
        resolve(str(tmp_path / "m.gguf"))
