"""Keys of a checkpoint's files that can change results, and how prefold treats each of them.

A key that no code reads would silently change results. So `KEYS` lists, per file, every key that changes what
transformers, sentence-transformers or llama.cpp compute. `tests/checkpoint/test_keys.py` tests each. A key of
config.json that is not in the table is judged by its name (`unread`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UnsupportedModelError
from .settings import Settings

Use = Literal["used", "refused", "harmless"]


@dataclass(frozen=True, slots=True)
class Key:
    """How prefold treats a key."""

    # "used": the value changes results, in the same way as in the program that the file was written for. "refused": a
    # value that changes results raises UnsupportedModelError. "harmless": no value changes a result.
    use: Use
    why: str  # the code that reads a used key, the feature that a refused key enables, why a harmless key is harmless
    plain: tuple[Any, ...] = ()  # accepted values of a refused key, besides null, false, 0 and empty values


def _keys(use: Use, why: str, *names: str, plain: tuple[Any, ...] = ()) -> dict[str, Key]:
    return dict.fromkeys(names, Key(use, why, plain))


_SAMPLING = "sampling is set by options, and by generation_config.json with --recommended"
_TRAINING = "only used in training"
_SPEED = "changes how a result is computed, not the result"
_RETURNED = "what transformers returns besides the result"

CONFIG = {
    **_keys("used", "the family", "architectures", "model_type", "quantization_config", "auto_map", "is_causal"),
    **_keys(
        "used", "sizes and tensors (model/decoders.py)", "vocab_size", "hidden_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings",
        "tie_word_embeddings", "attention_bias", "mlp_bias",
    ),
    **_keys(
        "used", "read by families that have it, and refused for the others", "hidden_act", "hidden_activation",
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rope_theta", "rope_scaling",
        "rope_parameters", "rope_local_base_freq", "sliding_window", "use_sliding_window", "max_window_layers",
        "layer_types", "sliding_window_pattern", "no_rope_layers", "logit_scale", "logits_scaling",
        "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "embedding_multiplier",
        "residual_multiplier", "attention_multiplier", "scale_attn_weights",
        "num_experts_per_tok", "norm_topk_prob",
    ),
    **_keys(
        "used", "heads (tasks/make.py, tasks/sentence.py)", "pad_token_id", "id2label", "num_labels", "problem_type",
        "sentence_transformers", "sbert_ce_default_activation_function",
    ),
    **_keys("used", "the tokens that end a text", "eos_token_id"),
    **_keys("used", "special tokens of a tokenizer that names none", "bos_token_id"),
    **_keys("used", "the dtype if none is asked for", "dtype", "torch_dtype"),
    # In these families transformers applies RoPE to whole heads, other programs to a part.
    **_keys("refused", "RoPE on a part of each head", "partial_rotary_factor", plain=(1,)),
    **_keys("refused", "an encoder", "is_encoder_decoder", "add_cross_attention"),
    **_keys("refused", "pruned heads", "pruned_heads"),
    **_keys(
        "harmless", _SAMPLING, "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
        "temperature", "top_k", "top_p", "typical_p",
    ),
    **_keys("harmless", "no meaning for a decoder", "decoder_start_token_id", "is_decoder", "sep_token_id"),
    **_keys("harmless", "the inverse of id2label", "label2id"),
    **_keys("harmless", _TRAINING, "attention_dropout", "hidden_dropout", "output_router_logits"),
    **_keys("harmless", "only used in training; Dory's factors are stored as multiples of it", "initializer_range"),
    **_keys("harmless", _SPEED, "use_cache", "pretraining_tp", "chunk_size_feed_forward", "_attn_implementation"),
    **_keys("harmless", _RETURNED, "output_attentions", "output_hidden_states", "return_dict", "task_specific_params"),
}  # fmt: skip

GENERATION = {
    **_keys("used", "the tokens that end a text, also for a tokenizer that names none", "eos_token_id"),
    **_keys("used", "special tokens of a tokenizer that names none", "bos_token_id", "pad_token_id"),
    **_keys(
        "used", "--recommended", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    ),
    **_keys("refused", "forbidden tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    **_keys("refused", "forced tokens", "forced_bos_token_id", "forced_eos_token_id", "force_words_ids"),
    **_keys("refused", "biases", "sequence_bias", "constraints"),
    **_keys("refused", "forbidden repetitions", "no_repeat_ngram_size"),
    **_keys("refused", "a sampling filter", "typical_p", plain=(1,)),
    **_keys("refused", "a sampling filter", "epsilon_cutoff", "eta_cutoff", "top_h"),
    **_keys("refused", "beam search", "num_beams", "num_beam_groups", plain=(1,)),
    **_keys("refused", "contrastive decoding", "guidance_scale", plain=(1,)),
    **_keys("refused", "contrastive decoding", "penalty_alpha", "dola_layers"),
    **_keys("refused", "a minimum length", "min_length", "min_new_tokens"),
    **_keys("refused", "a length penalty", "exponential_decay_length_penalty"),
    **_keys("refused", "stop strings", "stop_strings"),
    **_keys("refused", "a watermark", "watermarking_config"),
    **_keys("refused", "token healing", "token_healing"),
    **_keys("harmless", "only for beam search", "diversity_penalty", "early_stopping", "length_penalty"),
    **_keys("harmless", "only for an encoder", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
            "decoder_start_token_id"),
    **_keys("harmless", "max_tokens limits the answer", "max_length", "max_new_tokens", "max_time"),
    **_keys("harmless", "n sets the number of samples", "num_return_sequences"),
    **_keys("harmless", "logits that are not finite end a sequence with an error", "remove_invalid_values"),
    **_keys("harmless", "a shift of the logits does not change the softmax", "renormalize_logits"),
    **_keys("harmless", _SPEED, "use_cache", "cache_implementation", "prompt_lookup_num_tokens", "low_memory"),
    **_keys("harmless", _RETURNED, "output_attentions", "output_hidden_states", "output_logits", "output_scores",
            "return_dict_in_generate"),
}  # fmt: skip

SENTENCE = {
    **_keys("used", "the text before each input", "prompts", "default_prompt_name"),
    **_keys("used", "only the first dimensions of each embedding stay", "truncate_dim"),
    **_keys("used", "how a pair is scored", "model_type", "activation_fn"),
    **_keys("harmless", "how other programs compare embeddings; they stay the same", "similarity_fn_name"),
    **_keys("harmless", "versions and precision", "__version__", "keep_in_fp32_modules"),
}

BERT = {
    **_keys("used", "tasks/sentence.py", "max_seq_length", "do_lower_case", "transformer_task", "modality_config",
            "processing_kwargs"),
    **_keys("refused", "multi-vector embeddings", "query_length", "document_length", "query_expansion"),
    **_keys("refused", "another tokenizer", "tokenizer_name_or_path"),
    **_keys("refused", "arguments of transformers' classes", "model_args", "tokenizer_args", "config_args",
            "model_kwargs", "processor_kwargs", "config_kwargs", plain=({"trust_remote_code": True},)),
    **_keys("harmless", "a name inside sentence-transformers", "module_output_name"),
    **_keys("harmless", _SPEED, "unpad_inputs"),
}  # fmt: skip

POOLING = {
    **_keys("used", "tasks/sentence.py", "pooling_mode", "pooling_mode_cls_token", "pooling_mode_lasttoken",
            "pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_mean_tokens",
            "pooling_mode_weightedmean_tokens", "include_prompt"),
    **_keys("harmless", "the model's own size", "word_embedding_dimension", "embedding_dimension"),
}  # fmt: skip

TOKENIZER = {
    **_keys("used", "text/load.py", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens",
            "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "chat_template",
            "model_max_length", "truncation_side", "split_special_tokens"),
    **_keys("refused", "removal of spaces before punctuation",
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"),
    **_keys("refused", "another word split than tokenizer.json has", "fix_mistral_regex"),
    **_keys("harmless", "tokenizer.json decides, as in transformers 5", "add_bos_token", "add_eos_token",
            "add_prefix_space", "do_lower_case", "legacy", "sp_model_kwargs", "tokenizer_class"),
    **_keys("harmless", "transformers ignores it for BPE", "clean_up_tokenization_spaces"),
    **_keys("harmless", "nothing is padded", "padding_side", "pad_to_multiple_of", "max_length", "stride",
            "truncation_strategy"),
    **_keys("harmless", "for older classes", "errors", "spaces_between_special_tokens", "use_default_system_prompt",
            "model_input_names", "processor_class"),
}  # fmt: skip

# Keys of GGUF metadata without the architecture's name at the front.
GGUF = {
    **_keys("used", "checkpoint/gguf_config.py", "block_count", "context_length", "embedding_length",
            "feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.key_length",
            "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window",
            "attention.causal", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
            "rope.scaling.attn_factor", "rope.scale_linear", "expert_count", "expert_used_count", "pooling_type",
            "nextn_predict_layers"),
    **_keys("refused", "clamped queries, keys and values", "attention.clamp_kqv"),
    **_keys("refused", "attention biases by distance", "attention.max_alibi_bias"),
    **_keys("refused", "another attention scale", "attention.scale", "attention.temperature_scale",
            "attention.temperature_length", "attention.output_scale"),
    **_keys("refused", "a factor", "logit_scale", "residual_scale", "embedding_scale", plain=(1,)),
    **_keys("refused", "soft capping", "attn_logit_softcapping", "final_logit_softcapping",
            "router_logit_softcapping"),
    **_keys("refused", "an MLP parallel to attention", "use_parallel_residual"),
    **_keys("refused", "a factor on experts", "expert_weights_scale", plain=(1,)),
    **_keys("refused", "groups of experts", "expert_group_count", "expert_group_used_count", plain=(1,)),
    **_keys("refused", "layers with shared keys", "attention.shared_kv_layers"),
    **_keys("harmless", "the tensors determine it", "vocab_size", "rope.scaling.finetuned", "rope.dimension_count"),
    **_keys("harmless", "every converter writes llama.cpp's order", "tensor_data_layout"),
}  # fmt: skip
# Whole keys.
GGUF_TOKENIZER = {
    **_keys("used", "text/load.py", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
            "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges",
            "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id",
            "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
            "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template"),
    **_keys("refused", "text normalization", "tokenizer.ggml.remove_extra_whitespaces",
            "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.normalizer.lowercase"),
    **_keys("refused", "forbidden tokens", "tokenizer.ggml.suppress_tokens"),
    **_keys("harmless", "no task uses such tokens", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.mask_token_id",
            "tokenizer.ggml.cls_token_id", "tokenizer.ggml.add_sep_token", "tokenizer.ggml.token_type_count"),
}  # fmt: skip

LOGIT_SCORE = {
    **_keys("used", "the tokens that score a pair with their logits", "true_token_id", "false_token_id"),
    **_keys("refused", "another output of the model", "module_input_name", plain=("causal_logits",)),
}

KEYS: Mapping[str, Mapping[str, Key]] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "config_sentence_transformers.json": SENTENCE,
    "sentence_bert_config.json": BERT,
    "1_Pooling/config.json": POOLING,
    "1_LogitScore/config.json": LOGIT_SCORE,
    "tokenizer_config.json": TOKENIZER,
    "{architecture}.": GGUF,
    "GGUF metadata": GGUF_TOKENIZER,
}


def check_keys(
    file: str, values: Mapping[str, Any], place: str, *, prefix: str = "", read: Collection[str] = ()
) -> None:
    """Raise UnsupportedModelError for a refused key if its value asks for something.

    Args:
        file: The table in `KEYS`.
        values: The content of the file.
        place: The file's name in errors.
        prefix: Text before the keys in errors.
        read: Keys to accept, because the model's family reads them.
    """
    for name, key in KEYS.get(file, {}).items():
        if key.use != "refused" or name not in values or name in read:
            continue
        value = values[name]
        if value and value not in key.plain:
            raise UnsupportedModelError(
                f"{place}: {prefix}{name} is {shown(value)}, which asks for {key.why}; prefold does not support that. "
                "Remove the key from the file if the model works without it"
            )


# Parts of names of settings that change what a model computes, mostly without changing its tensors: positions,
# visibility and weights of attention, factors, norms, activations, experts, and choices of layers for these. The text
# models of transformers use these names, and later models are likely to.
CHANGES = re.compile(
    r"rope|rotary|alibi|position_(bias|embedding)|relative|window|chunk|layer_(types|ids|idx|ind)|layers_block|"
    r"_(pattern|period|interval|offset)|layers_per|_every_n|attention|attn|causal|bidirectional|prefix_lm|"
    r"scal|multiplier|alpha|(^|_)mup|softcap|soft_cap|clip|clamp|limit|temperature|floor|sink|tuning|"
    r"norm|_eps|epsilon|residual|parallel|activation|(^|_)act($|_)|glu|sparsity|gat(e|ing)|"
    r"expert|moe|router|routed|topk|top_k|mamba|ssm|conv_|recurren|shared_layers|sharing|altup|"
    r"block_types|indexer|hc_|ngram|embedding_fraction|early_exit|loop|ut_steps"
)
# Parts of key names that match the pattern above but change no result: training, precision and implementation, returned
# values, tokens and sampling, biases (they are tensors, and an unread tensor is an error), and settings without meaning
# unless another setting is present.
NEUTRAL = re.compile(
    r"drop|init|loss|jitter|checkpoint|lora_|neftune|^finetuning|ngram_size|cross_attention|^(top_k|temperature)$|^sbert_|"
    r"flash|implementation|attn_impl|kernel|memory_efficient|fp32|in_float32|"
    r"^output_(attentions|hidden|router)|^return_|token|^summary_|^reorder_and_upcast|^chunk_size_feed|"
    r"(?<!position)_bias$|^max_position|"
    r"^(max_window_layers|_?sliding_window_pattern|original_max_position_embeddings|rope_theta)$"
)
# Values of a key that mean the same as a missing key.
PLAIN: Mapping[str, Any] = {
    "layer_types": "full_attention",
    "use_rope": True,
    "scale_attn_weights": True,
    "rotary_pct": 1,
    "position_embedding_type": "rope",
}


def unread(hf: Settings, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting that changes results and was not read, as (dotted name, value)."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in hf.reads:
            changes = CHANGES.search(key.lower()) and not NEUTRAL.search(key.lower()) and not _is_harmless(key)
            if changes and not _is_off(key, value, values):
                yield name, value
        elif isinstance(value, Mapping) and any(read.startswith(f"{name}.") for read in hf.reads):
            yield from unread(hf, value, f"{name}.")


def _is_harmless(key: str) -> bool:
    return key in CONFIG and CONFIG[key].use == "harmless"


def _is_off(key: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Return True if a value means the same as a missing key."""
    if key == "sliding_window" and values.get("use_sliding_window") is False:
        return True
    items = value if isinstance(value, list) else [value]
    if key in PLAIN:
        return all(item == PLAIN[key] for item in items)
    # A factor of 1 changes nothing, and an empty value asks for nothing.
    return all(not item or (isinstance(item, float) and item == 1) for item in items)


def shown(value: Any) -> str:
    """Return a value for an error message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
