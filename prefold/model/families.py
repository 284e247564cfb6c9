"""Model families by architecture name, and checks that all checkpoints pass. No torch.

A family is data: a function from a Hugging Face config (a dict) to a ModelConfig. `register_family` adds one, see
docs/families.md. A setting that a family does not support is an UnsupportedModelError, and so is a setting that changes
results but that the family has not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import wraps
from inspect import unwrap
from types import MappingProxyType
from typing import Any

from ..checkpoint.keys import check_keys, shown, unread
from ..checkpoint.settings import Settings
from ..errors import CheckpointError, UnsupportedModelError
from ..spec.plugins import load_plugins
from .config import ModelConfig
from .decoders import (  # fmt: skip
    HFConfig,
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    granite,
    llama,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    starcoder2,
)
from .gemma3n import gemma3n, gemma3n_with_towers
from .gemma4 import gemma4, gemma4_unified, gemma4_unified_with_media
from .hybrids import (  # fmt: skip
    bamba,
    falcon_h1,
    granite4,
    lara_mini,
    lfm2,
    lfm2_moe,
    lfm3,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_with_tower,
    qwen3_5_with_tower,
    qwen3_next,
)
from .latent import deepseek_v2, deepseek_v3, glm4_moe_lite, minicpm3, mistral4, youtu
from .layer_norms import (  # fmt: skip
    codegen,
    cohere,
    falcon,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gptj,
    jais2,
    nemotron,
    opt,
    persimmon,
    phi,
    stablelm,
)
from .llamas import (  # fmt: skip
    apertus,
    arcee,
    bitnet,
    cwm,
    ernie4_5,
    exaone,
    glm,
    glm4,
    granite_swa,
    helium,
    hunyuan,
    hyperclovax,
    internlm3,
    iquestcoder,
    ministral,
    ministral3,
    nanochat,
    olmo,
    seed_oss,
    vaultgemma,
)
from .mixtures import gpt_oss, granite_moe, mixtral, olmoe, qwen2_moe, qwen3_moe
from .routed import (  # fmt: skip
    afmoe,
    aria,
    cohere2_moe,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    flex_olmo,
    flint,
    glm4_moe,
    granite_moe_swa,
    hunyuan_moe,
    hy_v3,
    kolibri,
    mellum,
    minimax_m2,
    phimoe,
    sarvam_moe,
    solar_open,
)

# Prefixes of architectures that may rotate only part of each head. For prefold's other families transformers rotates
# whole heads and ignores partial_rotary_factor, but other programs rotate a part.
_GPTJ = ("GPTJ", "CodeGen")
PARTLY_TURNED = (
    "Bamba",
    "Phi3",
    "PhiFor",
    "PhiModel",
    "Qwen3_5",
    "Glm",
    "Nemotron",
    "StableLm",
    "GPTNeoX",
    "Persimmon",
    "MiniMaxM2",
    "SolarOpen",
    "SarvamMoE",
    "Mellum",
    *_GPTJ,
)


def check_read(hf: Settings, architecture: str, config: ModelConfig) -> None:
    """Raise UnsupportedModelError for a setting that changes results, has not been read and is not "off"."""
    if not config.loading and architecture not in REGISTERED:
        is_partly = architecture.startswith(PARTLY_TURNED)
        check_keys("config.json", hf, hf.file, read=("partial_rotary_factor",) if is_partly else ())
        if config.turned != config.head_dim and not is_partly:
            part = config.turned / config.head_dim
            check_keys("config.json", {"partial_rotary_factor": part}, hf.file, prefix="rope_parameters.")
    for key, value in unread(hf, hf):
        raise UnsupportedModelError(
            f"{key} is {shown(value)}. This setting changes results, but {architecture} does not read it. In a family "
            "of your own, read the key (docs/families.md); for any other model, remove the key from the file if "
            "transformers computes the same results without it"
        )


# Encoders, in which every token sees every other token: most embedding models and cross-encoders.
ENCODERS = re.compile(
    r"(?!\w+ForCausalLM)(Bert|Roberta|XLMRoberta|ModernBert|MPNet|DistilBert|Electra|Deberta|DebertaV2|Albert|"
    r"Camembert|NomicBert|EuroBert|New|Gte|JinaBert|JinaEmbeddingsV3|Ultrabert|NeoMME|EmbeddingGemma2|M?T5)"
    r"(Model|TextModel|For|Encoder)"
)
# Decoders that were fine-tuned so that every token sees every other token (llama-nemotron, by its own code).
BOTH_WAYS = re.compile(r"(\w+)Bidirectional(Model|For)")

Family = Callable[[HFConfig], ModelConfig]
Fallback = Callable[[Settings, str, bool], Family | None]

MOST_LABELS = 2**20
MOST_CHARACTERS = 1200  # maximum length of an error message


def config_from(hf: HFConfig) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face config.

    Raise UnsupportedModelError for a model or setting that prefold does not support, and CheckpointError for invalid
    settings. The message names the file (if `hf` comes from a checkpoint), the key and the fault.
    """
    load_plugins()
    hf = Settings.of(hf)
    hf.reads.update(hf.prefix + key for key in hf)  # keys that a family passes to another family count as unread
    hf = Settings(dict(hf.items()), hf.file, hf.prefix)
    try:
        config = _config_from(hf)
        check_read(hf, _architecture(hf), config)
        return config
    except CheckpointError as error:
        message = " ".join(str(error).split())  # names from the config may have lines
        message = message if len(message) <= MOST_CHARACTERS else message[:MOST_CHARACTERS] + "..."
        raise type(error)(message if hf.file in message else f"{hf.file}: {message}") from error


def _config_from(hf: Settings) -> ModelConfig:
    architecture = _architecture(hf)
    own = FAMILIES.get(architecture)
    is_left = architecture in LEFT_TO_OTHERS and not _is_done_here(hf, LEFT_TO_OTHERS[architecture])
    family = None if is_left else own
    if own is None and (found := ENCODERS.match(str(architecture)) or BOTH_WAYS.match(str(architecture))):
        what = "an encoder" if found.re is ENCODERS else "made to attend in both directions"
        raise UnsupportedModelError(
            f"the architecture {architecture!r:.200} is not supported: {found[1]} is {what}. Its tokens see later "
            "tokens, so texts cannot share a prefix; use a causal embedder or reranker (docs/models.md), "
            "or another program"
        )
    if architecture not in _REFUSED:
        families = (fallback(hf, architecture, family is not None) for fallback in _FALLBACKS.values())
        try:
            family = next(filter(None, families), own)
        except UnsupportedModelError:
            if not is_left:
                raise
            family = own  # its error names the setting
    if family is None and architecture in _REFUSED:
        raise UnsupportedModelError(f"the architecture {architecture!r} is not supported: {_REFUSED[architecture]}")
    if family is None:
        raise UnsupportedModelError(
            f"the architecture {architecture!r:.200} is not supported; use one of the {len(FAMILIES)} architectures "
            "that `prefold models` lists, or add a family with register_family and --plugin (docs/families.md)"
        )
    quantised = hf.get("quantization_config") or hf.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
        if method != _QUANTISED.get(architecture):
            raise UnsupportedModelError(
                f"the checkpoint is quantised (method {method!r:.200}), which is not supported; use the original "
                "checkpoint or a GGUF file of the model"
            )
    if hf.get("is_causal") is False:
        raise UnsupportedModelError(
            "the model attends in both directions (is_causal is false); only causal models work"
        )
    if dict(hf.items()).get("use_bidirectional_attention") in (True, "all"):
        key = "use_bidirectional_attention"
        raise UnsupportedModelError(f"the model attends in both directions ({key}); only causal models work")
    code, is_own = hf.get("auto_map"), architecture in REGISTERED
    done_here = is_own or architecture in _OWN_CODE
    if isinstance(code, Mapping) and not done_here and any(str(k).startswith("AutoModel") for k in code):
        raise UnsupportedModelError(
            "the checkpoint has its own model code (auto_map), which prefold never runs; remove auto_map from its "
            f"config.json only if it is a plain {architecture}"
        )
    return _of_registered(architecture, family, hf) if is_own else family(hf)


def _is_done_here(hf: Settings, done: HFConfig) -> bool:
    """Return whether the config has these values, or no value, under these keys."""
    return all(hf.get(key) in (None, value) for key, value in done.items())


def register_family(architecture: str, family: Family) -> None:
    """Let checkpoints of `architecture` load: `family` turns their config into a ModelConfig.

    The config is a dict with further methods for typed values, such as `config.size("hidden_size")`. If the function
    leaves a key unread that changes results, loading the checkpoint is an error. Model code in the checkpoint
    (auto_map) never runs. See docs/families.md.
    """
    FAMILIES[architecture] = family
    REGISTERED.add(architecture)


def add_families(
    families: Mapping[str, Family],
    *,
    model_types: Mapping[str, str],
    own_code: Collection[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    quantised: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add prefold's own families, by architecture.

    Args:
        families: the families.
        model_types: architecture for checkpoints whose config has only a model_type.
        own_code: architectures that elsewhere exist only as code in checkpoints, and that prefold implements.
        refused: reasons for architectures that are refused, instead of a list of supported ones.
        quantised: per architecture, the quantization method whose tensors prefold reads.
    """
    FAMILIES.update(families)
    MODEL_TYPES.update(model_types)
    _OWN_CODE.update(own_code)
    _REFUSED.update(refused)
    _QUANTISED.update(quantised)


def add_fallback(family: Fallback, label: str) -> None:
    """Add a source of families for architectures that the tables lack.

    Args:
        family: takes a config, its architecture, and whether the tables have that architecture. Returns the family;
            None leaves the choice to the tables.
        label: describes the models in a few words, for listings.
    """
    _FALLBACKS[label] = family


def fallbacks() -> list[str]:
    """Return descriptions of the models that load beside `supported_architectures`."""
    load_plugins()
    return list(_FALLBACKS)


def _of_registered(architecture: str, family: Family, hf: Settings) -> ModelConfig:
    """Return the ModelConfig from a registered family.

    Raise CheckpointError if the function fails or returns something else.
    """
    names = ", ".join(field.name for field in fields(ModelConfig))
    try:
        config = family(hf)
    except CheckpointError:
        raise
    except Exception as error:
        message = f"the family registered for {architecture!r} failed with {type(error).__name__}: {error}"
        hint = f"; ModelConfig has the fields {names}" if "ModelConfig" in str(error) else ""
        raise CheckpointError(message + hint) from error
    if not isinstance(config, ModelConfig):
        raise CheckpointError(
            f"the family registered for {architecture!r} returned a {type(config).__name__}, not a ModelConfig; "
            f"ModelConfig has the fields {names}"
        )
    return config


def supported_architectures() -> list[str]:
    """Return the architectures that can be loaded, plugins' included, in alphabetical order."""
    load_plugins()
    return sorted(FAMILIES)


def _architecture(hf: Settings) -> str:
    names, model_type = hf.texts("architectures", None), hf.text("model_type", None)
    if names and model_type in RUN_AS_OTHERS:
        return names[0].replace(*RUN_AS_OTHERS[model_type])
    return names[0] if names else MODEL_TYPES.get(str(model_type), str(model_type))


def families_by_function() -> dict[Family, list[str]]:
    """Return {family function: its architectures, in the order of registration}.

    The first sentence of a function's docstring describes the family in docs/models.md.
    """
    load_plugins()
    functions: dict[Family, list[str]] = {}
    for architecture, family in FAMILIES.items():
        functions.setdefault(unwrap(family), []).append(architecture)
    return functions


def with_heads(causal: str, other: str, family: Family, *, classified: bool = True) -> dict[str, Family]:
    """Return a family under its architectures: with an LM head, without a head, and with a classification head.

    Architectures other than `causal` start with `other`. `classified` adds the classification head.
    """
    families = {causal: family, f"{other}Model": _with_head(family)}
    return families | ({f"{other}ForSequenceClassification": _with_head(family, _classifier)} if classified else {})


def _with_head(family: Family, head: Callable[[Settings], dict[str, Any]] = lambda hf: {}) -> Family:
    """Return the family for checkpoints with another head than the LM head, or without a head.

    Their configs have no logits, even if the embedding could serve as an LM head. These models were trained for other
    tasks, and their next-token predictions mean nothing.

    Args:
        head: returns the fields of ModelConfig that describe the head.
    """

    @wraps(family)
    def headed(hf: HFConfig) -> ModelConfig:
        return replace(family(hf), lm_head=False, **head(Settings.of(hf)))

    return headed


def _classifier(hf: Settings) -> dict[str, Any]:
    """Return the ModelConfig fields of a classification head of one linear."""
    labels = _labels(hf)
    return {"num_labels": len(labels) or hf.size("num_labels", 2, most=MOST_LABELS), "labels": labels}


def _labels(hf: Settings) -> tuple[str, ...]:
    """Return the label names in the order of their indices; () if the config has no names."""
    names = hf.settings("id2label")
    try:
        numbered = {int(key): str(value) for key, value in names.items()}
    except ValueError:
        raise hf.wrong("id2label", "an object of names by number") from None
    return tuple(numbered[i] for i in sorted(numbered))


def _reward(hf: Settings) -> dict[str, Any]:
    """Return the ModelConfig fields of a head of two linears."""
    return {"num_labels": hf.size("num_labels", 1, most=MOST_LABELS), "head_layers": 2}


MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "youtu": "YoutuForCausalLM",
    "cohere": "CohereForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "cwm": "CwmForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "helium": "HeliumForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "apertus": "ApertusForCausalLM",
    "apertus1p5_text": "Apertus1p5TextForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "olmo": "OlmoForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "lara_mini": "LaraMiniForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "aria_text": "AriaTextForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "mellum": "MellumForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "sarvam_moe": "SarvamMoEForCausalLM",
    "sarvam_mla": "DeepseekV3ForCausalLM",
    "flint": "FlintForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "kolibri1": "Kolibri1ForCausalLM",
}
# Checkpoints whose config names the architecture of another model: by model_type, its prefix there and prefold's.
RUN_AS_OTHERS = {
    "exaone": ("Llama", "Exaone"),
    "internlm3": ("Llama", "InternLM3"),
    "iquestcoder": ("Llama", "IQuestCoder"),
    "sarvam_moe": ("Glm4Moe", "SarvamMoE"),
}
# Settings that prefold's own family supports. With another value, the fallbacks are asked first.
LEFT_TO_OTHERS: dict[str, HFConfig] = {
    "OlmoForCausalLM": {"clip_qkv": None},
    "OPTForCausalLM": {"do_layer_norm_before": True},
}
# Families without a classifier in transformers.
UNCLASSIFIED: tuple[Family, ...] = (
    granite, granite4, cohere2, olmoe, granite_moe, lfm2, lfm2_moe, qwen3_5, qwen3_5_moe, qwen3_next, cohere, cwm, lfm3,
    ernie4_5, hyperclovax, granite_swa, apertus, nanochat, jais2, vaultgemma, bitnet, internlm3, iquestcoder, exaone,
    codegen, gemma4, gemma4_unified, glm4_moe_lite, mistral4, youtu, lara_mini, olmo_hybrid, falcon_h1, nemotron_h,
    bamba, glm4_moe, minimax_m2, ernie4_5_moe, afmoe, dots1, exaone_moe, aria, flex_olmo, solar_open, granite_moe_swa,
    mellum, cohere2_moe, sarvam_moe, flint, hy_v3, kolibri, gemma3n,
)  # fmt: skip
# See `add_families`.
_OWN_CODE = {"Qwen2ForRewardModel", "Phi3ForCausalLM", "NemotronHForCausalLM"}
_OWN_CODE |= {"PhiMoEForCausalLM", "AfmoeForCausalLM", "SarvamMoEForCausalLM", "MiniMaxM2ForCausalLM"}
_OWN_CODE |= {"HunYuanMoEV1ForCausalLM"}
_OWN_CODE |= {f"{_name}ForCausalLM" for _name in ("InternLM3", "IQuestCoder", "Exaone", "Falcon", "HunYuanDenseV1")}
_REFUSED: dict[str, str] = {}
_QUANTISED: dict[str, str] = {"GptOssForCausalLM": "mxfp4"}
_FALLBACKS: dict[str, Fallback] = {}  # {label: fallback}
# Architectures of families that plugins have registered.
REGISTERED: set[str] = set()
FAMILIES: dict[str, Family] = {"Qwen2ForRewardModel": _with_head(qwen2, _reward)}
for _causal, _other, _family in (
    ("LlamaForCausalLM", "Llama", llama),
    ("MistralForCausalLM", "Mistral", mistral),
    ("Qwen2ForCausalLM", "Qwen2", qwen2),
    ("Qwen3ForCausalLM", "Qwen3", qwen3),
    ("SmolLM3ForCausalLM", "SmolLM3", smollm3),
    ("Olmo2ForCausalLM", "Olmo2", olmo2),
    ("Olmo3ForCausalLM", "Olmo3", olmo3),
    ("Phi3ForCausalLM", "Phi3", phi3),
    ("GraniteForCausalLM", "Granite", granite),
    ("GraniteMoeHybridForCausalLM", "GraniteMoeHybrid", granite4),
    ("GemmaForCausalLM", "Gemma", gemma),
    ("Gemma2ForCausalLM", "Gemma2", gemma2),
    ("Gemma3ForCausalLM", "Gemma3Text", gemma3),  # "Gemma3Model" has an image tower
    ("Gemma3nForCausalLM", "Gemma3nText", gemma3n),
    ("Gemma4ForCausalLM", "Gemma4Text", gemma4),
    ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedText", gemma4_unified),
    ("Cohere2ForCausalLM", "Cohere2", cohere2),
    ("Starcoder2ForCausalLM", "Starcoder2", starcoder2),
    ("Exaone4ForCausalLM", "Exaone4", exaone4),
    ("GPT2LMHeadModel", "GPT2", gpt2),
    ("Qwen2MoeForCausalLM", "Qwen2Moe", qwen2_moe),
    ("Qwen3MoeForCausalLM", "Qwen3Moe", qwen3_moe),
    ("OlmoeForCausalLM", "Olmoe", olmoe),
    ("GptOssForCausalLM", "GptOss", gpt_oss),
    ("MixtralForCausalLM", "Mixtral", mixtral),
    ("GraniteMoeForCausalLM", "GraniteMoe", granite_moe),
    ("GraniteMoeSharedForCausalLM", "GraniteMoeShared", granite_moe),
    ("Lfm2ForCausalLM", "Lfm2", lfm2),
    ("Lfm2MoeForCausalLM", "Lfm2Moe", lfm2_moe),
    ("Qwen3_5ForCausalLM", "Qwen3_5Text", qwen3_5),
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeText", qwen3_5_moe),
    ("Qwen3NextForCausalLM", "Qwen3Next", qwen3_next),
    ("DeepseekV2ForCausalLM", "DeepseekV2", deepseek_v2),
    ("DeepseekV3ForCausalLM", "DeepseekV3", deepseek_v3),
    ("Glm4MoeLiteForCausalLM", "Glm4MoeLite", glm4_moe_lite),
    ("MiniCPM3ForCausalLM", "MiniCPM3", minicpm3),
    ("Mistral4ForCausalLM", "Mistral4", mistral4),
    ("YoutuForCausalLM", "Youtu", youtu),
    ("CohereForCausalLM", "Cohere", cohere),
    ("GlmForCausalLM", "Glm", glm),
    ("Glm4ForCausalLM", "Glm4", glm4),
    ("SeedOssForCausalLM", "SeedOss", seed_oss),
    ("CwmForCausalLM", "Cwm", cwm),
    ("MinistralForCausalLM", "Ministral", ministral),
    ("Ministral3ForCausalLM", "Ministral3", ministral3),
    ("HeliumForCausalLM", "Helium", helium),
    ("Ernie4_5ForCausalLM", "Ernie4_5", ernie4_5),
    ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1", hunyuan),
    ("ArceeForCausalLM", "Arcee", arcee),
    ("NemotronForCausalLM", "Nemotron", nemotron),
    ("HyperCLOVAXForCausalLM", "HyperCLOVAX", hyperclovax),
    ("GraniteSWAForCausalLM", "GraniteSWA", granite_swa),
    ("ApertusForCausalLM", "Apertus", apertus),
    ("Apertus1p5TextForCausalLM", "Apertus1p5Text", apertus),
    ("StableLmForCausalLM", "StableLm", stablelm),
    ("FalconForCausalLM", "Falcon", falcon),
    ("GPTNeoXForCausalLM", "GPTNeoX", gpt_neox),
    ("PhiForCausalLM", "Phi", phi),
    ("OlmoForCausalLM", "Olmo", olmo),
    ("OPTForCausalLM", "OPT", opt),
    ("PersimmonForCausalLM", "Persimmon", persimmon),
    ("NanoChatForCausalLM", "NanoChat", nanochat),
    ("GPTBigCodeForCausalLM", "GPTBigCode", gpt_bigcode),
    ("Jais2ForCausalLM", "Jais2", jais2),
    ("VaultGemmaForCausalLM", "VaultGemma", vaultgemma),
    ("BitNetForCausalLM", "BitNet", bitnet),
    ("InternLM3ForCausalLM", "InternLM3", internlm3),
    ("IQuestCoderForCausalLM", "IQuestCoder", iquestcoder),
    ("ExaoneForCausalLM", "Exaone", exaone),
    ("CodeGenForCausalLM", "CodeGen", codegen),
    ("GPTJForCausalLM", "GPTJ", gptj),
    ("GPTNeoForCausalLM", "GPTNeo", gpt_neo),
    ("Lfm3ForCausalLM", "Lfm3", lfm3),
    ("LaraMiniForCausalLM", "LaraMini", lara_mini),
    ("OlmoHybridForCausalLM", "OlmoHybrid", olmo_hybrid),
    ("FalconH1ForCausalLM", "FalconH1", falcon_h1),
    ("NemotronHForCausalLM", "NemotronH", nemotron_h),
    ("BambaForCausalLM", "Bamba", bamba),
    ("Glm4MoeForCausalLM", "Glm4Moe", glm4_moe),
    ("MiniMaxM2ForCausalLM", "MiniMaxM2", minimax_m2),
    ("Ernie4_5_MoeForCausalLM", "Ernie4_5_Moe", ernie4_5_moe),
    ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1", hunyuan_moe),
    ("AfmoeForCausalLM", "Afmoe", afmoe),
    ("Dots1ForCausalLM", "Dots1", dots1),
    ("ExaoneMoeForCausalLM", "ExaoneMoe", exaone_moe),
    ("ExaoneMoEForCausalLM", "ExaoneMoE", exaone_moe),  # spelling in LG's own files
    ("PhimoeForCausalLM", "Phimoe", phimoe),
    ("PhiMoEForCausalLM", "PhiMoE", phimoe),  # spelling in Microsoft's own files
    ("AriaTextForCausalLM", "AriaText", aria),
    ("FlexOlmoForCausalLM", "FlexOlmo", flex_olmo),
    ("SolarOpenForCausalLM", "SolarOpen", solar_open),
    ("GraniteMoeSWAForCausalLM", "GraniteMoeSWA", granite_moe_swa),
    ("MellumForCausalLM", "Mellum", mellum),
    ("Cohere2MoeForCausalLM", "Cohere2Moe", cohere2_moe),
    ("SarvamMoEForCausalLM", "SarvamMoE", sarvam_moe),
    ("FlintForCausalLM", "Flint", flint),
    ("HYV3ForCausalLM", "HYV3", hy_v3),
    ("Kolibri1ForCausalLM", "Kolibri1", kolibri),
):
    FAMILIES |= with_heads(_causal, _other, _family, classified=_family not in UNCLASSIFIED)
FAMILIES["Gemma3nForConditionalGeneration"] = gemma3n_with_towers
FAMILIES["Gemma4UnifiedForConditionalGeneration"] = gemma4_unified_with_media
FAMILIES["Qwen3_5ForConditionalGeneration"] = qwen3_5_with_tower
FAMILIES["Qwen3_5MoeForConditionalGeneration"] = qwen3_5_moe_with_tower

_NO_ATTENTION = "it has no attention layers, and models without attention are not supported"
_MAMBA = "its layers are Mamba-1, with a separate decay for each state element; only Mamba-2 is supported"
_DELTA = "its delta nets have a separate decay for each key element (KDA); only one decay per head is supported"
# Refused hybrids and attention-free models: by model_type, the prefix of the architecture and the reason.
_WITH_STATES = {
    "bailing_hybrid": ("BailingHybrid", _DELTA),
    "falcon_mamba": ("FalconMamba", _NO_ATTENTION),
    "jamba": ("Jamba", _MAMBA),
    "kimi_linear": ("KimiLinear", _DELTA),
    "mamba": ("Mamba", _NO_ATTENTION),
    "mamba2": ("Mamba2", _NO_ATTENTION),
    "minimax": (
        "MiniMax",
        "most of its layers have lightning attention, a linear attention that prefold does not support",
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        "most of its layers are gated linear recurrences (RG-LRU), which prefold does not support",
    ),
    "rwkv": ("Rwkv", _NO_ATTENTION),
    "xlstm": ("xLSTM", _NO_ATTENTION),
    "zamba": ("Zamba", _MAMBA),
    "zamba2": ("Zamba2", "its attention blocks are shared by several layers and also read the token embedding"),
}
MODEL_TYPES |= {model_type: f"{name}ForCausalLM" for model_type, (name, _) in _WITH_STATES.items()}
for _name, _reason in _WITH_STATES.values():
    _REFUSED |= {f"{_name}{_end}": _reason for _end in ("ForCausalLM", "ForSequenceClassification", "Model")}
