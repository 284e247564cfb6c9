"""Log-probabilities and losses against plain transformers and PyTorch, a sequence at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from learning import group, sequences, trainable
from tiny import EVERY, reference, tiny_checkpoint
from torch.nn import functional as F

from prefold.errors import InputError
from prefold.train import TrainBatch, dpo_loss, dpo_margins, group_loss, logprobs, sft_loss
from prefold.worker.torch.load import load_model
from prefold.worker.torch.model import CausalLM

BETA = 0.3


def plain_logprobs(model: torch.nn.Module, tokens: list[int], prompt: int) -> torch.Tensor:
    """Of the tokens behind the prompt, under a model of transformers."""
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]


@pytest.fixture(scope="module", params=EVERY)
def both(request, tmp_path_factory):
    """Our model and transformers', of the same weights."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, tokenizer=False)
    return trainable(folder), reference(folder)


@pytest.fixture(scope="module")
def batch_and_numbers(tmp_path_factory):
    """A batch of pairs, and log-probabilities as three policies might give them, each apart from the other."""
    config = trainable(tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=False)).config
    batch = TrainBatch.build(config, group(2)[0], prompt_lengths=[20] * 4)
    generator = torch.Generator().manual_seed(0)
    first = -5 * torch.rand(batch.num_targets, generator=generator)
    others = [first + 0.5 * torch.randn(batch.num_targets, generator=generator) for _ in range(2)]
    return batch, first.requires_grad_(), *others


def embedding_gradients(both, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model, oracle = both
    (mine,) = torch.autograd.grad(ours, model.embedding)
    (expected,) = torch.autograd.grad(theirs, oracle.get_input_embeddings().weight)
    return mine, expected


def test_logprobs(both):
    model, oracle = both
    some = sequences(1)
    batch = TrainBatch.build(model.config, some)
    ours = batch.split(logprobs(model, batch))
    for mine, tokens in zip(ours, some, strict=True):
        torch.testing.assert_close(mine, plain_logprobs(oracle, tokens, 1), rtol=1e-4, atol=1e-4)


def test_sft(both):
    model, oracle = both
    some, prompts = group(0)
    batch = TrainBatch.build(model.config, some, prompt_lengths=prompts)
    ours = sft_loss(logprobs(model, batch))
    ids = torch.tensor(some)
    labels = ids.clone()
    labels[:, : prompts[0]] = -100
    theirs = oracle(ids, labels=labels).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*embedding_gradients(both, ours, theirs), rtol=1e-3, atol=1e-5)


def test_dpo(both):
    model, oracle = both
    some, prompts = group(4)
    batch = TrainBatch.build(model.config, some, prompt_lengths=prompts)
    values = logprobs(model, batch)
    before = values.detach() + 0.1 * torch.randn(len(values), generator=torch.Generator().manual_seed(0))
    ours = dpo_loss(values, before, batch, beta=BETA)
    parts, old = [plain_logprobs(oracle, s, p).sum() for s, p in zip(some, prompts, strict=True)], batch.sums(before)
    theirs = torch.stack(
        [-F.logsigmoid(BETA * ((parts[i] - old[i]) - (parts[i + 1] - old[i + 1]))) for i in (0, 2)]
    ).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*embedding_gradients(both, ours, theirs), rtol=1e-3, atol=1e-4)


def test_dpo_margins_and_smoothing(batch_and_numbers):
    batch, values, before, _ = batch_and_numbers
    ratios = [part.sum() for part in batch.split(values - before)]
    margins = torch.stack([ratios[0] - ratios[1], ratios[2] - ratios[3]])
    torch.testing.assert_close(dpo_margins(values, before, batch), margins)
    expected = -(0.8 * F.logsigmoid(BETA * margins) + 0.2 * F.logsigmoid(-BETA * margins)).mean()
    torch.testing.assert_close(dpo_loss(values, before, batch, beta=BETA, label_smoothing=0.2), expected)


def test_group_loss_by_the_book(batch_and_numbers):
    batch, values, old, before = batch_and_numbers
    advantages = torch.tensor([1.0, -0.5, 0.3, -2.0])
    ours = group_loss(values, old, advantages, batch, clip=0.2, clip_high=0.3, reference=before, kl=0.05)
    sequence_losses = []
    for mine, theirs, start, advantage in zip(*map(batch.split, (values, old, before)), advantages, strict=True):
        tokens = []
        for p, q, r in zip(mine, theirs, start, strict=True):
            ratio = torch.exp(p - q)
            objective = min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
            divergence = torch.exp(r - p) - (r - p) - 1
            tokens.append(objective - 0.05 * divergence)
        sequence_losses.append(-torch.stack(tokens).mean())
    expected = torch.stack(sequence_losses).mean()
    torch.testing.assert_close(ours, expected)
    mine, theirs = (torch.autograd.grad(loss, values, retain_graph=True)[0] for loss in (ours, expected))
    torch.testing.assert_close(mine, theirs)


def test_group_loss_clips(batch_and_numbers):
    """A ratio outside of the limits has no gradient where it would go further, and has one where it would come back."""
    batch, values, old, _ = batch_and_numbers
    ratio = (values - old).exp().detach()
    for sign in (1.0, -1.0):
        loss = group_loss(values, old, torch.full((4,), sign), batch)
        (gradient,) = torch.autograd.grad(loss, values)
        beyond = ratio > 1.2 if sign > 0 else ratio < 0.8
        assert beyond.any()
        assert torch.equal(gradient == 0, beyond)


def test_with_old_equal_to_new_it_is_the_policy_gradient(batch_and_numbers):
    batch, values, _, _ = batch_and_numbers
    advantages = torch.tensor([1.0, -0.5, 0.3, -2.0])
    (gradient,) = torch.autograd.grad(group_loss(values, values.detach(), advantages, batch), values)
    (expected,) = torch.autograd.grad(-(batch.means(values) * advantages).mean(), values)
    torch.testing.assert_close(gradient, expected)


def test_errors(tmp_path, batch_and_numbers):
    batch, values, old, _ = batch_and_numbers
    folder = tiny_checkpoint(tmp_path, tokenizer=False)
    odd = TrainBatch.build(trainable(folder).config, group(0, completions=3)[0])
    with pytest.raises(InputError, match="does not consist of pairs"):
        dpo_loss(torch.zeros(odd.num_targets), torch.zeros(odd.num_targets), odd)
    with pytest.raises(InputError, match="kl and reference"):
        group_loss(values, old, torch.ones(4), batch, kl=0.1)


def test_models_that_cannot_be_trained(tmp_path):
    model = trainable(tiny_checkpoint(tmp_path, tokenizer=False))
    batch = TrainBatch.build(model.config, [[1, 2, 3]])
    bare = trainable(tiny_checkpoint(tmp_path, head="bare", tokenizer=False))
    with pytest.raises(InputError, match="no LM head"):
        logprobs(bare, batch)
    other = trainable(tiny_checkpoint(tmp_path, "mistral", sliding_window=3, tokenizer=False))
    with pytest.raises(InputError, match="another model"):
        logprobs(other, batch)
    model.ranks = SimpleNamespace(size=2)
    with pytest.raises(InputError, match="split over ranks"):
        logprobs(model, batch)


def test_a_packed_model_reads_and_does_not_learn(tmp_path):
    from prefold.checkpoint import resolve

    checkpoint = resolve(str(tiny_checkpoint(tmp_path, hidden_size=64, num_attention_heads=4, tokenizer=False)))
    packed: CausalLM = load_model(checkpoint, dtype=torch.float32, device="cpu")
    if packed.layers[0].o.weight is not None:
        pytest.skip("nothing is packed on this machine")
    batch = TrainBatch.build(packed.config, [[1, 2, 3]])
    with torch.no_grad():
        values = logprobs(packed, batch)
    torch.testing.assert_close(
        values, logprobs(load_model(checkpoint, dtype=torch.float32, device="cpu", pack=False), batch).detach()
    )
    with pytest.raises(InputError, match="packed"):
        logprobs(packed, batch)


def test_wrong_shapes_and_types_are_named(batch_and_numbers):
    batch, first, old, reference = batch_and_numbers
    advantages = torch.ones(batch.num_sequences)
    targets = rf"; the batch has {batch.num_targets} targets"
    for call, field, message in (
        (lambda: sft_loss(first.tolist()), "logprobs", "logprobs is of type list, not a tensor"),
        (lambda: sft_loss(first.sum()), "logprobs", r"logprobs has the shape \[\];"),
        (lambda: dpo_loss(first, reference[:3], batch), "reference", r"reference has the shape \[3\]" + targets),
        (lambda: dpo_loss(first[None], reference, batch), "logprobs", targets),
        (lambda: group_loss(first, old, advantages.tolist(), batch), "advantages", "of type list"),
        (lambda: group_loss(first, old, first.detach(), batch), "advantages", "the batch has 4 sequences"),
        (lambda: group_loss(first, None, advantages, batch), "old", "of type NoneType"),
        (lambda: group_loss(first, old, advantages, batch, reference=old[1:], kl=0.1), "reference", targets),
    ):
        with pytest.raises(InputError, match=message) as caught:
            call()
        assert caught.value.field == field
    assert len(repr(batch)) < 120 and f"{batch.num_targets} targets" in repr(batch)
