"""Weights that stay as the checkpoint stores them: the same results (to the bit where rows are many), less memory, and
who has them."""

from __future__ import annotations

import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from blocks import VOCAB, write_model
from tiny import tiny_checkpoint

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.engine.schedule.steps import StreamStep
from prefold.errors import InputError, OutOfMemoryError
from prefold.kernels import Blocks
from prefold.model.families import config_from
from prefold.model.machine import computes_bf16
from prefold.worker.native.load import load_native
from prefold.worker.native.model import NativeModel
from prefold.worker.native.program import NativeProgram
from prefold.worker.native.steps import NativePath, prepare_stream

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
MIXES = {
    "Q8_0": lambda name: "Q8_0",
    "Q4_1": lambda name: "Q8_0" if name == "token_embd" else "Q4_1",
    "Q4_K_M": lambda name: "Q6_K" if name.endswith(("attn_v", "ffn_down", "token_embd", "output")) else "Q4_K",
    "Q5_0 and F16": lambda name: "F16" if "attn" in name else "Q5_0",
    "Q5_K, gates of two types": lambda name: "Q8_0" if name.endswith("ffn_up") else "Q5_K",
}
# The types of experts' gate and up, and of down.
EXPERTS = {"Q4_K": "Q6_K", "MXFP4": "MXFP4", "Q8_0": "Q5_K"}


def load(path, keep, dtype="float32", invariant=False, **options) -> NativeModel:
    checkpoint = resolve(str(path))
    config = replace(config_from(checkpoint.config), invariant=invariant)
    return load_native(checkpoint, config, dtype=dtype, keep=keep, **options)


def outputs(model: NativeModel) -> list[np.ndarray]:
    rows = np.arange(20)
    step = StreamStep(rows.astype(np.int32) * 7 % VOCAB, rows.astype(np.int32), 0, np.full(20, 20), rows, rows)
    batch = prepare_stream(step, model.config)
    hidden, _ = NativeProgram(model).over_rows(batch, NativePath())
    return [hidden, model.logits(hidden).copy(), model.logits(hidden, [3, 299, 17])]


def tensors_of(path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file as it has them."""
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def matrices(model: NativeModel, name: str) -> list[np.ndarray | Blocks]:
    """What the linears with this name have, layer by layer."""
    held = model.memory.matrices
    return [held[one.weight] for layer in model.program.layers for one in layer if getattr(one, "name", "") == name]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(one.tobytes() == other.tobytes() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_file_gives_the_same_bits(tmp_path, mix, dtype, tied):
    path = write_model(tmp_path / "m.gguf", MIXES[mix], tied=tied)
    kept, plain = load(path, "file", dtype), load(path, "dtype", dtype)
    assert same(outputs(kept), outputs(plain))
    assert all(isinstance(table, Blocks) for table in kept.memory.tables.values())
    assert isinstance(matrices(kept, "down")[0], Blocks)
    assert isinstance(matrices(kept, "gate_up")[0], Blocks) == ("two types" not in mix)
    assert ("as stored" in kept.stored_as, plain.stored_as) == (True, "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate_up", EXPERTS)
def test_experts_stay_as_stored(tmp_path, gate_up, dtype):
    """Results are those of the dequantised model, in invariant mode to the bit; memory is that of the file."""

    def type_of(name: str) -> str:
        return "Q8_0" if "exps" not in name else EXPERTS[gate_up] if "down" in name else gate_up

    path = write_model(tmp_path / "m.gguf", type_of, experts=4)
    kept, plain = load(path, "file", dtype), load(path, "dtype", dtype)
    stacks = kept.memory.stacks
    assert len(stacks) == 4 and all(isinstance(stack, Blocks) for stack in stacks.values())
    of_file = sum(tensor.nbytes for name, tensor in tensors_of(path).items() if "exps" in name)
    assert of_file <= sum(stack.nbytes for stack in stacks.values()) <= 1.03 * of_file
    assert {gate_up, EXPERTS[gate_up]} <= set(re.findall(r"[A-Z0-9_]+", kept.stored_as))
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for found, expected in zip(outputs(kept), outputs(plain), strict=True):
        most = np.abs(expected.astype(np.float32)).max()
        assert np.abs(found.astype(np.float32) - expected.astype(np.float32)).max() <= tolerance * most
    kept, plain = load(path, "file", dtype, invariant=True), load(path, "dtype", dtype, invariant=True)
    assert same(outputs(kept), outputs(plain))


def test_a_mixture_that_fits_in_its_blocks_alone(tmp_path, free_memory):
    path = write_model(tmp_path / "m.gguf", lambda name: "Q4_K", experts=16)
    free_memory(path.stat().st_size * 3 // 2)
    with pytest.raises(OutOfMemoryError):
        load(path, "dtype", "bfloat16")
    assert load(path, "file", "bfloat16").memory.num_bytes < 1.05 * path.stat().st_size


def test_gates_of_experts_of_two_types_are_dequantised(tmp_path):
    """Gate and up share panels; the other matrices stay as stored."""
    path = write_model(tmp_path / "m.gguf", lambda name: "Q5_K" if "ffn_up" in name else "Q4_K", experts=4)
    kept, plain = load(path, "file"), load(path, "dtype")
    assert [isinstance(stack, Blocks) for stack in kept.memory.stacks.values()] == [False, True] * 2
    for found, expected in zip(outputs(kept), outputs(plain), strict=True):
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_sixteen_bits_are_not_widened(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    kept, plain = load(folder, "file"), load(folder, "dtype")
    assert same(outputs(kept), outputs(plain))
    assert isinstance(matrices(kept, "gate_up")[0], Blocks)
    sizes = [matrices(model, "down")[0].nbytes for model in (kept, plain)]
    assert sizes[0] * 2 == sizes[1]
    with pytest.raises(
        InputError, match="support none of the checkpoint's types"
    ):  # in bfloat16 there is nothing to gain
        load(folder, "file", "bfloat16")


def test_automatic(tmp_path, monkeypatch):
    """Weights stay as stored; "fast" widens them to bfloat16 if memory is plenty, and so does "auto" where bfloat16 is
    not multiplied."""
    path = write_model(tmp_path / "m.gguf", MIXES["Q8_0"])
    assert load(path, "auto").stored_as and load(path, "file", "bfloat16").stored_as
    assert bool(load(path, "auto", "bfloat16").stored_as) == computes_bf16()
    assert load(path, "fast").stored_as, "in float32 they are faster"
    assert not load(path, "fast", "bfloat16").stored_as
    size = load(path, "dtype", "bfloat16").memory.num_bytes
    monkeypatch.setattr("prefold.worker.native.load.available_memory", lambda: size)
    assert load(path, "fast", "bfloat16").stored_as


@pytest.mark.parametrize("experts", [8, 16])
def test_experts_of_a_sparse_mixture_stay_although_linears_may_not(tmp_path, experts):
    """In bfloat16 on a CPU that does not multiply it: few rows meet in one of sixteen experts of which two are
    chosen."""
    path = write_model(tmp_path / "m.gguf", MIXES["Q8_0"], experts=experts)
    for wish, linears, stacks in (("auto", computes_bf16(), experts == 16 or computes_bf16()), ("fast", False, False)):
        model = load(path, wish, "bfloat16")
        assert {isinstance(stack, Blocks) for stack in model.memory.stacks.values()} == {stacks}
        assert {isinstance(matrix, Blocks) for matrix in matrices(model, "o")} == {linears}
    assert not load(path, "auto", "bfloat16", invariant=True).stored_as


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


def test_the_other_executor_has_no_code_for_it(tmp_path):
    path = write_model(tmp_path / "m.gguf", MIXES["Q8_0"])
    with pytest.raises(InputError, match=r"PyTorch.*leave --weights out") as error:
        LLM(str(path), weights="file", executor="torch")
    assert error.value.field == "weights"
    assert "as stored" not in LLM(str(path), weights="auto", executor="torch").passes


def test_a_type_without_code_is_dequantised(tmp_path):
    """Beside types that there is code for. Float16 numbers are no smaller than bfloat16 ones."""
    path = write_model(tmp_path / "m.gguf", lambda name: "Q8_0" if name != "blk.0.attn_output" else "F16")
    first, second = matrices(load(path, "file", "bfloat16"), "o")
    assert isinstance(first, np.ndarray) and isinstance(second, Blocks)
