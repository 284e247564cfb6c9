"""The sharing modes have the same gradients, in float32 and float64, and so does recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import distance, gradients, group, sequences, trainable, weights_for
from tiny import EVERY, FAMILIES, tiny_checkpoint

from prefold.spec.requests import SHARING_MODES
from prefold.train import TrainBatch, logprobs
from prefold.worker.torch.model import CausalLM

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every family in both dtypes, loaded when first asked for."""
    folder, loaded = tmp_path_factory.mktemp("models"), {}

    def model(family: str, dtype: torch.dtype, **overrides) -> CausalLM:
        key = family, dtype, *overrides.items()
        if key not in loaded:
            loaded[key] = trainable(tiny_checkpoint(folder, family, tokenizer=False, **overrides), dtype)
        return loaded[key]

    return model


def of_mode(model: CausalLM, sharing: str, given: list, **options) -> dict[str, torch.Tensor]:
    batch = TrainBatch.build(model.config, given, sharing=sharing, **options)

    def loss() -> torch.Tensor:
        values = logprobs(model, batch)
        assert values.dtype == model.dtype
        return (values * weights_for(values)).sum()

    return gradients(model, loss)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", EVERY)
def test_every_mode_has_the_gradients_of_off(models, family, dtype):
    model, some = models(family, dtype), sequences(3)
    expected = of_mode(model, "off", some)
    assert set(expected) == {name for name, _ in model.named_parameters()}
    for sharing in ("full", "mlp"):
        assert distance(of_mode(model, sharing, some), expected) < TOLERANCE[dtype]


def test_values_and_rows_of_the_modes(models):
    model = models("qwen3", torch.float32)
    some, prompt_lengths = group(0)
    values, rows = {}, {}
    for sharing in SHARING_MODES:
        batch = TrainBatch.build(model.config, some, prompt_lengths=prompt_lengths, sharing=sharing)
        values[sharing], rows[sharing] = logprobs(model, batch).detach(), batch.num_rows
        assert batch.num_tokens == 4 * (20 + 5)
    # A prompt of 20, and four times the five tokens of a completion that anything is read at.
    assert rows == {"full": 20 + 4 * 5, "mlp": 20 + 4 * 5, "off": 4 * (20 + 5)}
    for sharing in ("full", "mlp"):
        torch.testing.assert_close(values[sharing], values["off"], rtol=0, atol=1e-4)


@settings(max_examples=25)
@given(data=st.data())
def test_random_tries_and_masks(models, data):
    """Any trie, any targets: gradients of full and mlp are those of off."""
    token = st.integers(0, 3)
    some = data.draw(st.lists(st.lists(token, min_size=2, max_size=12), min_size=1, max_size=8))
    masks = []
    for tokens in some:
        mask = [False, *data.draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        mask[data.draw(st.integers(1, len(tokens) - 1))] = True
        masks.append(mask)
    model = models(data.draw(st.sampled_from(FAMILIES)), torch.float64)
    expected = of_mode(model, "off", some, masks=masks)
    for sharing in ("full", "mlp"):
        ours = of_mode(model, sharing, some, masks=masks)
        for name, gradient in expected.items():
            # Where a gradient is nothing but rounding there is no norm to be relative to.
            assert (ours[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-13, name


@pytest.mark.parametrize("sharing", SHARING_MODES)
@pytest.mark.parametrize("family", EVERY)
def test_recomputing_layers_changes_nothing(models, family, sharing):
    model, some = models(family, torch.float64), sequences(5)
    expected = of_mode(model, sharing, some)
    model.recompute = True
    try:
        recomputed = of_mode(model, sharing, some)
    finally:
        model.recompute = False
    assert distance(recomputed, expected) < 1e-12


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_hand_on_more_than_one_stream(tmp_path, name):
    """Buffers that layers change, and that leave out rows which are not read."""
    model = trainable(checkpoint_of(tmp_path, name, PROGRAMS[name]), torch.float64)
    some, prompt_lengths = group(0)
    expected = of_mode(model, "off", some, prompt_lengths=prompt_lengths)
    assert set(expected) == {name for name, _ in model.named_parameters()}
    for model.recompute in (False, True):
        for sharing in SHARING_MODES:
            found = of_mode(model, sharing, some, prompt_lengths=prompt_lengths)
            assert distance(found, expected) < 1e-7


@pytest.mark.parametrize("trained", ["down", "o.", "norm", "lm_head"])
def test_recomputing_where_few_weights_are_trained(models, trained):
    """What comes before the first trained weight has no gradient, and compiled operations write into it."""
    model = models("llama", torch.float32, num_hidden_layers=2)
    some = sequences(6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    try:
        expected = of_mode(model, "full", some)
        model.recompute = True
        recomputed = of_mode(model, "full", some)
    finally:
        model.recompute = False
        model.requires_grad_(True)
    assert expected and distance(recomputed, expected) < 1e-5


def test_recomputing_holds_less(models):
    """What autograd keeps for the backward pass, counted in bytes."""
    model = models("llama", torch.float32)
    some, prompt_lengths = group(1, completions=8, prompt=60, length=20)
    batch = TrainBatch.build(model.config, some, prompt_lengths=prompt_lengths)

    def kept() -> int:
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs(model, batch).sum()
        return sum(held.values())

    whole = kept()
    model.recompute = True
    try:
        assert kept() < whole / 2
    finally:
        model.recompute = False


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_without_gradients_the_values_are_the_same(models, sharing):
    model = models("qwen2", torch.float32)
    batch = TrainBatch.build(model.config, sequences(8), sharing=sharing)
    with torch.no_grad():
        compiled = logprobs(model, batch)
    torch.testing.assert_close(compiled, logprobs(model, batch).detach(), rtol=1e-5, atol=1e-4)


def test_a_chosen_row_moves_only_what_it_sees(models):
    """The gradient of a target with respect to the embeddings of tokens that lie in other branches is zero."""
    model = models("llama", torch.float64, tie_word_embeddings=False)
    some = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9]]
    batch = TrainBatch.build(model.config, some, masks=[[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1]])
    moved = gradients(model, lambda: logprobs(model, batch)[1])["embedding"].norm(dim=1) > 0
    assert np.flatnonzero(moved.numpy()).tolist() == [1, 2, 5]


def test_under_autocast_with_and_without_gradients(models):
    """Tensors of several dtypes come to the operations there, which the compiled ones do not take."""
    model = models("llama", torch.float32)
    given, prompt_lengths = group(0)
    batch = TrainBatch.build(model.config, given, prompt_lengths=prompt_lengths)
    with torch.autocast("cpu", torch.bfloat16):
        expected = logprobs(model, batch).detach()
        with torch.no_grad():
            found = logprobs(model, batch)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.01)
