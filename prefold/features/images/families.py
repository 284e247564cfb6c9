"""The families of models with images: a text model and its tower, both as data. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...checkpoint.settings import Settings
from ...errors import UnsupportedModelError
from ...model.builders import ATTENDED, QKV, WIDE, LayerBuilder, Module, norm, widths_of
from ...model.config import ModelConfig, Plane
from ...model.decoders import HFConfig, gemma3, llama
from ...model.gemma4 import gemma4_with_towers
from ...model.program import DELTA, OUT, Add, Attend, Buffer, Embed, H, Linear, Norm, Operation, Program, Weight, X
from .config import TEXT, TOWER, TowerConfig, gemma4_tower, tower_config
from .gemma4 import MERGED, PATCHES, gemma4_program


@dataclass(frozen=True, kw_only=True)
class SeeingConfig(ModelConfig):
    """The config of a text model with a tower, which computes rows of images."""

    tower: TowerConfig

    @classmethod
    def of(cls, text: ModelConfig, tower: TowerConfig) -> SeeingConfig:
        """Return the config of a text model with this tower."""
        return cls(**_fields(text), tower=tower)

    @property
    def text(self) -> ModelConfig:
        return ModelConfig(**_fields(self))

    def image_inputs(self, checkpoint: Any, tokenizer: Any, table: Any = None, **options: Any) -> Any:
        from .items import image_inputs

        return image_inputs(checkpoint, self.tower, tokenizer, table, **options)

    @property
    def models_beside(self) -> Sequence[ModelConfig]:
        return (tower_model(self.tower),)

    @property
    def resident(self) -> str:
        return "the model takes images, and its tower stays in memory (--no-tower: text alone)"

    @property
    def span_rows(self) -> int:
        return self.tower.rows if self.tower.span else 0

    def has_spans(self, window: int | None) -> bool:
        return window is not None or not self.tower.both_ways


def tower_of(config: ModelConfig) -> TowerConfig | None:
    """Return the tower of a model, or None if the model takes text alone."""
    return config.tower if isinstance(config, SeeingConfig) else None


def _fields(config: ModelConfig) -> dict[str, object]:
    return {field.name: getattr(config, field.name) for field in fields(ModelConfig)}


PROJECTOR_NORM = "mm_soft_emb_norm.weight"
# By TowerConfig.kind. Gemma 3 stores this matrix as [inputs, outputs], in folders and in GGUF files.
PROJECTION = {"gemma3": "mm_input_projection_weight", "idefics3": "modality_projection.proj.weight"}


@dataclass(frozen=True, kw_only=True)
class TowerModel(ModelConfig):
    """The config of a tower as a model. A row is a patch of a tile, and its token is the patch's place in the tile."""

    tower: TowerConfig

    def program(self, copies: int = 1) -> Program:
        return gemma4_program(self, self.tower) if self.tower.kind == "gemma4" else tower_program(self)


def tower_model(tower: TowerConfig) -> TowerModel:
    """Return a tower as a model with a program that an executor can run."""
    if tower.kind == "gemma4":
        return TowerModel(
            tower=tower, vocab_size=2 * tower.places, hidden=tower.hidden, layers=tower.layers, heads=tower.heads,
            kv_heads=tower.heads, head_dim=tower.head_dim, intermediate=tower.intermediate, norm_eps=tower.norm_eps,
            rope=None, max_positions=tower.patches, planes=(Plane(),) * tower.layers, activation="gelu_tanh",
            query_scalar=1.0, lm_head=False,
        )  # fmt: skip
    return TowerModel(
        tower=tower, vocab_size=tower.patches, hidden=tower.hidden, layers=tower.layers, heads=tower.heads,
        kv_heads=tower.heads, head_dim=tower.head_dim, intermediate=tower.intermediate, norm_eps=tower.norm_eps,
        norm="layer", rope=None, max_positions=tower.patches, planes=(Plane(),) * tower.layers, mlp="plain",
        activation="gelu_tanh", lm_head=False,
    )  # fmt: skip


def tower_program(model: TowerModel) -> Program:
    """Return the program of a tower.

    In attention, the patches of a tile see each other. `end` starts with a norm, which fills H. The executor of towers
    then merges squares of patches, which is not an operation: it fills MERGED with one row per square. The other
    operations of `end` are the projector and run over these rows.
    """
    tower, hidden = model.tower, model.hidden
    patch = Weight((("embeddings.patch_embedding.weight", hidden),), (tower.patch_inputs,))
    bias = Weight((("embeddings.patch_embedding.bias", hidden),))
    embedding: tuple[Operation, ...] = (Linear(PATCHES, DELTA, patch, bias), Add(X, DELTA))
    layers = [_tower_layer(model, number) for number in range(model.layers)]
    projector: list[Operation] = []
    if tower.kind == "gemma3":
        # The weight is stored minus one. It is wide, because adding 1 in a shorter dtype would lose its last bits.
        weight = Weight(((PROJECTOR_NORM, hidden),), offset=1.0, wide=True)
        projector.append(Norm(MERGED, MERGED, weight, tower.projector_eps))
    projector.append(Linear(MERGED, OUT, Weight(((PROJECTION[tower.kind], tower.output),), (tower.merged,))))
    return Program(
        widths=widths_of(model, layers) | {PATCHES: tower.patch_inputs, MERGED: tower.merged, OUT: tower.output},
        embed=Embed(X, Weight((("embeddings.position_embedding.weight", tower.patches),), (hidden,))),
        layers=(embedding + layers[0], *layers[1:]),
        end=(norm(model, "post_layernorm", X, H), *projector),
    )


def _tower_layer(model: TowerModel, number: int) -> tuple[Operation, ...]:
    builder, hidden, width = LayerBuilder(model, number), model.hidden, model.intermediate

    def linear(source: Buffer, out: Buffer, inputs: int, *modules: Module, activation: str = "") -> None:
        builder.linear("", modules, source, out, inputs, biased=modules, activation=activation)

    builder.norm("layer_norm1", X, H)
    linear(H, QKV, hidden, *((f"self_attn.{name}_proj", hidden) for name in "qkv"))
    heads, dim = model.heads, model.head_dim
    builder.add(Attend(QKV, 0, dim, QKV, hidden, ATTENDED, heads, heads, dim))
    linear(ATTENDED, DELTA, hidden, ("self_attn.out_proj", hidden))
    builder.add(Add(X, DELTA))
    builder.norm("layer_norm2", X, H)
    linear(H, WIDE, hidden, ("mlp.fc1", width), activation=model.activation)
    linear(WIDE, DELTA, width, ("mlp.fc2", hidden))
    builder.add(Add(X, DELTA))
    return tuple(builder.operations)


# transformers' defaults for keys that a text_config lacks.
GEMMA3_TEXT: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
LLAMA_TEXT: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
# Architectures that are refused with a reason, instead of the list of supported ones.
_THREE_POSITIONS = (
    "a row of its images has three positions (time, height and width), and none of them is its depth in the prompt; "
    "use Gemma 3, Gemma 4, Idefics3 or SmolVLM for images"
)
REFUSED: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": _THREE_POSITIONS,
    "Qwen2_5_VLForConditionalGeneration": _THREE_POSITIONS,
}


def gemma3_images(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 3 with its tower (4B and larger)."""
    hf = Settings.of(hf)
    text = gemma3(GEMMA3_TEXT | hf.settings("text_config"))
    tied = hf.flag("tie_word_embeddings", True)
    return _seeing(hf, replace(text, tie_embeddings=tied), tower_config("gemma3", hf, text.hidden))


def gemma4_images(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 4 with its tower for images, if it has one. The tower for sound is not read."""
    hf = Settings.of(hf)
    text = gemma4_with_towers(hf)
    if hf.get("vision_config") is None:
        return text
    settings = hf.settings("text_config")
    both_ways = settings.text("use_bidirectional_attention", None) == "vision"
    tower = gemma4_tower(hf, text.hidden, both_ways=both_ways)
    nearest = min((plane.window for plane in text.planes if plane.window is not None), default=tower.rows)
    if both_ways and tower.rows > nearest:
        # Beyond the window, transformers hides rows of an image from other rows of the same image.
        raise UnsupportedModelError(
            f"{hf.file}: images have up to {tower.rows} rows (vision_soft_tokens_per_image), which do not fit into the "
            f"sliding_window of {nearest}"
        )
    if not 0 <= text.media_token < text.vocab_size:
        raise UnsupportedModelError(f"{hf.file}: text_config.pad_token_id is {text.media_token}, which is not a token")
    return SeeingConfig.of(replace(text, dtype=_dtype(hf, text)), tower)


def idefics3_images(hf: HFConfig) -> ModelConfig:
    """Return the config of Idefics3 and SmolVLM: Llama with a tower."""
    hf = Settings.of(hf)
    settings = hf.settings("text_config")
    if settings.text("model_type", "llama") != "llama":
        raise UnsupportedModelError(f"the text model is {settings['model_type']!r}; only 'llama' is supported")
    for key in ("use_resampler", "qk_layer_norms"):
        if settings.get(key):
            raise UnsupportedModelError(f"text_config.{key} is not supported")
    text = llama(LLAMA_TEXT | settings)
    tied = hf.flag("tie_word_embeddings")
    return _seeing(hf, replace(text, tie_embeddings=tied), tower_config("idefics3", hf, text.hidden))


def _seeing(hf: Settings, text: ModelConfig, tower: TowerConfig) -> SeeingConfig:
    """Return the config of a text model with a tower.

    Args:
        hf: The whole model's config.
    """
    names = replace(text.names, before=TEXT, other_names=TOWER)
    return SeeingConfig.of(replace(text, names=names, dtype=_dtype(hf, text)), tower)


def _dtype(hf: Settings, text: ModelConfig) -> str | None:
    """Return the dtype of the checkpoint, which the whole model's config may name."""
    return hf.text("dtype", None) or hf.text("torch_dtype", None) or text.dtype
