"""Models that transformers' modules compute, from outside: adapters, heads, memory, what is refused and how."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from architectures import GEMMA4, TAKEN, checkpoint_of, config_for
from running import as_request, prompts, run
from safetensors.torch import load_file, save_file
from tiny import randomise, reference, tiny_checkpoint, write_tokenizer

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.cli.models import sections
from prefold.errors import CheckpointError, InputError, MissingExtraError, UnsupportedModelError
from prefold.features.hf import fused
from prefold.model import config_from
from prefold.spec.requests import Namespace, Readout, Request
from prefold.worker.torch.load import load_model


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setenv("PREFOLD_TRANSFORMERS", "all")


def model_of(folder, **options) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", **options)


# Adapters


def write_lora(folder, llm, linears, seed):
    """A PEFT folder that adapts these linears, by their names in transformers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name in linears:
        inputs, outputs = llm.config.linears[name]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / 6
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6}))
    return str(folder)


def merged(folder, adapter):
    model, tensors = reference(folder), load_file(adapter + "/adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                change = 1.5 * tensors[name.replace("lora_A", "lora_B")] @ a
                target = parameters[name.removeprefix("base_model.model.").replace("lora_A.", "")]
                target += change.T if ".c_" in name else change  # GPT-2's linears are stored transposed
    return model


@pytest.mark.parametrize("name", ["phi3", "olmo2", "gpt2", pytest.param("olmoe", marks=pytest.mark.slow)])
def test_rows_of_several_adapters_and_of_none(tmp_path, forced, name):
    folder = checkpoint_of(tmp_path / "model", name, TAKEN.get(name, {}))
    bare = model_of(folder)
    linears = [linear for linear in bare.config.linears if ".0." not in linear]
    assert len(linears) >= 8
    adapters = {one: write_lora(tmp_path / one, bare, linears[i::2], i) for i, one in enumerate(("x", "y"))}
    llm = model_of(folder, adapters=adapters)
    oracles = {"": reference(folder)} | {one: merged(folder, path) for one, path in adapters.items()}
    some = [
        Request(np.array(p, np.int32), namespace=Namespace(one)) for p in prompts(6, count=6) for one in ("", "x", "y")
    ]
    for rows in (3, 100):
        results = run(llm, some, Readout("last"), sharing="full", rows=rows)
        for request, result in zip(some, results, strict=True):
            with torch.inference_mode():
                ids = torch.from_numpy(request.tokens[None].astype(np.int64))
                expected = oracles[request.namespace.adapter].base_model(input_ids=ids)[0][0, -1].numpy()
            np.testing.assert_allclose(result.values, expected, rtol=0, atol=2e-4)
    options = {"max_tokens": 6, "ignore_eos": True}
    tokens = [llm.generate([[5, 6, 7, 8]], adapter=one or None, **options)[0].tokens for one in oracles]
    for given, model in zip(tokens, oracles.values(), strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[5, 6, 7, 8, *given]])).logits[0, 3:-1]
        assert (logits.max(-1).values - logits[torch.arange(6), torch.tensor(given)]).max() < 1e-3


def test_an_adapter_of_what_is_no_linear_of_every_row_is_refused(tmp_path, forced):
    folder = checkpoint_of(tmp_path / "model", "olmo2", {})
    bare = model_of(folder)
    path = write_lora(tmp_path / "x", bare, ["model.layers.0.self_attn.q_proj"], 0)
    file = path + "/adapter_model.safetensors"
    save_file({key.replace("self_attn", "nothing"): value for key, value in load_file(file).items()}, file)
    with pytest.raises(UnsupportedModelError, match=r"nothing\.q_proj, which is not a linear of the model"):
        model_of(folder, adapters={"x": path})


# Other heads, dtypes, random weights


def test_a_classifier(tmp_path, forced):
    folder = tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3)
    llm = model_of(folder)
    asked = prompts(3, count=6)
    with torch.inference_mode():
        model = reference(folder, "classifier")
        expected = [model(input_ids=torch.tensor([p])).logits[0].numpy() for p in asked]
    results = run(llm, [as_request(p) for p in asked], Readout("head"), sharing="full", rows=5)
    np.testing.assert_allclose([r.values for r in results], expected, rtol=0, atol=1e-4)
    with pytest.raises(UnsupportedModelError, match="has a classification head"):
        llm.generate("yes", max_tokens=1)


def test_a_model_without_a_head(tmp_path, forced):
    folder = tiny_checkpoint(tmp_path, "qwen3", head="bare")
    llm, asked = model_of(folder), prompts(3, count=6)
    with torch.inference_mode():
        model = reference(folder, "bare")
        expected = [model(input_ids=torch.tensor([p])).last_hidden_state[0].mean(0).numpy() for p in asked]
    results = run(llm, [as_request(p) for p in asked], Readout("mean"), sharing="full", rows=5)
    np.testing.assert_allclose([r.values for r in results], expected, rtol=0, atol=1e-4)


def test_bfloat16(tmp_path, forced):
    folder = checkpoint_of(tmp_path, "cohere2", TAKEN["cohere2"])
    llm, asked = LLM(str(folder), dtype="bfloat16", device="cpu"), prompts(3, count=6)
    results = run(llm, [as_request(p) for p in asked], Readout("logits", (3, 5)), sharing="full", rows=5)
    with torch.inference_mode():
        model = reference(folder)
        expected = [model(input_ids=torch.tensor([p])).logits[0, -1, [3, 5]].numpy() for p in asked]
    np.testing.assert_allclose([r.values for r in results], expected, rtol=0.1, atol=0.05 * np.abs(expected).max())


def test_random_weights_are_the_same_for_the_same_seed(tmp_path, forced):
    folder = checkpoint_of(tmp_path, "olmo2", {})
    for path in folder.glob("*.safetensors"):
        path.unlink()
    one, two, three = (
        LLM(str(folder), load_format="dummy", dtype="float32", seed=seed).embed([[5, 6]]) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, two)
    assert not np.allclose(one, three)


def test_sizes_are_those_that_attention_is_called_with(tmp_path, forced):
    llm = model_of(checkpoint_of(tmp_path, "gemma4_unified_text", TAKEN["gemma4_unified_text"]))
    config = llm.config
    assert [plane.window for plane in config.planes] == [5, 5, None]
    assert {(one.kv_heads, one.head_dim) for one in config.attention} == {(2, 8), (1, 16)}
    assert (config.heads, config.kv_heads, config.head_dim) == (6, 2, 16)
    assert config.num_parameters == sum(parameter.numel() for parameter in reference(tmp_path).parameters())


WITHOUT_SHARED = GEMMA4 | {"num_kv_shared_layers": 0}


@pytest.mark.parametrize(
    "settings",
    [
        WITHOUT_SHARED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},  # as the 31B
        WITHOUT_SHARED | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        WITHOUT_SHARED | {"hidden_size_per_layer_input": 0},
    ],
)
def test_each_kind_of_gemma_4_gives_what_transformers_does(tmp_path, settings):
    folder = checkpoint_of(tmp_path, "gemma4_text", settings)
    assert_last_states(model_of(folder), reference(folder).model)


def test_of_gemma_4_with_towers_text_is_read(tmp_path, forced):
    import transformers

    text = config_for("gemma4_text", GEMMA4)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 840}
    config = transformers.Gemma4Config(text_config=text.to_dict(), vision_config=vision)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    randomise(model, 1)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    llm = model_of(tmp_path, images=False, executor="torch")
    assert_last_states(llm, model.model.language_model)
    assert "vision" not in "".join(name for name, _ in llm.model.named_parameters())


@torch.inference_mode()
def assert_last_states(llm, decoder) -> None:
    texts = prompts(3)
    results = run(llm, list(map(as_request, texts)), Readout("last"), sharing="full", rows=7)
    for result, tokens in zip(results, texts, strict=True):
        state = decoder(torch.tensor([tokens])).last_hidden_state[0, -1].numpy()
        assert np.abs(result.values - state).max() < 1e-4


def test_factors_that_change_with_the_length_bound_it(tmp_path, forced):
    llm = model_of(checkpoint_of(tmp_path, "phi3", TAKEN["phi3"]))
    assert llm.config.max_positions == 64
    with pytest.raises(InputError, match="64"):
        llm.embed([[5] * 65])


def test_norms_mlps_and_rotations_are_ours(tmp_path, forced, monkeypatch):
    """Of each layer four norms, an MLP and a rotation; and one norm behind the layers."""
    rotated = []
    theirs = fused.Rotation.__call__
    monkeypatch.setattr(fused.Rotation, "__call__", lambda self, *given: rotated.append(0) or theirs(self, *given))
    folder = tiny_checkpoint(tmp_path, "qwen3")
    llm = model_of(folder)
    kinds = Counter(type(module).__name__ for module in llm.model.decoder.modules())
    assert (kinds["RowNorm"], kinds["RowMlp"], kinds["RowLinear"]) == (13, 3, 15)
    assert "Linear" not in kinds and "Qwen3RMSNorm" not in kinds
    rotated.clear()
    llm.embed([[5, 6, 7]])
    assert len(rotated) == 3
    # A model beside it in transformers is as before.
    reference(folder)(input_ids=torch.tensor([[5, 6, 7]]))
    assert len(rotated) == 3


@pytest.mark.parametrize(
    ("name", "settings"),
    [("olmo", {"clip_qkv": 0.3}), ("opt", {"do_layer_norm_before": False, "ffn_dim": 64, "word_embed_proj_dim": 24})],
)
def test_settings_that_a_family_of_its_own_does_not_do(tmp_path, name, settings):
    folder = checkpoint_of(tmp_path / "model", name, settings)
    llm, tokens = model_of(folder), [5, 6, 7, 8]
    assert "transformers" in llm.passes
    with torch.inference_mode():
        expected = reference(folder)(input_ids=torch.tensor([[*tokens, 9]])).logits[0, 3].log_softmax(-1)[9]
    assert llm.score(tokens, [9]).logprobs == pytest.approx([float(expected)], abs=1e-4)


# Where it says so


def test_the_list_of_models_and_the_summary_say_so(tmp_path):
    lines = dict(sections())["Architectures"]
    assert any("prefold[transformers]" in line for line in lines)
    assert "DiffLlamaForCausalLM" not in lines


def test_families_of_its_own_are_not_touched(tmp_path):
    llm = model_of(tiny_checkpoint(tmp_path, "qwen3"))
    assert type(llm.config).__name__ == "ModelConfig" and "transformers" not in llm.passes


# Errors

DIFF_LLAMA = {
    "architectures": ["DiffLlamaForCausalLM"],
    "model_type": "diffllama",
    "hidden_size": 48,
    "num_attention_heads": 6,
}


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r"'DiffLlamaForCausalLM'.*pip install 'prefold\[transformers\]'"):
        config_from(DIFF_LLAMA)
    monkeypatch.setenv("PREFOLD_TRANSFORMERS", "all")
    with pytest.raises(MissingExtraError, match=r"PREFOLD_TRANSFORMERS=all.*prefold\[transformers\]"):
        config_from({"architectures": ["Qwen3ForCausalLM"]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "nothing"},
            "neither prefold nor transformers .* has a causal model of this name with model_type 'nothing'",
        ),
        ({"model_type": "llama"}, "'DiffLlamaForCausalLM' is not supported.*'llama'"),
        ({"model_type": "nothing", "auto_map": {"AutoModelForCausalLM": "x.X"}}, "own code, auto_map, is never run"),
        ({"auto_map": {"AutoModelForCausalLM": "x.X"}}, "auto_map.*never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_attention_heads": "six"}, "transformers .* refuses the config"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "'T5ForConditionalGeneration'"),
    ],
)
def test_configs_that_are_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        config_from(DIFF_LLAMA | settings)


def test_a_gguf_file_of_an_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'bloom' is not supported.*safetensors may run, through"):
        resolve(str(tmp_path / "m.gguf"))


def test_tensors_that_do_not_fit(tmp_path, forced):
    folder = checkpoint_of(tmp_path, "olmo2", {})
    tensors = load_file(folder / "model.safetensors")
    gone = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors | {"model.layers.1.strange.weight": gone}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.self_attn\.q_proj.*unexpected: .*strange"):
        model_of(folder)


def test_pickles_are_never_opened(tmp_path, forced):
    folder = checkpoint_of(tmp_path, "olmo2", {})
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only pickled weights"):
        model_of(folder)


def test_a_split_model_is_refused(tmp_path, forced):
    folder = checkpoint_of(tmp_path, "olmo2", {})
    with pytest.raises(InputError, match="tensor_parallel is 2, but transformers' modules"):
        load_model(resolve(str(folder)), dtype=torch.float32, device="cpu", ranks=SimpleNamespace(size=2))


def test_weights_that_are_to_stay_as_stored_are_refused(tmp_path, forced):
    folder = checkpoint_of(tmp_path, "olmo2", {})
    with pytest.raises(InputError, match=r"cannot use weights as the checkpoint stores them.*leave --weights out"):
        model_of(folder, weights="file")
