"""int8 arithmetic: which linears of a model have it, and the text that says which must not."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from adapters import write_adapter
from blocks import write_model
from machines import kernels_in_use
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.engine.schedule.steps import SlotStep
from prefold.errors import InputError
from prefold.kernels import Blocks
from prefold.kernels.abi import IN_INT8
from prefold.model import config_from
from prefold.model.adapters import read_adapter
from prefold.model.program import Linear
from prefold.text import load_tokenizer
from prefold.worker.native import int8
from prefold.worker.native.load import DTYPES, load_native
from prefold.worker.native.program import NativeProgram, Part
from prefold.worker.native.steps import prepare_slots
from prefold.worker.native.store import NativeStore, layouts_of

compiled = kernels.load()
needs_int8 = pytest.mark.skipif(compiled is None or not compiled.has_int8, reason="no kernels for int8")
TOKENS = np.arange(5, 55)
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3}


def load(folder, *, dtype="float32", **options):
    if not compiled.has_products(DTYPES[dtype]):
        pytest.skip("no products of this dtype on this CPU")
    checkpoint = resolve(str(folder))
    return load_native(checkpoint, config_from(checkpoint.config), dtype=dtype, **options)


def hidden(model, adapters=(), numbers=None):
    """Final hidden states of one sequence, float32 [rows, hidden]. numbers: of the adapter of each row"""
    config, rows, one = model.config, np.arange(len(TOKENS)), np.zeros(1, np.int64)
    step = SlotStep(
        TOKENS, rows, rows + 1, run_start=one + 1, run_count=one + len(rows), run_position=one, run_first=one,
        run_last=one + len(rows), read_rows=rows, adapters=numbers,
    )  # fmt: skip
    batch = prepare_slots(step, replace(config, invariant=False))
    store = NativeStore(layouts_of(model.kernels, config, model.dtype), len(rows) + 1, model.kernels)
    return NativeProgram(model, adapters).over_slots(batch, store).astype(np.float32)


def cosines(a, b):
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def in_int8(model) -> list[bool]:
    """Of each layer, whether its linears multiply in int8: all or none of them."""
    every = []
    for layer in model.program.layers:
        matrices = [model.memory.matrices[one.weight] for one in layer if isinstance(one, Linear)]
        used = {isinstance(matrix, Blocks) and bool((matrix.table[:, 1] >= IN_INT8).all()) for matrix in matrices}
        assert len(used) == 1 and len(matrices) in (4, 5)
        every.append(used.pop())
    return every


@needs_int8
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_int8_is_near_the_model(tmp_path, family, dtype):
    folder = tiny_checkpoint(tmp_path, family)
    exact, quantised = load(folder), load(folder, dtype=dtype, int8=TOKENS)
    assert all(in_int8(quantised)) and "int8 arithmetic in" in quantised.stored_as
    a, b = hidden(exact), hidden(quantised)
    assert not np.array_equal(a, b) and cosines(a, b).mean() > 0.99


def break_layer(folder, number: int) -> None:
    """Makes a model with a channel of huge activations in the MLP of a layer: the others of its group become zeros, and
    they are what the layer gives."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    up, down = (tensors[f"model.layers.{number}.mlp.{name}_proj.weight"] for name in ("up", "down"))
    up[7] *= 1e5
    down[:, 7] *= 1e-5
    save_file(tensors, path, metadata={"format": "pt"})


@needs_int8
def test_the_probe_catches_a_channel_of_huge_activations(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", **SIZES)
    assert in_int8(load(folder, int8=TOKENS)) == [True, True, True]
    break_layer(folder, 1)
    model = load(folder, int8=TOKENS)
    assert in_int8(model) == [True, False, True]
    assert re.search(r"int8 arithmetic in 2 of 3 layers .*; float32 in layers .*: 1 \(0\.\d+\)", model.stored_as)
    assert cosines(hidden(load(folder)), hidden(model)).min() > 0.99


@needs_int8
def test_without_the_probe_the_broken_model_would_be_wrong(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path, "llama", **SIZES)
    break_layer(folder, 1)
    monkeypatch.setattr(int8, "LEAST_COSINE", -1.0)
    assert cosines(hidden(load(folder)), hidden(load(folder, int8=TOKENS))).min() < 0.98


@needs_int8
def test_the_probe_computes_what_the_model_does(tmp_path):
    """Through one layer after the other, and at once."""
    model = load(tiny_checkpoint(tmp_path, "gemma3"))
    probe = int8.Probe(model, TOKENS)
    for number in range(len(model.program.layers)):
        probe.layer(number, {})
    assert list(probe.report.cosines) == [0, 1, 2] and min(probe.report.cosines.values()) > 0.9999
    end = NativeProgram(model, part=Part(ends=True)).end_of(probe.exact, probe.batch)
    np.testing.assert_array_equal(end, hidden(model))


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_int8_are_near_those_on_the_dtype(tmp_path, dtype):
    folder = tiny_checkpoint(tmp_path / "m", "qwen3", tokenizer=False)
    paths = [write_adapter(tmp_path / name, folder, seed=seed) for seed, name in enumerate(("one", "two"))]
    exact, quantised = load(folder), load(folder, dtype=dtype, int8=TOKENS)
    adapters = [read_adapter(path, exact.config, name=path.name) for path in paths]
    numbers = np.arange(len(TOKENS)) % 3 - 1
    plain, a, b = hidden(exact), hidden(exact, adapters, numbers), hidden(quantised, adapters, numbers)
    assert all(in_int8(quantised)) and np.abs(b - a).max() < 0.3 * np.abs(a - plain).max()


@needs_int8
def test_an_llm_says_so_and_its_results_are_others(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    options = {"device": "cpu", "dtype": "float32"}
    with LLM(str(folder), **options) as exact, LLM(str(folder), arithmetic="int8", **options) as llm:
        assert "int8 arithmetic in 3 of 3 layers" in llm.passes and "int8" not in exact.passes
        assert llm.identity == exact.identity | {"arithmetic": "int8"}
        a, b = exact.embed(["one two", "three"]), llm.embed(["one two", "three"])
        assert (a != b).any() and ((a * b).sum(1) > 0.99).all()
        np.testing.assert_allclose(llm.embed(["three"])[0], b[1], atol=1e-6)


@needs_int8
@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"arithmetic": "float", "weights": "int8"}, "for int8 arithmetic alone", "--arithmetic int8"),
        ({"tensor_parallel": 2}, "split over 2 ranks", "leave --arithmetic out"),
        ({"dtype": "float16"}, "the dtype is float16", "use --dtype bfloat16 or float32"),
        ({"weights": "dtype"}, "'dtype' says", "leave --weights out"),
        ({"weights": "file"}, "'file' says", "leave --weights out"),
    ],
)
def test_refusals(tmp_path, options, message, remedy):
    folder = tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(InputError, match=message) as error:
        LLM(str(folder), **({"device": "cpu", "dtype": "float32", "arithmetic": "int8"} | options))
    assert remedy in str(error.value)


def config_of(folder):
    return config_from(resolve(str(folder)).config)


def test_refusals_of_a_machine(tmp_path):
    config = config_of(tiny_checkpoint(tmp_path, "llama"))
    options = {"weights": "auto", "ranks": 1, "is_quantised": False}
    with pytest.raises(InputError, match="the device is cuda, and int8 runs only on CPUs"):
        int8.check_int8(config, "bfloat16", "cuda", **options)
    for in_use, match in ((None, "no compiled kernels here"), (SimpleNamespace(has_int8=False), "no VNNI")):
        with kernels_in_use(in_use), pytest.raises(InputError, match=match):
            int8.check_int8(config, "bfloat16", "cpu", **options)


@needs_int8
def test_weights_that_are_quantised_already(tmp_path):
    config = config_of(tiny_checkpoint(tmp_path, "llama"))
    with pytest.raises(InputError, match="quantised already") as error:
        int8.check_int8(config, "float32", "cpu", weights="int8", ranks=1, is_quantised=True)
    assert "the blocks are used directly" in str(error.value)


@needs_int8
def test_matrices_of_mixed_types_are_counted(tmp_path):
    """Gate and up of two types have no panel of one type."""
    mixed = write_model(tmp_path / "mixed.gguf", lambda name: "Q4_0" if name.endswith("ffn_up") else "Q8_0")
    plain = write_model(tmp_path / "plain.gguf", lambda name: "Q8_0")
    assert "2 matrices of mixed types quantised a second time" in load(mixed, int8=TOKENS).stored_as
    assert "second time" not in load(plain, int8=TOKENS).stored_as


@needs_int8
def test_the_torch_executor_has_none(tmp_path):
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    with pytest.raises(InputError, match=r"PyTorch's executor has no int8 arithmetic.*executor auto"):
        LLM(folder, device="cpu", dtype="float32", arithmetic="int8", executor="torch")


@pytest.mark.parametrize("vocab_size", [97, 2])
def test_a_tokenizer_may_have_more_ids_than_the_model(tmp_path, vocab_size):
    """The tiny tokenizer has 265; none of the text's is below 2."""
    checkpoint = resolve(str(tiny_checkpoint(tmp_path, "llama", vocab_size=vocab_size, num_hidden_layers=1)))
    ids = int8.probe_tokens(load_tokenizer(checkpoint), config_from(checkpoint.config)).tolist()
    assert ids and min(ids) >= 0 and max(ids) < vocab_size


@needs_int8
def test_a_model_with_fewer_ids_than_the_tokenizer_in_int8(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", **SIZES | {"vocab_size": 97, "num_hidden_layers": 1})
    with LLM(str(folder), dtype="float32", arithmetic="int8") as llm:
        assert "int8 arithmetic in" in llm.passes
        assert len(llm.generate([[5, 9, 20]], max_tokens=2, ignore_eos=True)[0].tokens) == 2
