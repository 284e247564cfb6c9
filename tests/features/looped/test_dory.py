"""Dory beyond what tests/model/test_family_programs.py compares: its files, its settings, adapters, other loops."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from looped_dense import looped_adapter
from running import as_request, prompts, run
from safetensors.torch import load_file, save_file
from tiny import reference

from prefold import LLM, InputError, kernels
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.features.looped.config import LoopedConfig
from prefold.model import config_from
from prefold.spec.requests import Readout
from prefold.train import TrainBatch, logprobs
from prefold.worker.torch.load import load_model

EXECUTORS = ["torch", *(["native"] if kernels.load() is not None else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("dory"), "dory", PROGRAMS["dory"])


def settings_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def copy_of(folder: Path, place: Path, tensors: dict[str, torch.Tensor] | None = None, **settings) -> Path:
    """A folder at `place` with the same model, but for its tensors and these settings."""
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    (place / "config.json").write_text(json.dumps(settings_of(folder) | settings))
    if tensors is not None:
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def last_states(folder: Path, asked: list[list[int]], executor: str, **options) -> np.ndarray:
    with LLM(str(folder), dtype="float32", device="cpu", executor=executor, **options) as llm:
        results = run(llm, [as_request(tokens) for tokens in asked], Readout("last"), sharing="full", rows=5)
        return np.stack([result.values for result in results])


@torch.inference_mode()
def by_transformers(folder: Path, asked: list[list[int]]) -> np.ndarray:
    model = reference(folder).model
    return np.stack([model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1].numpy() for tokens in asked])


def as_released(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of files that have two layers for one."""
    found = {}
    for name, tensor in tensors.items():
        name = re.sub(r"layers\.(\d+)\.self_attn\.", lambda m: f"layers.{2 * int(m[1])}.mixer.", name)
        name = re.sub(r"layers\.(\d+)\.mlp\.", lambda m: f"layers.{2 * int(m[1]) + 1}.mixer.", name)
        name = re.sub(r"layers\.(\d+)\.lambda_1", lambda m: f"layers.{2 * int(m[1])}.attn_alpha", name)
        name = re.sub(r"layers\.(\d+)\.lambda_2", lambda m: f"layers.{2 * int(m[1]) + 1}.mlp_alpha", name)
        found[name] = tensor
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_files_with_two_layers_for_one(folder, tmp_path, executor):
    asked, tensors = prompts(1, count=5), as_released(load_file(folder / "model.safetensors"))
    assert {"backbone.layers.7.mixer.up_proj.weight", "backbone.layers.6.attn_alpha"} <= tensors.keys()
    released = copy_of(folder, tmp_path / "released", tensors)
    wanted = by_transformers(released, asked)
    np.testing.assert_allclose(wanted, by_transformers(folder, asked), rtol=0, atol=1e-6)
    np.testing.assert_allclose(last_states(released, asked, executor), wanted, rtol=0, atol=1e-4)


def test_configs_that_list_layers_once(folder):
    twice = config_from(settings_of(folder))
    once = settings_of(folder) | {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1}
    once |= {"n_recurrent_layers": 2, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    for key in ("n_recurrent_layers", "layer_types", "rope_parameters"):
        assert config_from(once) == twice
        once[key] = None
    assert config_from(once) == twice
    assert isinstance(twice, LoopedConfig) and twice.visited == (0, 1, 2, 1, 2, 3)
    assert [plane.window for plane in twice.planes] == [5, 5, 5, 5, 5, None]
    assert [rope.theta for rope in twice.ropes] == [1e4] * 5 + [1e7]


def test_sizes_of_the_released_model():
    import transformers

    own = transformers.DoryConfig()
    with torch.device("meta"):
        model = transformers.DoryForCausalLM(own)
    config = config_from(own.to_dict() | {"architectures": ["DoryForCausalLM"]})
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert isinstance(config, LoopedConfig) and len(config.planes) == 8 + 2 * 20 + 8
    assert sum(plane.window is None for plane in config.planes) == 2 + 2 * 5 + 2


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("loops", [1, 3])
def test_other_numbers_of_loops(folder, tmp_path, executor, loops):
    asked = prompts(2, count=4)
    wanted = by_transformers(copy_of(folder, tmp_path / "model", n_recurrent_loops=loops), asked)
    np.testing.assert_allclose(last_states(tmp_path / "model", asked, executor), wanted, rtol=0, atol=1e-4)
    if loops == 1:
        with LLM(str(folder), dtype="float32", device="cpu", executor=executor) as llm:
            found = llm.embed(asked, normalize=False, route=(0,))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_adapters_work_before_the_learned_factors(folder, tmp_path, executor):
    asked, adapter = prompts(3, count=4), tmp_path / "adapter"
    merged = looped_adapter(folder, adapter)
    assert (
        merged["backbone.layers.2.self_attn.g_proj.weight"]
        .ne(load_file(folder / "model.safetensors")["backbone.layers.2.self_attn.g_proj.weight"])
        .all()
    )
    wanted = by_transformers(copy_of(folder, tmp_path / "merged", merged), asked)
    with LLM(str(folder), dtype="float32", device="cpu", executor=executor, adapters={"one": str(adapter)}) as llm:
        found = llm.embed(asked, normalize=False, adapter="one")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.skipif(len(EXECUTORS) == 1, reason="no kernels")
def test_bfloat16_is_near(folder):
    asked = prompts(4, count=6)
    found = [LLM(str(folder), dtype="bfloat16", device="cpu", executor=executor).embed(asked) for executor in EXECUTORS]
    exact = by_transformers(folder, asked)
    for states in found:
        assert (states * exact).sum(1).min() > 0.99


LAST_LOOP = {"recurrent_kv_cache_mode": "last_loop"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LAST_LOOP, 'recurrent_kv_cache_mode is "last_loop": .* a shared prefix depends on how prompts are cut'),
        ({"recurrent_kv_cache_mode": "first_loop"}, "recurrent_kv_cache_mode is 'first_loop'; it must be one of"),
        ({"n_recurrent_loops": 0}, "n_recurrent_loops is 0; a pass makes at least one visit"),
        ({"n_input_layers": 3}, "n_input_layers is 3; it must be an even number"),
        ({"n_recurrent_layers": 6}, "n_recurrent_layers is 6; it must be the layers"),
        ({"n_recurrent_layers": None, "n_output_layers": 6}, "do not make 1 blocks"),
        ({"layer_types": ["sliding_attention", "mlp"] * 3 + ["mlp"] * 2}, "layer_types has mlp; only full_attention"),
        ({"layer_types": ["sliding_attention", "mlp", "mlp", "full_attention"] * 2}, "each second entry is"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is .* settings for full_attention and"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}},
            r"rope_parameters\.sliding_attention\.partial_rotary_factor is 0\.4; it must be 1, because Dory",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; it must be 1, because Dory rotates"),
        ({"initializer_range": 0}, "initializer_range is 0; it must be more than 0"),
        ({"hidden_act": "xielu"}, "xielu.* needs MLPs of the kind"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(folder, settings, message):
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        config_from(settings_of(folder) | settings)


def test_one_loop_has_one_set_of_keys_whatever_the_mode(folder):
    one = settings_of(folder) | {"n_recurrent_loops": 1}
    assert config_from(one | LAST_LOOP) == config_from(one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "hrm_text"}, r"'HrmTextForCausalLM' is not supported: it is a prefix-LM \(prefix_lm\)"),
        ({"architectures": ["HrmTextForCausalLM"], "prefix_lm": True}, "no two prompts share the computation"),
        ({"model_type": "inkling2_loop_text"}, "'Inkling2LoopForCausalLM' is not supported: its loops mix messages"),
        ({"architectures": ["Inkling2LoopForConditionalGeneration"]}, "biases of relative positions"),
    ],
)
def test_other_looped_models_are_refused_with_the_reason(settings, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from(settings)


def test_it_is_not_split_or_trained(folder):
    for executor in EXECUTORS:
        with pytest.raises(UnsupportedModelError, match=r"unit sphere \(nGPT\) is not split over ranks"):
            LLM(str(folder), dtype="float32", device="cpu", executor=executor, tensor_parallel=2)
    model = load_model(LLM(str(folder), dtype="float32").checkpoint, dtype=torch.float32, device="cpu", pack=False)
    with pytest.raises(InputError, match="LM head has a bias or scales"):
        logprobs(model, TrainBatch.build(model.config, [[5, 7, 11]]))
