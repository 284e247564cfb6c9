"""Gemma 4 in GGUF files as llama.cpp's converter writes them, and in checkpoints that have towers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from architectures import GEMMA4, GEMMA4_26B, checkpoint_of, config_for
from gguf_gemma4 import write_gguf
from safetensors.torch import load_file, save_file

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.errors import UnsupportedModelError
from prefold.model import config_from
from prefold.text import load_tokenizer

TEXTS = ["the quick brown fox", "the quick brown dog jumps over it", "the quick", "another line, not like the others"]
FORMS = {"E2B": GEMMA4, "26B": GEMMA4_26B}


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
    "num_kv_shared_layers": (3, "no full_attention layer with its own keys"),
    "use_bidirectional_attention": ("all", "both directions"),
    "vocab_size_per_layer_input": (300, "must be vocab_size, 307"),
    "per_layer_config": ({"0": {"head_dim": 16}}, "all full-attention layers only"),
}


@pytest.mark.parametrize("key", WRONG)
def test_settings_that_cannot_be(key):
    hf = config_for("gemma4_text", GEMMA4).to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    value, message = WRONG[key]
    with pytest.raises(UnsupportedModelError, match=message):
        config_from(hf | {key: value})
    assert config_from(hf).kv_layers == (0, 1, 0, 1)
