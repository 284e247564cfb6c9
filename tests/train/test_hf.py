"""A model of transformers on rows: values and gradients of its own, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from learning import distance, gradients, group, sequences, trainable, weights_for
from tiny import FAMILIES, reference, tiny_checkpoint

from prefold.errors import InputError, UnsupportedModelError
from prefold.spec.requests import SHARING_MODES
from prefold.train import TrainBatch, hf, sft_loss


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, tokenizer=False)
    return hf.share(reference(folder, attention="sdpa"))


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What normalises the input of each layer."""
    return [m for name, m in model.named_modules() if name.endswith(("input_layernorm", "ln_1"))]


def plain(model: torch.nn.Module, some: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, a sequence at a time."""
    values = []
    for tokens in some:
        ids = torch.tensor([tokens])
        values.append(model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(values)


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_values_and_gradients_are_those_of_plain_sequences(model, sharing):
    some = sequences(3)
    batch = TrainBatch.build(hf.config_of(model), some, sharing=sharing)

    def ours() -> torch.Tensor:
        values = hf.logprobs(model, batch)
        return (values * weights_for(values)).sum()

    def expected() -> torch.Tensor:
        values = plain(model, some)
        return (values * weights_for(values)).sum()

    torch.testing.assert_close(ours(), expected(), rtol=1e-4, atol=1e-4)
    assert distance(gradients(model, ours), gradients(model, expected)) < 1e-5


def test_sinks(tmp_path):
    model, some = reference(tiny_checkpoint(tmp_path, "gpt-oss", tokenizer=False)), sequences(3)
    expected = plain(model, some)
    hf.share(model)
    torch.testing.assert_close(
        hf.logprobs(model, TrainBatch.build(hf.config_of(model), some)), expected, rtol=1e-4, atol=1e-4
    )
    with pytest.raises(UnsupportedModelError, match="sinks"):
        plain(model, some)


def test_logits_of_all_rows_or_of_those_that_are_read(model):
    some, prompts = group(1)
    batch = TrainBatch.build(hf.config_of(model), some, prompt_lengths=prompts)
    with torch.no_grad():
        inputs = hf.folded_inputs(model, batch)
        assert inputs["input_ids"].shape == (1, batch.num_rows)
        whole = hf.from_logits(model(**inputs).logits, batch)
        kept = model(**inputs, logits_to_keep=torch.from_numpy(batch.step.read_rows)).logits
        expected = hf.logprobs(model, batch)
    assert kept.shape[1] == len(batch.step.read_rows) < batch.num_rows
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hf.from_logits(kept, batch), expected, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing(model):
    batch = TrainBatch.build(hf.config_of(model), sequences(5))

    def loss() -> torch.Tensor:
        return sft_loss(hf.logprobs(model, batch))

    expected = gradients(model, loss)
    dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    for dropout in dropouts:
        dropout.p = 0.0  # GPT-2 has some by default
    model.train()
    begun: list[torch.nn.Module] = []
    hooks = [layer.register_forward_pre_hook(lambda layer, _: begun.append(layer)) for layer in layers_of(model)]
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    try:
        assert distance(gradients(model, loss), expected) < 1e-6
    finally:
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        model.eval()
        for hook in hooks:
            hook.remove()
    assert len(begun) == 2 * len(hooks)  # forward, and again for the backward pass


@pytest.mark.parametrize("left", [True, False])
def test_padded_completions_as_trl_has_them(model, left):
    some, (prompt, *_) = group(2, completions=5)
    some = [tokens[i % 2 :] if left else tokens for i, tokens in enumerate(some)]  # prompts of two lengths
    some[1], some[4] = some[1][:-2], some[4][:prompt]  # a short completion, and one that is empty
    kept, width = 6, prompt + 6
    ids, mask = torch.zeros(5, width, dtype=torch.int64), torch.zeros(5, width, dtype=torch.int64)
    for i, tokens in enumerate(some):
        start = i % 2 if left else 0
        ids[i, start : start + len(tokens)], mask[i, start : start + len(tokens)] = torch.tensor(tokens), 1
    if not left:
        ids[4, prompt:], mask[4, prompt:] = 0, 0
    values = hf.completion_logprobs(model, ids, mask, kept)
    values.sum().backward()
    assert values.shape == (5, kept)
    for i, tokens in enumerate(some):
        length = prompt - (i % 2 if left else 0)
        target_count = len(tokens) - length
        assert (values[i, target_count:] == 0).all()
        if target_count:
            expected = plain(model, [tokens]).detach()[-target_count:]
            torch.testing.assert_close(values[i, :target_count].detach(), expected, rtol=1e-4, atol=1e-4)


def test_without_rows_it_is_sdpa(model):
    """A plain call of a padded batch, and generation."""
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])

    @torch.no_grad()
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return model(ids, attention_mask=mask).logits, model.generate(ids[:1], max_new_tokens=3, do_sample=False)

    found = run()
    model.set_attn_implementation("sdpa")
    try:
        expected = run()
    finally:
        hf.share(model)
    torch.testing.assert_close(found, expected)


def test_under_autocast(model):
    batch = TrainBatch.build(hf.config_of(model), sequences(4))
    with torch.no_grad():
        expected = hf.logprobs(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            values = hf.logprobs(model, batch)
    assert values.dtype == torch.float32
    assert 0 < (values - expected).abs().mean() < 0.3


def test_windows_differ_from_layer_to_layer(tmp_path):
    """Positions, not rows, count for a window: branches lie far apart in the stream."""
    folder = tiny_checkpoint(tmp_path, "gemma3", tokenizer=False)
    oracle, model = hf.share(reference(folder)), trainable(folder)
    some, prompts = group(7, completions=6, prompt=12, length=9)
    batch = TrainBatch.build(model.config, some, prompt_lengths=prompts)
    with torch.no_grad():
        values = batch.split(hf.logprobs(oracle, batch))
    for mine, tokens in zip(values, some, strict=True):
        torch.testing.assert_close(mine, plain(oracle, [tokens]).detach()[-9:], rtol=1e-4, atol=1e-4)


def test_errors(tmp_path):
    model = reference(tiny_checkpoint(tmp_path, attention_dropout=0.1, tokenizer=False), attention="sdpa")
    batch = TrainBatch.build(hf.config_of(model), [[3, 4, 5]])
    with pytest.raises(InputError, match=r"share\(model\) first"):
        hf.logprobs(model, batch)
    hf.share(model).train()
    with pytest.raises(InputError, match="attention_dropout"):
        hf.logprobs(model, batch)
    model.eval()
    assert hf.logprobs(model, batch).shape == (2,)
    model.lm_head = torch.nn.Linear(36, 307, bias=True)
    with pytest.raises(UnsupportedModelError, match="plain linear"):
        hf.logprobs(model, batch)
    model.config.architectures = ["OtherForCausalLM"]
    with pytest.raises(UnsupportedModelError, match="'OtherForCausalLM'"):
        hf.config_of(model)


def test_without_transformers(tmp_path):
    """The error names what to install."""
    import subprocess
    import sys

    code = "import sys; sys.modules['transformers'] = None; import prefold.train; import prefold.train.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in done.stderr
    assert "pip install 'prefold[train]'" in done.stderr
