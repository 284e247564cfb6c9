"""The declarations of src/interface.h for ctypes. `scripts/generate` writes this file.

The header documents each name.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum

PLACES = 64
PANEL = 32
IN_INT8 = 256
ONE_FORM = 512
S8 = 65536
RANK_LINE = 64
MOST_MIXED = 8


class Failure(IntEnum):
    NO_MEMORY = 1
    NO_SLOT = 2
    NO_TOKEN = 3
    NO_POSITION = 4
    GONE = 5
    LATE = 6
    APART = 7


class BlockType(IntEnum):
    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    MXFP4 = 39


class Activation(IntEnum):
    LINEARLY = 0
    SILU = 1
    GELU_TANH = 2
    CLAMPED = 3
    GELU = 4
    RELU = 5
    RELU2 = 6


class RouterScore(IntEnum):
    SOFTMAX = 0
    SIGMOID = 1
    SPARSE_MIXER = 2


class Kind(IntEnum):
    NORM = 0
    LINEAR = 1
    GATED = 2
    ROPE = 3
    ATTEND = 4
    PICK = 5
    EMBED = 6
    HEAD = 7
    ADD = 8
    GATE = 9
    EXPERTS = 10
    SHORT_CONV = 11
    GATED_DELTA = 12
    MAMBA2 = 13
    ATTEND_LATENT = 14
    NORM_HEADS = 15
    XIELU = 16
    BY_POSITION = 17
    SCALE_ROWS = 18
    SCALE_HEADS = 19
    ACTIVATE_GATED = 20
    INTERPOLATE = 21
    MIX = 22
    MATCH = 23
    SPARSE_GATE = 24
    CLAMP = 25


class Run(Structure):
    _fields_ = (
        ("first", c_int32),
        ("count", c_int32),
    )


class MaskedPair(Structure):
    _fields_ = (
        ("pair", c_int32),
        ("mask", c_uint32),
    )


class OwnRun(Structure):
    _fields_ = (
        ("first", c_int32),
        ("count", c_int32),
    )


class PlacedRun(Structure):
    _fields_ = (
        ("first", c_int32),
        ("count", c_int32),
        ("place", c_int32),
        ("queries", c_uint32),
    )


class TileCall(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("q_row", c_int64),
        ("q_head", c_int64),
        ("queries", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("tiles", c_int64),
        ("run_offsets", c_void_p),
        ("mask_offsets", c_void_p),
        ("runs", c_void_p),
        ("masked", c_void_p),
        ("tile_starts", c_void_p),
        ("own_offsets", c_void_p),
        ("own", c_void_p),
        ("placed_offsets", c_void_p),
        ("placed", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("threads", c_int32),
        ("cap", c_float),
    )


class RowCall(Structure):
    _fields_ = (
        ("tiles", TileCall),
        ("k", c_void_p),
        ("v", c_void_p),
        ("path_k", c_void_p),
        ("path_v", c_void_p),
        ("k_row", c_int64),
        ("k_head", c_int64),
        ("v_row", c_int64),
        ("v_head", c_int64),
        ("path_k_row", c_int64),
        ("path_k_head", c_int64),
        ("path_v_row", c_int64),
        ("path_v_head", c_int64),
        ("rows", c_int64),
        ("path", c_int64),
        ("tail", c_void_p),
        ("path_tail", c_void_p),
        ("tail_row", c_int64),
        ("path_tail_row", c_int64),
        ("tail_dim", c_int64),
    )


class SlotPlane(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("unsafe", c_void_p),
        ("slots", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("rounded", c_int64),
    )


class SlotCall(Structure):
    _fields_ = (
        ("tiles", TileCall),
        ("plane", SlotPlane),
    )


class WriteCall(Structure):
    _fields_ = (
        ("plane", SlotPlane),
        ("slots", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_row", c_int64),
        ("k_head", c_int64),
        ("v_row", c_int64),
        ("v_head", c_int64),
        ("rows", c_int64),
        ("threads", c_int32),
    )


class BlockPanel(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("type", c_int64),
    )


class LowRank(Structure):
    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("spans", c_void_p),
        ("ranks", c_int64),
    )


class RowLow(Structure):
    _fields_ = (
        ("adapter", c_void_p),
        ("low", c_void_p),
    )


class Epilogue(Structure):
    _fields_ = (
        ("adapted", c_void_p),
        ("activation", c_int32),
        ("gate_scale", c_float),
    )


class RanksView(Structure):
    _fields_ = (
        ("memory", c_void_p),
        ("first", c_int64),
        ("part", c_int64),
        ("rank", c_int64),
        ("size", c_int64),
        ("pipes", c_void_p),
        ("num_pipes", c_int64),
        ("patience", c_double),
        ("met", c_uint64),
    )


class ExpertsCall(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("logits", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_blocks", c_void_p),
        ("down_blocks", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("correction", c_void_p),
        ("scales", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("x_row", c_int64),
        ("experts", c_int64),
        ("chosen", c_int64),
        ("hidden", c_int64),
        ("width", c_int64),
        ("bias_width", c_int64),
        ("groups", c_int64),
        ("chosen_groups", c_int64),
        ("group_best", c_int64),
        ("scale", c_float),
        ("least_sum", c_float),
        ("tolerance", c_float),
        ("score", c_int32),
        ("corrects_logits", c_int32),
        ("is_plain", c_int32),
        ("normalised", c_int32),
        ("threads", c_int32),
    )


class LatentCall(Structure):
    _fields_ = (
        ("expand", c_void_p),
        ("absorb", c_void_p),
        ("restore", c_void_p),
        ("expand_words", c_int64),
        ("absorb_words", c_int64),
        ("restore_words", c_int64),
        ("rank", c_int64),
        ("tail", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
    )


class LatentSplit(Structure):
    _fields_ = (
        ("absorbed", c_void_p),
        ("expanded", c_void_p),
        ("slots", c_void_p),
        ("num_absorbed", c_int64),
        ("num_expanded", c_int64),
        ("keys", c_int64),
        ("tiles", TileCall),
    )


class ConvCall(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("row_of", c_void_p),
        ("states", c_void_p),
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("above", c_void_p),
        ("below", c_void_p),
        ("to", c_void_p),
        ("rows", c_int64),
        ("x_row", c_int64),
        ("channels", c_int64),
        ("kept", c_int64),
        ("first_row", c_int64),
        ("num_ends", c_int64),
    )


class ShortConvCall(Structure):
    _fields_ = (
        ("conv", ConvCall),
        ("out", c_void_p),
        ("pick", c_void_p),
        ("picked", c_int64),
        ("threads", c_int32),
    )


class RunLists(Structure):
    _fields_ = (
        ("first", c_void_p),
        ("stop", c_void_p),
        ("source", c_void_p),
        ("to", c_void_p),
        ("waves", c_void_p),
        ("num_waves", c_int64),
        ("num_states", c_int64),
        ("num_between", c_int64),
    )


class DeltaCall(Structure):
    _fields_ = (
        ("conv", ConvCall),
        ("runs", RunLists),
        ("out", c_void_p),
        ("pick", c_void_p),
        ("states", c_void_p),
        ("between", c_void_p),
        ("rates", c_void_p),
        ("dt_bias", c_void_p),
        ("norm", c_void_p),
        ("picked", c_int64),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("eps", c_float),
        ("beta_scale", c_float),
        ("tiled", c_int32),
        ("threads", c_int32),
    )


class MambaCall(Structure):
    _fields_ = (
        ("conv", ConvCall),
        ("runs", RunLists),
        ("out", c_void_p),
        ("pick", c_void_p),
        ("states", c_void_p),
        ("between", c_void_p),
        ("rates", c_void_p),
        ("dt_bias", c_void_p),
        ("skips", c_void_p),
        ("norm", c_void_p),
        ("picked", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("eps", c_float),
        ("least", c_float),
        ("most", c_float),
        ("gate_scale", c_float),
        ("step_scale", c_float),
        ("norm_first", c_int32),
        ("threads", c_int32),
    )


class Operation(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("source", c_int32),
        ("out", c_int32),
        ("beside", c_int32),
        ("wide", c_int32),
        ("plane", c_int32),
        ("window", c_int32),
        ("activation", c_int32),
        ("linear", c_int32),
        ("summed", c_int32),
        ("eps", c_float),
        ("at", c_int64),
        ("keys", c_int64),
        ("heads", c_int64),
        ("dim", c_int64),
        ("kv_heads", c_int64),
        ("columns", c_int64),
        ("positions", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("blocks", c_void_p),
        ("stride", c_int64),
        ("call", c_void_p),
    )


class PathPlane(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("next_keys", c_void_p),
        ("next_values", c_void_p),
    )


class StatePlane(Structure):
    _fields_ = (
        ("columns", c_void_p),
        ("states", c_void_p),
    )


class PlaceLists(Structure):
    _fields_ = (
        ("above", c_void_p),
        ("below", c_void_p),
    )


class StateStep(Structure):
    _fields_ = (
        ("places", c_void_p),
        ("to", c_void_p),
        ("num_ends", c_int64),
        ("runs", RunLists),
    )


class ProgramCall(Structure):
    _fields_ = (
        ("operations", c_void_p),
        ("count", c_int64),
        ("buffers", c_void_p),
        ("widths", c_void_p),
        ("rows", c_int64),
        ("picked", c_int64),
        ("read", c_void_p),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("dims", c_void_p),
        ("num_tables", c_int64),
        ("angles", c_void_p),
        ("ids", c_void_p),
        ("planes", c_void_p),
        ("paths", c_void_p),
        ("path", c_int64),
        ("keep_path", c_void_p),
        ("keep_new", c_void_p),
        ("kept_path", c_int64),
        ("kept_new", c_int64),
        ("unfolded", c_int64),
        ("scatter", c_void_p),
        ("gather", c_void_p),
        ("read_order", c_void_p),
        ("unfolded_room", c_void_p),
        ("plans", c_void_p),
        ("read_plans", c_void_p),
        ("splits", c_void_p),
        ("read_splits", c_void_p),
        ("numbers", c_void_p),
        ("adapters", c_void_p),
        ("adapted", c_void_p),
        ("low", c_void_p),
        ("most_ranks", c_int64),
        ("ranks", c_void_p),
        ("none", c_int64),
        ("scale", c_float),
        ("cap", c_float),
        ("threads", c_int32),
        ("is_bf16", c_int32),
        ("states", c_void_p),
        ("state_step", c_void_p),
    )


CONSTANTS = {
    "PLACES": PLACES,
    "PANEL": PANEL,
    "IN_INT8": IN_INT8,
    "ONE_FORM": ONE_FORM,
    "S8": S8,
    "RANK_LINE": RANK_LINE,
    "MOST_MIXED": MOST_MIXED,
}
ENUMS: tuple[type[IntEnum], ...] = (
    Failure,
    BlockType,
    Activation,
    RouterScore,
    Kind,
)
STRUCTURES: tuple[type[Structure], ...] = (
    Run,
    MaskedPair,
    OwnRun,
    PlacedRun,
    TileCall,
    RowCall,
    SlotPlane,
    SlotCall,
    WriteCall,
    BlockPanel,
    LowRank,
    RowLow,
    Epilogue,
    RanksView,
    ExpertsCall,
    LatentCall,
    LatentSplit,
    ConvCall,
    ShortConvCall,
    RunLists,
    DeltaCall,
    MambaCall,
    Operation,
    PathPlane,
    StatePlane,
    PlaceLists,
    StateStep,
    ProgramCall,
)
# The letter of the result (void: none), ":", the letters of the arguments: `LETTERS` of interface.py.
FUNCTIONS = {
    "prefold_plan_rows": "p:pqppqpqip",
    "prefold_row_list_sizes": ":pp",
    "prefold_copy_row_lists": ":ppppppp",
    "prefold_free_row_lists": ":p",
    "prefold_plan_slots": "p:pppppqqpqqi",
    "prefold_slot_list_sizes": ":pp",
    "prefold_copy_slot_lists": ":pppppppppp",
    "prefold_free_slot_lists": ":p",
    "prefold_choose_expanded": "i:pppqqqqqqp",
    "prefold_row_attention": "i:pi",
    "prefold_slot_attention": "i:pi",
    "prefold_write_slots": "i:pi",
    "prefold_read_keys": ":ppqpii",
    "prefold_stores_bf16_pairs": "i:",
    "prefold_has_products": "i:i",
    "prefold_linear_float32": "i:pqppppqqqip",
    "prefold_linear_bfloat16": "i:pqppppqqqip",
    "prefold_linear_bfloat16_float32": "i:pqppppqqqip",
    "prefold_gated_linear_silu_float32": "i:pqppppqqqip",
    "prefold_gated_linear_gelu_tanh_float32": "i:pqppppqqqip",
    "prefold_gated_linear_gelu_float32": "i:pqppppqqqip",
    "prefold_gated_linear_relu_float32": "i:pqppppqqqip",
    "prefold_gated_linear_relu2_float32": "i:pqppppqqqip",
    "prefold_gated_linear_silu_bfloat16": "i:pqppppqqqip",
    "prefold_gated_linear_gelu_tanh_bfloat16": "i:pqppppqqqip",
    "prefold_gated_linear_gelu_bfloat16": "i:pqppppqqqip",
    "prefold_gated_linear_relu_bfloat16": "i:pqppppqqqip",
    "prefold_gated_linear_relu2_bfloat16": "i:pqppppqqqip",
    "prefold_block_panel_size": "q:qq",
    "prefold_pack_blocks": ":qpqqpi",
    "prefold_block_rows_float32": ":pppqqi",
    "prefold_block_rows_bfloat16": ":pppqqi",
    "prefold_has_int8": "i:",
    "prefold_pack_int8_float32": "i:pqqqqpi",
    "prefold_pack_int8_bfloat16": "i:pqqqqpi",
    "prefold_pack_words_float32": ":pqqqpi",
    "prefold_pack_words_float32_bfloat16": ":pqqqpi",
    "prefold_pack_words_bfloat16": ":pqqqpi",
    "prefold_pack_words_bfloat16_float32": ":pqqqpi",
    "prefold_pack_words_float16_float32": ":pqqqpi",
    "prefold_pack_words_float16_bfloat16": ":pqqqpi",
    "prefold_add_rms_norm_float32": ":ppppqqqqqfi",
    "prefold_add_rms_norm_bfloat16": ":ppppqqqqqfi",
    "prefold_add_rms_norm_bfloat16_float32": ":ppppqqqqqfi",
    "prefold_add_layer_norm_float32": ":pppppqqfi",
    "prefold_add_layer_norm_bfloat16": ":pppppqqfi",
    "prefold_add_layer_norm_bfloat16_float32": ":pppppqqfi",
    "prefold_norm_heads_float32": ":pppqqqqqqfi",
    "prefold_norm_heads_bfloat16": ":pppqqqqqqfi",
    "prefold_rope_float32": ":pppqqqqqfi",
    "prefold_rope_bfloat16": ":pppqqqqqfi",
    "prefold_rope_bfloat16_float32": ":pppqqqqqfi",
    "prefold_gate_mul_silu_float32": ":ppqqqi",
    "prefold_gate_mul_gelu_tanh_float32": ":ppqqqi",
    "prefold_gate_mul_silu_bfloat16": ":ppqqqi",
    "prefold_gate_mul_gelu_tanh_bfloat16": ":ppqqqi",
    "prefold_sum_ranks_float32": "i:ppqi",
    "prefold_sum_ranks_bfloat16": "i:ppqi",
    "prefold_gather_ranks": "i:ppqp",
    "prefold_log_sum_exp": ":pqqqppi",
    "prefold_entropy": ":pqqqpppi",
    "prefold_draw": "i:pqqppppqpi",
    "prefold_largest": ":pqqqqppi",
    "prefold_count_larger": ":pqqppqpi",
    "prefold_greedy_float32": "i:ppppqqqqiqp",
    "prefold_greedy_bfloat16": "i:ppppqqqqiqp",
    "prefold_experts_silu_float32": "i:p",
    "prefold_experts_silu_bfloat16": "i:p",
    "prefold_experts_gelu_tanh_float32": "i:p",
    "prefold_experts_gelu_tanh_bfloat16": "i:p",
    "prefold_experts_clamped_float32": "i:p",
    "prefold_experts_clamped_bfloat16": "i:p",
    "prefold_experts_relu2_float32": "i:p",
    "prefold_experts_relu2_bfloat16": "i:p",
    "prefold_short_conv_float32": ":p",
    "prefold_short_conv_bfloat16": ":p",
    "prefold_delta_net_float32": "i:p",
    "prefold_delta_net_bfloat16": "i:p",
    "prefold_mamba2_float32": "i:p",
    "prefold_mamba2_bfloat16": "i:p",
    "prefold_run_program": "i:p",
    "prefold_follow_program": ":pi",
    "prefold_calm_openmp": ":",
    "prefold_layout": "p:",
}
