"""Names of tensors and modules in checkpoints that differ from prefold's names. prefold uses Llama's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a checkpoint uses, and how it lays out its tensors. Patterns are regular expressions.

    Attributes:
        prefix: precedes all names except the heads' names. Checkpoints may omit it.
        lists: the lists of layers, in order, with prefold's number of each list's first layer.
        parts: prefold's names for each module. With several names, the checkpoint fuses their outputs in this order
            into one tensor. A tensor outside any module has its own entry. "{}" stands for the number of an expert. If
            a name occurs both inside and outside layers, the entry for layers starts with the list, as in
            "layers.norm".
        grouped: fused modules of `parts` whose outputs alternate in groups: all parts of the first group, then all
            parts of the second, and so on. The value is the entry of `ModelConfig.sizes` with the number of groups.
        stacks: tensors [matrices, outputs, inputs] of a layer that stack numbered matrices. The value has prefold's
            names of the tensors that lie side by side in each matrix, with "{}" for the number.
        writes_stacks: when saving, write these stacks. If False, write separate tensors. Loading accepts both.
        in_turn: a stacked matrix interleaves the outputs of its tensors, instead of one tensor's outputs after
            all outputs of the previous one.
        turned: stacked matrices are [inputs, outputs], unless they are MXFP4 blocks (`mxfp4`).
        halves: pattern of in-layer names. Their layer number is halved, because the checkpoint numbers attention and
            MLP as two layers. "": no such names.
        joined: prefold's tensors of a layer that the checkpoint stores as several tensors of any sizes, to be stacked
            along their rows. The value has their names.
        transposed: weights of the layers' linears are [inputs, outputs].
        interleaved: each head of q and k stores rotated pairs next to each other, instead of one half after the other.
        swapped: the halves of each head change places, so heads rotate in the opposite direction.
        before: pattern of a prefix of this model's names, for checkpoints that contain more than this model. It is
            removed before `prefix`.
        other_names: pattern of the start of names that do not belong to this model; "": all tensors belong to it.
        single_rows: suffixes of prefold's names of vectors that the checkpoint stores as [1, size].
        negative_exponentials: suffixes of prefold's names of tensors that the checkpoint stores as -exp(x), not x.
    """

    prefix: str = "model."
    lists: Mapping[str, int] = field(default_factory=lambda: {"layers": 0})
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    grouped: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    writes_stacks: bool = False
    in_turn: bool = False
    turned: bool = False
    halves: str = ""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    interleaved: bool = False
    swapped: bool = False
    before: str = ""
    other_names: str = ""
    single_rows: tuple[str, ...] = ()
    negative_exponentials: tuple[str, ...] = ()

    def of_module(self, stored: str) -> tuple[str, ...]:
        """Return prefold's names of a checkpoint's module. Return an unknown name unchanged, without the prefix."""
        stored = self._own(stored)
        return self._named(stored, self.parts) or (stored,)

    def grouped_by(self, stored: str) -> str | None:
        """Return the key in `ModelConfig.sizes` for the number of groups of a fused module (see `grouped`).

        Return None if the module, or the module of the tensor `stored`, has one group.
        """
        return next((size for module, size in self.grouped.items() if re.search(rf"\b{module}(\.|$)", stored)), None)

    def of_stack(self, stored: str) -> tuple[str, ...]:
        """Return prefold's names of the tensors in a stack, with "{}" for the number; () for any other tensor."""
        return self._named(self._own(stored), self.stacks)

    def _own(self, stored: str) -> str:
        """Return a stored name without `before` and `prefix`."""
        before = re.match(self.before, stored)
        return stored[before.end() if before else 0 :].removeprefix(self.prefix)

    def _named(self, stored: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Return a table's names for a module or tensor, inside or outside layers; () if the table has none."""
        if stored in table:
            return table[stored]
        in_layer = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", stored)
        if not in_layer or in_layer[1] not in self.lists:
            return ()
        rest, expert = in_layer[3], ""
        if rest not in table and (numbered := re.search(r"\.(\d+)(?=\.|$)", rest)) is not None:
            rest, expert = f"{rest[: numbered.start()]}.{{}}{rest[numbered.end() :]}", numbered[1]
        if f"{in_layer[1]}.{rest}" in table:
            rest = f"{in_layer[1]}.{rest}"
        if rest not in table:
            return ()
        number = int(in_layer[2])
        if self.halves and re.match(self.halves, in_layer[3]):
            number //= 2
        number += self.lists[in_layer[1]]
        return tuple(f"layers.{number}.{name.replace('{}', expert) if expert else name}" for name in table[rest])

    def of_tensor(self, stored: str) -> tuple[str, ...]:
        """Return prefold's names of a checkpoint's tensor; () if it does not belong to this model."""
        if self.other_names and re.match(self.other_names, stored):
            return ()
        module, dot, kind = stored.rpartition(".")
        if of_its_own := self._named(self._own(stored), self.parts):
            return of_its_own
        return tuple(name + dot + kind for name in self.of_module(module))

    def layer(self, number: int) -> str:
        """Return the name of a layer in the checkpoint, such as "layers.3"."""
        name = [name for name, first in self.lists.items() if first <= number][-1]
        return f"{name}.{number - self.lists[name]}"


GPT2 = Names(
    prefix="transformer.",
    lists={"h": 0},
    parts={
        "wte": ("embed_tokens",),
        "wpe": ("embed_positions",),
        "ln_f": ("norm",),
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp.c_fc": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    },
    transposed=True,  # transformers' Conv1D
)
GGUF = Names(
    prefix="",
    lists={"blk": 0},
    parts={
        "token_embd": ("embed_tokens",),
        "output_norm": ("norm",),
        "output": ("lm_head",),
        "attn_norm": ("input_layernorm",),
        "attn_q": ("self_attn.q_proj",),
        "attn_k": ("self_attn.k_proj",),
        "attn_v": ("self_attn.v_proj",),
        "attn_output": ("self_attn.o_proj",),
        "attn_q_norm": ("self_attn.q_norm",),
        "attn_k_norm": ("self_attn.k_norm",),
        "attn_sinks.weight": ("self_attn.sinks",),
        "ffn_norm": ("post_attention_layernorm",),
        "post_attention_norm": ("post_attention_layernorm",),
        "ffn_gate": ("mlp.gate_proj",),
        "ffn_up": ("mlp.up_proj",),
        "ffn_down": ("mlp.down_proj",),
        "ffn_gate_inp": ("mlp.gate",),
        "ffn_gate_inp_shexp": ("mlp.shared_expert_gate",),
        "ffn_gate_shexp": ("mlp.shared_expert.gate_proj",),
        "ffn_up_shexp": ("mlp.shared_expert.up_proj",),
        "ffn_down_shexp": ("mlp.shared_expert.down_proj",),
        "exp_probs_b.bias": ("mlp.gate.correction",),
    },
    stacks={
        f"ffn_{name}_exps.{kind}": tuple(f"mlp.experts.{{}}.{part}_proj.{kind}" for part in name.split("_"))
        for name in ("gate", "up", "down", "gate_up")
        for kind in ("weight", "bias")
    },
)
# Models with fused q, k and v, and fused gate and up.
FUSED = Names(
    parts={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)
GGUF_FUSED = replace(
    GGUF, parts={**GGUF.parts, "attn_qkv": FUSED.parts["self_attn.qkv_proj"], "ffn_up": FUSED.parts["mlp.gate_up_proj"]}
)
# {GGUF architecture: names}, if they differ from `GGUF`. The key ends with " mlp_norm" for Falcon models with a
# separate norm of the MLP.
GGUF_OF: dict[str, Names] = {"phi3": GGUF_FUSED}
for _arch in ("falcon", "gptneox"):
    GGUF_OF[_arch] = replace(GGUF, parts={**GGUF.parts, "attn_qkv": FUSED.parts["self_attn.qkv_proj"]})
GGUF_OF["falcon mlp_norm"] = replace(
    GGUF,
    parts={
        **GGUF_OF["falcon"].parts,
        "attn_norm": ("post_attention_layernorm",),
        "attn_norm_2": ("input_layernorm",),
    },
)
STARCODER2 = Names(parts={"mlp.c_fc": ("mlp.up_proj",), "mlp.c_proj": ("mlp.down_proj",)})
# Granite 4's shared expert, which is the only MLP in its dense models.
GRANITE4 = Names(
    parts={"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"), "shared_mlp.output_linear": ("mlp.down_proj",)}
)
# Models with a norm after each sublayer too.
GGUF_OUT_NORMS = replace(
    GGUF,
    parts={
        **GGUF.parts,
        "post_attention_norm": ("post_attention_layernorm",),
        "ffn_norm": ("pre_feedforward_layernorm",),
        "post_ffw_norm": ("post_feedforward_layernorm",),
    },
)
_LAYER_INPUTS = {
    "per_layer_token_embd": ("embed_tokens_per_layer",),
    "per_layer_model_proj": ("per_layer_model_projection",),
    "per_layer_proj_norm": ("per_layer_projection_norm",),
    "inp_gate": ("per_layer_input_gate",),
    "proj": ("per_layer_projection",),
    "post_norm": ("post_per_layer_input_norm",),
}
_GEMMA3N = {
    "altup_router": ("altup.modality_router",),
    "altup_router_norm": ("altup.router_norm",),
    "altup_predict_coef": ("altup.prediction_coefs",),
    "altup_correct_coef": ("altup.correction_coefs",),
    "altup_correct_scale.weight": ("altup.correct_output_scale",),
    "laurel_l": ("laurel.linear_left",),
    "laurel_r": ("laurel.linear_right",),
    "laurel_post_norm": ("laurel.post_laurel_norm",),
}
_GEMMA4 = {
    "layer_output_scale.weight": ("layer_scalar",),
    "ffn_gate_inp.scale": ("router.scale",),
    "ffn_down_exps.scale": ("router.per_expert_scale",),
    "pre_ffw_norm_2": ("pre_feedforward_layernorm_2",),
    "post_ffw_norm_1": ("post_feedforward_layernorm_1",),
    "post_ffw_norm_2": ("post_feedforward_layernorm_2",),
}
_LFM2 = {
    "token_embd_norm": ("norm",),  # the norm after the last layer
    "shortconv.in_proj": ("conv.in_proj",),
    "shortconv.conv": ("conv.conv",),
    "shortconv.out_proj": ("conv.out_proj",),
}
_DELTA_NET = {
    "attn_qkv": ("linear_attn.in_proj_qkv",),
    "attn_gate": ("linear_attn.in_proj_z",),
    "ssm_beta": ("linear_attn.in_proj_b",),
    "ssm_alpha": ("linear_attn.in_proj_a",),
    "ssm_conv1d": ("linear_attn.conv1d",),
    "ssm_a": ("linear_attn.A_log",),
    "ssm_dt.bias": ("linear_attn.dt_bias",),
    "ssm_norm": ("linear_attn.norm",),
    "ssm_out": ("linear_attn.out_proj",),
}
_QWEN35 = replace(GGUF, parts={**GGUF.parts, **_DELTA_NET}, negative_exponentials=("linear_attn.A_log",))
_QKV = ("linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v")
_QWEN3_NEXT = {
    "attn_qkv": _QKV,
    "ssm_in": (*_QKV, "linear_attn.in_proj_z"),  # older files: instead of attn_qkv and attn_gate
    "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
_MAMBA = {
    "ssm_in": ("mamba.in_proj",),
    "ssm_conv1d": ("mamba.conv1d",),
    "ssm_dt.bias": ("mamba.dt_bias",),
    "ssm_a": ("mamba.A_log",),
    "ssm_d": ("mamba.D",),
    "ssm_norm": ("mamba.norm",),
    "ssm_out": ("mamba.out_proj",),
}
_LATENT = {
    "attn_q_a": ("self_attn.q_a_proj",),
    "attn_q_a_norm": ("self_attn.q_a_layernorm",),
    "attn_q_b": ("self_attn.q_b_proj",),
    "attn_kv_a_mqa": ("self_attn.kv_a_proj_with_mqa",),
    "attn_kv_a_norm": ("self_attn.kv_a_layernorm",),
    "attn_kv_b": ("self_attn.kv_b_proj",),  # older files: instead of attn_k_b and attn_v_b
    "attn_k_b": ("self_attn.k_b_proj",),
    "attn_v_b": ("self_attn.v_b_proj",),
}
GGUF_OF |= {
    "deepseek2": replace(GGUF, parts={**GGUF.parts, **_LATENT}),
    "afmoe": replace(GGUF_OUT_NORMS, parts={**GGUF_OUT_NORMS.parts, "attn_gate": ("self_attn.g_proj",)}),
    "glm4": replace(GGUF_OUT_NORMS, parts={**GGUF_OUT_NORMS.parts, "ffn_up": FUSED.parts["mlp.gate_up_proj"]}),
    "gemma3n": replace(
        GGUF_OUT_NORMS,
        parts={**GGUF_OUT_NORMS.parts, **_LAYER_INPUTS, **_GEMMA3N},
        stacks={
            "altup_proj.weight": ("altup_projections.{}.weight",),
            "altup_unembd_proj.weight": ("altup_unembed_projections.{}.weight",),
        },
    ),
    "gemma4": replace(GGUF_OUT_NORMS, parts={**GGUF_OUT_NORMS.parts, **_LAYER_INPUTS, **_GEMMA4}),
    "lfm2": replace(GGUF, parts={**GGUF.parts, **_LFM2}),
    "lfm2moe": replace(GGUF, parts={**GGUF.parts, **_LFM2}),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": replace(
        _QWEN35, parts={**_QWEN35.parts, **_QWEN3_NEXT}, grouped={"ssm_in": "key_heads", "ssm_ba": "key_heads"}
    ),
    "granitehybrid": replace(GGUF, parts={**GGUF.parts, **_MAMBA}, negative_exponentials=("mamba.A_log",)),
}
