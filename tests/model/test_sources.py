"""The tensors of a GGUF file, read a block of rows at a time, against the same tensors dequantised whole."""

from __future__ import annotations

import mmap
import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from adapters import write_adapter
from counts import most_bytes
from tiny import tiny_checkpoint

from prefold.checkpoint import GGUFFile, resolve
from prefold.model import config_from
from prefold.model.sources import GGUFSource, RandomSource, SafetensorsSource, open_source, put
from prefold.worker.torch.tensors import BFLOAT16, array_of, tensor_of

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

    sizes = {"head_dim": HEAD, "turned": HEAD, "latent": None}
    config = SimpleNamespace(**sizes, out_norms=False, mlp_norm=False, is_unread=lambda name: False)
    norms = [name for name in Blocks(GGUFFile(path), config).shapes if name.endswith("norm.weight")]
    source = Blocks(GGUFFile(path), config, dict.fromkeys(norms, float(arch == "gemma3")))
    for name, (stored, _) in source._stored.items():
        for where in [(), *PLACES.get(stored, [])]:
            expected = whole(path, stored, arch, where)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                target = torch.full(expected.shape, 7.0, dtype=dtype)
                source.read_into(name, array_of(target), where)
                # The random bytes of quantised numbers make some that are no numbers.
                torch.testing.assert_close(target, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
            found = torch.from_numpy(source.read(name, where).astype(np.float32))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def write_model(path, kind, vocab, hidden):
    """A Llama of one layer and of ones as a GGUF file, its matrices in the ggml type `kind`."""
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
        type_ = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LOAD = """
import sys, gguf.quants, torch
from prefold.checkpoint import resolve
from prefold.model import config_from
from prefold.worker.torch.load import load_model

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
    path = tmp_path / "m.gguf"
    write_model(path, "Q8_0", 1 << 16, 512)  # 128 MiB as float32, 64 as bfloat16, and 34 in the file
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    assert weights > 64 * 1024
    assert peak < weights + 48 * 1024, f"{peak >> 10} MiB at peak for {weights >> 10} MiB of weights"


def opened(folder, offsets=None):
    checkpoint = resolve(str(folder))
    return open_source(checkpoint, config_from(checkpoint.config), {}, 0, offsets or {})


def mapped_by(values):
    """Whether an array is over a mapping of a file, and its own numbers are nowhere else."""
    while isinstance(values, np.ndarray):
        values = values.base
    return isinstance(values, mmap.mmap) or isinstance(getattr(values, "obj", None), mmap.mmap)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"]),
        ("phi3", ["self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]),  # parts of one tensor
        ("granite-moe", ["mlp.experts.1.gate_proj", "mlp.experts.3.up_proj", "mlp.experts.2.down_proj"]),  # stacks
        ("gpt2", ["self_attn.k_proj", "mlp.down_proj"]),  # stored as [inputs, outputs]
    ],
)
def test_tensors_that_lie_in_order_are_read_where_they_lie(tmp_path, architecture, names):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    sizes |= {"n_inner": 256} if architecture == "gpt2" else {}
    folder = tiny_checkpoint(tmp_path, architecture, tokenizer=False, dtype=torch.bfloat16, **sizes)
    source = opened(folder)
    for name in (f"layers.1.{name}.weight" for name in names):
        whole, shape = source.read(name), source.shapes[name]
        assert whole.dtype == BFLOAT16 and whole.shape == shape and mapped_by(whole), name
        assert most_bytes(lambda name=name: source.read(name, (slice(1, 3), slice(2, None)))) < 20_000 < whole.nbytes
        part = source.read(name, (slice(1, 3), slice(2, None)))
        assert np.array_equal(part, whole[1:3, 2:]) and mapped_by(part)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            target = torch.empty(shape, dtype=dtype)
            source.read_into(name, array_of(target))
            assert torch.equal(target, tensor_of(whole.copy()).to(dtype))
        kind, row = source.stored_type(name)
        stored = source.stored(name)
        assert (kind, row) == (stored.type, stored.rows.shape[1]) == ("BF16", 2 * shape[1])
        assert np.array_equal(stored.rows, np.ascontiguousarray(whole).view(np.uint8))
        assert mapped_by(stored.rows) == (architecture != "gpt2")


def test_heads_in_another_order_are_copied(tmp_path):
    """Cohere's checkpoints have the two halves of a head in turn, and parts of such a tensor are whole heads."""
    folder = tiny_checkpoint(tmp_path, "cohere2", tokenizer=False)
    (file,) = SafetensorsSource.opened(resolve(str(folder)))
    stored = file.array("model.layers.0.self_attn.q_proj.weight")
    size = config_from(resolve(str(folder)).config).head_dim
    turned = np.concatenate([head[at::2] for head in np.split(stored, len(stored) // size) for at in (0, 1)])
    found = opened(folder).read("layers.0.self_attn.q_proj.weight")
    assert np.array_equal(found, turned) and not np.array_equal(found, stored)
    part = (slice(size, 3 * size), slice(3, 9))
    assert np.array_equal(opened(folder).read("layers.0.self_attn.q_proj.weight", part), turned[part])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("kind", [np.float32, np.float16, BFLOAT16, np.float64])
def test_numbers_are_rounded_to_the_nearest(kind, dtype):
    """As PyTorch rounds them, also where they are too large or no numbers."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(BFLOAT16 if kind == BFLOAT16 else np.float16)
    if kind in (np.float32, np.float64):
        values = (bits.astype(np.uint32) * 65537 + 0x8000).view(np.float32)  # halves, and what lies beside them
    with np.errstate(invalid="ignore"):
        values = values.astype(kind, copy=False).reshape(256, 256)
    target = np.empty(values.shape, dtype)
    put(target, values)
    expected = tensor_of(values).to(tensor_of(target).dtype)
    torch.testing.assert_close(tensor_of(target), expected, rtol=0, atol=0, equal_nan=True)


def test_random_weights():
    shapes = {"a.weight": (1200, 1000), "b.weight": (7, 9), "norm.weight": (5,)}
    source, again, other = (RandomSource(shapes, seed, {"norm.weight": 1.0}) for seed in (3, 3, 4))
    for name, shape in shapes.items():
        values = source.read(name)
        assert values.shape == shape and np.array_equal(values, again.read(name))
        for dtype in (np.float32, BFLOAT16):
            target = np.empty(shape, dtype)
            source.read_into(name, target)
            assert np.array_equal(target, values.astype(dtype))
        if len(shape) > 1:
            assert not np.array_equal(values, other.read(name))
            part = (slice(2, 5), slice(1, None))
            assert np.array_equal(source.read(name, part), values[part])
            source.read_into(name, target := np.empty((3, shape[1] - 1), np.float32), part)
            assert np.array_equal(target, values[part])
    assert not source.read("norm.weight").any()
    numbers = source.read("a.weight")
    assert abs(numbers.mean()) < 1e-4 and abs(numbers.std() - 0.02) < 1e-4
    assert abs(np.mean(np.abs(numbers) < 0.02) - 0.6827) < 2e-3
    assert not np.array_equal(source.read("b.weight").ravel(), numbers.ravel()[:63])


WITHOUT_TORCH = """
import sys
import numpy as np
from prefold.checkpoint import resolve
from prefold.model import config_from
from prefold.model.adapters import read_adapter
from prefold.model.sources import open_source

checkpoint = resolve(sys.argv[1], **({"load_format": "dummy"} if sys.argv[2] == "dummy" else {}))
config = config_from(checkpoint.config)
source = open_source(checkpoint, config, {"embed_tokens.weight": (9, 8)}, 0, {})
for name, shape in source.shapes.items():
    values = source.read(name)
    assert values.shape == shape
    source.read_into(name, np.empty(shape, np.float32))
if sys.argv[2] == "adapter":
    assert read_adapter(sys.argv[3], config).layers[0]
print(len(source.shapes), "torch" in sys.modules)
"""


@pytest.mark.parametrize("kind", ["folder", "adapter", "dummy", "gguf-F32", "gguf-Q8_0"])
def test_reading_imports_no_torch(tmp_path, kind):
    folder = tiny_checkpoint(tmp_path, "qwen3-moe", tokenizer=False, dtype=torch.bfloat16)
    if kind == "adapter":
        folder = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    names = [str(folder), kind, str(write_adapter(tmp_path / "a", folder) if kind == "adapter" else "")]
    if kind.startswith("gguf"):
        names[0] = str(tmp_path / "m.gguf")
        write_model(names[0], kind.partition("-")[2], 64, 32)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *names], capture_output=True, text=True, check=True)
    count, has_torch = done.stdout.split()
    assert int(count) > 0 and has_torch == "False"
