"""A saved folder is what transformers loads: every family, trained or not, and what lies beside the weights."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from learning import gradients, sequences, trainable
from tiny import EVERY, UNCLASSIFIED, reference, tiny_checkpoint

from prefold.checkpoint import Checkpoint, resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.text import load_tokenizer
from prefold.train import TrainBatch, logprobs, save_model, sft_loss
from prefold.worker.torch.load import load_model


def trained(folder) -> torch.nn.Module:
    """A step of plain gradient descent away from the checkpoint, every parameter."""
    model = trainable(folder)
    batch = TrainBatch.build(model.config, sequences(2))
    moved = gradients(model, lambda: sft_loss(logprobs(model, batch)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.1 * moved[name]
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", EVERY)
def test_transformers_loads_what_was_trained(tmp_path, family, tied):
    assert_trained(tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied), tmp_path)


def test_a_weight_that_a_layer_uses_twice_is_trained_once(tmp_path):
    assert_trained(checkpoint_of(tmp_path / "model", "gemma3n_text", PROGRAMS["gemma3n_text"]), tmp_path)


def assert_trained(folder, tmp_path) -> None:
    model = trained(folder)
    saved = save_model(model, resolve(str(folder)), tmp_path / "saved")
    batch = TrainBatch.build(model.config, some := sequences(9))
    ours = batch.split(logprobs(model, batch).detach())
    oracle, before, moved = reference(saved), reference(folder), 0.0
    for mine, tokens in zip(ours, some, strict=True):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            theirs, old = (
                m(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] for m in (oracle, before)
            )
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        moved = max(moved, float((theirs - old).abs().max()))
    assert moved > 0.05  # it was trained, and is not the checkpoint copied


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("head", ["causal", "classifier", "bare"])
def test_untrained_tensors_come_back_as_they_were(tmp_path, family, head):
    if head == "classifier" and family in UNCLASSIFIED:
        pytest.skip("transformers has no such class")
    folder = tiny_checkpoint(tmp_path, family, head=head)
    saved = save_model(trainable(folder), resolve(str(folder)), tmp_path / "saved")
    expected, found = reference(folder, head).state_dict(), reference(saved, head).state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    again = load_model(resolve(str(saved)), dtype=torch.float32, device="cpu", pack=False)
    for name, parameter in trainable(folder).named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_in_bfloat16(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    saved = save_model(trainable(folder), resolve(str(folder)), tmp_path / "saved", dtype=torch.bfloat16)
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    expected, found = reference(folder).state_dict(), reference(saved).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_tokenizer_goes_along(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors.index.json").write_text("{}")
    saved = save_model(trainable(folder), resolve(str(folder)), tmp_path / "saved")
    assert not (saved / "model.safetensors.index.json").exists()
    ours, expected = load_tokenizer(resolve(str(saved))), load_tokenizer(resolve(str(folder)))
    text, messages = "yes the noö", [{"role": "user", "content": "no"}]
    assert ours.encode(text).tolist() == expected.encode(text).tolist()
    assert ours.render_chat(messages) == expected.render_chat(messages)
    assert (saved / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"


def test_random_weights_without_files(tmp_path):
    folder = tiny_checkpoint(tmp_path, tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    checkpoint = Checkpoint.dummy(config)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", pack=False)
    saved = save_model(model, checkpoint, tmp_path / "saved")
    oracle = reference(saved)
    with torch.no_grad():
        assert torch.equal(oracle.get_input_embeddings().weight, model.embedding)


def test_what_cannot_be_saved(tmp_path):
    folder = tiny_checkpoint(tmp_path, hidden_size=64, num_attention_heads=4, tokenizer=False)
    checkpoint = resolve(str(folder))
    with pytest.raises(CheckpointError, match="another folder"):
        save_model(trainable(folder), checkpoint, folder)
    config = checkpoint.config | {"rope_parameters": {"rope_type": "factors", "factors": [1.0] * 8, "rope_theta": 1e4}}
    factors = Checkpoint.dummy(config)
    model = load_model(factors, dtype=torch.float32, device="cpu", pack=False)
    with pytest.raises(UnsupportedModelError, match="rotary frequencies"):
        save_model(model, factors, tmp_path / "saved")
    split = trainable(folder)
    split.ranks = SimpleNamespace(size=2)
    with pytest.raises(CheckpointError, match="split over ranks"):
        save_model(split, checkpoint, tmp_path / "saved")
    packed = load_model(checkpoint, dtype=torch.float32, device="cpu")
    if packed.layers[0].o.weight is None:
        with pytest.raises(CheckpointError, match="packed"):
            save_model(packed, checkpoint, tmp_path / "saved")


@pytest.mark.slow
def test_the_default_model_and_its_tokenizer_out_of_a_gguf_file(tmp_path):
    import transformers

    checkpoint = resolve("smollm2-135m")
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", pack=False)
    saved = save_model(model, checkpoint, tmp_path / "saved")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    theirs, ours = transformers.AutoTokenizer.from_pretrained(saved), load_tokenizer(checkpoint)
    messages = [{"role": "user", "content": "Name three rivers. Größe 12!"}]
    text = ours.render_chat(messages, add_generation_prompt=True)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    ids = ours.encode(text, special=False).tolist()
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    with torch.no_grad():
        values = logprobs(model, TrainBatch.build(model.config, [ids]))
        expected = oracle(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(values, expected.gather(1, torch.tensor(ids)[1:, None])[:, 0], rtol=1e-4, atol=1e-3)


def test_a_model_with_a_tower_is_not_saved(tmp_path):
    from tiny_vision import tiny_vision

    checkpoint = resolve(str(tiny_vision(tmp_path, "smolvlm")))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", pack=False)
    with pytest.raises(UnsupportedModelError, match="has an image tower"):
        save_model(model, checkpoint, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "name", ["aria_text", "ernie4_5_moe", "granitemoe_swa", "lfm2_moe", "minimax_m2", "sarvam_moe", "stablelm"]
)
def test_names_of_experts_and_heads_come_back(tmp_path, name):
    folder = checkpoint_of(tmp_path / "model", name, PROGRAMS[name])
    saved = save_model(trainable(folder), resolve(str(folder)), tmp_path / "saved")
    expected, found = reference(folder).state_dict(), reference(saved).state_dict()
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
