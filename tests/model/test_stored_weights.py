"""Weights that stay as the checkpoint stores them: the same results (to the bit where rows are many), less memory, and
who has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import VOCAB, write_model
from tiny import DenseAttend, tiny_checkpoint

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.errors import InputError, OutOfMemoryError
from prefold.model import load_model
from prefold.model.products import GatePanels, Panels, product_kernels

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
MIXES = {
    "Q8_0": lambda name: "Q8_0",
    "Q4_1": lambda name: "Q8_0" if name == "token_embd" else "Q4_1",
    "Q4_K_M": lambda name: "Q6_K" if name.endswith(("attn_v", "ffn_down", "token_embd", "output")) else "Q4_K",
    "Q5_0 and F16": lambda name: "F16" if "attn" in name else "Q5_0",
    "Q5_K, gates of two types": lambda name: "Q8_0" if name.endswith("ffn_up") else "Q5_K",
}


def load(path, keep, dtype=torch.float32, **options):
    if product_kernels(torch.empty(1, 2, dtype=dtype)) is None:
        pytest.skip(f"no products of {dtype} on this CPU")
    return load_model(resolve(str(path)), device="cpu", dtype=dtype, keep=keep, **options)


def outputs(model):
    tokens = torch.arange(20) * 7 % VOCAB
    with torch.inference_mode():
        hidden = model(tokens, torch.arange(20), DenseAttend(model.config))
        return hidden, model.logits(hidden), model.logits(hidden, [3, 299, 17])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
def test_a_file_gives_the_same_bits(tmp_path, mix, dtype, tied):
    path = write_model(tmp_path / "m.gguf", MIXES[mix], tied=tied)
    kept, plain = load(path, "file", dtype), load(path, "dtype", dtype)
    for ours, expected in zip(outputs(kept), outputs(plain), strict=True):
        assert torch.equal(ours, expected)
    assert not kept.embedding.isfinite().any(), "nothing may read the parameter"
    assert isinstance(kept.layers[0].down.product.packed, kernels.Blocks)
    in_blocks = isinstance(kept.layers[0].gate_up.product.packed, kernels.Blocks)
    assert in_blocks == ("two types" not in mix)
    assert ("as stored" in kept.stored_as, plain.stored_as) == (True, "")


def test_sixteen_bits_are_not_widened(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    kept, plain = load(folder, "file"), load(folder, "dtype")
    for ours, expected in zip(outputs(kept), outputs(plain), strict=True):
        assert torch.equal(ours, expected)
    assert type(kept.layers[0].gate_up.product) is GatePanels
    sizes = [model.layers[0].down.product.packed.nbytes for model in (kept, plain)]
    assert sizes[0] * 2 == sizes[1]
    narrow = load(folder, "file", torch.bfloat16)
    assert not narrow.stored_as, "in bfloat16 there is nothing to gain"


def test_automatic(tmp_path, monkeypatch):
    """Weights stay as stored; "fast" widens them to bfloat16 if memory is plenty."""
    path = write_model(tmp_path / "m.gguf", MIXES["Q8_0"])
    assert load(path, "auto").stored_as and load(path, "auto", torch.bfloat16).stored_as
    assert load(path, "fast").stored_as, "in float32 they are faster"
    assert not load(path, "fast", torch.bfloat16).stored_as
    size = sum(parameter.nbytes for parameter in load(path, "dtype", torch.bfloat16, pack=False).parameters())
    monkeypatch.setattr("prefold.model.stored.available_memory", lambda device: size)
    assert load(path, "fast", torch.bfloat16).stored_as
    assert not load(path, "auto", pack=False).stored_as, "gradients need parameters"


def test_a_model_that_fits_in_its_blocks_alone(tmp_path, free_memory):
    path = write_model(tmp_path / "m.gguf", MIXES["Q4_K_M"], layers=6)
    free_memory(path.stat().st_size * 3 // 2)
    with pytest.raises(OutOfMemoryError):
        load(path, "dtype")
    assert load(path, "file").stored_as
    free_memory(path.stat().st_size // 2)
    with pytest.raises(OutOfMemoryError, match="needs"):
        load(path, "file")


def test_all_tasks_of_the_built_in_model():
    texts = ["The cat sat on the mat.", "The cat sat on the hat."]
    answers = []
    for weights in ("dtype", "file"):
        with LLM("smollm2-135m", weights=weights, dtype="float32", max_batch_rows=16) as llm:
            assert ("as stored (Q4_1, Q8_0)" in llm.passes) == (weights == "file")
            embedded = llm.embed(texts)
            generated = [answer.text for answer in llm.generate(texts, max_tokens=5)]
            scores = [score.logprob for score in llm.score(texts, [" Yes", " No"])]
            labels = [found.label for found in llm.classify(texts, ["good", "bad"])]
            answers.append((embedded, generated, labels, scores))
    (first, *same, scores), (second, *others, other_scores) = answers
    assert same == others
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores, other_scores, rtol=0, atol=1e-4)


def test_who_has_no_code_for_it(tmp_path, multiply_by):
    path = write_model(tmp_path / "m.gguf", MIXES["Q8_0"])
    multiply_by(lambda weight: None)
    with pytest.raises(InputError, match=r"no code for that on this CPU.*leave --weights out") as error:
        load(path, "file")
    assert error.value.field == "weights"
    assert not load(path, "auto").stored_as


def test_a_type_without_code_is_dequantised(tmp_path):
    """Beside types that there is code for. Float16 numbers are no smaller than bfloat16 ones."""
    path = write_model(tmp_path / "m.gguf", lambda name: "Q8_0" if name != "blk.0.attn_output" else "F16")
    model = load(path, "file", torch.bfloat16)
    assert type(model.layers[0].o.product) is Panels
    assert isinstance(model.layers[0].o.product.packed, np.ndarray)
    assert isinstance(model.layers[1].o.product.packed, kernels.Blocks)
