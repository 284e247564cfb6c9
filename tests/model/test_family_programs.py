"""Families of prefold's own, one tiny random checkpoint each: what the native executor gives at any cut is what
transformers gives of each prompt by itself, PyTorch's executor gives the same, and no company changes a bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from generating import ask, engine_of, generate
from invariance import bits
from running import as_request, prompts, run
from safetensors.torch import load_file, save_file
from tiny import reference

from prefold import LLM, InputError
from prefold.engine.cache import CacheOptions
from prefold.errors import CheckpointError
from prefold.features.hybrid.steps import StateFacts
from prefold.model import config_from
from prefold.spec.requests import Readout

TOLERANCE = 1e-4
MAX_TOKENS = 24
IDS = (3, 200, 17)


@pytest.fixture(scope="module", params=PROGRAMS)
def case(request, tmp_path_factory):
    """(LLM, prompts, transformers' model, its hidden states and logits of each prompt)"""
    name = request.param
    folder = checkpoint_of(tmp_path_factory.mktemp(name), name, PROGRAMS[name])
    asked, model = prompts(len(name), count=9), reference(folder)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([tokens])).logits[0].numpy() for tokens in asked]
        found = [model.base_model(input_ids=torch.tensor([tokens])) for tokens in asked]
    states = [one.last_hidden_state[0].numpy() for one in found]
    with LLM(str(folder), dtype="float32", cache=None) as llm:
        yield llm, asked, model, states, logits


def check_readouts(llm: LLM, asked: list[list[int]], states, logits, sharing: str, rows: int) -> None:
    requests = [as_request(tokens) for tokens in asked]
    for kind in ("last", "mean", "logits"):
        readout = Readout(kind, IDS if kind == "logits" else ())
        for result, hidden, scores in zip(
            run(llm, requests, readout, sharing=sharing, rows=rows), states, logits, strict=True
        ):
            each = {"last": hidden[-1], "mean": hidden.mean(0), "logits": scores[-1, list(IDS)]}
            np.testing.assert_allclose(result.values, each[kind], rtol=0, atol=TOLERANCE)


def test_it_is_a_program(case):
    llm = case[0]
    assert llm.executor == "native"
    assert "transformers" not in (llm.passes or "")


@pytest.mark.parametrize("sharing", ["full", "off"])
def test_readouts_at_random_cuts(case, sharing):
    llm, asked, _, states, logits = case
    for rows in (int(np.random.default_rng(len(states[0])).integers(1, 9)), 1000):
        check_readouts(llm, asked, states, logits, sharing, rows)


def test_rows_computed_are_the_unique_tokens(case):
    llm, asked, _, _, _ = case
    before = llm.stats.rows_computed
    run(llm, [as_request(tokens) for tokens in asked], Readout("last"), sharing="full", rows=7)
    assert llm.stats.rows_computed - before == len(
        {tuple(tokens[: end + 1]) for tokens in asked for end in range(len(tokens))}
    )


def test_states_of_one_path_are_held(case):
    """Those of its branch points, the one at the cut, and the one at the end of the window before."""
    llm, asked, *_ = case
    if not llm.config.has_states:
        return
    size = llm.engine.worker.facts.of(StateFacts).state_bytes
    shapes = [part.shape for number in range(llm.config.layers) for part in llm.config.states(number)]
    assert size == 4 * sum(map(math.prod, shapes))
    llm.engine.reset_stats()
    run(llm, [as_request(tokens) for tokens in asked], Readout("last"), sharing="full", rows=7)
    assert 0 < llm.engine.stats.state_bytes_peak <= (most_branches(asked) + 2) * size


def most_branches(asked: list[list[int]]) -> int:
    """The most places on the path of a prompt where prompts part, or where one ends."""
    after = dict[tuple[int, ...], set[int]]()
    for tokens in asked:
        for end in range(len(tokens) + 1):
            after.setdefault(tuple(tokens[:end]), set()).add(tokens[end] if end < len(tokens) else -1)
    return max(sum(len(after[tuple(tokens[:end])]) > 1 for end in range(len(tokens))) for tokens in asked)


def test_generation_with_preemption_and_a_cache(case):
    llm, asked, model, _, _ = case
    options = {"slots": max(map(len, asked)) + MAX_TOKENS + 10, "max_running": 16, "reserve_output": False}
    engine = engine_of(llm, rows=16, **options)
    likeliest(model, asked, generate(engine, [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked]))
    assert engine.stats.generation.preemptions > 0
    engine = engine_of(llm, rows=32, slots=600, cache=CacheOptions(min_overlap=0))
    first = generate(engine, [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked])
    likeliest(model, asked, first)
    turns = [[*p, *r[0].tokens, 5] for p, r in zip(asked, first, strict=True)]
    likeliest(model, turns, generate(engine, [ask(p, max_tokens=3, ignore_eos=True) for p in turns]))


@torch.inference_mode()
def likeliest(model, asked, results):
    """Each token is the likeliest by transformers of what is before it, or as likely but for rounding."""
    for prompt, (sample,) in zip(asked, results, strict=True):
        tokens = list(sample.tokens)
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (logits.max(-1).values - chosen).max() <= 2 * TOLERANCE


def test_the_executor_of_pytorch(case):
    llm, asked, _, states, logits = case
    with LLM(str(llm.checkpoint.path), dtype="float32", cache=None, executor="torch") as other:
        check_readouts(other, asked, states, logits, "full", 5)


def test_no_company_changes_a_bit(case):
    llm, asked, *_ = case
    try:
        other = LLM(str(llm.checkpoint.path), dtype="float32", invariant=True)
    except InputError as error:
        assert "Mamba" in str(error)
        return

    def answers(of: list[list[int]]) -> list:
        generated = other.generate(of, max_tokens=3, temperature=0, logprobs=1, ignore_eos=True)
        return [bits(one) for one in zip(generated, other.embed(of), strict=True)]

    with other:
        found = answers(asked)
        assert all(answers([asked[number]]) == [found[number]] for number in (0, 3, 8))


@pytest.mark.parametrize("name", ["afmoe", "ernie4_5_moe", "minimax_m2"])
def test_two_ranks(tmp_path, name):
    """Gates of numbers, biases of what lies beside experts, and norms over all heads, of which a part is rotated."""
    folder, asked = checkpoint_of(tmp_path, name, PROGRAMS[name]), prompts(3, count=4)
    with torch.inference_mode():
        found = [reference(folder).base_model(input_ids=torch.tensor([tokens]))[0][0, -1] for tokens in asked]
    with LLM(str(folder), dtype="float32", cache=None, tensor_parallel=2) as llm:
        for vector, hidden in zip(llm.embed(asked, normalize=False), found, strict=True):
            np.testing.assert_allclose(vector, hidden.numpy(), rtol=0, atol=TOLERANCE)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    folder = checkpoint_of(tmp_path, "glm4_moe", PROGRAMS["glm4_moe"])
    file = folder / "model.safetensors"
    tensors, eh = load_file(file), {"model.layers.3.eh_proj.weight": torch.zeros(48, 96)}
    with LLM(str(folder), dtype="float32") as llm:
        before = llm.embed([[5, 6, 7]])
    save_file(tensors | eh | {"model.layers.3.mlp.gate.weight": torch.zeros(6, 48)}, file, {"format": "pt"})
    with LLM(str(folder), dtype="float32") as llm:
        assert (llm.embed([[5, 6, 7]]) == before).all()
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(48, 96)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: layers\.4\.eh_proj\.weight"):
        LLM(str(folder))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; it must be 2, because SparseMixer"),
        ("aria_text", {"hidden_act": "gelu"}, "hidden_act is gelu; Aria needs silu"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is softmax; MiniMax M2 needs sigmoid"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "linear attention is not supported"),
        ("minimax_m2", {"rotary_dim": 10}, "rotary_dim is 10; it must be at most 8, the size of a head"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1]}, "moe_topk is .1, 2, 1.; it must be the same in all layers"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2; Hunyuan needs 1"),
        ("afmoe", {"score_func": "softmax"}, "score_func is softmax; AFMoE needs sigmoid"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is softmax; a router of sigmoids needs sigmoid"),
        ("cohere2_moe", {"expert_selection_fn": "max"}, "expert_selection_fn is 'max'; it must be softmax or sigmoid"),
        ("exaone_moe", {"mlp_layer_types": ["dense", "linear", "sparse"]}, "mlp_layer_types is .* dense or sparse"),
        (
            "exaone_moe",
            {"is_moe_layer": [True, True, True]},
            "is_moe_layer is .* consistent with first_k",
        ),
        ("dots1", {"n_routed_experts": None}, "has no n_routed_experts"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; Solar Open needs 0"),
    ],
)
def test_settings_of_mixtures_that_are_refused(tmp_path, name, settings, message):
    config = json.loads((checkpoint_of(tmp_path, name, PROGRAMS[name]) / "config.json").read_text(encoding="utf-8"))
    assert config_from(config).experts is not None
    with pytest.raises(CheckpointError, match=message):
        config_from(config | settings)


HUNYUAN = {"moe_topk": [3] * 3, "num_shared_expert": [1] * 3, "moe_intermediate_size": [64] * 3}
HUNYUAN |= {"use_mixed_mlp_moe": True, "topk_group": False, "n_group": False, "use_rotary_pos_emb": True}
MINIMAX = {"attn_type_list": [1] * 3, "layernorm_mlp_beta": 1.0, "qk_norm_type": "per_layer", "use_qk_norm": True}
MINIMAX |= {"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0, "use_mtp": True}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("hunyuan_v1_moe", HUNYUAN | {"kv_lora_rank": None, "moe_layer_num_skipped": 0, "cla_share_factor": 2}),
        ("minimax_m2", MINIMAX | {"shared_moe_mode": "sigmoid", "num_mtp_modules": 3, "sliding_window": None}),
        ("afmoe", {"score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1, "n_group": 1, "topk_group": 1}),
        ("dots1", {"scoring_func": "noaux_tc", "moe_layer_freq": 1}),
        ("exaone_moe", {"is_moe_layer": [False, True, True], "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        ("exaone_moe", {"architectures": ["ExaoneMoEForCausalLM"]}),
        ("phimoe", {"architectures": ["PhiMoEForCausalLM"], "auto_map": {"AutoModelForCausalLM": "a.B"}}),
        ("ernie4_5_moe", {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True}),
    ],
)
def test_keys_of_published_files_say_what_transformers_computes(tmp_path, name, published):
    config = json.loads((checkpoint_of(tmp_path, name, PROGRAMS[name]) / "config.json").read_text(encoding="utf-8"))
    assert config_from(config | published) == config_from(config)


def test_positions_of_phi_moe(tmp_path):
    """Beyond the positions that it was trained on, the factors and the scale of long sequences, as its makers' code."""
    name = "phimoe with a factor of positions"
    folder = checkpoint_of(tmp_path, name, PROGRAMS[name])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for positions, kind, scale in ((512, "short", 1.3), (1024, "long", 1.1)):
        rope = config_from(config | {"max_position_embeddings": positions}).rope
        assert rope.settings["attention_factor"] == scale
        assert list(rope.settings["factors"]) == config["rope_parameters"][f"{kind}_factor"]
