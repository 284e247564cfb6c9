"""Whatever is in a config.json or in a GGUF header: a model, or one line that names the file and the key."""

from __future__ import annotations

import copy
import json
import random
import struct

import pytest
import torch
from looped_dense import LOOPS
from tiny import SIZES
from transformers import AutoConfig

from prefold.checkpoint import Checkpoint, resolve
from prefold.errors import CheckpointError, OutOfMemoryError
from prefold.model import config_from
from prefold.spec.plugins import named_class
from prefold.worker.torch.load import load_model
from prefold.worker.torch.rotary_tables import RotaryTables

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel"),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2ForRewardModel"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "gpt2": ("GPT2LMHeadModel",),
    "ouro": ("OuroForCausalLM",),
    "huginn": ("RavenForCausalLM",),
    "looped": ("PrefoldLoopedForCausalLM",),
}
ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "factors", "factors": [1.0, 2.0, 3.0]},
]
WRONG = [
    None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1.0, 1e308, 10**9, 10**18, 10**40, 2**63, 2**64, "", "yes", "3",
    "a" * 5000, "\ud800", "line\nline", [], {}, [[]], [1, 2, 3], ["yes"], [None], {"a": 1}, {"0": "x"},
    float("nan"), float("inf"), -float("inf"), {"rope_type": "yarn"}, {"full_attention": {"factor": []}},
]  # fmt: skip
KEYS = [
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "sliding_window_pattern", "query_pre_attn_scalar", "rope_local_base_freq", "partial_rotary_factor",
    "id2label", "num_labels", "hidden_act", "hidden_activation", "activation_function", "attention_bias", "mlp_bias",
    "head_dim", "rms_norm_eps", "tie_word_embeddings", "dtype", "torch_dtype", "architectures", "model_type",
    "quantization_config", "is_causal", "auto_map", "original_max_position_embeddings", "n_inner",
    "scale_attn_weights", "layer_norm_epsilon", "n_embd", "n_head", "n_layer", "n_positions", "loop", "total_ut_steps",
    "early_exit_step", "early_exit_threshold", "mean_recurrence", "n_layers_in_prelude", "n_layers_in_recurrent_block",
    "n_layers_in_coda", "test_time_noise", "qk_bias", "state_seed", "blocks", "order", "visits", "prelude", "coda",
    "between", "noise", "seed", "gate", "threshold", "router",
]  # fmt: skip


def base_config(kind: str, rng: random.Random) -> dict:
    """A config.json that is right."""
    if kind in LOOPS:
        return copy.deepcopy(LOOPS[kind])
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("_token_id")}
    config = json.loads(AutoConfig.for_model(kind, **sizes).to_json_string(use_diff=False))
    config["architectures"] = [rng.choice(ARCHITECTURES[kind])]
    if rng.random() < 0.5 and kind not in ("gpt2", "gemma3_text"):
        config.pop("rope_parameters", None)
        config["rope_scaling"] = dict(rng.choice(ROPES))
    return config


def broken(rng: random.Random) -> dict:
    """A config with one to three of its values, at any depth, replaced or taken away."""
    config = copy.deepcopy(base_config(rng.choice(list(ARCHITECTURES)), rng))
    for _ in range(rng.choice([1, 1, 2, 3])):
        place = config
        inner = [value for value in config.values() if isinstance(value, dict) and value]
        if inner and rng.random() < 0.4:
            place = rng.choice(inner)
        key = rng.choice([*place, *(KEYS if place is config or place is config.get("loop") else ())])
        if rng.random() < 0.1:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(rng.choice(WRONG))
    return config


def check(folder, config: dict) -> bool:
    """Whether the config gives a model; what it gives can be made, and what it says otherwise is one line."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        checkpoint = resolve(str(folder))
        made = config_from(checkpoint.config)
    except CheckpointError as error:
        assert str(folder) in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        return False
    if made.num_parameters < 10_000_000 and made.layers < 100:
        named_class(made.model)(made, dtype=torch.float32, device=torch.device("meta"))
        if made.rope is not None and made.head_dim < 10_000:
            RotaryTables(made.ropes, made.rotated_dims, torch.device("cpu"))(torch.arange(3))
    return True


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 12_000), marks=pytest.mark.slow)], ids=str)
def test_any_config_is_a_model_or_one_line(tmp_path, seeds):
    whole = sum(check(tmp_path, broken(random.Random(seed))) for seed in seeds)
    assert 0 < whole < len(seeds)


def test_the_configs_are_right_before_they_are_broken(tmp_path):
    for kind in ARCHITECTURES:
        for seed in range(4):
            config = base_config(kind, random.Random(seed))
            assert check(tmp_path, config) or "factors" in str(config), config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 10**9}, r"config\.json: num_hidden_layers is 1000000000; it must be at most 4,096"),
        ({"hidden_size": 10**12}, r"hidden_size is 1000000000000; it must be at most 16,777,216"),
        ({"vocab_size": "many"}, r"vocab_size is 'many'; it must be a whole number"),
        ({"rms_norm_eps": [1]}, r"rms_norm_eps is \[1\]; it must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"rope_scaling\.factor is '2'; it must be a number"),
        ({"rope_scaling": [2]}, r"rope_scaling is \[2\]; it must be an object"),
        ({"architectures": [["x"]]}, r"architectures is \[\['x'\]\]; it must be a list of strings"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; it must be a string"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no'; it must be true or false"),
    ],
)
def test_the_file_and_the_key_are_named(tmp_path, overrides, message):
    (tmp_path / "config.json").write_text(json.dumps(base_config("llama", random.Random(1)) | overrides))
    with pytest.raises(CheckpointError, match=message):
        config_from(resolve(str(tmp_path)).config)


def test_what_is_far_too_large_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr("prefold.worker.torch.load.CausalLM", None)
    sizes = base_config("llama", random.Random(1)) | {"hidden_size": 2**24, "intermediate_size": 2**24}
    with pytest.raises(OutOfMemoryError, match="GB"):
        load_model(Checkpoint.dummy(sizes), dtype=torch.float32, device="cpu")


# GGUF ---------------------------------------------------------------------------------------------------------------

GGUF_WRONG = [
    (4, 0), (4, 1), (4, 2**32 - 1), (5, -1), (6, float("nan")), (6, 0.0), (7, True), (8, b"llama"), (8, b""),
    (8, b"\xff"), (10, 2**63), (12, 1e308), (9, (4, [])), (9, (4, [2, 2])), (9, (4, [1, 2])), (9, (8, [b"a", b"b"])),
    (9, (9, [(4, [1])])),
]  # fmt: skip
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def gguf_value(kind: int, value) -> bytes:
    if kind == 8:
        return struct.pack("<Q", len(value)) + value
    if kind == 9:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(gguf_value(item, one) for one in values)
    return struct.pack("<" + SCALARS[kind], value)


def gguf_file(metadata: dict[str, tuple], tensors: dict[str, tuple[tuple[int, ...], int]]) -> bytes:
    """A GGUF file with zeros for numbers. tensors: name -> (shape, innermost first; ggml type)."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, (kind, value) in metadata.items():
        parts += [gguf_value(8, key.encode()), struct.pack("<I", kind), gguf_value(kind, value)]
    for number, (name, (shape, kind)) in enumerate(tensors.items()):
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        parts += [gguf_value(8, name.encode()), dims, struct.pack("<IQ", kind, 8192 * number)]
    return b"".join(parts) + bytes(8192 * 4)


def broken_gguf(rng: random.Random) -> bytes:
    arch = rng.choice(["llama", "qwen2", "qwen3", "gemma3"])
    sizes = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.sliding_window": 16,
    }  # fmt: skip
    metadata: dict[str, tuple] = {"general.architecture": (8, arch.encode())}
    metadata |= {f"{arch}.{key}": (4, value) for key, value in sizes.items()}
    metadata |= {f"{arch}.attention.layer_norm_rms_epsilon": (6, 1e-5), f"{arch}.rope.freq_base": (6, 1e4)}
    tensors = {"token_embd.weight": ((32, 50), 0), "blk.0.attn_q.weight": ((32, 32), 0)}
    if rng.random() < 0.3:
        tensors["rope_freqs.weight"] = ((4,), 0)
    extra = ["rope.scaling.type", "rope.scaling.factor", "attention.key_length", "expert_count", "attention.causal"]
    for _ in range(rng.choice([1, 2, 3])):
        if tensors and rng.random() < 0.25:
            name = rng.choice(list(tensors))
            shape = rng.choice([(), (0,), (32,), (2**63, 2**63), (0, 2**62), (1,) * 70, (32, 50, 2)])
            tensors[name] = (shape, rng.choice([0, 1, 2, 14, 39, 999]))
            if rng.random() < 0.3:
                del tensors[rng.choice(list(tensors))]
        elif rng.random() < 0.1:
            metadata.pop(rng.choice(list(metadata)))
        else:
            key = rng.choice([*metadata, *(f"{arch}.{key}" for key in extra), "split.count"])
            metadata[key] = rng.choice(GGUF_WRONG)
    data = gguf_file(metadata, tensors)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))]
    return data


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 12_000), marks=pytest.mark.slow)], ids=str)
def test_any_gguf_header_is_a_model_or_one_line(tmp_path, seeds):
    path, whole = tmp_path / "m.gguf", 0
    for seed in seeds:
        path.write_bytes(broken_gguf(random.Random(seed)))
        try:
            config_from(resolve(str(path)).config)
            whole += 1
        except CheckpointError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
    assert 0 < whole < len(seeds)


def test_lists_in_lists_without_end(tmp_path):
    path = tmp_path / "m.gguf"
    value = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_value(8, b"a") + struct.pack("<I", 9) + value)
    with pytest.raises(CheckpointError, match="damaged"):
        resolve(str(path))
