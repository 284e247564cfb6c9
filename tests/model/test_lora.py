"""LoRA adapters against transformers with W + scale B A in place of W, and against PEFT where it is installed."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
from adapters import MODULES, merged, write_adapter
from blocks import DIM, HEADS, HIDDEN, KV_HEADS, WIDTH, write_model
from safetensors.torch import load_file, save_file
from tiny import EVERY, MIXTURES, DenseAttend, reference, tiny_checkpoint

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.model.adapter_config import Pattern, read_adapter_config
from prefold.worker.torch.load import load_model
from prefold.worker.torch.lora import RowAdapters, load_adapter

LENGTHS = (7, 11, 1, 9, 6)
ROWS = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
TOKENS = torch.randint(3, 300, (ROWS,), generator=torch.Generator().manual_seed(1))


class ManySequences:
    """Attention of several sequences whose rows lie in `order`; each attends to itself."""

    def __init__(self, config, order=None, read_rows=None):
        self.config = config
        self.order = torch.arange(ROWS) if order is None else order
        self.read_rows = torch.arange(ROWS) if read_rows is None else read_rows

    def __call__(self, plane, q, k, v, sinks=None):
        # Into the order of the sequences, all queries; what is not read is zeros there.
        rows = self.read_rows if len(q) < len(k) else torch.arange(ROWS)
        back = torch.argsort(self.order)
        every = q.new_zeros(ROWS, *q.shape[1:]).index_copy(0, rows, q)[back]
        one = DenseAttend(self.config)
        parts = zip(*(t.split(LENGTHS) for t in (every, k[back], v[back])), strict=True)
        return torch.cat([one(plane, *part, sinks) for part in parts])[self.order][rows]


def load(folder, **options):
    return load_model(resolve(str(folder)), **({"dtype": torch.float32, "device": "cpu"} | options))


def adapter_of(folder, model, **options):
    return load_adapter(folder, model.config, dtype=model.dtype, device="cpu", **options)


def of_sequences(numbers):
    """The number of each row, from that of each sequence."""
    return np.repeat(np.array(numbers, np.int64), LENGTHS)


def expected(models):
    """Hidden states of each sequence by its own model."""
    states = []
    with torch.inference_mode():
        for tokens, model in zip(TOKENS.split(LENGTHS), models, strict=True):
            states.append(model.base_model(tokens[None]).last_hidden_state[0])
    return torch.cat(states)


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "v_proj"), ("k_proj",), ("up_proj", "o_proj"), ("down_proj",)])
def test_rows_of_two_adapters_and_of_none(tmp_path, family, modules):
    every = MODULES
    if family in MIXTURES:  # of which attention alone can be adapted
        every = MODULES[:4]
        modules = every if modules == ("down_proj",) else tuple(m for m in modules if m in every)
    base = tiny_checkpoint(tmp_path, family, tokenizer=False)
    one = write_adapter(tmp_path / "one", base, modules, seed=1)
    two = write_adapter(tmp_path / "two", base, every, seed=2, r=3, lora_alpha=9, layers=(0, 2))
    model, plain = load(base), reference(base)
    adapters = [adapter_of(one, model), adapter_of(two, model)]
    wanted = expected([m_one := merged(base, one), plain, m_two := merged(base, two, lambda _: 3), m_one, m_two])
    numbers = of_sequences([0, -1, 1, 0, 1])
    attend = ManySequences(model.config)
    with torch.inference_mode():
        found = model(TOKENS, POSITIONS, attend, adapters=RowAdapters(adapters, numbers))
        without = model(TOKENS, POSITIONS, attend)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    untouched = torch.from_numpy(numbers == -1)
    assert torch.equal(found[untouched], without[untouched])
    assert (found - without)[~untouched].abs().max() > 0.05


@pytest.mark.parametrize("family", ["phi3", "cohere2", "granite4", "starcoder2"])
def test_adapters_of_fused_tensors_and_of_heads_in_another_order(tmp_path, family):
    test_rows_of_two_adapters_and_of_none(tmp_path, family, MODULES)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("read", [[0, 6, 18, 33], [20], [], None])
@pytest.mark.parametrize("mixed", [True, False])
def test_read_rows_and_scattered_rows(tmp_path, layers, read, mixed):
    base = tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=layers, tokenizer=False)
    folders = [write_adapter(tmp_path / str(i), base, seed=i, layers=range(layers)) for i in range(2)]
    model = load(base)
    wanted = expected([merged(base, folders[0]), merged(base, folders[1]), *[reference(base)] * 3])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5)) if mixed else torch.arange(ROWS)
    rows = None if read is None else torch.tensor(read, dtype=torch.int64)
    known = None if read is None else np.array(read, np.int64)
    numbers = of_sequences([0, 1, -1, -1, -1])[order.numpy()]
    adapters = RowAdapters([adapter_of(f, model) for f in folders], numbers, known)
    with torch.inference_mode():
        attend = ManySequences(model.config, order, rows)
        found = model(TOKENS[order], POSITIONS[order], attend, rows, adapters)
    torch.testing.assert_close(found, wanted[order][slice(None) if rows is None else rows], rtol=1e-4, atol=1e-4)


def test_read_rows_that_the_adapters_do_not_know(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    model = load(base)
    adapters = RowAdapters([adapter_of(write_adapter(tmp_path / "a", base), model)], np.zeros(ROWS, np.int64))
    with pytest.raises(ValueError, match="read_rows"):
        model(TOKENS, POSITIONS, ManySequences(model.config), torch.tensor([3]), adapters)


def test_ranks_and_scales_by_module(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    patterns = {
        "rank_pattern": {"q_proj": 2, "down_proj": 7},
        "alpha_pattern": {"q_proj": 10, r"self_attn\.[vo]_proj": 1},
    }
    ranks, alphas = {"q_proj": 2, "down_proj": 7}, {"q_proj": 10, "v_proj": 1, "o_proj": 1}
    model = load(base)
    for rs in (False, True):
        folder = write_adapter(tmp_path / f"a{rs}", base, use_rslora=rs, **patterns)

        def scale(module, rs=rs):
            rank = ranks.get(module, 4)
            return alphas.get(module, 6) / (rank**0.5 if rs else rank)

        with torch.inference_mode():
            adapters = RowAdapters([adapter_of(folder, model)], np.zeros(ROWS, np.int64))
            found = model(TOKENS, POSITIONS, ManySequences(model.config), adapters=adapters)
        torch.testing.assert_close(found, expected([merged(base, folder, scale)] * 5), rtol=1e-4, atol=1e-4)


def test_adapters_of_classifiers_and_bare_models(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", head="bare", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base)  # names without "model."
    model = load(base)
    with torch.inference_mode():
        adapters = RowAdapters([adapter_of(folder, model)], np.zeros(ROWS, np.int64))
        found = model(TOKENS, POSITIONS, ManySequences(model.config), adapters=adapters)
    torch.testing.assert_close(found, expected([merged(base, folder, head="bare")] * 5), rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path):
    base = tiny_checkpoint(tmp_path, "qwen2", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base)
    exact = merged(base, folder)
    wanted = expected([exact] * 5)
    theirs = expected([exact.bfloat16()] * 5).float()
    model = load(base, dtype=torch.bfloat16)
    with torch.inference_mode():
        adapters = RowAdapters([adapter_of(folder, model)], np.zeros(ROWS, np.int64))
        ours = model(TOKENS, POSITIONS, ManySequences(model.config), adapters=adapters).float()
    # Theirs is merged before it is rounded; a few rows make the most of either.
    assert (ours - wanted).pow(2).mean() < 4 * (theirs - wanted).pow(2).mean()


def test_an_adapter_has_a_name_and_a_size(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base, ("q_proj",))
    model = load(base)
    assert adapter_of(folder, model).name == str(folder)
    assert adapter_of(folder, model, name="mine").name == "mine"
    assert adapter_of(folder, model).nbytes == 3 * 4 * 4 * (36 + 36)


def test_gradients_reach_the_adapter(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    model = load(base, pack=False)
    adapter = adapter_of(write_adapter(tmp_path / "a", base), model)
    weights = [t for layer in adapter.layers for d in layer.values() for t in (d.a, *(part.b for part in d.parts))]
    for weight in weights:
        weight.requires_grad_()
    adapters = RowAdapters([adapter], of_sequences([0, -1, -1, 0, -1]))
    model(TOKENS, POSITIONS, ManySequences(model.config), adapters=adapters).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in weights)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "type 'IA3'"),
        ({"use_dora": True}, "DoRA.*use_dora"),
        ({"bias": "lora_only"}, "biases.*lora_only"),
        ({"lora_bias": True}, "biases.*lora_bias"),
        ({"modules_to_save": ["score"]}, "fully trained modules.*score"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"trainable_token_indices": [5]}, "trained tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*convert it"),
        ({"r": 5}, r"q_proj has lora_A \[4, 36\] and lora_B \[36, 4\], not \[5, 36\] and \[36, 5\]"),
        ({"rank_pattern": {"layers.1.self_attn.v_proj": 2}}, r"layers\.1\.self_attn\.v_proj has lora_A \[4, 36\]"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern has the unsupported pattern '\(': a bracket is not closed"),
        ({"rank_pattern": {"(([a-z_.0-9]+)+)+!": 3}}, "rank_pattern has .*a repeated group contains a repetition"),
        ({"rank_pattern": {"(?:a{1,65000}){1,65000}": 3}}, "rank_pattern has .*is not supported"),
        ({"rank_pattern": {f".{i}*": 3 for i in range(300)}}, "more than 256 regular expressions"),
        ({"rank_pattern": {"a" * 600 + "*": 3}}, "601 characters, more than 512"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]; it must be an object"),
        ({"alpha_pattern": {"q_proj": {"a": 1}}}, r"alpha_pattern\.q_proj is .*a number"),
        ({"rank_pattern": {"q_proj": True}}, r"rank_pattern\.q_proj is True; it must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'; it must be a number"),
        ({"lora_alpha": True}, "lora_alpha is True; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf; it must be a number"),
        ({"lora_alpha": 1e308}, "lora_alpha is 1e.308; it must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is a number of .* bits; it must be a number"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a number"),
        ({"r": True}, "r is True; it must be a whole number"),
        ({"r": 0}, "r is 0; it must be at least 1"),
        ({"use_rslora": "no"}, "use_rslora is 'no'; it must be true or false"),
        ({"peft_type": ["LORA"]}, "peft_type is .*a string"),
    ],
)
def test_refusals(tmp_path, config, message):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    with pytest.raises(CheckpointError, match=message):
        adapter_of(folder, load(base))


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 100_000, '{"r": ' + "9" * 10_000 + "}", "{}" + " " * (17 << 20)]
)
def test_configs_that_are_deep_or_huge(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json") as caught:
        read_adapter_config(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.to(torch.int64), "lora_A of .* has dtype int64"),
        (lambda a: a > 0, "lora_A of .* has dtype bool"),
        (lambda a: a.to(torch.complex64), "lora_A of .* has dtype complex64"),
        (lambda a: a * torch.nan, "proj has values that are not finite"),
    ],
)
def test_tensors_of_no_finite_numbers(tmp_path, change, message):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: change(tensors[name])}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        adapter_of(folder, load(base))


def test_tensors_of_a_layer_of_thousands_of_digits(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base)
    tensors = load_file(folder / "adapter_model.safetensors")
    far = {name.replace("layers.0", "layers.1" + "0" * 5000): tensor for name, tensor in tensors.items()}
    save_file(far, folder / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"layers\.1000"):
        adapter_of(folder, load(base))


def test_patterns_match_as_peft_does():
    """At random, against the expression that PEFT gives to Python's own matcher."""
    rng = random.Random(1)
    signs = ["a", "b", ".", r"\.", r"\w", "*", "+", "?", "|", "(", ")", "(?:", "[ab.]", "^", "$"]
    num_compared = 0
    for _ in range(4000):
        text = "".join(rng.choice(signs) for _ in range(rng.randint(1, 7)))
        try:
            pattern, theirs = Pattern(text), re.compile(rf"(.*\.)?({text})$")
        except (ValueError, re.error):
            continue
        for name in ("a.b", "ab", "b", "aab.ab", "a.b.a"):
            assert pattern.matches(name) == bool(theirs.match(name)), (text, name)
            num_compared += 1
    assert num_compared > 3000


def test_patterns_of_many_ways_end():
    for text in ("(a|a)" * 30 + "!", ".*" * 250 + "!", "(.?.?.?.?)*" * 8 + "!"):
        assert not Pattern(text).matches("a" * 200)


def test_the_first_pattern_wins(tmp_path):
    patterns = {"0.q_proj": 2, r".*\.q_proj": 3, "q_proj": 4, "^model.layers.2.q_proj": 5, "v_proj$": 6}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "rank_pattern": patterns}))
    ranks = read_adapter_config(tmp_path).ranks
    names = ["model.layers.0.q_proj", "model.layers.1.q_proj", "q_proj", "x.v_proj", "xv_proj", "k_proj"]
    assert [ranks.of(name) for name in names] == [2, 3, 4, 6, 8, 8]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", "lora_embedding_A, not supported"),
        ("lm_head.lora_A.weight", "lm_head"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "magnitude_vector"),
        ("model.layers.0.self_attn.q_proj.bias", r"q_proj\.bias"),
        ("model.layers.0.mlp.experts.lora_A.weight", r"lacks or does not support: model\.layers\.0\.mlp\.experts"),
        ("model.layers.3.self_attn.q_proj.lora_A.weight", r"does not support: model\.layers\.3\.self_attn\.q_proj"),
    ],
)
def test_other_tensors_are_refused(tmp_path, name, message):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    folder = write_adapter(tmp_path / "a", base)
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {f"base_model.model.{name}": torch.zeros(4, 36)}, path)
    with pytest.raises(UnsupportedModelError, match=message):
        adapter_of(folder, load(base))


def test_shapes_of_gpt2(tmp_path):
    base = tiny_checkpoint(tmp_path, "gpt2", tokenizer=False)
    model, folder = load(base), write_adapter(tmp_path / "a", base)
    path = folder / "adapter_model.safetensors"
    tensors, name = load_file(path), "base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"
    save_file(tensors | {name: torch.zeros(100, 4)}, path)
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn has lora_B \[100, 4\], not 108 rows"):
        adapter_of(folder, model)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"only lora_A of transformer\.h\.1\.attn\.c_attn"):
        adapter_of(folder, model)
    save_file({"base_model.model.transformer.wte.lora_A.weight": torch.zeros(4, 36)}, path)
    with pytest.raises(UnsupportedModelError, match=r"transformer\.wte\.lora_A\.weight, not supported"):
        adapter_of(folder, model)


def test_files_that_are_missing_or_damaged(tmp_path):
    base = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    model, folder = load(base), write_adapter(tmp_path / "a", base)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    half = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    save_file({k: v for k, v in tensors.items() if k != half}, path)
    with pytest.raises(CheckpointError, match=r"only lora_A of model\.layers\.0\.mlp\.up_proj"):
        adapter_of(folder, model)
    other = load(tiny_checkpoint(tmp_path, "llama", intermediate_size=40, tokenizer=False))
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"gate_proj has .* \[50, 4\], not \[4, 36\] and \[40, 4\]"):
        adapter_of(folder, other)
    save_file({}, path)
    with pytest.raises(CheckpointError, match="adapts nothing"):
        adapter_of(folder, model)
    path.write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        adapter_of(folder, model)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        adapter_of(folder, model)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        adapter_of(folder, model)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        adapter_of(tmp_path, model)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {
            "rank_pattern": {"v_proj": 2, "c_attn": 2},
            "alpha_pattern": {r"^\w+\.\w+\.1.*(up_proj|c_fc)": 3},
        },
    ],
)
def test_folders_that_peft_writes(tmp_path, family, options):
    peft = pytest.importorskip("peft")
    base = tiny_checkpoint(tmp_path, family, tokenizer=False)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(reference(base), settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    theirs.eval().save_pretrained(tmp_path / "a")
    model = load(base)
    with torch.inference_mode():
        adapters = RowAdapters([adapter_of(tmp_path / "a", model)], np.zeros(ROWS, np.int64))
        found = model(TOKENS, POSITIONS, ManySequences(model.config), adapters=adapters)
    torch.testing.assert_close(found, expected([theirs.get_base_model()] * 5), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(kernels.load() is None, reason="no kernels")
def test_adapters_on_weights_in_sixteen_bits_give_the_same_bits(tmp_path):
    """As stored, where the model computes in float32."""
    base = tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    check_on(base, base, tmp_path, rtol=0)


@pytest.mark.skipif(kernels.load() is None, reason="no kernels")
def test_adapters_on_blocks_of_a_file(tmp_path):
    path = write_model(tmp_path / "m.gguf", lambda name: "Q6_K" if name == "token_embd" else "Q4_K")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 2, "head_dim": DIM}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    base = tiny_checkpoint(tmp_path / "like", "llama", tokenizer=False, **sizes, **heads)  # for names and shapes
    check_on(path, base, tmp_path, rtol=1e-4)


def check_on(model, base, folder, *, rtol):
    """Rows of two adapters and of none are those of weights in the dtype. base: a checkpoint with the same shapes"""
    paths = {name: str(write_adapter(folder / name, base, seed=seed, layers=(0, 1))) for seed, name in enumerate("ab")}
    texts = [tokens.tolist() for tokens in TOKENS.split(LENGTHS)]
    found = []
    for weights in ("file", "dtype"):
        with LLM(str(model), weights=weights, dtype="float32", device="cpu", adapters=paths) as llm:
            assert ("as stored" in llm.passes) == (weights == "file")
            found.append([llm.embed(texts, adapter=name, normalize=False) for name in ("a", "b", None)])
    for kept, plain in zip(*found, strict=True):
        assert rtol or kept.tobytes() == plain.tobytes()
        assert np.linalg.norm(kept - plain) <= rtol * np.linalg.norm(plain)
    without = found[1][2]
    for adapted in found[1][:2]:
        assert np.linalg.norm(adapted - without) > 0.3 * np.linalg.norm(adapted), "the adapters change much"
