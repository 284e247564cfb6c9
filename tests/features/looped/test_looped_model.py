"""Looped models against their definitions, written down densely in `looped_dense`: at every cut, in every mode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from generating import ask, engine_of, generate, tokens_of
from looped_dense import HUGINN, LOOPED, OURO, Dense, looped_adapter, looped_checkpoint, state_noise
from running import as_request, prompts, run
from safetensors.torch import load_file, save_file
from tiny import DenseAttend

from prefold import LLM, kernels
from prefold.checkpoint import GEOMETRIES, Checkpoint, resolve
from prefold.errors import CheckpointError, InputError, UnsupportedModelError
from prefold.features.looped.gates import position_noise
from prefold.features.looped.model import LoopedLM, RowExits
from prefold.features.looped.train import visit_logprobs
from prefold.model import config_from
from prefold.spec.requests import Namespace, Readout
from prefold.train import TrainBatch, logprobs, save_model
from prefold.worker.native.arrays import NumpyArrays, erf_inverse
from prefold.worker.torch.arrays import TorchArrays
from prefold.worker.torch.load import load_model

INJECTED = {"blocks": 2, "order": [1, 0, 1], "prelude": 1, "coda": 1, "between": "inject", "noise": 0.5, "seed": 2**40}
ADDED = {"blocks": 2, "order": [1, 0, 1], "prelude": 1, "coda": 1, "between": "add"}
VARIANTS = [
    ("ouro", {}),
    ("ouro", {"num_key_value_heads": 2, "total_ut_steps": 2, "tie_word_embeddings": True, "num_hidden_layers": 1}),
    ("huginn", {}),
    ("huginn", {"n_layers_in_prelude": 2, "n_layers_in_coda": 2, "qk_bias": False, "state_seed": 2**35 + 7}),
    ("huginn", {"n_layers_in_coda": 0, "n_layers_in_prelude": 0, "tie_embeddings": False}),
    ("looped", {}),
    ("looped", {"loop": {"blocks": 1, "order": [0, 0, 0], "prelude": 1, "coda": 2, "between": "norm"}}),
    ("looped", {"num_hidden_layers": 6, "loop": INJECTED}),
    ("looped", {"num_hidden_layers": 6, "rms_norm_eps": 1e-5, "loop": ADDED}),
]
BUDGETS = [1, 3, 8, 1000]


def load(folder, **options):
    return load_model(resolve(str(folder)), **({"dtype": torch.float32, "device": "cpu"} | options))


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: f"{v[0]}-{len(v[1])}")
def folder(request, tmp_path_factory):
    family, overrides = request.param
    return looped_checkpoint(tmp_path_factory.mktemp("looped"), family, **overrides)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), dtype="float32", device="cpu")


def test_hidden_states_and_logits(folder):
    tokens = prompts(1)[3] * 4
    dense, model = Dense(folder), load(folder)
    with torch.inference_mode():
        found = model(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttend(model.config))
        expected = dense.hidden(tokens)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.logits(found), dense.logits(expected), rtol=1e-4, atol=2e-4)
    assert dense.logits(expected).std() > 0.5


@pytest.mark.parametrize("read", [[44], [0], [0, 3, 4, 40], list(range(45)), []])
def test_reading_some_rows_reads_the_same(folder, read):
    model, tokens = load(folder), torch.arange(45) * 7 % 300
    attends = DenseAttend(model.config), DenseAttend(model.config, torch.tensor(read, dtype=torch.int64))
    with torch.inference_mode():
        whole = model(tokens, torch.arange(45), attends[0])
        some = model(tokens, torch.arange(45), attends[1], attends[1].read_rows)
    torch.testing.assert_close(some, whole[read], rtol=1e-5, atol=1e-5)
    planes = len(model.config.planes)
    assert attends[1].calls == [(plane, plane == planes - 1 and len(read) < 45) for plane in range(planes)]


def test_a_visit_at_a_time_is_the_same(folder):
    model, tokens = load(folder), torch.arange(9)
    assert isinstance(model, LoopedLM)
    with torch.inference_mode():
        whole = model(tokens, tokens, DenseAttend(model.config))
        rows = model.start(tokens, tokens, DenseAttend(model.config))
        for block in model.loop.order:
            model.visit(rows, block)
        assert torch.equal(model.finish(rows), whole)


@pytest.fixture(scope="module")
def defined(folder):
    """(what computes the definition, prompts, their hidden states)"""
    dense, token_lists = Dense(folder), prompts(len(folder.name))
    return dense, token_lists, [dense.hidden(tokens) for tokens in token_lists]


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("rows", BUDGETS)
@pytest.mark.parametrize("kind", ["last", "mean", "logits"])
def test_every_readout_at_every_cut(defined, llm, sharing, rows, kind):
    (dense, token_lists, hidden), ids = defined, (3, 200, 17)
    readout = Readout(kind, ids if kind == "logits" else ())
    results = run(llm, [as_request(t) for t in token_lists], readout, sharing=sharing, rows=rows)
    for result, states in zip(results, hidden, strict=True):
        expected = {"last": states[-1], "mean": states.mean(0)}
        expected["logits"] = dense.logits(states[-1])[list(ids)]
        np.testing.assert_allclose(result.values, expected[kind], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def scored(folder):
    """(prompts, the log-probability of the last token of each)"""
    dense, token_lists = Dense(folder), [t for t in prompts(4) if len(t) > 1]
    return token_lists, [dense.logits(dense.hidden(t[:-1])).log_softmax(-1)[-1, t[-1]] for t in token_lists]


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("rows", BUDGETS)
def test_logprobs_at_every_cut(scored, llm, sharing, rows):
    token_lists, wanted = scored
    requests = [as_request(t[:-1], t[-1:]) for t in token_lists]
    results = run(llm, requests, Readout("logprobs"), sharing=sharing, rows=rows)
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result.values, [expected], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("rows", [2, pytest.param(7, marks=pytest.mark.slow), 1000])
def test_generated_tokens(folder, llm, rows):
    """Over slots: prompts in pieces, K/V of each visit in planes of their own."""
    dense, token_lists = Dense(folder), prompts(5, count=5)
    engine = engine_of(llm, rows=rows)
    requests = [ask(tokens, max_tokens=6, temperature=0, ignore_eos=True) for tokens in token_lists]
    found = tokens_of(generate(engine, requests))
    for tokens, given in zip(token_lists, found, strict=True):
        # A row's state does not depend on the rows behind it.
        for token, logits in zip(given, dense.logits(dense.hidden([*tokens, *given[:-1]]))[-6:], strict=True):
            assert logits[token] > logits.max() - 1e-3


@pytest.mark.parametrize("family", ["huginn", "looped"])
def test_lora_in_every_visit(tmp_path, family):
    """A layer's adapter works in each of its visits; of fused linears each part has its rows."""
    folder = looped_checkpoint(tmp_path, family)
    place = tmp_path / "adapter"
    merged = looped_adapter(folder, place)
    llm = LLM(str(folder), dtype="float32", device="cpu", adapters={"one": str(place)})
    for tokens in prompts(8, count=4):
        for name, dense in (("", Dense(folder)), ("one", Dense(folder, merged))):
            asked = [replace(as_request(tokens), namespace=Namespace(name))]
            found = run(llm, asked, Readout("last"), sharing="full", rows=3)
            np.testing.assert_allclose(found[0].values, dense.hidden(tokens)[-1], rtol=1e-3, atol=1e-3)


def test_training_and_saving(folder, tmp_path):
    """A step of gradient descent, saved: each tensor is as the definition's own gradients make it."""
    model, tokens = load(folder, pack=False), [5, 7, 11, 7, 30]
    sequences = [tokens, [*tokens[:3], 20], [9, 9]]
    batch = TrainBatch.build(model.config, sequences)
    (-logprobs(model, batch).sum()).backward()
    dense = Dense(folder)
    dense.t = {name: t.requires_grad_() for name, t in dense.t.items()}
    loss = 0.0
    for some in sequences:
        scores = dense.logits(dense.hidden(some[:-1])).log_softmax(-1)
        loss = loss - scores.gather(1, torch.tensor(some[1:])[:, None]).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:  # the gate has none: nothing leaves
                parameter -= 0.01 * parameter.grad
    saved = save_model(model, resolve(str(folder)), tmp_path / "saved")
    found = load_file(saved / "model.safetensors")
    assert set(found) == {name for name in dense.t if name != "freqs_cis"}
    for name, tensor in found.items():
        grad = dense.t[name].grad
        assert (grad is None) == ("gate." in name and "mlp" not in name)
        expected = dense.t[name] if grad is None else dense.t[name] - 0.01 * grad
        torch.testing.assert_close(
            tensor, expected.detach(), rtol=1e-4, atol=1e-4 * (1 + (0 if grad is None else grad.abs().max()))
        )
    again = load(saved)
    assert again.config == replace(model.config, dtype="float32")


def test_recomputing_gives_the_same_gradients(folder):
    model = load(folder, pack=False)
    batch = TrainBatch.build(model.config, [[5, 7, 11, 7, 30], [5, 7, 20]])
    found = []
    for model.recompute in (False, True):
        model.zero_grad()
        (-logprobs(model, batch).sum()).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["native", "torch"])
def arrays(request):
    return NumpyArrays(kernels.load()) if request.param == "native" else TorchArrays(torch.device("cpu"))


def test_the_noise_is_that_of_the_definition(arrays):
    def noise_of(seed, positions, columns):
        return torch.as_tensor(position_noise(arrays, seed, arrays.send(np.array(positions)), columns))

    for seed in (0, 7, 2**40 + 3, 2**63 - 1):
        found = noise_of(seed, range(5), 33)
        torch.testing.assert_close(found, state_noise(seed, 5, 33), rtol=1e-5, atol=1e-5)
        assert torch.equal(noise_of(seed, [3, 3, 1], 33), found[[3, 3, 1]])
    noise = noise_of(1, range(300), 2000)
    assert abs(float(noise.mean())) < 0.01
    # The standard deviation of the normal distribution cut off at three.
    assert abs(float(noise.std()) - 0.98658) < 0.005
    assert noise.abs().max() < 3
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 0.01
    assert abs(float((noise[:, 1:] * noise[:, :-1]).mean())) < 0.01


def test_the_inverse_of_the_error_function():
    tails = 1 - 10.0 ** -np.arange(1, 16)
    numbers = np.concatenate((np.linspace(-1, 1, 20001), tails, -tails))
    expected = torch.erfinv(torch.from_numpy(numbers)).numpy()
    np.testing.assert_allclose(erf_inverse(numbers), expected, rtol=1e-14, atol=1e-15)


def test_planes_and_sizes():
    for config in (OURO, HUGINN, LOOPED, *(GEOMETRIES[name] for name in ("ouro-1.4b", "huginn-3.5b", "looped-2x4"))):
        made = config_from(config)
        model = LoopedLM(made, dtype=torch.float32, device=torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) == made.num_parameters
        assert len(made.planes) == len(made.visited) == len(made.ropes)
    assert config_from(GEOMETRIES["ouro-1.4b"]).num_parameters == 1_434_652_673
    assert config_from(GEOMETRIES["huginn-3.5b"]).num_parameters == 3_564_976_800
    ouro, huginn, ours = (config_from(config) for config in (OURO, HUGINN, LOOPED))
    assert list(ouro.visited) == [0, 1, 2] * 4
    assert list(huginn.visited) == [0, 1, 2, 1, 2, 1, 2, 3]
    assert list(ours.visited) == [0, 1, 2, 3, 2, 3, 0, 1, 2, 3]
    of_ours, of_huginn = (sum(op.row_weights for op in made.program().layers[0]) for made in (ours, huginn))
    assert ours.linear_flops == 10 * 2 * of_ours
    assert huginn.linear_flops == 2 * (8 * of_huginn + 3 * 2 * 36 * 36)
    assert config_from(OURO | {"early_exit_step": 1}).loop.order == (0, 0)
    windowed = config_from(OURO | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2})
    assert [plane.window for plane in windowed.planes] == [None, None, 5] * 4


def test_slots_have_a_place_for_each_visit():
    plain = config_from(OURO | {"total_ut_steps": 1})
    one, four = (LLM(Checkpoint.dummy(OURO | {"total_ut_steps": n}), dtype="float32", device="cpu") for n in (1, 4))
    assert len(plain.planes) == 3
    assert four.engine.worker.facts.slot_bytes == 4 * one.engine.worker.facts.slot_bytes


def exits_of(dense: Dense, tokens: list[int], threshold: float, fewest: int = 1, most: int = 100) -> list[int]:
    """The visit that each token leaves after, from 0, one token at a time."""
    found = []
    for shares in dense.leaving(dense.visits(tokens)).T.tolist():
        left, visit = shares[0], 0
        while visit < len(shares) - 1 and visit + 1 < most and (left < threshold or visit + 1 < fewest):
            visit += 1
            left += shares[visit]
        found.append(visit)
    return found


GATED = LOOPED["loop"] | {"gate": True}
EXITING = [("ouro", "early_exit_threshold"), ("looped", "loop")]
# Normed twice where it is read, after whichever visit.
FED = {"blocks": 1, "order": [0] * 4, "prelude": 1, "between": "inject", "noise": 0.5, "gate": True}


@pytest.mark.covering(1)
@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("threshold", [0.3, 0.7])
@pytest.mark.parametrize(("family", "key"), EXITING)
def test_rows_are_read_at_their_exits(tmp_path, family, key, threshold, sharing):
    folder = looped_checkpoint(
        tmp_path, family, **{key: threshold if family == "ouro" else GATED | {"threshold": threshold}}
    )
    dense, llm, token_lists = Dense(folder), LLM(str(folder), dtype="float32", device="cpu"), prompts(3, count=8)
    expected, visits = [], set()
    for tokens in token_lists:
        leaves = exits_of(dense, tokens, threshold)
        visits |= set(leaves)
        states = dense.visits(tokens)
        expected.append(torch.stack([states[visit][row] for row, visit in enumerate(leaves)]))
    assert len(visits) > 2
    for rows in BUDGETS:
        for kind in ("last", "mean"):
            found = run(llm, [as_request(t) for t in token_lists], Readout(kind), sharing=sharing, rows=rows)
            for result, states in zip(found, expected, strict=True):
                wanted = states[-1] if kind == "last" else states.mean(0)
                np.testing.assert_allclose(result.values, wanted, rtol=1e-4, atol=1e-4)


def test_exits_between_the_fewest_and_the_most_visits(tmp_path):
    folder = looped_checkpoint(tmp_path, "ouro", total_ut_steps=5)
    dense, model, tokens = Dense(folder), load(folder), list(range(40, 70))
    states, rows = torch.stack(dense.visits(tokens)), torch.arange(30)
    for threshold, fewest, most in ((0.4, 1, 5), (0.4, 3, 5), (0.9, 1, 2), (1.0, 1, 5), (1.0, 1, 3), (0.01, 4, 4)):
        leaves = torch.tensor(exits_of(dense, tokens, threshold, fewest, most))
        exits = RowExits(torch.full((30,), threshold), torch.full((30,), fewest), torch.full((30,), most))
        for given in (exits, RowExits(threshold, fewest, most)):
            with torch.inference_mode():
                found = model(torch.tensor(tokens), rows, DenseAttend(model.config), exits=given)
            torch.testing.assert_close(found, states[leaves, rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "loop"), [("ouro", None), ("looped", GATED), ("looped", FED)])
def test_training_reads_each_visit(tmp_path, family, loop):
    folder = looped_checkpoint(tmp_path, family, **({} if loop is None else {"loop": loop}))
    dense, model, sequences = Dense(folder), load(folder, pack=False), [[5, 7, 11, 7, 30], [5, 7, 20], [9, 9]]
    batch = TrainBatch.build(model.config, sequences)
    ids = np.random.default_rng(0).integers(0, 300, (len(model.loop.order), batch.num_targets))
    found, gate = visit_logprobs(model, batch, ids)
    own, _ = visit_logprobs(model, batch)
    at = 0
    for tokens in sequences:
        states = dense.visits(tokens[:-1])
        share, left = torch.sigmoid(gate[:, at : at + len(tokens) - 1]), 1.0
        for visit, (state, leaving) in enumerate(zip(states, dense.leaving(states), strict=True)):
            scores = dense.logits(state).log_softmax(-1)
            for row in range(len(tokens) - 1):
                assert float(found.detach()[visit, at + row]) == pytest.approx(
                    float(scores[row, ids[visit, at + row]]), abs=1e-3
                )
                assert float(own.detach()[visit, at + row]) == pytest.approx(
                    float(scores[row, tokens[row + 1]]), abs=1e-3
                )
            last = visit == len(states) - 1
            torch.testing.assert_close(left * (1 if last else share[visit]), leaving, rtol=1e-4, atol=1e-4)
            left = left * (1 - share[visit])
        at += len(tokens) - 1
    gate.sum().backward()
    assert model.gate.weight.grad.abs().max() > 0
    with pytest.raises(InputError, match="coda"):
        coda = load(looped_checkpoint(tmp_path, "huginn"), pack=False)
        visit_logprobs(coda, TrainBatch.build(coda.config, sequences))


def loop(**changes):
    return LOOPED | {"loop": LOOPED["loop"] | changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OURO | {"total_ut_steps": 0}, "total_ut_steps is 0"),
        (OURO | {"early_exit_threshold": 0}, "early_exit_threshold is 0"),
        (OURO | {"early_exit_threshold": 1.5}, r"early_exit_threshold is 1\.5"),
        (HUGINN | {"mean_recurrence": -1}, "mean_recurrence is -1"),
        (HUGINN | {"test_time_noise": 0.1}, r"test_time_noise is 0\.1"),
        (HUGINN | {"injection_type": "add"}, "injection_type is 'add'"),
        (HUGINN | {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (loop(order=[0, 2]), r"loop\.order names the block 2; the model has blocks 0 to 1"),
        (loop(order=[]), r"loop\.order is empty"),
        (loop(order=[-1]), r"loop\.order names the block -1"),
        (loop(blocks=0), r"loop\.blocks is 0"),
        (loop(order=None, visits=0), r"loop\.visits is 0"),
        (loop(threshold=0), r"loop\.threshold is 0"),
        (loop(threshold=0.5), r"loop\.threshold is 0\.5, but gate is false"),
        (loop(threshold=1.01), r"loop\.threshold is 1\.01"),
        (loop(between="noise"), r"loop\.between is 'noise'"),
        (loop(blocks=3), "do not make 3 blocks"),
        (loop(gate=True, coda=2, blocks=1, order=[0]), r"loop\.gate is true, but coda is 2"),
        (loop(order=[0, 1] * 8000), "a pass visits 32,000 layers"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from(config)


@pytest.mark.parametrize(
    ("family", "lost", "message"),
    [
        ("ouro", "model.early_exit_gate.weight", r"missing: gate\.weight"),
        ("huginn", "transformer.adapter.weight", r"missing: inject\.weight"),
        ("huginn", "transformer.core_block.1.attn.qk_bias", r"missing: layers\.2\.self_attn\.k_proj\.bias"),
        ("looped", "model.layers.3.mlp.up_proj.weight", r"missing: layers\.3\.mlp\.up_proj\.weight"),
    ],
)
def test_missing_tensors_are_named(tmp_path, family, lost, message):
    folder = looped_checkpoint(tmp_path, family, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(folder)
