"""gpt-oss: its files' MXFP4, what its configs say, and the folder that is written of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gguf.quants import GGMLQuantizationType, dequantize
from safetensors.torch import load_file, save_file
from tiny import DenseAttend, reference, tiny_checkpoint

from prefold import kernels
from prefold.checkpoint import resolve
from prefold.engine.schedule.steps import StreamStep
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.kernels import Blocks
from prefold.model import Mixture, config_from, mxfp4
from prefold.train import save_model
from prefold.worker.native.load import load_native
from prefold.worker.native.model import NativeModel
from prefold.worker.native.program import NativeProgram
from prefold.worker.native.steps import NativePath, prepare_stream
from prefold.worker.torch.load import load_model

TOKENS = torch.arange(40) * 7 % 300
SIZES = {"hidden_size": 64, "intermediate_size": 32}  # whole blocks


def logits_of(folder, **options):
    model = load_model(resolve(str(folder)), dtype=torch.float32, device="cpu", **options)
    with torch.inference_mode():
        return model.logits(model(TOKENS, torch.arange(40), DenseAttend(model.config)))


def packed_moe(generator, experts, outputs, inputs):
    """Blocks and scales such as gpt-oss's files have."""
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 127, shape, generator=generator, dtype=torch.uint8)


def as_mxfp4(folder, *, shards: bool = False):
    """Gives the experts in `folder` blocks of MXFP4, and returns the matrices that transformers makes of these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    tensors, matrices = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = packed_moe(generator, experts, outputs, inputs)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        matrices[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    if shards:  # scales in a file of their own
        (folder / "model.safetensors").unlink()
        files = {name: f"{'two' if name.endswith('_scales') else 'one'}.safetensors" for name in tensors}
        for file in set(files.values()):
            save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return matrices


@pytest.mark.skipif(kernels.load() is None, reason="no kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_mxfp4(tmp_path, dtype):
    """In their size; the results are those of their numbers."""
    folder = tiny_checkpoint(tmp_path, "gpt-oss", **SIZES)
    as_mxfp4(folder)
    checkpoint, found = resolve(str(folder)), []
    for keep in ("file", "dtype"):
        model = load_native(checkpoint, config_from(checkpoint.config), dtype=dtype, keep=keep)
        stacks = model.memory.stacks.values()
        assert all(isinstance(stack, Blocks) for stack in stacks) == (keep == "file")
        if keep == "file":
            files = load_file(folder / "model.safetensors")
            sizes = [tensor.nbytes for name, tensor in files.items() if name.endswith(("_blocks", "_scales"))]
            assert sum(stack.nbytes for stack in stacks) == sum(sizes)
            assert "MXFP4" in model.stored_as
        found.append(model_logits(model))
    most = np.abs(found[1]).max() * (1e-4 if dtype == "float32" else 0.1)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=most)


def model_logits(model: NativeModel) -> np.ndarray:
    """The logits of all tokens."""
    rows, config = np.arange(40), model.config
    step = StreamStep(TOKENS.numpy().astype(np.int32), rows.astype(np.int32), 0, np.full(40, 40), rows, rows)
    hidden, _ = NativeProgram(model).over_rows(prepare_stream(step, config), NativePath())
    return model.logits(hidden).copy()


def test_blocks_of_mxfp4_are_those_of_gguf():
    blocks, scales = packed_moe(torch.Generator().manual_seed(0), 1, 40, 64)
    blocks, scales = blocks[0].numpy(), scales[0].numpy()
    found = dequantize(mxfp4.as_blocks(blocks, scales), GGMLQuantizationType.MXFP4)
    assert np.array_equal(found, mxfp4.numbers(blocks, scales))


def test_mxfp4_is_what_transformers_reads():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256).repeat(4).view(2, 32, 1, 16).to(torch.uint8)  # every byte
    scales = torch.arange(64).view(2, 32, 1).mul(3).add(30).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    for expert in range(2):
        found = torch.from_numpy(mxfp4.numbers(blocks[expert].numpy(), scales[expert].numpy()))
        assert torch.equal(found, expected[expert])
        assert torch.equal(found.bfloat16().float(), found)


@pytest.mark.parametrize("shards", [True, False])
def test_files_of_mxfp4(tmp_path, shards):
    folder = tiny_checkpoint(tmp_path, "gpt-oss", tokenizer=False, **SIZES)
    oracle = reference(folder)
    matrices = as_mxfp4(folder, shards=shards)
    with torch.inference_mode():
        for name, matrix in matrices.items():
            oracle.get_parameter(name).copy_(matrix)
        expected = oracle(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(folder), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "has no scales: .*_scales is missing"),
        (lambda tensors, name: tensors.update({f"{name}_scales": torch.zeros(4, 64, 3, dtype=torch.uint8)}), "scales"),
        (lambda tensors, name: tensors.update({name: torch.zeros(4, 64, 64)}), "twice"),
    ],
)
def test_damaged_files_of_mxfp4(tmp_path, change, message):
    folder = tiny_checkpoint(tmp_path, "gpt-oss", tokenizer=False, **SIZES)
    as_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        logits_of(folder)


def test_what_is_saved_is_read_by_transformers(tmp_path):
    folder = tiny_checkpoint(tmp_path, "gpt-oss", **SIZES)
    as_mxfp4(folder)
    checkpoint = resolve(str(folder))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", pack=False)
    saved = save_model(model, checkpoint, tmp_path / "saved")
    with torch.inference_mode():
        expected = reference(saved)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(folder), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(saved), expected, rtol=1e-4, atol=1e-4)


def test_openai_config():
    """That of gpt-oss-20b, as its file has it."""
    hf = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "swiglu_limit": 7.0, "rope_theta": 150000,
        "initial_context_length": 4096, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }  # fmt: skip
    config = config_from(hf)
    assert (config.experts, config.sinks) == (Mixture(32, 4, 2880, biases=True, clamped=True), True)
    assert [plane.window for plane in config.planes] == [128, None, 128, None]
    assert (config.rope.kind, config.rope.theta, config.rope.settings["truncate"]) == ("yarn", 150000.0, False)
    few = {
        key: hf[key] for key in ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    }
    own = config_from(few | {"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32})
    assert np.all([getattr(own, key) == getattr(config, key) for key in ("rope", "planes", "head_dim")])
    assert own.experts.chosen == config.experts.chosen
    with pytest.raises(CheckpointError, match=r"swiglu_limit is 5\.0"):
        config_from(hf | {"swiglu_limit": 5.0})
    with pytest.raises(UnsupportedModelError, match=r"quantised \(method 'awq'\)"):
        config_from(hf | {"quantization_config": {"quant_method": "awq"}})
