"""Parts of a batch add up to it, and groups stay together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from learning import distance, gradients, group, sequences, trainable
from tiny import tiny_checkpoint

from prefold.errors import InputError
from prefold.spec.requests import SHARING_MODES
from prefold.train import TrainBatch, accumulate, dpo_loss, group_loss, logprobs, micro_batches, sft_loss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return trainable(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tokenizer=False), torch.float64)


def pairs(count: int) -> tuple[list[list[int]], list[int], np.ndarray]:
    """Pairs of completions of several prompts, their prompts' lengths, their groups."""
    some, prompts = [], []
    for seed in range(count):
        completions, lengths = group(seed % 3, completions=2, prompt=10, length=3 + seed % 4)
        some += [
            [*tokens[:10], *np.random.default_rng(seed + i).integers(0, 300, 4)] for i, tokens in enumerate(completions)
        ]
        prompts += lengths
    return some, prompts, np.arange(2 * count) // 2


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_groups_stay_together_within_the_budget(model, sharing):
    some, prompts, groups = pairs(7)
    batches = micro_batches(model.config, some, prompt_lengths=prompts, groups=groups, max_rows=40, sharing=sharing)
    assert len(batches) > 1
    assert sorted(np.concatenate([batch.numbers for batch in batches])) == list(range(len(some)))
    for batch in batches:
        assert batch.num_rows <= 40
        assert batch.numbers[::2].tolist() == (batch.numbers[1::2] - 1).tolist()  # chosen, then rejected
        assert (batch.numbers[::2] % 2 == 0).all()
        alone = TrainBatch.build(
            model.config,
            [some[i] for i in batch.numbers],
            prompt_lengths=[prompts[i] for i in batch.numbers],
            sharing=sharing,
        )
        assert alone.target_ids.tolist() == batch.target_ids.tolist()
        assert alone.num_rows == batch.num_rows
    # No two neighbours could have been one.
    for one, other in pairwise(batches):
        numbers = [*one.numbers, *other.numbers[:2]]
        joined = TrainBatch.build(
            model.config, [some[i] for i in numbers], prompt_lengths=[prompts[i] for i in numbers], sharing=sharing
        )
        assert joined.num_rows > 40


def test_prompts_that_are_alike_lie_together(model):
    """Six pairs of three prompts, in turn: a batch has room for one prompt's pairs, and gets just these."""
    some, prompts, groups = pairs(6)
    batches = micro_batches(model.config, some, prompt_lengths=prompts, groups=groups, max_rows=10 + 4 * 4)
    assert len(batches) == 3
    for batch in batches:
        assert len({tuple(some[i][:10]) for i in batch.numbers}) == 1


@pytest.mark.parametrize("max_rows", [25, 60, 1000])
def test_losses_of_the_parts_add_up(model, max_rows):
    some, prompts, groups = pairs(6)
    whole = TrainBatch.build(model.config, some, prompt_lengths=prompts)
    before = torch.linspace(-6, -1, whole.num_targets, dtype=torch.float64)
    advantages = torch.linspace(-1, 2, len(some), dtype=torch.float64)
    old = [part.detach() for part in whole.split(logprobs(model, whole) + 0.1)]
    reference = list(whole.split(before))

    def of_part(parts: list[torch.Tensor], batch: TrainBatch) -> torch.Tensor:
        return torch.cat([parts[i] for i in batch.numbers])

    losses = {
        "sft": lambda batch: sft_loss(logprobs(model, batch), count=whole.num_targets),
        "dpo": lambda batch: dpo_loss(logprobs(model, batch), of_part(reference, batch), batch, count=len(some) // 2),
        "group": lambda batch: group_loss(
            logprobs(model, batch), of_part(old, batch), advantages[batch.numbers], batch, count=len(some)
        ),
    }
    batches = micro_batches(model.config, some, prompt_lengths=prompts, groups=groups, max_rows=max_rows)
    for name, loss in losses.items():
        expected = gradients(model, lambda loss=loss: loss(whole))
        model.zero_grad()
        total = accumulate(batches, loss)
        assert total == pytest.approx(float(loss(whole).detach()), rel=1e-12), name
        assert distance({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-10, name


def test_without_groups_each_sequence_is_by_itself(model):
    some = sequences(0)
    batches = micro_batches(model.config, some, max_rows=max(map(len, some)) - 1)
    assert sorted(np.concatenate([batch.numbers for batch in batches])) == list(range(len(some)))


def test_errors(model):
    some, prompts, groups = pairs(2)
    with pytest.raises(InputError, match=r"the group of sequence 2 has 16 rows; the maximum is 15"):
        micro_batches(model.config, some, prompt_lengths=prompts, groups=groups, max_rows=15)
    with pytest.raises(InputError, match="3 group numbers for 4 sequences"):
        micro_batches(model.config, some, groups=[0, 0, 1], max_rows=100)
