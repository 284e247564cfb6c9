"""What the weights are stored as is what the files hold, whatever the config says."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from prefold.checkpoint import Checkpoint, resolve
from prefold.checkpoint.identity import stored_as


def folder(tmp_path, config=None, **files):
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return resolve(str(tmp_path))


def gguf_file(tmp_path, file_type=None, types=("Q8_0", "F32")):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if file_type is not None:
        writer.add_file_type(file_type)
    for i, name in enumerate(types):
        kind = gguf.GGMLQuantizationType[name]
        values = np.ones((64 >> i, 64), np.float32)
        writer.add_tensor(f"t.{i}", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint("m", path, "gguf", {})


def test_a_folder_is_stored_in_the_dtype_of_most_weights(tmp_path):
    large, small = torch.zeros(100, 10, dtype=torch.bfloat16), torch.zeros(50)
    checkpoint = folder(tmp_path, {"torch_dtype": "float32"}, a={"w": large}, b={"v": small, "u": small.clone()})
    assert stored_as(checkpoint) == "bfloat16"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0[1,2]", b"\x02\0\0\0\0\0\0\0{}"])
def test_without_a_readable_header_the_config_says_it(tmp_path, damage):
    (tmp_path / "model.safetensors").write_bytes(damage)
    assert stored_as(folder(tmp_path, {"dtype": "float16"})) == "float16"


def test_neither(tmp_path):
    assert stored_as(folder(tmp_path)) == "unknown"


def test_gguf_by_its_file_type(tmp_path):
    assert stored_as(gguf_file(tmp_path, gguf.LlamaFileType.MOSTLY_Q4_K_M)) == "Q4_K_M GGUF"
    assert stored_as(gguf_file(tmp_path, gguf.LlamaFileType.ALL_F32)) == "F32 GGUF"


@pytest.mark.parametrize("file_type", [None, 9999, gguf.LlamaFileType.GUESSED])
def test_gguf_without_one_by_most_of_its_weights(tmp_path, file_type):
    assert stored_as(gguf_file(tmp_path, file_type)) == "Q8_0 GGUF"


def test_random_weights():
    assert stored_as(resolve("smollm2-135m", load_format="dummy")) == "random weights"
