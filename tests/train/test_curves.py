"""Training as a whole: with and without sharing it goes the same way, and the example works."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from learning import trainable
from tiny import reference, tiny_checkpoint

from prefold.train import TrainBatch, logprobs, sft_loss

ROOT = Path(__file__).parents[2]


def curve(folder: Path, sharing: str, steps: int) -> list[float]:
    """Losses of AdamW on groups of completions drawn anew in each step, the same ones for every mode."""
    model = trainable(folder)
    optimizer, rng, losses = torch.optim.AdamW(model.parameters(), lr=3e-4), np.random.default_rng(0), []
    for _ in range(steps):
        some = []
        for _ in range(2):
            prompt = rng.integers(3, 30, 16).tolist()
            # The completion begins as the prompt did, so there is something to learn.
            some += [prompt + prompt[:4] + rng.integers(3, 30, 3).tolist() for _ in range(4)]
        batch = TrainBatch.build(model.config, some, prompt_lengths=[16] * 8, sharing=sharing)
        loss = sft_loss(logprobs(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2, tokenizer=False)


def test_steps_with_and_without_sharing(folder):
    off = curve(folder, "off", 100)
    assert np.mean(off[-10:]) < np.mean(off[:10]) - 1  # it learns
    for sharing in ("full", "mlp"):
        np.testing.assert_allclose(curve(folder, sharing, 30), off[:30], rtol=1e-3)


def test_the_example_trains_and_saves(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("dpo_example", ROOT / "examples" / "dpo.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = tiny_checkpoint(tmp_path, "llama", max_position_embeddings=1024, num_hidden_layers=2)
    arguments = ["--model", str(folder), "--learning-rate", "1e-3"]
    losses = {
        sharing: example.main([*arguments, "--out", str(tmp_path / sharing), "--sharing", sharing, "--steps", steps])
        for sharing, steps in (("full", "4"), ("mlp", "2"))
    }
    assert losses["full"][0] > np.log(2)  # DPO's, where nothing has moved, and the cross entropy of the chosen
    assert losses["full"][-1] < losses["full"][0] - 1
    np.testing.assert_allclose(losses["full"][:2], losses["mlp"], rtol=1e-3)
    printed = capsys.readouterr().out
    assert "16 pairs" in printed and f"saved to {tmp_path / 'full'}" in printed
    weights = reference(tmp_path / "full").get_input_embeddings().weight
    assert (weights - reference(folder).get_input_embeddings().weight).abs().max() > 1e-4
