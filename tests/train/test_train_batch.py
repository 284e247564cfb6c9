"""How sequences become rows and targets, and what is wrong with those that cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learning import sequences

from prefold.errors import InputError
from prefold.model import config_from
from prefold.spec.requests import SHARING_MODES
from prefold.train import TrainBatch

CONFIG = config_from(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 307,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 12,
    }
)


def read_at(batch: TrainBatch) -> list[list[int]]:
    """Of each target: the tokens on the path to the row at which it is read, and the target."""
    step = batch.step
    found = []
    for read, target in zip(batch.target_reads, batch.target_ids, strict=True):
        row = step.read_rows[read]
        key = row if step.fold is None else step.fold.gather[row]
        path = [j for j in range(key + 1) if j <= key < step.end[j]]
        rows = path if step.fold is None else step.fold.scatter[path]
        assert step.key_positions[path].tolist() == list(range(len(path)))
        found.append([*step.tokens[rows].tolist(), int(target)])
    return found


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_every_target_is_read_behind_what_comes_before_it(sharing):
    some = sequences(4, longest=5)
    some = [tokens[:12] for tokens in some]
    rng = np.random.default_rng(0)
    masks = [np.array([False, *(rng.random(len(tokens) - 1) < 0.6)]) for tokens in some]
    for mask in masks:
        mask[1] |= not mask.any()
    batch = TrainBatch.build(CONFIG, some, masks=masks, sharing=sharing)
    expected = [tokens[: i + 1] for tokens, mask in zip(some, masks, strict=True) for i in np.flatnonzero(mask)]
    assert read_at(batch) == expected
    assert np.diff(batch.target_offsets).tolist() == [int(mask.sum()) for mask in masks]


def test_a_row_is_read_once_and_what_follows_the_last_target_is_no_row():
    some = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7]]
    batch = TrainBatch.build(CONFIG, some, masks=[[0, 0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1]])
    assert batch.step.tokens.tolist() == [1, 2, 3]
    assert batch.step.read_rows.tolist() == [1, 2]
    assert batch.target_reads.tolist() == [0, 1, 1, 0]
    assert batch.target_ids.tolist() == [3, 4, 6, 7]
    assert (batch.num_tokens, batch.num_rows, batch.num_targets) == (3 + 3 + 2, 3, 4)


def test_prompt_lengths_and_the_default_are_masks():
    some = [[1, 2, 3, 4], torch.tensor([5, 6, 7])]
    for options, masks in (
        ({"prompt_lengths": [3, 1]}, [[0, 0, 0, 1], [0, 1, 1]]),
        ({}, [[0, 1, 1, 1], [0, 1, 1]]),
    ):
        batch, other = TrainBatch.build(CONFIG, some, **options), TrainBatch.build(CONFIG, some, masks=masks)
        assert batch.target_ids.tolist() == other.target_ids.tolist()
        assert batch.step.read_rows.tolist() == other.step.read_rows.tolist()


def test_sums_means_and_parts():
    batch = TrainBatch.build(CONFIG, [[1, 2, 3, 4], [1, 2], [5, 6, 7]])
    values = torch.tensor([1.0, 2.0, 6.0, 5.0, -1.0, 4.0], requires_grad=True)
    assert batch.sums(values).tolist() == [9, 5, 3]
    assert batch.means(values).tolist() == [3, 5, 1.5]
    assert [part.tolist() for part in batch.split(values)] == [[1, 2, 6], [5], [-1, 4]]
    batch.means(values)[2].backward()
    assert values.grad.tolist() == [0, 0, 0, 0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("some", "options", "message"),
    [
        ([], {}, "there are no sequences"),
        ([[1, 2], []], {}, "sequence 1 is empty"),
        ([[1, 2], [3]], {}, "sequence 1 has 1 tokens and a prompt of 1"),
        ([[1, 2], [3, 4]], {"prompt_lengths": [1, 2]}, "sequence 1 has 2 tokens and a prompt of 2"),
        ([[1, 2], [3, 4]], {"prompt_lengths": [1, 0]}, "sequence 1 has 2 tokens and a prompt of 0"),
        ([[1, 2]], {"prompt_lengths": [1, 1]}, "2 prompt lengths for 1 sequences"),
        ([[1, 2], [3, 4]], {"masks": [[0, 1], [0, 0]]}, "sequence 1 has no target"),
        ([[1, 2], [3, 4]], {"masks": [[0, 1], [1, 0]]}, "sequence 1's first token is a target"),
        ([[1, 2], [3, 4]], {"masks": [[0, 1], [0, 1, 1]]}, r"sequence 1 has 2 tokens and a mask of shape \[3\]"),
        ([[1, 2]], {"masks": []}, "0 masks for 1 sequences"),
        ([[1, 2]], {"masks": [[0, 1]], "prompt_lengths": [1]}, "both"),
        ([[1, 2], [3, 307]], {}, "sequence 1, position 1: token id 307 is not below the vocabulary size 307"),
        ([[1, 2], [-3, 4]], {}, "sequence 1, position 0: token id -3 is negative"),
        ([[1, 2], [1] * 14], {}, "sequence 1 has 13 tokens before its last target; the maximum is 12"),
        ([[1, 2]], {"sharing": "some"}, "sharing is 'some'"),
        ([[0.5, 2.0]], {}, "dtype float64"),
    ],
)
def test_errors_name_the_sequence(some, options, message):
    with pytest.raises(InputError, match=message):
        TrainBatch.build(CONFIG, some, **options)


def test_a_sequence_may_be_as_long_as_the_model_and_one_target_more():
    assert TrainBatch.build(CONFIG, [[1] * 13]).num_rows == 12
    # What follows the last target is no row, however long it is.
    assert TrainBatch.build(CONFIG, [[1] * 40], masks=[[0, 1] + [0] * 38]).num_rows == 1
