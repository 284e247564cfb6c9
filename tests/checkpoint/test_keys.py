"""Every key of a checkpoint's files that is known to change results: one that is used changes what is read, one that is
refused gives an error with its name and value, and one that is harmless changes nothing."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import SIZES, reference, tiny_checkpoint, write_tokenizer

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.checkpoint.gguf import GGUFTensor
from prefold.checkpoint.gguf_config import config_from_gguf
from prefold.checkpoint.keys import KEYS
from prefold.errors import PrefoldError, UnsupportedModelError
from prefold.model import config_from
from prefold.tasks import embed_settings, end_ids, make_task, recommended_sampling
from prefold.tasks.sentence import pair_settings
from prefold.text.load import gguf_tokenizer, load_tokenizer

MODEL = SIZES | {"hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODEL = {key: value for key, value in MODEL.items() if not key.endswith("_token_id")}
TEXTS = ["the yes", "<|im_start|>user\nthe <extra> no<|im_end|>", " The YES , no!", "y" * 9]
FULL, SLIDING = "full_attention", "sliding_attention"


def keys(file: str, use: str) -> list[str]:
    return [name for name, key in KEYS[file].items() if key.use == use]


def of(family: str, **values: Any) -> dict[str, Any]:
    return {"architectures": [family]} | values


HEAD = of("LlamaForSequenceClassification", num_labels=1)
GEMMA2 = of("Gemma2ForCausalLM", head_dim=10, sliding_window=5)
GEMMA3 = of("Gemma3ForCausalLM", head_dim=10, sliding_window=5)
QWEN2 = of("Qwen2ForCausalLM", sliding_window=5, use_sliding_window=True, max_window_layers=1)
GPT2 = of("GPT2LMHeadModel", n_embd=36, n_head=6, n_layer=3, n_positions=512)
MOE = of("Qwen3MoeForCausalLM", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=22)
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}
# {key: (keys added to MODEL (... removes a key), the value that changes the result)}.
USED: dict[str, tuple[dict[str, Any], Any]] = {
    "architectures": ({}, ["MistralForCausalLM"]),
    "model_type": ({"architectures": ...}, "mistral"),
    "quantization_config": ({}, {"quant_method": "gptq"}),
    "auto_map": ({}, {"AutoModelForCausalLM": "modeling_x.X"}),
    "is_causal": ({}, False),
    "vocab_size": ({}, 301),
    "hidden_size": ({}, 48),
    "num_hidden_layers": ({}, 2),
    "num_attention_heads": ({}, 4),
    "num_key_value_heads": ({}, 3),
    "head_dim": ({}, 10),
    "intermediate_size": ({}, 48),
    "max_position_embeddings": ({}, 100),
    "tie_word_embeddings": ({}, True),
    "attention_bias": ({}, True),
    "mlp_bias": ({}, True),
    "hidden_act": ({}, "gelu_new"),
    "hidden_activation": (GEMMA2, "silu"),
    "rms_norm_eps": ({}, 1e-3),
    "layer_norm_eps": (of("Cohere2ForCausalLM", sliding_window=5), 1e-3),
    "layer_norm_epsilon": (GPT2, 1e-3),
    "norm_epsilon": (of("Starcoder2ForCausalLM"), 1e-3),
    "rope_theta": ({}, 500.0),
    "rope_scaling": ({}, LINEAR),
    "rope_parameters": ({}, LINEAR),
    "rope_local_base_freq": (GEMMA3, 500.0),
    "sliding_window": (of("MistralForCausalLM"), 7),
    "use_sliding_window": (QWEN2, False),
    "max_window_layers": (QWEN2, 2),
    "layer_types": (GEMMA2, [FULL, FULL, SLIDING]),
    "sliding_window_pattern": (GEMMA3, 2),
    "no_rope_layers": (of("SmolLM3ForCausalLM"), [0, 1, 1]),
    "logit_scale": (of("Cohere2ForCausalLM", sliding_window=5), 0.5),
    "logits_scaling": (of("GraniteForCausalLM"), 3.0),
    "attn_logit_softcapping": (GEMMA2, 2.0),
    "final_logit_softcapping": (GEMMA2, None),
    "query_pre_attn_scalar": (GEMMA2, 7),
    "embedding_multiplier": (of("GraniteForCausalLM"), 3.0),
    "residual_multiplier": (of("GraniteForCausalLM"), 0.4),
    "attention_multiplier": (of("GraniteForCausalLM"), 0.3),
    "scale_attn_weights": (GPT2, False),
    "num_experts_per_tok": (MOE, 3),
    "norm_topk_prob": (MOE, True),
    "pad_token_id": (HEAD, 7),
    "id2label": (HEAD, {"0": "good"}),
    "num_labels": (HEAD, 3),
    "problem_type": (HEAD, "regression"),
    "sentence_transformers": (HEAD, IDENTITY),
    "sbert_ce_default_activation_function": (HEAD, IDENTITY["activation_fn"]),
    "eos_token_id": ({}, [2, 7]),
    "bos_token_id": ({"bos_token_id": 5}, 9),
    "dtype": ({}, "bfloat16"),
    "torch_dtype": ({}, "float16"),
}
OTHER_USED: dict[str, dict[str, Any]] = {
    "generation_config.json": {
        "eos_token_id": [9], "bos_token_id": 9, "pad_token_id": 9, "do_sample": False, "temperature": 0.5, "top_k": 9,
        "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0,
    },
    "config_sentence_transformers.json": {
        "prompts": {"query": "no: "}, "default_prompt_name": None, "truncate_dim": 8, "model_type": "CrossEncoder",
        "activation_fn": "torch.nn.modules.activation.Tanh",
    },
    "sentence_bert_config.json": {
        "max_seq_length": 9, "do_lower_case": True, "transformer_task": "fill-mask",
        "modality_config": {"message": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "processing_kwargs": {"text": {"x": 1}},
    },
    "1_Pooling/config.json": dict.fromkeys(keys("1_Pooling/config.json", "used"), True)
    | {"pooling_mode": "mean", "include_prompt": False, "pooling_mode_lasttoken": False},
    "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": None},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"265": {"content": "<extra>"}}, "additional_special_tokens": ["<extra>"],
        "extra_special_tokens": ["<extra>"], "bos_token": "<|im_end|>", "eos_token": "<|im_start|>",
        "unk_token": "<extra>", "sep_token": "<extra>", "pad_token": "<|im_end|>", "cls_token": "<extra>",
        "mask_token": "<extra>", "chat_template": "{{ messages[0]['content'] }}", "model_max_length": 9,
        "truncation_side": "left", "split_special_tokens": True,
    },
}  # fmt: skip
# Values of refused keys; of the others ODD.
ASKING = {
    "partial_rotary_factor": 1 / 3, "typical_p": 0.5, "num_beams": 4, "num_beam_groups": 2, "guidance_scale": 1.5,
    "logit_scale": 0.5, "residual_scale": 0.5, "embedding_scale": 3.0, "expert_weights_scale": 2.5,
    "expert_group_count": 4, "expert_group_used_count": 2,
    "tokenizer.ggml.suppress_tokens": [3],
}  # fmt: skip
ODD = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint without weights, with a file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    write_tokenizer(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_LogitScore").mkdir()
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    contents = {
        "config.json": MODEL,
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
        "1_LogitScore/config.json": {"true_token_id": 5, "false_token_id": 6},
        "config_sentence_transformers.json": {"prompts": {"query": "yes: "}, "default_prompt_name": "query"},
        "sentence_bert_config.json": {},
        "generation_config.json": {"do_sample": True, "temperature": 0.7},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def outcome(folder) -> dict[str, Any]:
    """What prefold reads of a folder's files before the weights: by reader, the value or the error."""
    checkpoint = resolve(str(folder))

    def tokens(tokenizer):
        ids = [tokenizer.encode(text).tolist() for text in TEXTS]
        special = {name: getattr(tokenizer, name) for name in ("bos_id", "eos_id", "pad_id", "truncation_side")}
        chat = tokenizer.render_chat([{"role": "user", "content": "the yes"}])
        return ids, special, chat, [tokenizer.decode(each) for each in ids], tokenizer.max_length

    def head(tokenizer):
        task = make_task("classify", checkpoint, tokenizer)
        return task.labels, task.activation, task.inputs.unread

    readers = {
        "tokens": tokens,
        "config": lambda tokenizer: config_from(checkpoint.config),
        "ends": lambda tokenizer: end_ids(checkpoint, tokenizer),
        "sampling": lambda tokenizer: recommended_sampling(checkpoint),
        "embed": lambda tokenizer: embed_settings(checkpoint),
        "pair": lambda tokenizer: pair_settings(checkpoint, tokenizer),
    }
    if "Pooling" not in str(checkpoint.read_json("modules.json")):
        del readers["embed"]
    if "Sequence" in str(checkpoint.config.get("architectures")):
        readers["head"] = head
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read(load_tokenizer(checkpoint))
        except PrefoldError as error:
            found[name] = str(error)
    return found


@pytest.fixture
def change(files, tmp_path):
    """Gives what is read of the files with other keys in one of them; ... removes a key."""
    folder = tmp_path / "files"
    shutil.copytree(files, folder)

    def change(file: str, **values: Any) -> dict[str, Any]:
        if values.keys() & {"bos_token_id", "pad_token_id"}:  # they count for a tokenizer that names no such token
            named = json.loads((files / "tokenizer_config.json").read_text())
            unnamed = {name: value for name, value in named.items() if name not in ("bos_token", "pad_token")}
            (folder / "tokenizer_config.json").write_text(json.dumps(unnamed))
        kinds = {"Transformer": ""} if {"model_type", "activation_fn"} & values.keys() and "sentence" in file else {}
        if file == "1_LogitScore/config.json":
            kinds = {"Transformer": "", "LogitScore": "1_LogitScore"}
        if kinds:  # of a CrossEncoder
            modules = [{"type": kind, "path": path} for kind, path in kinds.items()]
            (folder / "modules.json").write_text(json.dumps(modules))
        before = json.loads((files / file).read_text())
        content = {key: value for key, value in (before | values).items() if value is not ...}
        (folder / file).write_text(json.dumps(content))
        return outcome(folder)

    return change


JSON_FILES = [file for file in KEYS if file.endswith(".json")]


@pytest.mark.parametrize("key", keys("config.json", "used"))
def test_keys_of_config_json_that_are_used(change, key):
    beside, value = USED[key]
    assert change("config.json", **beside | {key: value}) != change("config.json", **beside)


@pytest.mark.parametrize(
    ("file", "key"), [(file, key) for file in JSON_FILES if file != "config.json" for key in keys(file, "used")]
)
def test_keys_that_are_used(change, file, key):
    # An activation is of a CrossEncoder alone.
    beside = {"activation_fn": {"model_type": "CrossEncoder"}, "model_type": {"activation_fn": "torch.nn.Tanh"}}
    before = beside.get(key, {key: 5} if key.endswith("s_token_id") or key == "pad_token_id" else {})
    assert change(file, **before | {key: OTHER_USED[file][key]}) != change(file, **before)


@pytest.mark.parametrize(("file", "key"), [(file, key) for file in JSON_FILES for key in keys(file, "refused")])
def test_keys_that_are_refused(change, file, key):
    base, value = change(file), ASKING.get(key, ODD)
    said = [text for text in change(file, **{key: value}).values() if isinstance(text, str)]
    assert said and all(f"{key} is {value}, which asks for {KEYS[file][key].why}" in text for text in said)
    nothing = () if key == "partial_rotary_factor" else (False, 0)
    for plain in (None, *nothing, *KEYS[file][key].plain):
        assert change(file, **{key: plain}) == base


@pytest.mark.parametrize(("file", "key"), [(file, key) for file in JSON_FILES for key in keys(file, "harmless")])
def test_keys_that_are_harmless(change, file, key):
    base = change(file)
    for value in (True, 3, "x"):
        assert change(file, **{key: value}) == base


def test_every_key_that_is_used_has_a_value_here():
    assert USED.keys() == set(keys("config.json", "used"))
    assert all(OTHER_USED[file].keys() == set(keys(file, "used")) for file in JSON_FILES if file != "config.json")


def gguf(**metadata: Any) -> Any:
    """A GGUF file of a Llama as its metadata alone."""
    sizes = {"block_count": 1, "embedding_length": 32, "attention.head_count": 4, "feed_forward_length": 64}
    sizes |= {"context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {name: GGUFTensor(name, (32, 32), 0, 0) for name in ("token_embd.weight", "blk.0.attn_q.weight")}
    values = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in (sizes | metadata).items()}
    return SimpleNamespace(path="a.gguf", metadata=values, tensors=tensors, type_name=lambda name: "F32")


@pytest.mark.parametrize("key", keys("{architecture}.", "refused"))
def test_gguf_keys_that_are_refused(key):
    value = ASKING.get(key, ODD)
    with pytest.raises(UnsupportedModelError, match=rf"a\.gguf: llama\.{key} is .*, which asks for") as caught:
        config_from_gguf(gguf(**{key: value}))
    assert str(value)[:50] in str(caught.value)
    for plain in (False, 0, *KEYS["{architecture}."][key].plain):
        assert config_from_gguf(gguf(**{key: plain})) == config_from_gguf(gguf())


@pytest.mark.parametrize("key", keys("{architecture}.", "harmless"))
def test_gguf_keys_that_are_harmless(key):
    assert config_from_gguf(gguf(**{key: 8})) == config_from_gguf(gguf())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2), ("context_length", 64), ("embedding_length", 64), ("feed_forward_length", 32),
        ("attention.head_count", 2), ("attention.head_count_kv", 2), ("attention.key_length", 16),
        ("attention.layer_norm_rms_epsilon", 1e-3), ("attention.sliding_window", 16), ("rope.freq_base", 500.0),
        ("rope.scaling.factor", 2.0), ("rope.scale_linear", 2.0),
    ],
)  # fmt: skip
def test_gguf_keys_that_are_used(key, value):
    assert config_from_gguf(gguf(**{key: value})) != config_from_gguf(gguf())


def read_gguf_tokenizer(files, **changed: Any) -> Any:
    """What the tokenizer of a GGUF file of the tiny one's tokens gives."""
    spec = json.loads((files / "tokenizer.json").read_text())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    ids = {"bos": 1, "eos": 2, "unknown": 0, "padding": 0}
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["merges"]],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    } | {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    read = gguf_tokenizer(SimpleNamespace(name="a.gguf", metadata=(values | changed).get))
    special = {name: getattr(read, name) for name in ("bos_id", "eos_id", "pad_id")}
    rendered = read.render_chat([{"role": "user", "content": "the yes"}])
    return [read.encode(text).tolist() for text in [*TEXTS, "e\u0301 the b"]], special, read.special_tokens, rendered


@pytest.mark.parametrize("key", keys("GGUF metadata", "refused"))
def test_keys_of_gguf_tokenizers_that_are_refused(files, key):
    value = ASKING.get(key, ODD)
    with pytest.raises(UnsupportedModelError, match=r"a\.gguf: tokenizer\.ggml\.\w+") as caught:
        read_gguf_tokenizer(files, **{key: value})
    assert f"{key} is {value}, which asks for" in str(caught.value)
    assert read_gguf_tokenizer(files, **{key: False}) == read_gguf_tokenizer(files)


@pytest.mark.parametrize("key", keys("GGUF metadata", "harmless"))
def test_keys_of_gguf_tokenizers_that_are_harmless(files, key):
    assert read_gguf_tokenizer(files, **{key: 1}) == read_gguf_tokenizer(files)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pre", "qwen2"), ("merges", ["y e"]), ("token_type", [3] * 2 + [1] * 263), ("bos_token_id", 2),
        ("eos_token_id", 1), ("padding_token_id", 2), ("unknown_token_id", 2), ("add_bos_token", False),
        ("add_eos_token", True), ("tokens", None), ("model", "bert"),
    ],
)  # fmt: skip
def test_keys_of_gguf_tokenizers_that_are_used(files, key, value):
    try:
        found = read_gguf_tokenizer(files, **{f"tokenizer.ggml.{key}": value})
    except PrefoldError as error:
        found = str(error)
    assert found != read_gguf_tokenizer(files)


# Keys that change results without another tensor, against transformers.
COMPUTED = [
    ("llama", "rms_norm_eps", 0.5),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 3.0}),
    ("llama", "hidden_act", "gelu_new"),
    ("llama", "rope_parameters", {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}),
    ("mistral", "sliding_window", 3),
    ("gemma2", "final_logit_softcapping", None),
    ("gemma2", "attn_logit_softcapping", 0.5),
    ("gemma2", "query_pre_attn_scalar", 2),
    ("gemma2", "hidden_activation", "silu"),
    ("cohere2", "logit_scale", 2.0),
    ("cohere2", "layer_norm_eps", 0.5),
    ("granite", "logits_scaling", 5.0),
    ("granite", "embedding_multiplier", 0.5),
    ("granite", "residual_multiplier", 2.0),
    ("granite", "attention_multiplier", 0.05),
    ("smollm3", "no_rope_layers", [0, 0, 1]),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "layer_norm_epsilon", 0.5),
    ("starcoder2", "norm_epsilon", 0.5),
    ("qwen3-moe", "num_experts_per_tok", 1),
    ("qwen3-moe", "norm_topk_prob", False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "key", "value"), COMPUTED)
def test_used_keys_change_results_as_in_transformers(tmp_path, family, key, value):
    import torch

    folder = tiny_checkpoint(tmp_path, family, tokenizer=False)
    ids = list(range(5, 17))

    def logprobs() -> np.ndarray:
        with LLM(str(folder), dtype="float32", weights="dtype") as llm:
            return np.array(llm.score(ids[:1], ids[1:]).logprobs)

    before = logprobs()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with torch.inference_mode():
        logits = reference(folder)(torch.tensor([ids])).logits[0]
    wanted = torch.log_softmax(logits.double(), -1)[torch.arange(11), ids[1:]].numpy()
    found = logprobs()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    assert np.abs(found - before).max() > 1e-2
