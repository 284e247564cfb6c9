"""int8 arithmetic: which linears of a model have it, and the text that says which must not."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from blocks import write_model
from machines import kernels_in_use
from safetensors.torch import load_file, save_file
from tiny import DenseAttend, tiny_checkpoint

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.errors import InputError
from prefold.model import config_from, int8, load_model
from prefold.model.layers import Linear
from prefold.model.stored import NOTHING
from prefold.model.transformer import CausalLM
from prefold.text import load_tokenizer

compiled = kernels.load()
needs_int8 = pytest.mark.skipif(compiled is None or not compiled.has_int8, reason="no kernels for int8")
TOKENS = list(range(5, 55))
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3}


def load(folder, **options):
    if not compiled.has_products(options.get("dtype", torch.float32)):
        pytest.skip("no products of this dtype on this CPU")
    return load_model(resolve(str(folder)), **({"dtype": torch.float32, "device": "cpu"} | options))


def hidden(model):
    tokens = torch.tensor(TOKENS)
    with torch.inference_mode():
        return model(tokens, torch.arange(len(tokens)), DenseAttend(model.config))


def in_int8(model) -> list[bool]:
    """Of each layer, whether its linears multiply in int8: all or none of them."""
    every = []
    for layer in model.layers:
        linears = [module for module in layer.modules() if isinstance(module, Linear)]
        used = {compiled.has_int8 and _is_int8(linear) for linear in linears}
        assert len(used) == 1 and len(linears) in (4, 5)
        every.append(used.pop())
    return every


def _is_int8(linear: Linear) -> bool:
    packed = linear.product.packed
    return isinstance(packed, kernels.Blocks) and bool((packed.table[:, 1] >= 256).all())


@needs_int8
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_int8_is_near_the_model(tmp_path, family, dtype):
    folder = tiny_checkpoint(tmp_path, family)
    exact, quantised = load(folder), load(folder, dtype=dtype, int8=TOKENS)
    assert all(in_int8(quantised)) and "int8 arithmetic in" in quantised.stored_as
    a, b = hidden(exact), hidden(quantised).float()
    assert not torch.equal(a, b) and torch.nn.functional.cosine_similarity(a, b, dim=1).mean() > 0.99


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
    assert re.search(r"int8 arithmetic in 2 of 3 layers .*; float32 in those .*: 1 \(0\.\d+\)", model.stored_as)
    a, b = hidden(load(folder)), hidden(model)
    assert torch.nn.functional.cosine_similarity(a, b, dim=1).min() > 0.99


@needs_int8
def test_without_the_probe_the_broken_model_would_be_wrong(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path, "llama", **SIZES)
    break_layer(folder, 1)
    monkeypatch.setattr(int8, "LEAST_COSINE", -1.0)
    a, b = hidden(load(folder)), hidden(load(folder, int8=TOKENS))
    assert torch.nn.functional.cosine_similarity(a, b, dim=1).min() < 0.98


@needs_int8
def test_an_llm_says_so_and_its_results_are_others(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    options = {"device": "cpu", "dtype": "float32"}
    with LLM(str(folder), **options) as exact, LLM(str(folder), arithmetic="int8", **options) as llm:
        assert "int8 arithmetic in 3 of 3 layers" in llm.passes and "int8" not in exact.passes
        assert llm.identity == exact.identity | {"arithmetic": "int8"}
        a, b = exact.embed(["one two", "three"]), llm.embed(["one two", "three"])
        assert (a != b).any() and ((a * b).sum(1) > 0.99).all()
        assert (llm.embed(["three"])[0] == b[1]).all()


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


def test_refusals_of_a_machine():
    options = {"weights": "auto", "ranks": 1, "is_quantised": False}
    with pytest.raises(InputError, match="this is cuda, and int8 is computed on CPUs"):
        int8.check_int8(torch.bfloat16, torch.device("cuda"), **options)
    for in_use, match in ((None, "no compiled kernels here"), (SimpleNamespace(has_int8=False), "no VNNI")):
        with kernels_in_use(in_use), pytest.raises(InputError, match=match):
            int8.check_int8(torch.bfloat16, torch.device("cpu"), **options)


@needs_int8
def test_weights_that_are_quantised_already():
    options = {"weights": "int8", "ranks": 1, "is_quantised": True}
    with pytest.raises(InputError, match="quantised already") as error:
        int8.check_int8(torch.float32, torch.device("cpu"), **options)
    assert "its blocks are used as they are" in str(error.value)


@needs_int8
@needs_int8
def test_matrices_of_mixed_types_are_counted(tmp_path):
    """Gate and up of two types have no panel of one type."""
    mixed = write_model(tmp_path / "mixed.gguf", lambda name: "Q4_0" if name.endswith("ffn_up") else "Q8_0")
    plain = write_model(tmp_path / "plain.gguf", lambda name: "Q8_0")
    assert "2 matrices of mixed types quantised a second time" in load(mixed, int8=TOKENS).stored_as
    assert "second time" not in load(plain, int8=TOKENS).stored_as


def test_models_of_another_kind_are_refused(tmp_path):
    class Other(CausalLM):
        pass

    config = load(tiny_checkpoint(tmp_path, "llama")).config
    model = Other(config, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(InputError, match="layers of another kind"):
        int8.fill_in_int8(model, [], lambda *_: None, NOTHING, TOKENS)


@pytest.mark.parametrize("vocab_size", [97, 2])
def test_a_tokenizer_may_have_more_ids_than_the_model(tmp_path, monkeypatch, vocab_size):
    """The tiny tokenizer has 265; none of the text's is below 2."""
    monkeypatch.setattr(int8, "check_int8", lambda *_, **__: None)  # whatever this CPU can
    checkpoint = resolve(str(tiny_checkpoint(tmp_path, "llama", vocab_size=vocab_size, num_hidden_layers=1)))
    options = SimpleNamespace(arithmetic="int8", weights="auto", tensor_parallel=1)
    place = torch.float32, torch.device("cpu")
    ids = int8.probe_tokens(options, checkpoint, config_from(checkpoint.config), load_tokenizer(checkpoint), *place)
    assert ids and min(ids) >= 0 and max(ids) < vocab_size


@needs_int8
def test_a_model_with_fewer_ids_than_the_tokenizer_in_int8(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", **SIZES | {"vocab_size": 97, "num_hidden_layers": 1})
    with LLM(str(folder), dtype="float32", arithmetic="int8") as llm:
        assert "int8 arithmetic in" in llm.passes
        assert len(llm.generate([[5, 9, 20]], max_tokens=2, ignore_eos=True)[0].tokens) == 2
