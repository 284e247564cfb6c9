"""The keys of a checkpoint's files that are known to change results somewhere, and what prefold does with each.

A key that no code reads is an error without a message. So every key that changes what transformers,
sentence-transformers or llama.cpp compute stands in `KEYS`, by the file that has it. `tests/checkpoint/test_keys.py`
feeds each of them. A key of config.json that the table does not have is judged by its name (`unread`).
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
    """What prefold does with a key.

    use    "used": results change as in the program that wrote the file. "refused": a value that asks for something
           raises UnsupportedModelError. "harmless": no value changes a result
    why    what reads the key, what it asks for, or why it changes nothing
    plain  values of a refused key that ask for nothing, beside null, false, 0 and what is empty
    """

    use: Use
    why: str
    plain: tuple[Any, ...] = ()


def _keys(use: Use, why: str, *names: str, plain: tuple[Any, ...] = ()) -> dict[str, Key]:
    return dict.fromkeys(names, Key(use, why, plain))


_SAMPLING = "how text is drawn is said by options, and by generation_config.json with --recommended"
_TRAINING = "of training"
_SPEED = "the same is computed, by other code or in other pieces"
_RETURNED = "of what transformers returns beside the result"

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
    # transformers turns whole heads in these families, other programs a part.
    **_keys("refused", "rotation of a part of each head", "partial_rotary_factor", plain=(1,)),
    **_keys("refused", "an encoder", "is_encoder_decoder", "add_cross_attention"),
    **_keys("refused", "heads left out", "pruned_heads"),
    **_keys(
        "harmless", _SAMPLING, "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
        "temperature", "top_k", "top_p", "typical_p",
    ),
    **_keys("harmless", "says nothing to a decoder", "decoder_start_token_id", "is_decoder", "sep_token_id"),
    **_keys("harmless", "names of labels, the other way round", "label2id"),
    **_keys("harmless", _TRAINING, "attention_dropout", "hidden_dropout", "output_router_logits"),
    **_keys("harmless", "of training; Dory reads it, whose factors are stored as multiples of it", "initializer_range"),
    **_keys("harmless", _SPEED, "use_cache", "pretraining_tp", "chunk_size_feed_forward", "_attn_implementation"),
    **_keys("harmless", _RETURNED, "output_attentions", "output_hidden_states", "return_dict", "task_specific_params"),
}  # fmt: skip

GENERATION = {
    **_keys("used", "the tokens that end a text, and those of a tokenizer that names none", "eos_token_id"),
    **_keys("used", "special tokens of a tokenizer that names none", "bos_token_id", "pad_token_id"),
    **_keys(
        "used", "--recommended", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    ),
    **_keys("refused", "tokens that are forbidden", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    **_keys("refused", "tokens that are forced", "forced_bos_token_id", "forced_eos_token_id", "force_words_ids"),
    **_keys("refused", "biases", "sequence_bias", "constraints"),
    **_keys("refused", "repetitions that are forbidden", "no_repeat_ngram_size"),
    **_keys("refused", "a filter of the next token", "typical_p", plain=(1,)),
    **_keys("refused", "a filter of the next token", "epsilon_cutoff", "eta_cutoff", "top_h"),
    **_keys("refused", "search by beams", "num_beams", "num_beam_groups", plain=(1,)),
    **_keys("refused", "contrast with another pass", "guidance_scale", plain=(1,)),
    **_keys("refused", "contrast with another pass", "penalty_alpha", "dola_layers"),
    **_keys("refused", "a least length", "min_length", "min_new_tokens"),
    **_keys("refused", "a penalty of the length", "exponential_decay_length_penalty"),
    **_keys("refused", "texts that end an answer", "stop_strings"),
    **_keys("refused", "a watermark", "watermarking_config"),
    **_keys("refused", "a prompt whose end is cut", "token_healing"),
    **_keys("harmless", "of beams, of which there are none", "diversity_penalty", "early_stopping", "length_penalty"),
    **_keys("harmless", "of an encoder", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
            "decoder_start_token_id"),
    **_keys("harmless", "how long an answer may be is said by max_tokens", "max_length", "max_new_tokens", "max_time"),
    **_keys("harmless", "how many samples there are is said by n", "num_return_sequences"),
    **_keys("harmless", "values that are not finite end a sequence with an error", "remove_invalid_values"),
    **_keys("harmless", "a softmax does not change with a shift", "renormalize_logits"),
    **_keys("harmless", _SPEED, "use_cache", "cache_implementation", "prompt_lookup_num_tokens", "low_memory"),
    **_keys("harmless", _RETURNED, "output_attentions", "output_hidden_states", "output_logits", "output_scores",
            "return_dict_in_generate"),
}  # fmt: skip

SENTENCE = {
    **_keys("used", "the text before each input", "prompts", "default_prompt_name"),
    **_keys("used", "the first numbers of each vector are kept", "truncate_dim"),
    **_keys("used", "how a pair is scored", "model_type", "activation_fn"),
    **_keys("harmless", "how other programs compare vectors; the vectors are the same", "similarity_fn_name"),
    **_keys("harmless", "of what wrote the file, and of precision", "__version__", "keep_in_fp32_modules"),
}

BERT = {
    **_keys("used", "tasks/sentence.py", "max_seq_length", "do_lower_case", "transformer_task", "modality_config",
            "processing_kwargs"),
    **_keys("refused", "vectors of several tokens", "query_length", "document_length", "query_expansion"),
    **_keys("refused", "another tokenizer", "tokenizer_name_or_path"),
    **_keys("refused", "arguments of transformers' classes", "model_args", "tokenizer_args", "config_args",
            "model_kwargs", "processor_kwargs", "config_kwargs", plain=({"trust_remote_code": True},)),
    **_keys("harmless", "a name inside of sentence-transformers", "module_output_name"),
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
    **_keys("refused", "spaces before punctuation left out of texts",
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"),
    **_keys("refused", "words that are split in another way than tokenizer.json says", "fix_mistral_regex"),
    **_keys("harmless", "tokenizer.json says it, as in transformers 5", "add_bos_token", "add_eos_token",
            "add_prefix_space", "do_lower_case", "legacy", "sp_model_kwargs", "tokenizer_class"),
    **_keys("harmless", "transformers leaves it out for BPE", "clean_up_tokenization_spaces"),
    **_keys("harmless", "nothing is padded", "padding_side", "pad_to_multiple_of", "max_length", "stride",
            "truncation_strategy"),
    **_keys("harmless", "of older classes", "errors", "spaces_between_special_tokens", "use_default_system_prompt",
            "model_input_names", "processor_class"),
}  # fmt: skip

# By the end of a key of GGUF metadata, behind the architecture's name.
GGUF = {
    **_keys("used", "checkpoint/gguf_config.py", "block_count", "context_length", "embedding_length",
            "feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.key_length",
            "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window",
            "attention.causal", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
            "rope.scaling.attn_factor", "rope.scale_linear", "expert_count", "expert_used_count", "pooling_type",
            "nextn_predict_layers"),
    **_keys("refused", "limits of queries, keys and values", "attention.clamp_kqv"),
    **_keys("refused", "biases by distance", "attention.max_alibi_bias"),
    **_keys("refused", "another scale of attention", "attention.scale", "attention.temperature_scale",
            "attention.temperature_length", "attention.output_scale"),
    **_keys("refused", "a factor", "logit_scale", "residual_scale", "embedding_scale", plain=(1,)),
    **_keys("refused", "soft capping", "attn_logit_softcapping", "final_logit_softcapping",
            "router_logit_softcapping"),
    **_keys("refused", "an MLP beside attention", "use_parallel_residual"),
    **_keys("refused", "a factor of experts", "expert_weights_scale", plain=(1,)),
    **_keys("refused", "groups of experts", "expert_group_count", "expert_group_used_count", plain=(1,)),
    **_keys("refused", "layers that share keys", "attention.shared_kv_layers"),
    **_keys("harmless", "said by the tensors", "vocab_size", "rope.scaling.finetuned", "rope.dimension_count"),
    **_keys("harmless", "every converter writes the order that llama.cpp reads", "tensor_data_layout"),
}  # fmt: skip
# By the whole key.
GGUF_TOKENIZER = {
    **_keys("used", "text/load.py", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
            "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges",
            "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id",
            "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
            "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template"),
    **_keys("refused", "texts that are changed before they are split", "tokenizer.ggml.remove_extra_whitespaces",
            "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.normalizer.lowercase"),
    **_keys("refused", "tokens that are forbidden", "tokenizer.ggml.suppress_tokens"),
    **_keys("harmless", "no task has such tokens", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.mask_token_id",
            "tokenizer.ggml.cls_token_id", "tokenizer.ggml.add_sep_token", "tokenizer.ggml.token_type_count"),
}  # fmt: skip

LOGIT_SCORE = {
    **_keys("used", "the tokens whose logits are the score of a pair", "true_token_id", "false_token_id"),
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
    """Raise UnsupportedModelError for a key that is refused and asks for something.

    file    the name in `KEYS`
    place   what errors call the file
    prefix  what stands before the keys in errors
    read    keys that are not refused, because the model's family reads them
    """
    for name, key in KEYS.get(file, {}).items():
        if key.use != "refused" or name not in values or name in read:
            continue
        value = values[name]
        if value and value not in key.plain:
            raise UnsupportedModelError(
                f"{place}: {prefix}{name} is {shown(value)}, which asks for {key.why}; prefold does not do that. Take "
                "the key out of the file if the model works without it"
            )


# What the names of settings contain that change what a model computes, most of them without a tensor more or less:
# positions, what attention sees and how it weighs, factors, norms, activations, experts, and which layers these are of.
# The text models of transformers have such keys under these names, and later ones are likely to.
CHANGES = re.compile(
    r"rope|rotary|alibi|position_(bias|embedding)|relative|window|chunk|layer_(types|ids|idx|ind)|layers_block|"
    r"_(pattern|period|interval|offset)|layers_per|_every_n|attention|attn|causal|bidirectional|prefix_lm|"
    r"scal|multiplier|alpha|(^|_)mup|softcap|soft_cap|clip|clamp|limit|temperature|floor|sink|tuning|"
    r"norm|_eps|epsilon|residual|parallel|activation|(^|_)act($|_)|glu|sparsity|gat(e|ing)|"
    r"expert|moe|router|routed|topk|top_k|mamba|ssm|conv_|recurren|shared_layers|sharing|altup|"
    r"block_types|indexer|hc_|ngram|embedding_fraction|early_exit|loop|ut_steps"
)
# Parts of key names that change no result although they match the pattern above: training; the precision and the code
# of a computation; what is returned; tokens and sampling; biases (they are tensors, and an unread tensor is an error);
# and settings that have no meaning without another setting.
NEUTRAL = re.compile(
    r"drop|init|loss|jitter|checkpoint|lora_|neftune|^finetuning|ngram_size|cross_attention|^(top_k|temperature)$|^sbert_|"
    r"flash|implementation|attn_impl|kernel|memory_efficient|fp32|in_float32|"
    r"^output_(attentions|hidden|router)|^return_|token|^summary_|^reorder_and_upcast|^chunk_size_feed|"
    r"(?<!position)_bias$|^max_position|"
    r"^(max_window_layers|_?sliding_window_pattern|original_max_position_embeddings|rope_theta)$"
)
# Values of a key with which it says nothing else than a model without it does.
PLAIN: Mapping[str, Any] = {
    "layer_types": "full_attention",
    "use_rope": True,
    "scale_attn_weights": True,
    "rotary_pct": 1,
    "position_embedding_type": "rope",
}


def unread(hf: Settings, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each setting that changes results and was not read, as (its name with what it lies in, its value)."""
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
    """Returns whether a value says what a model without the key does."""
    if key == "sliding_window" and values.get("use_sliding_window") is False:
        return True
    items = value if isinstance(value, list) else [value]
    if key in PLAIN:
        return all(item == PLAIN[key] for item in items)
    # A factor of 1 changes nothing, and of nothing there is none.
    return all(not item or (isinstance(item, float) and item == 1) for item in items)


def shown(value: Any) -> str:
    """Return a value as errors show it, 60 characters at most."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
