"""The transformer against transformers' eager float32, and against itself cut in other ways."""

from __future__ import annotations

import pytest
import torch
from tiny import EVERY, MORE, DenseAttend, reference, tiny_checkpoint

from prefold.checkpoint import resolve
from prefold.errors import InputError
from prefold.features.looped.config import Loop, LoopedConfig
from prefold.model import config_from
from prefold.worker.torch.load import load_model

ROWS = 45
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CASES = {
    "llama": ("llama", {}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 6}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one layer": ("llama", {"num_hidden_layers": 1}),
    "llama, wide heads": ("llama", {"head_dim": 14}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, windowed": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2, windowed": ("qwen2", WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 4}),
    "qwen3, yarn, biases": ("qwen3", {"rope_parameters": YARN, "attention_bias": True}),
    "qwen3, windowed": ("qwen3", WINDOW),
    "gemma3": ("gemma3", {}),
    "gemma3, untied, biases": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3, one layer, windowed": ("gemma3", {"num_hidden_layers": 1}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2, odd heads, wide": ("gpt2", {"hidden_size": 35, "num_attention_heads": 5, "n_inner": None}),
    "gpt2, one layer": ("gpt2", {"num_hidden_layers": 1}),
    "gpt2, scores as they are": ("gpt2", {"scale_attn_weights": False, "reorder_and_upcast_attn": True}),
    **{family: (family, {}) for family in MORE},
    "gemma3, full layers scaled": ("gemma3", {"rope_parameters": GEMMA_ROPE, "sliding_window": 12}),
}


def load(folder, **options):
    return load_model(resolve(str(folder)), **({"dtype": torch.float32, "device": "cpu"} | options))


def some_tokens(rows=ROWS, seed=1):
    return torch.randint(3, 300, (rows,), generator=torch.Generator().manual_seed(seed))


def run(model, tokens, read=None):
    with torch.no_grad():
        return model(tokens, torch.arange(len(tokens)), DenseAttend(model.config, read), read)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits(case, tmp_path):
    family, overrides = CASES[case]
    folder, tokens = tiny_checkpoint(tmp_path, family, **overrides), some_tokens()
    model, oracle = load(folder), reference(folder)
    with torch.no_grad():
        out = oracle(tokens[None], output_hidden_states=True)
    hidden = run(model, tokens)
    torch.testing.assert_close(hidden, out.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(hidden), out.logits[0], rtol=1e-4, atol=1e-4)
    assert out.logits.std() > 0.5


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_positions_are_what_counts(tmp_path, family):
    """Rows at other positions: the model looks at positions, not at row numbers."""
    folder = tiny_checkpoint(tmp_path, family)
    tokens, oracle, model = some_tokens(), reference(folder), load(folder)
    positions = torch.arange(ROWS) * 3 + 100
    with torch.inference_mode():
        hidden = model(tokens, positions, DenseAttend(model.config))
        expected = oracle(tokens[None], position_ids=positions[None], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert (hidden - run(model, tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("read", [[44], [0], [0, 3, 4, 40], [5, 6], list(range(45)), []])
def test_reading_some_rows_reads_the_same(tmp_path, layers, read):
    model = load(tiny_checkpoint(tmp_path, "qwen2", num_hidden_layers=layers, tokenizer=False))
    tokens, read = some_tokens(), torch.tensor(read, dtype=torch.int64)
    expected = run(model, tokens)[read]
    torch.testing.assert_close(run(model, tokens, read), expected, rtol=1e-5, atol=1e-5)


def test_the_last_layer_attends_only_for_the_rows_read(qwen3):
    model, read = load(qwen3), torch.tensor([7, 20])
    attend = DenseAttend(model.config, read)  # asserts that q has two rows there
    with torch.inference_mode():
        model(some_tokens(), torch.arange(ROWS), attend, read)
    assert attend.calls == [(0, False), (1, False), (2, True)]


@pytest.mark.parametrize("order", [(0, 1, 2, 1, 2, 0), (2, 2), (1, 0, 2)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_only_the_last_plane_is_of_the_rows_read(tmp_path, family, order):
    """Whichever layer the last visit is of, and however often that layer was visited before."""
    checkpoint, read = resolve(str(tiny_checkpoint(tmp_path, family, tokenizer=False))), torch.tensor([7, 20])
    config = config_from(checkpoint.config)
    looped = LoopedConfig.of(config, Loop(blocks=3, order=order))
    model, tokens = load_model(checkpoint, dtype=torch.float32, device="cpu", config=looped), some_tokens()
    attend = DenseAttend(model.config, read)
    with torch.inference_mode():
        found = model(tokens, torch.arange(ROWS), attend, read)
        expected = model(tokens, torch.arange(ROWS), DenseAttend(model.config))[read]
    assert attend.calls == [(plane, plane == len(order) - 1) for plane in range(len(order))]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_logits_of_some_ids_are_columns_of_all(tmp_path):
    for tied in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            model = load(tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=tied), dtype=dtype)
            hidden, ids = run(model, some_tokens(5)), [300, 2, 2, 17]
            logits = model.logits(hidden)
            assert logits.dtype == torch.float32
            assert logits.shape == (5, 307)
            torch.testing.assert_close(model.logits(hidden, ids), logits[:, ids], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(model.logits(hidden, torch.tensor(ids)), model.logits(hidden, tuple(ids)))


def test_bfloat16_logits_are_not_rounded_to_bfloat16(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "llama"), dtype=torch.bfloat16)
    hidden = run(model, some_tokens())
    exact = hidden.double() @ model.lm_head.detach().double().T
    torch.testing.assert_close(model.logits(hidden).double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(exact.float().bfloat16().float(), model.logits(hidden))


@pytest.mark.parametrize("family", EVERY)
def test_bfloat16_stays_near_float32(tmp_path, family):
    folder, tokens = tiny_checkpoint(tmp_path, family), some_tokens()
    expected = run(load(folder), tokens)
    ours = run(load(folder, dtype=torch.bfloat16), tokens).float()
    with torch.no_grad():
        theirs = reference(folder).bfloat16()(tokens[None], output_hidden_states=True).hidden_states[-1][0].float()
    # As near as transformers itself comes in bfloat16, within chance.
    assert (ours - expected).pow(2).mean() < 1.5 * (theirs - expected).pow(2).mean()


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("num_labels", [1, 5])
def test_classification_heads(tmp_path, family, num_labels):
    folder = tiny_checkpoint(tmp_path, family, head="classifier", num_labels=num_labels)
    tokens, model = some_tokens(), load(folder)
    with torch.no_grad():
        expected = reference(folder, "classifier")(tokens[None]).logits
    scores = model.head(run(model, tokens, torch.tensor([ROWS - 1])))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="no LM head"):
        model.logits(run(model, tokens))


def test_a_causal_model_has_no_classification_head(qwen3):
    with pytest.raises(InputError, match="no classification head"):
        load(qwen3).head(torch.zeros(1, 36))


def test_gradients(tmp_path):
    folder, tokens = tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True), some_tokens()
    model, oracle = load(folder, pack=False), reference(folder)
    read = torch.tensor([3, ROWS - 1])
    model.logits(model(tokens, torch.arange(ROWS), DenseAttend(model.config, read), read)).square().sum().backward()
    oracle(tokens[None]).logits[0, read].square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    theirs = oracle.model.layers[1]
    stacked = torch.cat([getattr(theirs.self_attn, f"{x}_proj").weight.grad for x in "qkv"])
    pairs = {
        "embedding": (model.embedding.grad, oracle.model.embed_tokens.weight.grad),
        "qkv": (model.layers[1].qkv.weight.grad, stacked),
        "down": (model.layers[0].down.weight.grad, oracle.model.layers[0].mlp.down_proj.weight.grad),
        "q_norm": (model.layers[2].q_norm.weight.grad, oracle.model.layers[2].self_attn.q_norm.weight.grad),
    }
    for name, (ours, expected) in pairs.items():
        scale = expected.abs().max()
        assert (ours - expected).abs().max() < 1e-4 * scale, name


def test_gradients_of_gpt2(tmp_path):
    folder, tokens = tiny_checkpoint(tmp_path, "gpt2"), some_tokens()
    model, oracle = load(folder, pack=False), reference(folder)
    read = torch.tensor([3, ROWS - 1])
    model.logits(model(tokens, torch.arange(ROWS), DenseAttend(model.config, read), read)).square().sum().backward()
    oracle(tokens[None]).logits[0, read].square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    ours, theirs = model.layers[1], oracle.transformer.h[1]
    pairs = {
        "embedding": (model.embedding.grad, oracle.transformer.wte.weight.grad),
        "positions": (model.position_embedding.grad, oracle.transformer.wpe.weight.grad),
        "norm bias": (ours.post_attention_layernorm.bias.grad, theirs.ln_2.bias.grad),
        "qkv": (ours.qkv.weight.grad, theirs.attn.c_attn.weight.grad.T),
        "up": (ours.gate_up.weight.grad, theirs.mlp.c_fc.weight.grad.T),
        "down bias": (ours.down.bias.grad, theirs.mlp.c_proj.bias.grad),
    }
    for name, (grad, expected) in pairs.items():
        assert (grad - expected).abs().max() < 1e-4 * expected.abs().max(), name
