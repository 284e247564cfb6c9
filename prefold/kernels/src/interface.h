// The C interface of the kernels: every structure and every function that Python and C++ share.
//
// This file is the only place where they are written down. Each source file that defines or calls such a function
// includes it, so that the compiler checks every definition and every call. `scripts/generate` reads it and writes
// `kernels/abi.py` (the same for ctypes) and `layout.cpp` (what the compiler makes of it, which Python compares
// when it loads a library). Run `scripts/generate` after a change.
//
// The parser (`scripts/c_interface.py`) accepts constants, enums, opaque types, structures without methods, function
// types and declarations of functions, and refuses anything else. The name of a function ends with its dtypes, if
// there are several functions of its kind; an activation comes before them.
//
// Conventions:
#pragma once

#include <cstdint>

namespace prefold {

struct Bf16;       // a bfloat16 number (vectors.h)
struct F16;        // a float16 number (words.cpp)
struct TileLists;  // a plan of attention over rows (tiles.h)
struct SlotLists;  // a plan of attention over slots (tiles.h)

enum Failure : int32_t {
  kNoMemory = 1,
  kNoSlot = 2,      // a slot is out of range; nothing is written
  kNoToken = 3,     // a token id is out of range
  kNoPosition = 4,  // the model has no learned embedding for a position
  kGone = 5,        // another rank has ended
  kLate = 6,        // another rank did not come in time
  kApart = 7,       // the ranks are at different exchanges
};

// ---------------------------------------------------------------------------------------------------------- attention

// Keys are listed as aligned pairs (2p, 2p + 1), because bfloat16 instructions take two keys at once. All queries of a
// tile see the pairs [first, first + count).
struct Run {
  int32_t first, count;
};

// A pair of keys that some queries of a tile see. Bit r of `mask`: query r sees key 2p; bit 16 + r: it sees key 2p + 1.
struct MaskedPair {
  int32_t pair;
  uint32_t mask;
};

// The slots [first, first + count), which one query sees.
struct OwnRun {
  int32_t first, count;
};

constexpr int32_t kPlaces = 64;  // keys that are added up together if keys have places

// Keys [first, first + count), seen by the queries of a tile whose bits are set in `queries`. The first key has the place
// `place` among the kPlaces keys of a chunk; a run that is longer than its chunk goes on at the start of the next chunk.
// Keys whose places do not follow the last key's place begin another chunk.
struct PlacedRun {
  int32_t first, count, place;
  uint32_t queries;
};

// Queries, the place of their results, and the keys that each tile of queries reads. Tile t reads the runs
// [run_offsets[t], run_offsets[t + 1]) and the masked pairs [mask_offsets[t], mask_offsets[t + 1]).
struct TileCall {
  const void* q;  // [queries, heads, dim]
  void* out;      // [queries, heads, value_dim], contiguous
  int64_t q_row, q_head;
  int64_t queries, heads, kv_heads, dim, value_dim, tiles;
  const int64_t *run_offsets, *mask_offsets;  // [tiles + 1]
  const Run* runs;
  const MaskedPair* masked;
  const int64_t* tile_starts;  // [tiles + 1], the first query of each tile; null: each tile has sixteen
  const int64_t* own_offsets;  // [queries + 1], the own runs of each query; null if tile_starts is null
  const OwnRun* own;           // null if tile_starts is null
  // If not null, a result does not depend on the other queries: tile t reads the placed runs [placed_offsets[t],
  // placed_offsets[t + 1]) and nothing else, then each query its own runs, whose first key has the place 0. An own run
  // from -1 on is a gap.
  const int64_t* placed_offsets;  // [tiles + 1]
  const PlacedRun* placed;
  const float* sinks;  // [heads], a score without a value in the softmax of each head; null: none
  float scale;         // factor of the scores
  int32_t threads;
  float cap;  // scores s become cap * tanh(s / cap); 0: they stay
};

// Attention over rows as they lie: `path` carried rows, then `rows` new ones.
struct RowCall {
  TileCall tiles;
  const void *k, *v;            // [rows, kv_heads, dim - tail_dim], [rows, kv_heads, value_dim]
  const void *path_k, *path_v;  // likewise, of `path` rows
  int64_t k_row, k_head, v_row, v_head, path_k_row, path_k_head, path_v_row, path_v_head;
  int64_t rows, path;
  // The last numbers of each key, which all KV heads share: [rows, tail_dim] and [path, tail_dim].
  const void *tail, *path_tail;
  int64_t tail_row, path_tail_row, tail_dim;
};

// A plane of a KV store. Slots 2p and 2p + 1 lie together as pair p, as in `Packed` (attention.h). If `values` is `keys`,
// the first numbers of each key are its value.
struct SlotPlane {
  void *keys, *values;
  // [kv_heads, pairs], then one byte for all. Bit 0 of a pair's byte: the first slot has a value that is not finite;
  // bit 1: the second has. The last byte: whether a bit was ever set. All bytes are zero at first.
  uint8_t* unsafe;
  int64_t slots, kv_heads, dim, value_dim;
  int64_t rounded;  // whether float32 rows are kept as bfloat16
};

// Attention over the slots of a plane.
struct SlotCall {
  TileCall tiles;
  SlotPlane plane;
};

// Rows to write into slots. A slot may occur twice only if it is never read.
struct WriteCall {
  SlotPlane plane;
  const int64_t* slots;  // [rows]
  const void *k, *v;     // [rows, kv_heads, dim], [rows, kv_heads, value_dim]
  int64_t k_row, k_head, v_row, v_head, rows;
  int32_t threads;
};

// Plan the tiles of query rows. Returns null if the intervals [j, end[j]) are not nested (then *not_nested is 1) or
// memory is short. Free the plan with free_row_lists.
// placed: whether to make placed runs in place of the other lists.
// end [keys]; first [keys], the first row of the span around each key (null: no spans); rows [queries]; positions [keys]
// (null: no window).
extern "C" TileLists* prefold_plan_rows(const int64_t* end, int64_t keys, const int64_t* first, const int64_t* rows,
                                        int64_t queries, const int64_t* positions, int64_t window, int32_t placed,
                                        int32_t* not_nested);
// sizes [4]: the numbers of tiles, runs, masked pairs and placed runs.
extern "C" void prefold_row_list_sizes(const TileLists* lists, int64_t* sizes);
// run_offsets, mask_offsets, placed_offsets [tiles + 1]; runs [runs]; masked [masked pairs]; placed [placed runs].
extern "C" void prefold_copy_row_lists(const TileLists* lists, int64_t* run_offsets, int64_t* mask_offsets, Run* runs,
                                       MaskedPair* masked, int64_t* placed_offsets, PlacedRun* placed);
extern "C" void prefold_free_row_lists(TileLists* lists);

// Plan the tiles of queries over slots. Returns null if memory is short. Free the plan with free_slot_lists.
// start, count, position, first, last [runs]: `KeyRuns` of the attention package; query_positions [queries] (null: no
// window); group: query heads per KV head; placed: as for prefold_plan_rows.
extern "C" SlotLists* prefold_plan_slots(const int64_t* start, const int64_t* count, const int64_t* position,
                                         const int64_t* first, const int64_t* last, int64_t runs, int64_t queries,
                                         const int64_t* query_positions, int64_t window, int64_t group, int32_t placed);
// sizes [5]: the numbers of tiles, runs, masked pairs, placed runs and own runs.
extern "C" void prefold_slot_list_sizes(const SlotLists* lists, int64_t* sizes);
// run_offsets, mask_offsets, placed_offsets, tile_starts [tiles + 1]; own_offsets [queries + 1]; the rest as counted.
extern "C" void prefold_copy_slot_lists(const SlotLists* lists, int64_t* run_offsets, int64_t* mask_offsets, Run* runs,
                                        MaskedPair* masked, int64_t* placed_offsets, PlacedRun* placed,
                                        int64_t* tile_starts, int64_t* own_offsets, OwnRun* own);
extern "C" void prefold_free_slot_lists(SlotLists* lists);

extern "C" int32_t prefold_row_attention(const RowCall* call, int32_t is_bf16);
extern "C" int32_t prefold_slot_attention(const SlotCall* call, int32_t is_bf16);
extern "C" int32_t prefold_write_slots(const WriteCall* call, int32_t is_bf16);
// Returns 1 if a store keeps two bfloat16 numbers that are summed at once side by side, 0 if one after the other.
extern "C" int32_t prefold_stores_bf16_pairs();

// ----------------------------------------------------------------------------------------------------------- matrices

constexpr int32_t kPanel = 32;  // columns of a panel of a packed matrix

// The number formats of matrices that stay as their file has them, with the numbers of ggml.h.
// clang-format off
enum BlockType : int32_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14,
  kBF16 = 30, kMXFP4 = 39,
};
// clang-format on
// Added to a BlockType whose numbers are integers: multiply them with rows of int8 (int8.h).
constexpr int32_t kInInt8 = 256;
// Added to a type: the matrix is multiplied in the same way with few rows as with many.
constexpr int32_t kOneForm = 512;
// The type of a matrix of int8 is kS8 plus the numbers of a group, a multiple of 32.
constexpr int32_t kS8 = 65536;

// A panel of a matrix in blocks (blocks.h).
struct BlockPanel {
  const uint8_t* data;
  int64_t type;  // a BlockType, maybe plus kInInt8, kOneForm; or kS8 plus a group
};

// What a LoRA adapter (Hu et al. 2021) adds to a product: B A x.
struct LowRank {
  const uint32_t* a;     // [ranks, k], packed
  const void* b;         // scaled, of the dtype of x: for each panel [ranks of the panel, kPanel]
  const int64_t* spans;  // [panels, 3]: the first rank of a panel, the rank after its last, the place of its B
  int64_t ranks;         // 0: the adapter adds nothing
};

// A row's adapter, and A x of the row.
struct RowLow {
  const LowRank* adapter;  // null: the row has none
  const float* low;        // [ranks]
};

// kClamped: of experts alone. kGelu, kRelu: not of experts.
enum Activation : int32_t { kLinearly, kSilu, kGeluTanh, kClamped, kGelu, kRelu, kRelu2 };

// What a product does to its sums before it stores them.
struct Epilogue {
  const RowLow* adapted;  // [rows]; null: no row has an adapter
  int32_t activation;     // of the results of a Linear; a GatedLinear has its own
  float gate_scale;       // of a GatedLinear: the gates are multiplied with it before the activation
};

// Returns 1 if products of float32 or bfloat16 rows are as fast here as the processor's vectors allow, else 0.
extern "C" int32_t prefold_has_products(int32_t is_bf16);

// out [rows, columns] = x [rows, k] times the matrix, plus bias [columns] or null. The matrix is in `packed`
// (products.h) or in `blocks`; the other is null. k is even in bfloat16. epilogue may be null.
template <class E, class Out>
using Linear = int32_t(const E* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks, const E* bias,
                       Out* out, int64_t rows, int64_t columns, int64_t k, int32_t threads, const Epilogue* epilogue);
extern "C" Linear<float, float> prefold_linear_float32;
extern "C" Linear<Bf16, Bf16> prefold_linear_bfloat16;
extern "C" Linear<Bf16, float> prefold_linear_bfloat16_float32;

// out [rows, width] = activation(gate) * up. The matrix and bias [2 * width] (or null) have sixteen columns of gate,
// then sixteen of up, and so on; the rest as for Linear.
template <class E>
using GatedLinear = int32_t(const E* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks, const E* bias,
                            E* out, int64_t rows, int64_t width, int64_t k, int32_t threads, const Epilogue* epilogue);
extern "C" GatedLinear<float> prefold_gated_linear_silu_float32, prefold_gated_linear_gelu_tanh_float32;
extern "C" GatedLinear<float> prefold_gated_linear_gelu_float32, prefold_gated_linear_relu_float32;
extern "C" GatedLinear<float> prefold_gated_linear_relu2_float32;
extern "C" GatedLinear<Bf16> prefold_gated_linear_silu_bfloat16, prefold_gated_linear_gelu_tanh_bfloat16;
extern "C" GatedLinear<Bf16> prefold_gated_linear_gelu_bfloat16, prefold_gated_linear_relu_bfloat16;
extern "C" GatedLinear<Bf16> prefold_gated_linear_relu2_bfloat16;

// The number of bytes of a panel with k numbers along k; 0 if no decoder knows the type, or k is not whole blocks.
extern "C" int64_t prefold_block_panel_size(int64_t type, int64_t k);
// Pack panels of one type. rows [panels * kPanel]: the address of each column's row in the file, or null for zeros.
extern "C" void prefold_pack_blocks(int64_t type, const uint8_t* const* rows, int64_t panels, int64_t k, uint8_t* out,
                                    int32_t threads);
// out [n, k] = the rows `ids` [n] of a matrix in blocks: rows of an embedding.
template <class E>
using BlockRows = void(const BlockPanel* panels, const int64_t* ids, E* out, int64_t n, int64_t k, int32_t threads);
extern "C" BlockRows<float> prefold_block_rows_float32;
extern "C" BlockRows<Bf16> prefold_block_rows_bfloat16;

// Returns 1 if rows of int8 are multiplied here, else 0: it takes instructions that sum four products of bytes without
// saturating.
extern "C" int32_t prefold_has_int8();
// Pack weight [outputs, k] as panels of int8. `group` divides k rounded up to whole runs of 32.
template <class E>
using PackInt8 = int32_t(const E* weight, int64_t row, int64_t outputs, int64_t k, int64_t group, uint8_t* out,
                         int32_t threads);
extern "C" PackInt8<float> prefold_pack_int8_float32;
extern "C" PackInt8<Bf16> prefold_pack_int8_bfloat16;

// Pack rows as products.h has them: out [panels, words, kPanel]. rows [panels * kPanel] has the address of each column's
// `k` numbers, which may be at any byte; null: zeros. There are zeros between the end of a row and the end of its words.
// The names end with the dtype of the rows, then of the words; numbers that do not fit are rounded to nearest even.
template <class E>
using PackWords = void(const E* const* rows, int64_t panels, int64_t k, int64_t words, uint32_t* out, int32_t threads);
extern "C" PackWords<float> prefold_pack_words_float32, prefold_pack_words_float32_bfloat16;
extern "C" PackWords<Bf16> prefold_pack_words_bfloat16, prefold_pack_words_bfloat16_float32;
extern "C" PackWords<F16> prefold_pack_words_float16_float32, prefold_pack_words_float16_bfloat16;

// --------------------------------------------------------------------------------------------------- norms, rotations

// x += delta [rows, width] (or null); out [rows, width] = the RMS norm of x. out may be x.
template <class E, class W>
using AddRmsNorm = void(E* x, const E* delta, const W* weight, E* out, int64_t rows, int64_t width, int64_t x_row,
                        int64_t delta_row, int64_t out_row, float eps, int32_t threads);
extern "C" AddRmsNorm<float, float> prefold_add_rms_norm_float32;
extern "C" AddRmsNorm<Bf16, Bf16> prefold_add_rms_norm_bfloat16;
extern "C" AddRmsNorm<Bf16, float> prefold_add_rms_norm_bfloat16_float32;

// x += delta [rows, width] (or null); out [rows, width] = the layer norm of x, with weight and bias [width].
template <class E, class W>
using AddLayerNorm = void(E* x, const E* delta, const W* weight, const W* bias, E* out, int64_t rows, int64_t width,
                          float eps, int32_t threads);
extern "C" AddLayerNorm<float, float> prefold_add_layer_norm_float32;
extern "C" AddLayerNorm<Bf16, Bf16> prefold_add_layer_norm_bfloat16;
extern "C" AddLayerNorm<Bf16, float> prefold_add_layer_norm_bfloat16_float32;

// Norm `heads` heads of each row of x, `dim` numbers each and `head` apart, in place: LayerNorm with a bias, else the RMS
// norm. The weights, and biases, of heads are `apart` from each other; 0: all heads have the same.
template <class E>
using NormHeads = void(E* x, const float* weight, const float* bias, int64_t rows, int64_t heads, int64_t dim,
                       int64_t row, int64_t head, int64_t apart, float eps, int32_t threads);
extern "C" NormHeads<float> prefold_norm_heads_float32;
extern "C" NormHeads<Bf16> prefold_norm_heads_bfloat16;

// Rotate x [rows, heads, dim] in place by cos_sin [rows, dim]: cosines, then sines. With weight [dim] the RMS norm of
// each head comes first; null: no norm.
template <class E, class W>
using Rope = void(E* x, const float* cos_sin, const W* weight, int64_t rows, int64_t heads, int64_t dim, int64_t row,
                  int64_t head, float eps, int32_t threads);
extern "C" Rope<float, float> prefold_rope_float32;
extern "C" Rope<Bf16, Bf16> prefold_rope_bfloat16;
extern "C" Rope<Bf16, float> prefold_rope_bfloat16_float32;

// out [rows, width] = activation(gate) * up of gate_up [rows, 2 * width].
template <class E>
using GateMul = void(const E* gate_up, E* out, int64_t rows, int64_t width, int64_t row, int32_t threads);
extern "C" GateMul<float> prefold_gate_mul_silu_float32, prefold_gate_mul_gelu_tanh_float32;
extern "C" GateMul<Bf16> prefold_gate_mul_silu_bfloat16, prefold_gate_mul_gelu_tanh_bfloat16;

// --------------------------------------------------------------------------------------------------------------- ranks

constexpr int32_t kRankLine = 64;  // bytes of a `Line`

// One rank's view of the memory that the ranks of a split model share: a `Line` for each rank (ranks.h), then two
// parts for each rank. A rank writes one of its parts while the others may still read the other, so that ranks meet
// once for each exchange.
struct RanksView {
  char* memory;
  int64_t first, part;  // the place of the first part; bytes of a part, a multiple of 64
  int64_t rank, size;
  const int32_t* pipes;  // descriptors; one of them is hung up when a rank ends
  int64_t num_pipes;
  double patience;  // seconds to wait for another rank
  uint64_t met;     // exchanges so far
};

// x [count] = the sum of every rank's x, on every rank.
template <class E>
using SumRanks = int32_t(RanksView* ranks, E* x, int64_t count, int32_t threads);
extern "C" SumRanks<float> prefold_sum_ranks_float32;
extern "C" SumRanks<Bf16> prefold_sum_ranks_bfloat16;
// pieces [ranks, bytes] = every rank's piece [bytes], on rank 0; pieces is null on the others.
extern "C" int32_t prefold_gather_ranks(RanksView* ranks, const char* piece, int64_t bytes, char* pieces);

// ------------------------------------------------------------------------------------------------------------- logits

// sums [rows]: the log-sum-exp of each row of logits [rows, columns]; largest [rows]: the place of its largest number.
extern "C" void prefold_log_sum_exp(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                    int64_t* largest, int32_t threads);
// The same, and entropies [rows] in nats.
extern "C" void prefold_entropy(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                int64_t* largest, float* entropies, int32_t threads);
// tokens [draws]: token i is drawn from the row rows[i] of logits, with 1 / temperature inverses[i] and the key
// keys[i] of its noise. -1: the largest number of the row is not finite, or with filters some number is NaN.
// filters [draws, 4]: top_n_sigma (0: off), min_p, top_k (0: off) and top_p, in the order in which they are
// applied (worker/sampler.py); null: no filters. Returns 1 if memory is too small, else 0.
extern "C" int32_t prefold_draw(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                                const float* inverses, const double* filters, const uint64_t* keys, int64_t draws,
                                int64_t* tokens, int32_t threads);
// The `count` largest numbers of each row, falling, and their places: values, places [rows, count]. Of equals the first
// comes first. NaN is not larger than anything; count is at most `columns`.
extern "C" void prefold_largest(const float* logits, int64_t rows, int64_t columns, int64_t row, int64_t count,
                                float* values, int64_t* places, int32_t threads);
// counts [numbers]: how many numbers of the row rows[i] of logits are larger than values[i].
extern "C" void prefold_count_larger(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                                     const float* values, int64_t numbers, int64_t* counts, int32_t threads);

// ids [rows]: the column of the largest number of each row of x [rows, k] times the matrix, which is given as for
// Linear. Ties go to the lowest column. `none`: the largest number is not finite, or one is NaN. With ranks the
// columns of this rank start at `first`; ranks may be null.
template <class E>
using Greedy = int32_t(const E* x, const uint32_t* packed, const BlockPanel* blocks, int64_t* ids, int64_t rows,
                       int64_t columns, int64_t k, int64_t none, int32_t threads, int64_t first, RanksView* ranks);
extern "C" Greedy<float> prefold_greedy_float32;
extern "C" Greedy<Bf16> prefold_greedy_bfloat16;

// ------------------------------------------------------------------------------------------------------------- layers

// What the logits of a router become: their softmax; sigmoids; or a softmax for each choice, of the logits near its largest
// one that were not chosen before.
enum RouterScore : int32_t { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

// A mixture of experts. Each row goes through the `chosen` experts with its largest logits. Their results are weighted
// by the softmax of the logits: of the chosen experts if `normalised`, else of all.
struct ExpertsCall {
  const void* x;       // [rows, hidden]
  const void* logits;  // float32 [rows, experts]
  // The matrices of all experts, one behind the other; gate_up has columns as for GatedLinear, or is up alone. Each
  // is packed, or in blocks: the other is null.
  const void *gate_up, *down;
  const BlockPanel *gate_up_blocks, *down_blocks;
  const void*
      gate_up_bias;         // [experts, 2 * bias_width], gate before up (or of up alone), of the dtype of x; null: none
  const void* down_bias;    // [experts, hidden], of the dtype of x; null: none
  const float* correction;  // [experts], added to the scores that choose experts; null: none
  const float* scales;      // [experts], factors of the weights; null: none
  void* out;                // [rows, hidden]
  int64_t rows, x_row, experts, chosen, hidden;
  int64_t width;  // of an expert, a multiple of sixteen
  int64_t bias_width;
  // Of experts. A row goes through experts of the best groups: those whose `group_best` largest scores have the largest
  // sum.
  int64_t groups, chosen_groups, group_best;
  float scale;              // of the weights
  float least_sum;          // the weights are divided by this if their sum is smaller
  float tolerance;          // of kSparseMixer: how far from the largest logit one may be, as a part of it
  int32_t score;            // kSoftmax, kSigmoid or kSparseMixer
  int32_t corrects_logits;  // the correction is added to logits, not to scores
  int32_t is_plain;         // experts have no gate: activation(up)
  int32_t normalised, threads;
};
extern "C" int32_t prefold_experts_silu_float32(const ExpertsCall* call);
extern "C" int32_t prefold_experts_silu_bfloat16(const ExpertsCall* call);
extern "C" int32_t prefold_experts_gelu_tanh_float32(const ExpertsCall* call);
extern "C" int32_t prefold_experts_gelu_tanh_bfloat16(const ExpertsCall* call);
extern "C" int32_t prefold_experts_clamped_float32(const ExpertsCall* call);
extern "C" int32_t prefold_experts_clamped_bfloat16(const ExpertsCall* call);
extern "C" int32_t prefold_experts_relu2_float32(const ExpertsCall* call);
extern "C" int32_t prefold_experts_relu2_bfloat16(const ExpertsCall* call);

// The matrices of kAttendLatent, packed head by head, `*_words` words apart.
struct LatentCall {
  const void* expand;  // [dim + value_dim outputs, rank]: a head's keys without their tails, then its values
  const void*
      absorb;  // [rank + tail outputs, dim + tail]: a head's key matrix, transposed, and the identity for the tail
  const void* restore;  // [value_dim outputs, rank]: a head's value matrix
  int64_t expand_words, absorb_words, restore_words;
  int64_t rank, tail, dim, value_dim;
};

// The rows that a causal convolution reads. A place below first_row is a column of a state; a place from first_row on
// is a row of x. A stored state replaces a state that only its own rows read, if any row does.
struct ConvCall {
  const void* x;          // the rows, of stride x_row
  const int64_t* row_of;  // [rows]: the row of x that each row is; null: row i is row i of x
  void* states;           // [states, kept, channels]
  const float* taps;      // [kept + 1, channels]; the last is of the row itself
  const float* bias;      // [channels]; null: none
  const int64_t* above;   // [kept, rows]: the places above each row, the nearest first
  const int64_t* below;   // [num_ends, kept]: the places that make up each state to store, the oldest first
  const int64_t* to;      // [num_ends]: the states to store
  int64_t rows, x_row, channels, kept, first_row, num_ends;
};

// A gated short convolution. A row of x has b, c and x side by side; out = c * conv(b * x).
struct ShortConvCall {
  ConvCall conv;
  void* out;            // [picked, channels]
  const int64_t* pick;  // [picked], the rows to compute; null: all
  int64_t picked;
  int32_t threads;
};
extern "C" void prefold_short_conv_float32(const ShortConvCall* call);
extern "C" void prefold_short_conv_bfloat16(const ShortConvCall* call);

// How rows go through states that change with each row. Rows come in runs. A run starts from the state at the end of an
// earlier run; runs of a wave do not depend on each other.
struct RunLists {
  const int64_t *first, *stop;  // [runs]: the first row of a run, and the row after its last
  const int64_t* source;        // [runs]: the state that a run starts from, in `states` and then in `between`
  const int64_t* to;            // [runs]: the state that a run leaves, likewise; -1: none
  const int64_t* waves;         // [num_waves + 1]: the first run of each wave, and the number of runs
  int64_t num_waves;
  int64_t num_states, num_between;
};

// A gated delta net. A row of x has q, k and v of its heads, z, b and a side by side; the convolution covers q, k and
// v. Head h has the key head h % key_heads if `tiled`, else neighbouring heads share a key head.
struct DeltaCall {
  ConvCall conv;
  RunLists runs;
  void* out;                            // [picked, heads * value_dim]
  const int64_t* pick;                  // [picked], the rows to compute, each once; null: all
  float* states;                        // [num_states, heads, key_dim, value_dim]
  float* between;                       // [num_between, ...]: likewise, for states that only later runs start from
  const float *rates, *dt_bias, *norm;  // [heads]: -exp(a_log); [heads]; [value_dim]
  int64_t picked, heads, key_heads, key_dim, value_dim;
  float eps, beta_scale;  // beta_scale: of the sigmoids of b
  int32_t tiled, threads;
};
extern "C" int32_t prefold_delta_net_float32(const DeltaCall* call);
extern "C" int32_t prefold_delta_net_bfloat16(const DeltaCall* call);

// Mamba-2. A row of x has the gate, x, b, c and dt side by side; the convolution covers x, b and c. The heads of a group
// share b and c [key_dim] and the norm. With t = softplus(step_scale dt + dt_bias), within least and most:
// S = exp(rates t) S + t b x^T; y = c^T S + skips x; out = the RMS norm of y silu(gate_scale gate), or, if `norm_first`,
// the RMS norm of y, times silu(gate_scale gate).
struct MambaCall {
  ConvCall conv;
  RunLists runs;
  void* out;  // out, pick, states and between as in DeltaCall
  const int64_t* pick;
  float *states, *between;
  const float *rates, *dt_bias, *skips, *norm;  // [heads] each; norm [heads * value_dim], or null: there is no norm
  int64_t picked, heads, groups, key_dim, value_dim;
  float eps, least, most, gate_scale, step_scale;
  int32_t norm_first, threads;
};
extern "C" int32_t prefold_mamba2_float32(const MambaCall* call);
extern "C" int32_t prefold_mamba2_bfloat16(const MambaCall* call);

// ----------------------------------------------------------------------------------------------------------- programs

// The operations of a program. Rows lie in buffers, [rows, width] each.
//
// kNorm     out = the norm of `source` plus `beside` (-1: nothing), `columns` numbers from `at` on. With a bias it is a
//           LayerNorm, otherwise an RMS norm. If `summed`, of `heads` numbers that all ranks have together; each of
//           this rank's is on `kv_heads` ranks, and nothing is added
// kLinear   out = source times the matrix, plus bias, activated
// kGated    out = activation(eps * gate) * up of source
// kRope     rotate the first ProgramCall.dim numbers of `heads` heads of `dim` from `at` on by table `plane` (-1: none);
//           weight (null: none), eps, wide: a norm of the whole head before
// kAttend   out = attention of the queries in `source` from `at` on, over `beside`: keys from `keys` on, then values of
//           `columns` numbers. wide: keys and values are those of an earlier kAttend, which has stored them
// kAttendLatent
//           out = attention of the queries in `source`, [heads, dim + tail], over the latents in `beside`, [rank + tail],
//           by the matrices of `call` (latent.h)
// kPick     keep the rows that are read, of `source`; if `beside`, for all that follows
// kEmbed    out = eps * the embeddings of the tokens, plus the learned embeddings of `positions` positions in `bias`.
//           The matrix has rows that lie one behind the other; or is packed in words, if `wide`; or is in blocks.
//           Tokens from `keys` on have the embedding of token 0 (0: none has)
// kHead     ids = the most likely tokens of `source`; this rank has `columns` ids from `at` on
// kAdd      source += eps * beside
// kGate     source *= the sigmoid of the gates in `beside` from `at` on, for `heads` heads of `dim`. Each head has
//           `columns` gates: one for each number, or one for all. wide: the gates themselves, not their sigmoid;
//           activation kGeluTanh: GELU of them
// kExperts  out = the mixture of experts `call` of source; the router's matrix and bias are the operation's, and it reads
//           `beside`
// kShortConv, kGatedDelta, kMamba2
//           out = the mixer `call` of all rows of `source`, with the states `plane`. Rows that are not read get no
//           result if `beside`, or after a kPick for all that follows.
// kNormHeads   norm `heads` heads of `dim` of `source` from `at` on, in place: weight, bias (null: an RMS norm) and eps as
//           of NormHeads, `columns` from one head's weights to the next's
// kXielu    source = xIELU of it, in place; weight: its p, n, beta and eps (activations.h)
// kScaleRows  out = eps * weight * source; weight: float32, of each number of a row (null: none)
// kMix      s_i += the sum over j of (eps + (W tanh(by))_ij) * o_j, of `heads` buffers s and `kv_heads` buffers o, at most
//           kMostMixed each. `by`: `beside`; weight: W, float32 [heads * kv_heads, columns]; bias: the numbers of the
//           buffers, int64, s before o
// kMatch    source *= the root of the mean square of `beside`, divided by that of source, in place; eps: the least mean
//           square of source
// kSparseGate  out = activation(max(gate - cut, 0)) * up of source, which has `columns` gates, then up; the cut is the
//           gates' mean plus eps of their standard deviations
// kClamp    `columns` numbers of out, from `at` on, = the first ones of `source`, within weight[0] and weight[1]
// kByPosition  multiply `heads` heads of `dim` of `source` from `at` on, in place, with
//           1 + eps log(1 + floor(position / positions))
// kScaleHeads    multiply `heads` heads of `dim` of `source` from `at` on, in place, with weight [heads, dim]
// kActivateGated  out = activation(gate) * up of `source`, gate before up, of `columns` numbers each
// kInterpolate    source += weight * (beside - source)
//
// The weights of the last three are float32.
//
// `call` points to a LatentCall, ExpertsCall, ShortConvCall, DeltaCall or MambaCall. It has the weights, the sizes and eps; the
// program fills in the rest.
// clang-format off
enum Kind : int32_t {
  kNorm, kLinear, kGated, kRope, kAttend, kPick, kEmbed, kHead, kAdd, kGate, kExperts, kShortConv, kGatedDelta, kMamba2,
  kAttendLatent, kNormHeads, kXielu, kByPosition, kScaleRows, kScaleHeads, kActivateGated, kInterpolate,
  kMix, kMatch, kSparseGate, kClamp,
};
// clang-format on
constexpr int32_t kMostMixed = 8;

// An operation of a program; `Kind` says which fields it reads. Places within rows count elements.
struct Operation {
  int32_t kind;
  int32_t source, out, beside;  // buffers
  int32_t wide, plane, window;
  int32_t activation;  // kLinear, kGated, kExperts, kGate, kActivateGated, kSparseGate
  int32_t linear;      // kLinear, kGated: the index in the tables of adapters
  int32_t summed;      // whether the result, or the squares of a kNorm, are summed over all ranks
  float eps;
  int64_t at, keys, heads, dim, kv_heads, columns, positions;
  const void *weight, *bias;
  const BlockPanel* blocks;  // the matrix, if it is in blocks; then weight is null
  // kRope, kNormHeads, kByPosition, kScaleHeads, kAttend (of queries), kGate (of gates): from one head to the next; 0: dim
  int64_t stride;
  const void* call;  // kAttendLatent, kExperts, kShortConv, kGatedDelta, kMamba2
};

// Keys and values of the path above a step of a row stream, of one plane, and memory for the path above the next step:
// [path, kv_heads, dim] each.
struct PathPlane {
  const char *keys, *values;
  char *next_keys, *next_values;
};

// States of one layer, as ConvCall and DeltaCall have them; `states` is null for a short convolution.
struct StatePlane {
  void* columns;
  float* states;
};

// The rows that convolutions read, as ConvCall has them.
struct PlaceLists {
  const int64_t *above, *below;
};

// How rows go through states in one step, of all layers. With sharing "mlp" these are the rows of the stream.
struct StateStep {
  const PlaceLists* places;  // by the number of columns that a convolution keeps
  const int64_t* to;         // [num_ends], as in ConvCall
  int64_t num_ends;
  RunLists runs;
};

// A program for one step, over slots or over the rows of a stream.
struct ProgramCall {
  const Operation* operations;
  int64_t count;  // of operations
  char* const* buffers;
  const int64_t* widths;  // of a row of each buffer
  int64_t rows, picked;
  const int64_t* read;         // [picked], the rows that kPick keeps, ascending; unused if these are all
  const int64_t* tokens;       // [rows]
  const int64_t* positions;    // [rows]
  const int64_t* slots;        // [rows]; null: the rows of a stream
  const float* const* tables;  // [num_tables] of [positions, dims[t]]: cosines, then sines, of rotated numbers
  const int64_t* dims;         // [num_tables]
  int64_t num_tables;
  float* angles;                        // [rows, dims[t]] of each table, scratch memory
  int64_t* ids;                         // [picked]: results of kHead; null: skip kHead
  const SlotPlane* planes;              // over slots
  const PathPlane* paths;               // over a stream, by plane
  int64_t path;                         // rows of the path
  const int64_t *keep_path, *keep_new;  // the rows of the path, and the new rows, that the next step's path has
  int64_t kept_path, kept_new;          // how many
  // With sharing "mlp" a row stands for several rows of the stream, over which attention runs.
  int64_t unfolded;                    // rows of the stream
  const int64_t* scatter;              // [unfolded]: the row that stands for each; null: each row stands for itself
  const int64_t* gather;               // [rows]: a row of the stream that each row stands for
  const int64_t* read_order;           // [picked]: the order in which attention has the rows that are read
  char* unfolded_room;                 // scratch memory for q, k, v and the result
  const TileCall *plans, *read_plans;  // by window: of all rows, and of the rows that are read
  const int64_t* numbers;              // [rows]: the adapter of each row, or -1; null: no row has an adapter
  const LowRank* const* adapters;      // by number: the LowRank of each linear
  RowLow* adapted;                     // [rows], scratch memory
  float* low;                          // [rows, most_ranks], scratch memory
  int64_t most_ranks;
  RanksView* ranks;  // null: the model is not split
  int64_t none;      // the id of a row whose largest logit is not finite
  float scale, cap;  // as in TileCall
  int32_t threads, is_bf16;
  const StatePlane* states;     // by layer with a state
  const StateStep* state_step;  // null: no layer has a state
};

extern "C" int32_t prefold_run_program(const ProgramCall* call);
// Make a call over slots the call of the next step: each row moves on by one position, slot and key. takes: whether the
// tokens become `ids`. Not for models with windows. States stay as they are, so each run must have left its state where
// it started.
extern "C" void prefold_follow_program(const ProgramCall* call, int32_t takes);

// ------------------------------------------------------------------------------------------------------- the library

// Let the threads of PyTorch's OpenMP sleep soon after their work (threads.cpp).
extern "C" void prefold_calm_openmp();
// What the compiler made of this file, as text (layout.cpp).
extern "C" const char* prefold_layout();

}  // namespace prefold
