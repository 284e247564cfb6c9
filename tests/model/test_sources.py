"""The tensors of a GGUF file, read a block of rows at a time, against the same tensors dequantised whole."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from prefold.checkpoint import GGUFFile
from prefold.model.sources import GGUFSource

HEADS, KV_HEADS, HEAD, WIDTH, VOCAB = 6, 3, 10, 256, 83
SHAPES = {
    "token_embd.weight": (VOCAB, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (HEADS * HEAD, WIDTH),
    "blk.0.attn_q.bias": (HEADS * HEAD,),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD, WIDTH),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, 2 * WIDTH),
}
# Parts as the ranks of a split model read them (whole heads, columns), and others.
PLACES = {
    "blk.0.attn_q.weight": [(slice(2 * HEAD, 4 * HEAD),), (slice(7, 33), slice(5, 9))],
    "blk.0.attn_q.bias": [(slice(HEAD, 3 * HEAD),)],
    "blk.0.attn_k.weight": [(slice(HEAD, 2 * HEAD),), (slice(2 * HEAD, None),)],
    "blk.0.attn_v.weight": [(slice(HEAD, 2 * HEAD),)],
    "blk.0.ffn_down.weight": [(slice(None), slice(64, 192)), (slice(3, 200), slice(1, 2))],
    "token_embd.weight": [(slice(41, 83),), (slice(0, 0),)],
}


def write(path, arch, kind, shapes=SHAPES):
    """A GGUF file of random numbers, its matrices in the ggml type `kind`."""
    rng, (block, size) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, arch)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
            continue
        values = rng.integers(0, 256, (shape[0], shape[1] // block * size), np.uint8)
        if kind.name in ("F32", "F16"):
            values = rng.normal(size=shape).astype(kind.name.lower().replace("f", "float"))
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def whole(path, stored, arch, where):
    """What a tensor of the file holds as float32, dequantised by the gguf package in one piece."""
    (tensor,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == stored)
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(stored.rpartition(".")[0])
    if arch == "llama" and heads is not None:  # the rows of a head: first, middle, second, one after the middle, ...
        order = [head * HEAD + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(HEAD // 2)]
        values = values[order]
    if arch == "gemma3" and stored.endswith("norm.weight"):
        values = values - np.float32(1)
    return torch.from_numpy(values[where].copy())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("block", [1, 3 * HEAD * WIDTH])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_what_is_read_in_blocks_is_what_is_dequantised_whole(tmp_path, kind, arch, block):
    path = tmp_path / "m.gguf"
    write(path, arch, gguf.GGMLQuantizationType[kind])

    class Blocks(GGUFSource):
        BLOCK = block

    config = SimpleNamespace(head_dim=HEAD, turned=HEAD, out_norms=False)
    norms = [name for name in Blocks(GGUFFile(path), config).shapes if name.endswith("norm.weight")]
    source = Blocks(GGUFFile(path), config, dict.fromkeys(norms, float(arch == "gemma3")))
    for name, (stored, _) in source._stored.items():
        for where in [(), *PLACES.get(stored, [])]:
            expected = whole(path, stored, arch, where)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                target = torch.full(expected.shape, 7.0, dtype=dtype)
                source.read_into(name, target, where)
                # The random bytes of quantised numbers make some that are no numbers.
                torch.testing.assert_close(target, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


LOAD = """
import sys, gguf.quants, torch
from prefold.checkpoint import resolve
from prefold.model import config_from, load_model

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

checkpoint = resolve(sys.argv[1])
config_from(checkpoint.config)
before = kib("VmRSS")
model = load_model(checkpoint, dtype=torch.bfloat16, device="cpu", pack=False)
print(kib("VmHWM") - before, sum(p.nbytes for p in model.parameters()) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    vocab, hidden = 1 << 16, 512  # 128 MiB as float32, 64 as bfloat16, and 34 in the file
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {f"blk.0.{name}.weight": (hidden, hidden) for name in
              ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
    shapes |= {f"{name}.weight": (hidden,) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    for name, shape in (shapes | {"token_embd.weight": (vocab, hidden)}).items():
        values = np.ones(shape, np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    assert weights > 64 * 1024
    assert peak < weights + 48 * 1024, f"{peak >> 10} MiB at peak for {weights >> 10} MiB of weights"
