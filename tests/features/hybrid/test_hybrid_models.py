"""What hybrids are made of, and what cannot be had with them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import merged, write_adapter
from generating import ask, generate, tokens_of
from hybrids import HYBRIDS, QWEN3_5, hidden_states, hybrid_checkpoint
from invariance import check_invariant
from machines import kernels_in_use
from running import as_request, prompts, run
from tiny import SIZES, randomise, reference, write_tokenizer

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError, UnsupportedModelError
from prefold.features.hybrid.layers import gated_delta, state_space
from prefold.features.shifted.options import ShiftedReuse
from prefold.model import builders, config_from, families
from prefold.spec import environment, plugins
from prefold.spec.requests import Namespace, Readout
from prefold.worker.native.int8 import check_int8

PAGE = Path(__file__).parents[3] / "docs" / "hybrids.md"
MODULES = {
    "lfm2": ("in_proj", "out_proj", "q_proj", "k_proj", "w1", "w2"),
    "granite4_h": ("in_proj", "out_proj", "q_proj", "o_proj", "output_linear"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
}


@pytest.fixture(scope="module", params=HYBRIDS)
def folder(request, tmp_path_factory):
    return hybrid_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def by_rows(q, k, v, decay, beta, state):
    """The gated delta rule, a row at a time."""
    shared = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q * q.shape[-1] ** -0.5, k))
    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        state = state * decay[:, i].exp()[..., None, None]
        error = v[:, i] - torch.einsum("nhkv,nhk->nhv", state, k[:, i])
        state = state + torch.einsum("nhk,nhv->nhkv", k[:, i], error * beta[:, i, :, None])
        out[:, i] = torch.einsum("nhkv,nhk->nhv", state, q[:, i])
    return out, state


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 63, 64, 65, 200])
def test_chunks_give_what_rows_do(rows):
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape):
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.normalize(numbers(3, rows, 2, 8), dim=-1) for _ in range(2))
    case = q, k, numbers(3, rows, 4, 6), -numbers(3, rows, 4).exp(), numbers(3, rows, 4).sigmoid(), numbers(3, 4, 8, 6)
    for got, expected in zip(gated_delta(*case), by_rows(*case), strict=True):
        assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 63, 65, 150])
def test_chunks_of_a_state_space_give_what_rows_do(rows):
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape):
        return torch.randn(shape, generator=generator)

    c, b, x = numbers(3, rows, 2, 8), numbers(3, rows, 2, 8), numbers(3, rows, 4, 6)
    decay, step, state = -numbers(3, rows, 4).exp(), numbers(3, rows, 4).sigmoid(), numbers(3, 4, 8, 6)
    got, got_end = state_space(c, b, x, decay, step, state)
    for i in range(rows):
        keys = (step[:, i, :, None] * b[:, i].repeat_interleave(2, 1))[..., None]
        state = state * decay[:, i].exp()[..., None, None] + keys * x[:, i, :, None]
        expected = torch.einsum("nhkv,nhk->nhv", state, c[:, i].repeat_interleave(2, 1))
        assert (got[:, i] - expected).abs().max() < 1e-4
    assert (got_end - state).abs().max() < 1e-4


def test_the_config_knows_all_parameters(folder):
    llm = LLM(str(folder), dtype="float32")
    model = reference(folder)
    assert llm.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_bfloat16_is_near_float32(folder):
    texts = list(map(as_request, prompts(5)))
    wide, narrow = (
        run(LLM(str(folder), dtype=dtype), texts, Readout("last"), sharing="full", rows=9)
        for dtype in ("float32", "bfloat16")
    )
    errors = [np.abs(a.values - b.values).mean() for a, b in zip(wide, narrow, strict=True)]
    assert 0 < np.mean(errors) < 0.15


def test_adapters_are_added_to_rows_of_any_layer(folder, tmp_path):
    family = folder.name
    adapter = write_adapter(tmp_path / "adapter", folder, MODULES[family], layers=(0, 1, 2, 3), lora_alpha=1)
    llm = LLM(str(folder), dtype="float32", adapters={"a": str(adapter)})
    texts = prompts(2)
    requests = list(map(as_request, texts))
    adapted = [replace(request, namespace=Namespace("a")) for request in requests]
    results = run(llm, adapted, Readout("last"), sharing="full", rows=11)
    for result, states in zip(
        results, hidden_states(merged(folder, adapter, lambda module: 1 / 4), texts), strict=True
    ):
        assert np.abs(result.values - states[-1]).max() < 1e-4
    plain = run(llm, requests, Readout("last"), sharing="full", rows=11)
    for result, states in zip(plain, hidden_states(reference(folder), texts), strict=True):
        assert np.abs(result.values - states[-1]).max() < 1e-4
    # Beside each other in one step, too.
    engine = llm.engine
    asked = [ask(text, max_tokens=4, temperature=0, ignore_eos=True) for text in texts]
    mixed = [replace(one, namespace=Namespace("a")) if i % 2 else one for i, one in enumerate(asked)]
    alone = [tokens_of(generate(engine, [one]))[0] for one in mixed]
    assert tokens_of(generate(engine, mixed)) == alone


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_answers_alike_in_any_company(tmp_path, name):
    check_invariant(hybrid_checkpoint(tmp_path, name), dtype="float32")


def test_a_checkpoint_with_a_tower_gives_its_text_model(tmp_path):
    import transformers

    text = transformers.Qwen3_5TextConfig(**SIZES | QWEN3_5)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}
    settings = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration(settings)
    randomise(model, 3, norm=0)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    llm, texts = LLM(str(tmp_path), dtype="float32"), prompts(1)
    results = run(llm, list(map(as_request, texts)), Readout("last"), sharing="full", rows=8)
    with torch.inference_mode():
        for result, tokens in zip(results, texts, strict=True):
            states = model.eval().model.language_model(torch.tensor([tokens])).last_hidden_state
            assert np.abs(result.values - states[0, -1].numpy()).max() < 1e-4


@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_ranks_are_refused(tmp_path, executor):
    folder = str(hybrid_checkpoint(tmp_path, "lfm2"))
    with pytest.raises(UnsupportedModelError, match="layers of states is not split over ranks; use tensor_parallel 1"):
        LLM(folder, dtype="float32", device="cpu", tensor_parallel=2, executor=executor)


def test_what_cannot_be_had_is_refused(folder):
    cache = CacheOptions(shifted=ShiftedReuse(trial=True))
    with pytest.raises(InputError, match="state that runs along the sequence"):
        LLM(str(folder), dtype="float32", cache=cache)
    with pytest.raises(InputError, match="not looped"):
        LLM(str(folder), dtype="float32").generate(["a"], max_tokens=1, max_visits=2)


def test_the_example_of_the_page_gives_what_transformers_does(tmp_path, monkeypatch, keep):
    example = re.search(r"hybrid_models.py -->\n```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(example[1].splitlines()) <= 45
    plugins.load_plugins()
    keep(families.FAMILIES, builders.MIXERS, families.REGISTERED)
    families.REGISTERED.clear()
    monkeypatch.setenv(environment.PLUGINS, "")
    (tmp_path / "my_hybrids.py").write_text(example[1], encoding="utf-8")
    plugins.add_plugins([str(tmp_path / "my_hybrids.py")])
    folder = hybrid_checkpoint(tmp_path, "lfm2", conv_bias=False, block_auto_adjust_ff_dim=False)
    model, file = reference(folder), folder / "config.json"
    file.write_text(file.read_text().replace("Lfm2ForCausalLM", "MyHybridForCausalLM"))
    llm, texts = LLM(str(folder), dtype="float32"), prompts(4)
    results = run(llm, list(map(as_request, texts)), Readout("last"), sharing="full", rows=6)
    for result, states in zip(results, hidden_states(model, texts), strict=True):
        assert np.abs(result.values - states[-1]).max() < 1e-4


def test_int8_arithmetic_is_refused(tmp_path):
    config = config_from(resolve(str(hybrid_checkpoint(tmp_path, "qwen3_5"))).config)
    with (
        kernels_in_use(SimpleNamespace(has_int8=True)),
        pytest.raises(InputError, match="layers are attention and an MLP"),
    ):
        check_int8(config, "float32", "cpu", weights="auto", ranks=1, is_quantised=False)
