"""Loading: what is read is what was written; what does not fit is named before anything is read."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from safetensors.torch import load_file, save_file
from tiny import MORE, DenseAttend, reference, tiny_checkpoint

from prefold.checkpoint import GEOMETRIES, Checkpoint, resolve
from prefold.errors import CheckpointError, InputError, OutOfMemoryError
from prefold.model import config_from
from prefold.worker.torch.layers import Linear
from prefold.worker.torch.load import load_model
from prefold.worker.torch.products import packs_with_onednn, product_kernels

TOKENS = torch.tensor([5, 9, 100, 7, 7, 250, 11])


def load(path, **options):
    return load_model(resolve(str(path)), **({"dtype": torch.float32, "device": "cpu"} | options))


def hidden(model):
    with torch.no_grad():
        return model(TOKENS, torch.arange(len(TOKENS)), DenseAttend(model.config))


def edit(folder, change):
    """Applies change(tensors) to the folder's safetensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_shards(tmp_path):
    whole = tiny_checkpoint(tmp_path, "llama")
    parts = tiny_checkpoint(tmp_path, "llama", max_shard_size="50KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    torch.testing.assert_close(hidden(load(parts)), hidden(load(whole)), rtol=0, atol=0)
    next(parts.glob("*-00002-*")).unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002"):
        load(parts)


def test_bare_tensors_under_a_causal_architecture(tmp_path):
    """As embedding checkpoints come: tensors without "model.", no LM head, and an architecture that has one."""
    folder = tiny_checkpoint(tmp_path, "qwen3")
    expected = hidden(load(folder))

    def strip(tensors):
        del tensors["lm_head.weight"]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(folder, strip)
    model = load(folder)
    torch.testing.assert_close(hidden(model), expected, rtol=0, atol=0)
    with pytest.raises(InputError, match="no LM head"):
        model.logits(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_bare_models(tmp_path, tied):
    folder = tiny_checkpoint(tmp_path, "qwen3", head="bare", tie_word_embeddings=tied)
    model = load(folder)
    with torch.no_grad():
        expected = reference(folder, "bare")(TOKENS[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden(model), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="no LM head"):
        model.logits(expected)


def test_a_tied_head_may_be_saved_too(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    expected = hidden(load(folder))
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(folder)
    assert model.lm_head is None
    torch.testing.assert_close(hidden(model), expected, rtol=0, atol=0)


def test_a_head_that_is_saved_with_other_values_is_not_tied(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit(folder, lambda t: t.update({"lm_head.weight": torch.randn(307, 36)}))
    model = load(folder)
    assert not model.config.tie_embeddings
    with torch.no_grad():
        expected = reference(folder)(TOKENS[None]).logits[0]
    torch.testing.assert_close(model.logits(hidden(model)), expected, rtol=1e-4, atol=1e-4)


def test_reward_head_of_two_layers(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen2", head="bare")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"Qwen2Model"', '"Qwen2ForRewardModel"'))
    a, b = torch.randn(36, 36), torch.randn(36)
    c, d = torch.randn(1, 36), torch.randn(1)
    edit(folder, lambda t: t.update({"score.0.weight": a, "score.0.bias": b, "score.2.weight": c, "score.2.bias": d}))
    model = load(folder)
    states = hidden(model)
    torch.testing.assert_close(model.head(states), (states @ a.T + b).relu() @ c.T + d, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")

    def break_it(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.rel_bias"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(37)

    edit(folder, break_it)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert "missing: layers.1.mlp.up_proj.weight" in str(error.value)
    assert "unexpected: layers.0.self_attn.rel_bias" in str(error.value)
    assert "misshapen: norm.weight is [37], not [36]" in str(error.value)


def test_old_buffers_are_no_weights(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}))
    load(folder)


def test_gpt2_as_old_checkpoints_have_it(tmp_path):
    """Names without "transformer.", and the masks of attention saved as buffers."""
    folder = tiny_checkpoint(tmp_path, "gpt2")
    expected = hidden(load(folder))

    def age(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for number in range(3):
            tensors[f"h.{number}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
            tensors[f"h.{number}.attn.masked_bias"] = torch.tensor(-1e4)

    edit(folder, age)
    torch.testing.assert_close(hidden(load(folder)), expected, rtol=0, atol=0)
    bare = tiny_checkpoint(tmp_path, "gpt2", head="bare")
    with torch.no_grad():
        wanted = reference(bare, "bare")(TOKENS[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden(load(bare)), wanted, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_gpt2_is_named(tmp_path):
    folder = tiny_checkpoint(tmp_path, "gpt2")

    def break_it(tensors):
        del tensors["transformer.h.1.ln_2.bias"]
        tensors["transformer.h.0.crossattention.c_attn.weight"] = torch.zeros(36, 72)
        tensors["transformer.wpe.weight"] = torch.zeros(100, 36)
        tensors["transformer.h.2.mlp.c_fc.weight"] = torch.zeros(36, 49)

    edit(folder, break_it)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert "missing: layers.1.post_attention_layernorm.bias" in str(error.value)
    assert "unexpected: h.0.crossattention.c_attn.weight" in str(error.value)
    assert "embed_positions.weight is [100, 36], not [512, 36]" in str(error.value)
    assert "layers.2.mlp.up_proj.weight is [49, 36], not [50, 36]" in str(error.value)
    edit(folder, lambda t: t.update({"transformer.h.0.attn.c_attn.weight": torch.zeros(36, 107)}))
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.c_attn\.weight of .* has 107 outputs, not 108"):
        load(folder)
    twice = {f"{prefix}h.0.attn.c_attn.weight": torch.zeros(36, 108) for prefix in ("", "transformer.")}
    edit(folder, lambda t: t.update(twice))
    with pytest.raises(CheckpointError, match=r"c_attn\.weight' twice"):
        load(folder)


def test_a_class_count_that_differs_from_the_head(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=3)
    edit(folder, lambda t: t.update({"score.weight": torch.zeros(4, 36)}))
    with pytest.raises(CheckpointError, match=r"score\.weight is \[4, 36\], not \[3, 36\]"):
        load(folder)


def test_pickles_are_not_opened(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)


def test_a_damaged_file(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_memory_is_refused_before_loading(tmp_path, free_memory):
    checkpoint = resolve("smollm2-135m", load_format="dummy")
    free_memory(600_000_000)
    with pytest.raises(OutOfMemoryError, match=r"smollm2-135m in float32 needs 0\.7 GB.*0\.6 GB.*bfloat16 \(0\.3 GB\)"):
        load_model(checkpoint, dtype=torch.float32, device="cpu")
    free_memory(300_000_000)
    with pytest.raises(OutOfMemoryError, match=r"in bfloat16 needs 0\.3 GB"):
        load_model(checkpoint, dtype=torch.bfloat16, device="cpu")
    tiny = tiny_checkpoint(tmp_path, "llama")
    size = (tiny / "model.safetensors").stat().st_size
    free_memory(size * 9 // 10)
    with pytest.raises(OutOfMemoryError):
        load(tiny)
    free_memory(size * 2)
    load(tiny)


def test_random_weights_are_seeded_and_normal():
    config = GEOMETRIES["smollm2-135m"] | {"num_hidden_layers": 2, "vocab_size": 3000}
    models = [
        load_model(Checkpoint.dummy(config), dtype=torch.float32, device="cpu", pack=False, seed=s) for s in (0, 0, 1)
    ]
    weights = [m.layers[0].gate_up.weight.detach() for m in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert abs(weights[0].std().item() - 0.02) < 1e-3
    assert abs(weights[0].mean().item()) < 1e-3
    assert torch.equal(models[0].end.norm.weight.detach(), torch.ones(576))
    first, second = weights[0], models[0].layers[1].gate_up.weight.detach()
    assert (first - second).abs().mean() > 0.01
    assert hidden(models[0]).isfinite().all()


def test_random_weights_of_gpt2():
    config = GEOMETRIES["gpt2"] | {"n_layer": 2, "vocab_size": 300}
    model = load_model(Checkpoint.dummy(config), dtype=torch.bfloat16, device="cpu")
    assert torch.equal(model.layers[0].post_attention_layernorm.weight.float(), torch.ones(768))
    assert abs(model.position_embedding.std().item() - 0.02) < 1e-3
    assert hidden(model).isfinite().all()


def test_random_norms_are_one_with_what_is_added_to_them():
    config = {"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "vocab_size": 60}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config |= {"max_position_embeddings": 64}
    model = load_model(Checkpoint.dummy(config), dtype=torch.float32, device="cpu")
    delta, attention = model.layers[0], model.layers[3]
    for weight in (
        delta.input_layernorm.weight,
        attention.q_norm.weight,
        model.end.norm.weight,
        delta.gated_delta.norm,
    ):
        assert (weight == 1).all()  # the last one is not stored less one


@pytest.mark.parametrize("sizes", [(576, 960), (37, 11), (1, 5), (64, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_computes_the_same(sizes, dtype, bias):
    linear = Linear(*sizes, bias=bias, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        for rows in (0, 1, 3, 70):
            x = torch.randn(rows, sizes[0], generator=generator).to(dtype)
            exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
            packed = Linear(*sizes, bias=bias, dtype=dtype, device=torch.device("cpu"))
            packed.load_state_dict(linear.state_dict())
            packed.pack()
            assert (packed.weight is None) == (packs_with_onednn(linear.weight) or bool(product_kernels(linear.weight)))
            tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
            torch.testing.assert_close(packed(x).double(), exact, **tolerance)
            assert packed(x).dtype == dtype


def test_packing_frees_the_weight(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "llama"))
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(linears) == 3 * 4 + 1
    if packs_with_onednn(torch.zeros(2, 2)):
        assert all(m.weight is None and m.product is not None for m in linears)
    unpacked = load(tiny_checkpoint(tmp_path, "llama"), pack=False)
    torch.testing.assert_close(hidden(model), hidden(unpacked), rtol=1e-5, atol=1e-5)


# GGUF ---------------------------------------------------------------------------------------------------------------

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router.layer": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# What an architecture calls otherwise.
OWN_NAMES = dict.fromkeys(("gemma2", "gemma3", "olmo2", "exaone4"), OUT_NORMS) | {
    "gpt-oss": {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "hunyuan-dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "falcon": {
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
    },
    "gptneox": {
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "phi2": {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
}
# The settings of an architecture: (key, kind, value of the config).
GRANITE_KEYS = [
    ("embedding_scale", "float32", "embedding_multiplier"), ("residual_scale", "float32", "residual_multiplier"),
    ("attention.scale", "float32", "attention_multiplier"), ("logit_scale", "float32", "logits_scaling"),
]  # fmt: skip
OWN_KEYS = {
    "granite": GRANITE_KEYS,
    "granitemoe": GRANITE_KEYS,
    "gemma2": [
        ("attn_logit_softcapping", "float32", "attn_logit_softcapping"),
        ("final_logit_softcapping", "float32", "final_logit_softcapping"),
    ],
    "cohere2": [("logit_scale", "float32", "logit_scale")],
    "command-r": [("logit_scale", "float32", "logit_scale")],
    "gptneox": [("use_parallel_residual", "bool", "use_parallel_residual")],
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "arcee")
TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "embed_out.weight": "output.weight",
    **{f"{name}.weight": "token_embd.weight" for name in ("embed_in", "word_embeddings")},
    **{
        f"{name}.{kind}": f"output_norm.{kind}"
        for name in ("final_layer_norm", "final_layernorm", "ln_f")
        for kind in ("weight", "bias")
    },
}


def permute(weight, heads):
    """What llama.cpp's converter does to q and k of Llama: the halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "olmo3": "olmo2", "phi3-long": "phi3", "granite4": "granite", "qwen2-moe": "qwen2moe", "qwen3-moe": "qwen3moe",
    "mixtral": "llama", "granite-moe": "granitemoe", "granite-moe-shared": "granitemoe",
}  # fmt: skip
OLMO3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def as_granite3(folder):
    """Makes a dense Granite 4 in `folder` a Granite 3 of the same weights."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "input_linear" in name:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                tensors[name.replace("shared_mlp.input_linear", f"mlp.{part}_proj")] = rows.contiguous()
        else:
            tensors[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GraniteForCausalLM"], "intermediate_size": config["shared_intermediate_size"]}
    kept = {
        key: value
        for key, value in config.items()
        if not key.startswith(("mamba_", "num_experts", "num_local", "time_"))
    }
    (folder / "config.json").write_text(json.dumps(kept))


def stacked(tensors):
    """Tensors with those of all experts in one, as llama.cpp's converter has them."""
    stacks = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{theirs}.", f".{ours}.")
        if match := re.fullmatch(r"(.+)mlp\.experts\.(gate_up|down)_proj(_bias)?", name):  # gpt-oss
            parts, kind = match[2].split("_"), "bias" if match[3] else "weight"
            matrices = tensor if match[3] else tensor.mT
            for number, part in enumerate(parts):
                stacks[f"{match[1]}ffn_{part}_exps.{kind}"] = matrices[:, number :: len(parts)].contiguous()
            continue
        name = name.replace("self_attn.sinks", "self_attn.sinks.weight")
        halves = tensor.chunk(2, -2) if "input_linear" in name else (tensor,)
        kind = "shexp" if "shared" in name else "exps"
        for half, part in zip(("gate", "up") if len(halves) == 2 else ("down",), halves, strict=True):
            if name.endswith(("input_linear.weight", "output_linear.weight")):
                stacks[f"{name.split('mlp')[0].removesuffix('shared_')}ffn_{half}_{kind}.weight"] = part
            elif match := re.fullmatch(r"(.+)mlp\.(?:experts\.\d+|shared_expert)\.(\w+)_proj\.weight", name):
                stacks.setdefault(f"{match[1]}ffn_{match[2]}_{kind}.weight", []).append(part)
            else:
                stacks[name] = part
    return {
        name: (torch.stack(part) if "exps" in name else part[0]) if isinstance(part, list) else part
        for name, part in stacks.items()
    }


def write_gguf(folder, path, arch):
    """The checkpoint of `folder` as a GGUF file, tensors in float32."""
    config = config_from(resolve(str(folder)).config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    (writer.add_layer_norm_eps if config.norm == "layer" else writer.add_layer_norm_rms_eps)(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    names, hf = NAMES | OWN_NAMES.get(arch, {}), resolve(str(folder)).config
    windows = [plane.window for plane in config.planes]
    if windows[0] and arch in ("gemma3", "gemma2"):
        writer.add_sliding_window(windows[0])
        writer.add_sliding_window_pattern(2)
    elif windows[0]:
        writer.add_sliding_window(windows[0])
        if not all(windows):
            writer.add_sliding_window_pattern([window is not None for window in windows])
    if experts := config.experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.chosen)
        writer.add_expert_feed_forward_length(experts.width)
        writer.add_expert_shared_feed_forward_length(experts.shared)
    for key, kind, of_config in OWN_KEYS.get(arch, ()):
        getattr(writer, f"add_{kind}")(f"{arch}.{key}", hf[of_config])
    if arch == "phi3" or config.turned != config.head_dim:
        writer.add_rope_dimension_count(config.turned)
    if arch == "phi3" and config.rope.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(hf["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(config.rope.settings["attention_factor"])
        for which in ("long", "short"):
            factors = np.array(hf["rope_parameters"][f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if config.rope.kind == "yarn":
        settings = config.rope.settings
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(settings["factor"])
        writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
    if arch == "olmo2" and config.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.settings["factor"])
    for name, tensor in stacked(load_file(folder / "model.safetensors")).items():
        short, values = re.sub(r"^(model|gpt_neox|transformer)\.(h\.(?=\d))?", "", name), tensor.numpy()
        short = f"layers.{short}" if short[0].isdigit() else short
        if ".ffn_" in short:
            short = short.replace("layers.", "blk.")
        elif short not in TOP:
            _, number, rest = short.split(".", 2)
            role, kind = rest.rsplit(".", 1)
            if arch in PERMUTED and role.endswith(("q_proj", "k_proj")):
                values = permute(values, config.heads if role.endswith("q_proj") else config.kv_heads)
            short = f"blk.{number}.{names[role]}.{kind}"
            if role.endswith("query_key_value"):  # as the converters do: queries first, then keys, then values
                parts = values.reshape(config.kv_heads, -1, config.head_dim, *values.shape[1:])
                parts = (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])
                values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        if (arch.startswith("gemma") and "norm" in name) or (arch == "nemotron" and name.endswith("norm.weight")):
            values = values + 1  # as llama.cpp's converter does
        writer.add_tensor(TOP.get(short, short), values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", *MORE])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_same_model(tmp_path, family, tied):
    extra = {
        "llama": {"attention_bias": True},
        "gemma3": {"query_pre_attn_scalar": 10},
        "gemma2": {"query_pre_attn_scalar": 10},
        "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
        "olmo3": {"rope_parameters": OLMO3_ROPE},
    }.get(family, {})
    folder = tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied, **extra)
    path = tmp_path / "m.gguf"
    if family == "granite4":  # its converter writes the dense models as files of Granite 3
        as_granite3(folder)
    write_gguf(folder, path, GGUF_NAMES.get(family, family))
    ours, expected = load(path), load(folder)
    torch.testing.assert_close(hidden(ours), hidden(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logits(hidden(ours)), expected.logits(hidden(expected)), rtol=1e-5, atol=1e-4)


DENSE = {
    "cohere": "command-r", "cohere with norms": "command-r", "glm4": "glm4", "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5", "hunyuan_v1_dense": "hunyuan-dense", "arcee": "arcee", "nemotron": "nemotron",
    "stablelm": "stablelm", "stablelm parallel": "stablelm", "falcon": "falcon", "falcon with one key head": "falcon",
    "falcon with one norm": "falcon", "gpt_neox": "gptneox", "gpt_neox in turn": "gptneox", "phi": "phi2",
}  # fmt: skip
DENSE_SETTINGS: dict[str, dict] = PROGRAMS | {
    "cohere": {}, "cohere with norms": {"use_qk_norm": True}, "phi": {},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_a_gguf_file_of_a_dense_family_is_the_same_model(tmp_path, name):
    folder, path = checkpoint_of(tmp_path / "model", name, DENSE_SETTINGS[name], seed=3), tmp_path / "m.gguf"
    write_gguf(folder, path, DENSE[name])
    ours, expected = load(path), load(folder)
    torch.testing.assert_close(hidden(ours), hidden(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logits(hidden(ours)), expected.logits(hidden(expected)), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_smollm2_is_the_model_transformers_reads():
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = resolve("smollm2-135m")
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    # from_pretrained(gguf_file=...) does the same by way of the package accelerate.
    config = AutoConfig.from_pretrained(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(checkpoint.path, return_tensors=True, model_to_load=oracle)["tensors"]
    left = oracle.load_state_dict(tensors, strict=False)
    assert left.unexpected_keys == []
    assert left.missing_keys in ([], ["lm_head.weight"])
    tokens = torch.tensor([1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28])
    with torch.inference_mode():
        expected = oracle(tokens[None]).logits[0]
        ours = model.logits(model(tokens, torch.arange(len(tokens)), DenseAttend(model.config)))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 1
