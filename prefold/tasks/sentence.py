"""A checkpoint's settings for embedding and for scoring pairs.

They are read from sentence-transformers' files in the folder, or from a GGUF file's metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoint import read_object
from ..checkpoint.settings import Settings
from ..errors import CheckpointError, InputError, UnsupportedModelError
from ..text import RerankPrompt, rerank_prompt
from ..text.load import folder_templates

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..text import Tokenizer

Pooling = Literal["last", "mean", "first"]

# {pooling mode of sentence-transformers: ours}. Other modes are refused.
POOLING_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
# {value of {architecture}.pooling_type in a GGUF file: pooling mode}
GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
# Arguments of a tokenizer's call that files may set for the chat template. They are refused, because they would change
# how a text is cut.
_CALL_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "tokenize", "return_dict"}
_SIGNS_OF_PARTS = ("content[0]", ".type", "'type'", '"type"', "message.content[")


@dataclass(frozen=True)
class ChatSettings:
    """How texts become chat messages."""

    parts: bool = False  # content is a list of parts, [{"type": "text", "text": "..."}], and not a text
    options: Mapping[str, Any] = field(default_factory=dict)  # options for rendering the chat template
    restore_suffix: bool = True  # a truncated prompt still ends with the template's text after each content


@dataclass(frozen=True)
class EmbedSettings:
    """The settings of an embedding checkpoint."""

    pooling: Pooling = "last"  # the rows from which the embedding is read
    normalize: bool = True  # scale the embedding to length 1
    max_length: int | None = None  # maximum tokens of a text; None: the model's limit
    prompts: Mapping[str, str] = field(default_factory=dict)  # {name: text put before the input}
    default_prompt_name: str | None = None  # prompt of a task that names none; None: no prompt
    lower_case: bool = False  # lower-case texts first
    pool_prompt: bool = True  # include the prompt's tokens in pooling
    truncate_dim: int | None = None  # keep only this many values of a vector, after scaling it; None: all
    # how the chat template renders a text as a user's message, and a prompt as the system message; None: no template
    chat: ChatSettings | None = None


def embed_settings(checkpoint: Checkpoint) -> EmbedSettings:
    """Return the embedding settings in sentence-transformers' files (modules.json), or in a GGUF file's pooling type.

    If there is neither, the embedding is the normalised last token, as in Qwen3-Embedding and most embedding models
    made from causal transformers. Raise UnsupportedModelError for unsupported modules and pooling modes, and
    CheckpointError for files that cannot be read.
    """
    try:
        return _embed_settings(checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # values of another type
        line = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"the files of sentence-transformers in {checkpoint.name} are broken: {line}") from error


def _embed_settings(checkpoint: Checkpoint) -> EmbedSettings:
    modules = checkpoint.read_json("modules.json")
    if not modules:
        return EmbedSettings(pooling=_gguf_pooling(checkpoint))
    steps = [(str(module["type"]).rsplit(".", 1)[-1], module.get("path") or "") for module in modules]
    kinds = [kind for kind, _ in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{checkpoint.name} has the sentence-transformers modules {', '.join(kinds)}; prefold supports Transformer,"
            " Pooling and then, if wanted, Normalize"
        )
    if steps[0][1]:
        folder = steps[0][1]
        raise UnsupportedModelError(
            f"{checkpoint.name} has its transformer in the folder {folder!r}, not in the root folder"
        )
    transformer = _transformer_config(checkpoint)
    place = f"{steps[1][1]}/config.json"
    if checkpoint.read_json(place) is None:
        raise CheckpointError(f"{checkpoint.name} has no {place}, which defines its pooling")
    pooling = read_object(checkpoint, place, keys="1_Pooling/config.json")
    prompts = read_object(checkpoint, "config_sentence_transformers.json")
    return EmbedSettings(
        pooling=_pooling_mode(checkpoint, pooling),
        normalize=kinds[-1] == "Normalize",
        max_length=_max_length(checkpoint, transformer),
        prompts={name: text or "" for name, text in (prompts.get("prompts") or {}).items()},
        default_prompt_name=prompts.get("default_prompt_name"),
        lower_case=bool(transformer.get("do_lower_case")),
        pool_prompt=bool(pooling.get("include_prompt", True)),
        truncate_dim=Settings(prompts, "config_sentence_transformers.json").size("truncate_dim", None),
        chat=_chat_settings(checkpoint, transformer),
    )


def _transformer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = read_object(checkpoint, "sentence_bert_config.json")
    task = config.get("transformer_task") or "feature-extraction"
    if task != "feature-extraction":
        raise UnsupportedModelError(f"sentence-transformers uses {checkpoint.name} for {task}, not for embedding")
    return config


def _chat_settings(
    checkpoint: Checkpoint, transformer: Mapping[str, Any], output: str = "last_hidden_state"
) -> ChatSettings | None:
    """Return the ChatSettings with which sentence-transformers (6 and later) turns texts into messages.

    Return None if it uses texts as they are. It makes messages if the folder's `modality_config` has "message", as in
    decoders with a chat template.

    Args:
        output: the model output that is read
    """
    modalities = transformer.get("modality_config") or {}
    for name in {"text", "message"} & modalities.keys():
        if [modalities[name].get(key) for key in ("method", "method_output_name")] != ["forward", output]:
            does = "embeds" if output == "last_hidden_state" else "scores"
            raise UnsupportedModelError(
                f"{checkpoint.name} {does} by its own method ({name} of modality_config in sentence_bert_config.json);"
                f" prefold supports forward and {output}"
            )
    processing = {name: values for name, values in (transformer.get("processing_kwargs") or {}).items() if values}
    accepted = {"chat_template"} if "message" in modalities else set()
    if set(processing) - accepted or _CALL_OPTIONS & processing.get("chat_template", {}).keys():
        raise UnsupportedModelError(
            f"{checkpoint.name} has processing_kwargs in sentence_bert_config.json that prefold does not know:"
            f" {json.dumps(processing)[:200]}"
        )
    if "message" not in modalities:
        return None
    if transformer.get("do_lower_case"):
        raise UnsupportedModelError(f"{checkpoint.name} lower-cases chat messages, which is not supported")
    options = dict(processing.get("chat_template", {}))
    restore = bool(options.pop("restore_suffix", True))
    if "chat_template" in options:
        options["template"] = options.pop("chat_template")
    return ChatSettings(_takes_parts(checkpoint, modalities["message"].get("format", "auto")), options, restore)


def _takes_parts(checkpoint: Checkpoint, form: str) -> bool:
    """Return whether the chat template expects a list of parts.

    "auto" looks for signs of it, as sentence-transformers does.
    """
    if form != "auto":
        return form == "structured"
    source = folder_templates(checkpoint).get("default", "")
    return not source or any(sign in source for sign in _SIGNS_OF_PARTS)


def _max_length(checkpoint: Checkpoint, transformer: Mapping[str, Any]) -> int | None:
    limits = [transformer.get("max_seq_length")]
    if limits[0] is None:
        # As in sentence-transformers, the tokenizer's limit counts if the model sets none.
        limits = [read_object(checkpoint, "tokenizer_config.json").get("model_max_length")]
    limits.append(checkpoint.config.get("max_position_embeddings"))
    bounds = [int(limit) for limit in limits if limit is not None and 0 < limit < 1e12]
    return min(bounds) if bounds else None


def _pooling_mode(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on is True]
        modes = [{"cls_token": "cls", "mean_tokens": "mean"}.get(name, name) for name in modes] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        choices = ", ".join(POOLING_MODES)
        raise UnsupportedModelError(
            f"{checkpoint.name} pools by {' and '.join(modes)}; prefold supports one of {choices}"
        )
    return POOLING_MODES[modes[0]]


def _gguf_pooling(checkpoint: Checkpoint) -> Pooling:
    return GGUF_POOLING.get(_gguf_pooling_type(checkpoint), "last")


def _gguf_pooling_type(checkpoint: Checkpoint) -> Any:
    return checkpoint.metadata(f"{checkpoint.metadata('general.architecture')}.pooling_type")


def is_embedder(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint's files define the pooling of embeddings.

    These are the modules of sentence-transformers, and the metadata of a GGUF file.
    """
    modules = checkpoint.read_json("modules.json")
    kinds = [str(module.get("type")) for module in modules or () if isinstance(module, dict)]
    return any(kind.endswith("Pooling") for kind in kinds) or _gguf_pooling_type(checkpoint) in GGUF_POOLING


@dataclass(frozen=True)
class PairSettings:
    """The settings of a reranker that scores a query with one document.

    Attributes:
        prompt: None: query and document as they are, with the special tokens of a pair
        activation: function from the head's logit to the score: a class of torch.nn, or the path of another function
        instructed: the prompt with an instruction; None: the checkpoint has no place for one
        instruction: the checkpoint's own instruction, or without `prompt` the text before each query; None: none
        ids: ids of one or two tokens whose logits make the score (with two: the first minus the second); empty: the
            checkpoint has a classification head
        strips: remove white space around query, document and instruction
    """

    prompt: RerankPrompt | None = None
    activation: str = "Sigmoid"
    instructed: RerankPrompt | None = None
    instruction: str | None = None
    ids: tuple[int, ...] = ()
    strips: bool = False


def pair_settings(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> PairSettings:
    """Return the settings in the files of sentence-transformers' CrossEncoder, or settings that the tokenizer suggests.

    A CrossEncoder joins the pair plainly. If its `modality_config` has "message", it writes the pair as messages of the
    roles query and document. An instruction, or the default prompt of its files, becomes a system message, or the text
    before a plain query.

    A checkpoint without these files but with Qwen3's thinking tokens is treated as Qwen3-Reranker turned into a
    classifier, with Qwen3-Reranker's prompt. Any other classifier reads the pair as its tokenizer writes it.
    """
    settings, config = read_object(checkpoint, "config_sentence_transformers.json"), Settings.of(checkpoint.config)
    own_settings = config.settings("sentence_transformers")
    older = config.text("sbert_ce_default_activation_function", None)  # name until sentence-transformers 4
    path = str(settings.get("activation_fn") or own_settings.text("activation_fn", None) or older or "")
    activation = re.sub(r"^torch\.nn\.(modules\.\w+\.)?", "", path) or "Sigmoid"
    ids = logit_ids(checkpoint)
    is_cross_encoder = settings.get("model_type") == "CrossEncoder" or ids
    if not is_cross_encoder and "sentence_transformers" not in config and older is None:
        if tokenizer is None or None in (tokenizer.token_id("<think>"), tokenizer.token_id("<|im_start|>")):
            return PairSettings()
        return PairSettings(rerank_prompt(tokenizer))
    module = read_object(checkpoint, "sentence_bert_config.json")
    if ids and module.get("transformer_task") not in (None, "text-generation", "any-to-any", "image-text-to-text"):
        task = module["transformer_task"]
        raise UnsupportedModelError(f"sentence-transformers uses {checkpoint.name} for {task}, and reads its logits")
    chat = _chat_settings(checkpoint, module, "logits")
    instruction = (settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or None
    if chat is None or tokenizer is None:
        return PairSettings(None, activation, instruction=instruction, ids=ids)
    prompt, with_spaces = (_pair_of_messages(tokenizer, chat, around=around) for around in ("{}", " {} "))
    try:
        instructed = _pair_of_messages(tokenizer, chat, ("system", "query", "document"))
    except InputError:  # the template has no system messages
        instructed = None
    if instructed is not None and "{instruction}" not in instructed.body:
        instructed = None
    if instruction is not None and instructed is None:
        raise UnsupportedModelError(
            f"{checkpoint.name} has a default prompt, but its chat template has no place for it"
        )
    return PairSettings(prompt, activation, instructed, instruction, ids, strips=prompt == with_spaces)


def _pair_of_messages(
    tokenizer: Tokenizer, chat: ChatSettings, roles: Sequence[str] = ("query", "document"), around: str = "{}"
) -> RerankPrompt:
    """Return the prompt of a pair in the chat template.

    Args:
        around: format of the text around each field
    """
    texts = [around.format("{instruction}" if role == "system" else f"{{{role}}}") for role in roles]
    contents: list[Any] = [[{"type": "text", "text": text}] for text in texts] if chat.parts else list(texts)
    pair = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return RerankPrompt.from_template(tokenizer.render_chat(pair, **chat.options), special=False)


def logit_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids of the tokens whose logits score pairs, as sentence-transformers' module LogitScore says.

    The result is empty if the checkpoint has no such module. Raise UnsupportedModelError for a CrossEncoder with other
    modules, and CheckpointError for a file that cannot be read.
    """
    modules = [module for module in checkpoint.read_json("modules.json") or () if isinstance(module, dict)]
    kinds = [str(module.get("type")).rsplit(".", 1)[-1] for module in modules]
    is_cross_encoder = read_object(checkpoint, "config_sentence_transformers.json").get("model_type") == "CrossEncoder"
    if is_cross_encoder and kinds not in ([], ["Transformer"], ["Transformer", "LogitScore"]):
        raise UnsupportedModelError(
            f"{checkpoint.name} has the modules {', '.join(kinds)} of sentence-transformers' CrossEncoder; prefold"
            " supports Transformer and then, if wanted, LogitScore"
        )
    if kinds[-1:] != ["LogitScore"]:
        return ()
    place = f"{modules[-1].get('path') or '1_LogitScore'}/config.json"
    config = read_object(checkpoint, place, keys="1_LogitScore/config.json")
    ids = [config[key] for key in ("true_token_id", "false_token_id") if config.get(key) is not None]
    if config.get("true_token_id") is None or not all(type(id) is int and id >= 0 for id in ids):
        raise CheckpointError(
            f"{checkpoint.name}: {place} does not name the tokens whose logits are read: {config!r:.100}"
        )
    return tuple(ids)
