// The C interface of the kernels: all structures and functions that Python and C++ share.
//
// They are declared only here. Each source file that defines or calls such a function includes this file, so the
// compiler checks every definition and every call. `scripts/generate` reads it and writes `kernels/abi.py` (the same
// declarations for ctypes) and `layout.cpp`. When Python loads a library, it compares the sizes, offsets and signatures
// that `layout.cpp` reports with abi.py. Run `scripts/generate` after each change.
//
// The parser (`scripts/c_interface.py`) accepts constants, enums, opaque types, structures without methods, function
// types and function declarations, and refuses everything else. If several functions differ only in their dtypes, their
// names end with the dtypes. An activation comes before the dtypes.
//
// [rows, columns] behind a name is the shape of its array, in row order. x_row is the distance of the rows of x, in
// elements. Functions that return int32_t return 0 or a Failure, unless their comment says otherwise.
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
  kLate = 6,        // another rank did not arrive in time
  kApart = 7,       // the ranks are at different exchanges
};

// ---------------------------------------------------------------------------------------------------------- attention

// Keys come in aligned pairs (2p, 2p + 1), because bfloat16 instructions process two keys at once. All queries of a
// tile see the pairs [first, first + count).
struct Run {
  int32_t first, count;
};

// A pair of keys that only some queries of a tile see. Bit r of `mask`: query r sees key 2p. Bit 16 + r: it sees key
// 2p + 1.
struct MaskedPair {
  int32_t pair;
  uint32_t mask;
};

// The slots [first, first + count), seen by one query.
struct OwnRun {
  int32_t first, count;
};

constexpr int32_t kPlaces = 64;  // keys in a portion, which are summed together if keys have places

// Keys [first, first + count), seen by the queries of a tile whose bits are set in `queries`. The first key has the
// place `place` among the kPlaces places of a chunk. A run that exceeds its chunk continues at the start of the next
// chunk. If the places of a run do not come after the last key's place, the run starts another chunk.
struct PlacedRun {
  int32_t first, count, place;
  uint32_t queries;
};

// Queries, the memory for their results, and the keys of each tile of queries. Tile t reads the runs
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
  const int64_t* own_offsets;  // [queries + 1], the first own run of each query; null if tile_starts is null
  const OwnRun* own;           // null if tile_starts is null
  // If not null, a result does not depend on the other queries. Tile t reads only the placed runs
  // [placed_offsets[t], placed_offsets[t + 1]). Then each query reads its own runs, starting at place 0. An own run
  // with first = -1 is a gap.
  const int64_t* placed_offsets;  // [tiles + 1]
  const PlacedRun* placed;
  const float* sinks;  // [heads], a score without a value in each head's softmax; null: no sinks
  float scale;         // factor of the scores
  int32_t threads;
  float cap;  // a score s becomes cap * tanh(s / cap); 0: scores do not change
};

// Attention over rows as they lie: `path` rows that were carried over, then `rows` new rows.
struct RowCall {
  TileCall tiles;
  const void *k, *v;            // [rows, kv_heads, dim - tail_dim], [rows, kv_heads, value_dim]
  const void *path_k, *path_v;  // the same for the `path` rows
  int64_t k_row, k_head, v_row, v_head, path_k_row, path_k_head, path_v_row, path_v_head;
  int64_t rows, path;
  // The last numbers of each key, if all KV heads share them: [rows, tail_dim] and [path, tail_dim].
  const void *tail, *path_tail;
  int64_t tail_row, path_tail_row, tail_dim;
};

// A plane of a KV store. Slots 2p and 2p + 1 lie together as pair p, see `Packed` (attention.h). If `values` equals
// `keys`, each value is the first numbers of its key.
struct SlotPlane {
  void *keys, *values;
  // [kv_heads, pairs], then one byte for the plane. Bit 0 of a pair's byte: the first slot has a value that is not
  // finite. Bit 1: the second slot has one. The plane's byte: whether any bit was ever set. A new store has only zeros.
  uint8_t* unsafe;
  int64_t slots, kv_heads, dim, value_dim;
  int64_t rounded;  // whether float32 rows are stored as bfloat16
};

// Attention over the slots of a plane.
struct SlotCall {
  TileCall tiles;
  SlotPlane plane;
};

// Rows to write into slots. A slot may occur twice only if no query reads it.
struct WriteCall {
  SlotPlane plane;
  const int64_t* slots;  // [rows]
  const void *k, *v;     // [rows, kv_heads, dim], [rows, kv_heads, value_dim]
  int64_t k_row, k_head, v_row, v_head, rows;
  int32_t threads;
};

// Plan the tiles of query rows. Return null if out of memory, or if the intervals [j, end[j]) are not nested (then
// *not_nested is 1). Free the plan with prefold_free_row_lists.
//
// end [keys]; first [keys]: the first row of each key's span, or null without spans; rows [queries]: the rows of the
// queries; positions [keys], or null without a window; placed: write placed runs instead of runs and masked pairs.
extern "C" TileLists* prefold_plan_rows(const int64_t* end, int64_t keys, const int64_t* first, const int64_t* rows,
                                        int64_t queries, const int64_t* positions, int64_t window, int32_t placed,
                                        int32_t* not_nested);
// sizes [4]: the numbers of tiles, runs, masked pairs and placed runs.
extern "C" void prefold_row_list_sizes(const TileLists* lists, int64_t* sizes);
// run_offsets, mask_offsets, placed_offsets [tiles + 1]; runs [runs]; masked [masked pairs]; placed [placed runs].
extern "C" void prefold_copy_row_lists(const TileLists* lists, int64_t* run_offsets, int64_t* mask_offsets, Run* runs,
                                       MaskedPair* masked, int64_t* placed_offsets, PlacedRun* placed);
extern "C" void prefold_free_row_lists(TileLists* lists);

// Plan the tiles of queries over slots. Return null if out of memory. Free the plan with prefold_free_slot_lists.
//
// start, count, position, first, last [runs]: see `KeyRuns` of the attention package; query_positions [queries], or
// null without a window; group: query heads per KV head; placed: see prefold_plan_rows.
extern "C" SlotLists* prefold_plan_slots(const int64_t* start, const int64_t* count, const int64_t* position,
                                         const int64_t* first, const int64_t* last, int64_t runs, int64_t queries,
                                         const int64_t* query_positions, int64_t window, int64_t group, int32_t placed);
// sizes [5]: the numbers of tiles, runs, masked pairs, placed runs and own runs.
extern "C" void prefold_slot_list_sizes(const SlotLists* lists, int64_t* sizes);
// run_offsets, mask_offsets, placed_offsets, tile_starts [tiles + 1]; own_offsets [queries + 1]; the others by their
// counts.
extern "C" void prefold_copy_slot_lists(const SlotLists* lists, int64_t* run_offsets, int64_t* mask_offsets, Run* runs,
                                        MaskedPair* masked, int64_t* placed_offsets, PlacedRun* placed,
                                        int64_t* tile_starts, int64_t* own_offsets, OwnRun* own);
extern "C" void prefold_free_slot_lists(SlotLists* lists);

// Choose the queries over slots for which latent attention expands keys and values (latent_plan.cpp).
//
// count, first, last [runs]: see prefold_plan_slots; rank, tail, dim, value_dim: see LatentCall; chosen [queries]: 1
// for a chosen query, else 0.
extern "C" int32_t prefold_choose_expanded(const int64_t* count, const int64_t* first, const int64_t* last,
                                           int64_t runs, int64_t queries, int64_t rank, int64_t tail, int64_t dim,
                                           int64_t value_dim, uint8_t* chosen);

extern "C" int32_t prefold_row_attention(const RowCall* call, int32_t is_bf16);
extern "C" int32_t prefold_slot_attention(const SlotCall* call, int32_t is_bf16);
extern "C" int32_t prefold_write_slots(const WriteCall* call, int32_t is_bf16);
// Copy the keys in slots [rows] to out [rows, kv_heads, dim].
extern "C" void prefold_read_keys(const SlotPlane* plane, const int64_t* slots, int64_t rows, void* out,
                                  int32_t threads, int32_t is_bf16);
// Return 1 if a store has the bfloat16 numbers of two slots interleaved, because one instruction sums both. Return 0 if
// it has them one slot after the other.
extern "C" int32_t prefold_stores_bf16_pairs();

// ----------------------------------------------------------------------------------------------------------- matrices

constexpr int32_t kPanel = 32;  // columns of a panel of a packed matrix

// The number formats of GGUF that matrices may have in memory. The values are from ggml.h.
// clang-format off
enum BlockType : int32_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14,
  kBF16 = 30, kMXFP4 = 39,
};
// clang-format on
// Added to a BlockType with integers: multiply them with int8 rows (int8.h).
constexpr int32_t kInInt8 = 256;
// Added to a type: use the same kernel for few rows as for many.
constexpr int32_t kOneForm = 512;
// The type of an int8 matrix is kS8 plus the size of its groups, a multiple of 32.
constexpr int32_t kS8 = 65536;

// A panel of a matrix in blocks (blocks.h).
struct BlockPanel {
  const uint8_t* data;
  int64_t type;  // a BlockType, optionally plus kInInt8 or kOneForm; or kS8 plus a group size
};

// The sum that a LoRA adapter (Hu et al. 2021) adds to a product: B A x.
struct LowRank {
  const uint32_t* a;     // [ranks, k], packed
  const void* b;         // scaled, in the dtype of x; for each panel [ranks of the panel, kPanel]
  const int64_t* spans;  // [panels, 3]: the first rank of a panel, the rank after its last, the offset of its B
  int64_t ranks;         // 0: the adapter adds nothing
};

// A row's adapter, and A x for this row.
struct RowLow {
  const LowRank* adapter;  // null: the row has no adapter
  const float* low;        // [ranks]
};

// kClamped is only for experts. kGelu and kRelu are not for experts.
enum Activation : int32_t { kLinearly, kSilu, kGeluTanh, kClamped, kGelu, kRelu, kRelu2 };

// Work on the sums of a product before they are stored.
struct Epilogue {
  const RowLow* adapted;  // [rows]; null: no row has an adapter
  int32_t activation;     // for the results of a Linear; the name of a GatedLinear has its activation
  float gate_scale;       // GatedLinear: a factor of the gates before the activation
};

// Return 1 if these products use all of the processor's vector width, else 0. is_bf16: for rows of bfloat16, not
// float32.
extern "C" int32_t prefold_has_products(int32_t is_bf16);

// out [rows, columns] = x [rows, k] times the matrix, plus bias [columns] (or null). The matrix is in `packed`
// (products.h) or in `blocks`, and the other pointer is null. With bfloat16, k is even. epilogue may be null.
template <class E, class Out>
using Linear = int32_t(const E* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks, const E* bias,
                       Out* out, int64_t rows, int64_t columns, int64_t k, int32_t threads, const Epilogue* epilogue);
extern "C" Linear<float, float> prefold_linear_float32;
extern "C" Linear<Bf16, Bf16> prefold_linear_bfloat16;
extern "C" Linear<Bf16, float> prefold_linear_bfloat16_float32;

// out [rows, width] = activation(gate) * up. The matrix and bias [2 * width] (or null) have sixteen columns of gate,
// then sixteen of up, and so on. The other parameters are as for Linear.
template <class E>
using GatedLinear = int32_t(const E* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks, const E* bias,
                            E* out, int64_t rows, int64_t width, int64_t k, int32_t threads, const Epilogue* epilogue);
extern "C" GatedLinear<float> prefold_gated_linear_silu_float32, prefold_gated_linear_gelu_tanh_float32;
extern "C" GatedLinear<float> prefold_gated_linear_gelu_float32, prefold_gated_linear_relu_float32;
extern "C" GatedLinear<float> prefold_gated_linear_relu2_float32;
extern "C" GatedLinear<Bf16> prefold_gated_linear_silu_bfloat16, prefold_gated_linear_gelu_tanh_bfloat16;
extern "C" GatedLinear<Bf16> prefold_gated_linear_gelu_bfloat16, prefold_gated_linear_relu_bfloat16;
extern "C" GatedLinear<Bf16> prefold_gated_linear_relu2_bfloat16;

// Return the bytes of a panel with k numbers along k. Return 0 if the type is unknown, or if k is no whole number of
// blocks.
extern "C" int64_t prefold_block_panel_size(int64_t type, int64_t k);
// Pack panels of one type. rows [panels * kPanel]: the address of each column's row in the file, or null for zeros.
extern "C" void prefold_pack_blocks(int64_t type, const uint8_t* const* rows, int64_t panels, int64_t k, uint8_t* out,
                                    int32_t threads);
// out [n, k] = the rows `ids` [n] of a matrix in blocks, for embeddings.
template <class E>
using BlockRows = void(const BlockPanel* panels, const int64_t* ids, E* out, int64_t n, int64_t k, int32_t threads);
extern "C" BlockRows<float> prefold_block_rows_float32;
extern "C" BlockRows<Bf16> prefold_block_rows_bfloat16;

// Return 1 if this library multiplies int8 rows, else 0. It needs instructions that sum four products of bytes without
// saturation.
extern "C" int32_t prefold_has_int8();
// Pack weight [outputs, k] into int8 panels. `group` divides k rounded up to a multiple of 32.
template <class E>
using PackInt8 = int32_t(const E* weight, int64_t row, int64_t outputs, int64_t k, int64_t group, uint8_t* out,
                         int32_t threads);
extern "C" PackInt8<float> prefold_pack_int8_float32;
extern "C" PackInt8<Bf16> prefold_pack_int8_bfloat16;

// Pack rows into the panels of products.h: out [panels, words, kPanel]. rows [panels * kPanel] has the address of each
// column's `k` numbers, at any byte; null means zeros. The rest of a row's last words is zeros. The names end with the
// dtype of the rows, then of the words. Numbers are rounded to nearest even.
template <class E>
using PackWords = void(const E* const* rows, int64_t panels, int64_t k, int64_t words, uint32_t* out, int32_t threads);
extern "C" PackWords<float> prefold_pack_words_float32, prefold_pack_words_float32_bfloat16;
extern "C" PackWords<Bf16> prefold_pack_words_bfloat16, prefold_pack_words_bfloat16_float32;
extern "C" PackWords<F16> prefold_pack_words_float16_float32, prefold_pack_words_float16_bfloat16;

// --------------------------------------------------------------------------------------------------- norms, rotations

// x += delta [rows, width] (or null), in place; then out [rows, width] = the RMS norm of x. out may be x.
template <class E, class W>
using AddRmsNorm = void(E* x, const E* delta, const W* weight, E* out, int64_t rows, int64_t width, int64_t x_row,
                        int64_t delta_row, int64_t out_row, float eps, int32_t threads);
extern "C" AddRmsNorm<float, float> prefold_add_rms_norm_float32;
extern "C" AddRmsNorm<Bf16, Bf16> prefold_add_rms_norm_bfloat16;
extern "C" AddRmsNorm<Bf16, float> prefold_add_rms_norm_bfloat16_float32;

// x += delta [rows, width] (or null), in place; then out [rows, width] = the layer norm of x. weight, bias [width].
template <class E, class W>
using AddLayerNorm = void(E* x, const E* delta, const W* weight, const W* bias, E* out, int64_t rows, int64_t width,
                          float eps, int32_t threads);
extern "C" AddLayerNorm<float, float> prefold_add_layer_norm_float32;
extern "C" AddLayerNorm<Bf16, Bf16> prefold_add_layer_norm_bfloat16;
extern "C" AddLayerNorm<Bf16, float> prefold_add_layer_norm_bfloat16_float32;

// Norm `heads` heads of each row of x in place: a LayerNorm if there is a bias, else an RMS norm. A head has `dim`
// numbers; heads are `head` apart. The weights (and biases) of heads are `apart` from each other; 0: heads share them.
template <class E>
using NormHeads = void(E* x, const float* weight, const float* bias, int64_t rows, int64_t heads, int64_t dim,
                       int64_t row, int64_t head, int64_t apart, float eps, int32_t threads);
extern "C" NormHeads<float> prefold_norm_heads_float32;
extern "C" NormHeads<Bf16> prefold_norm_heads_bfloat16;

// Rotate x [rows, heads, dim] in place by cos_sin [rows, dim]: cosines, then sines. With weight [dim], the RMS norm of
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

constexpr int32_t kRankLine = 64;  // bytes of a `Line` (ranks.h)

// One rank's view of the shared memory of a split model: a `Line` for each rank (ranks.h), then two parts for each
// rank. A rank writes one of its parts while other ranks may still read the other part, so an exchange needs only one
// meeting.
struct RanksView {
  char* memory;
  int64_t first, part;  // the offset of the first part; bytes of a part, a multiple of 64
  int64_t rank, size;
  const int32_t* pipes;  // file descriptors; if a rank ends, one of them is hung up
  int64_t num_pipes;
  double patience;  // seconds to wait for another rank
  uint64_t met;     // the number of exchanges so far
};

// Set x [count] on every rank to the sum of all ranks' x.
template <class E>
using SumRanks = int32_t(RanksView* ranks, E* x, int64_t count, int32_t threads);
extern "C" SumRanks<float> prefold_sum_ranks_float32;
extern "C" SumRanks<Bf16> prefold_sum_ranks_bfloat16;
// Set pieces [ranks, bytes] on rank 0 to all ranks' pieces [bytes]. pieces is null on other ranks.
extern "C" int32_t prefold_gather_ranks(RanksView* ranks, const char* piece, int64_t bytes, char* pieces);

// ------------------------------------------------------------------------------------------------------------- logits

// sums [rows] = the log-sum-exp of each row of logits [rows, columns]; largest [rows] = the column of its largest
// number.
extern "C" void prefold_log_sum_exp(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                    int64_t* largest, int32_t threads);
// Like prefold_log_sum_exp, and entropies [rows] in nats.
extern "C" void prefold_entropy(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                int64_t* largest, float* entropies, int32_t threads);
// tokens [draws]: draw token i from the row rows[i] of logits. inverses[i] is 1 / temperature, keys[i] the key of the
// noise. The token is -1 if the largest number of the row is not finite, or if there are filters and a number is NaN.
// filters [draws, 4]: top_n_sigma (0: off), min_p, top_k (0: off) and top_p, applied in this order (worker/sampler.py);
// null: no filters. Return 1 if out of memory, else 0.
extern "C" int32_t prefold_draw(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                                const float* inverses, const double* filters, const uint64_t* keys, int64_t draws,
                                int64_t* tokens, int32_t threads);
// values, places [rows, count] = the `count` largest numbers of each row in descending order, and their columns. Ties
// go to the lower column. NaN counts as the lowest number. count is at most `columns`.
extern "C" void prefold_largest(const float* logits, int64_t rows, int64_t columns, int64_t row, int64_t count,
                                float* values, int64_t* places, int32_t threads);
// counts [numbers] = how many numbers in the row rows[i] of logits are larger than values[i].
extern "C" void prefold_count_larger(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                                     const float* values, int64_t numbers, int64_t* counts, int32_t threads);

// ids [rows] = the column of the largest number in each row of x [rows, k] times the matrix (see Linear). Ties go to
// the lowest column. The id is `none` if the largest number is not finite, or if any number is NaN. With ranks, the
// columns of this rank start at `first`; ranks may be null.
template <class E>
using Greedy = int32_t(const E* x, const uint32_t* packed, const BlockPanel* blocks, int64_t* ids, int64_t rows,
                       int64_t columns, int64_t k, int64_t none, int32_t threads, int64_t first, RanksView* ranks);
extern "C" Greedy<float> prefold_greedy_float32;
extern "C" Greedy<Bf16> prefold_greedy_bfloat16;

// ------------------------------------------------------------------------------------------------------------- layers

// How a router turns logits into scores: a softmax, sigmoids, or (kSparseMixer) one softmax for each chosen expert,
// over the experts that were not chosen before it and whose logits are close to its logit.
enum RouterScore : int32_t { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

// A mixture of experts. Each row runs through the `chosen` experts with the largest logits. Their results are weighted
// by the softmax of the logits: over the chosen experts if `normalised`, else over all experts.
struct ExpertsCall {
  const void* x;       // [rows, hidden]
  const void* logits;  // float32 [rows, experts]
  // The matrices of all experts, one after the other. gate_up has columns as for GatedLinear, or only up if `is_plain`.
  // Each matrix is packed or in blocks, and its other pointer is null.
  const void *gate_up, *down;
  const BlockPanel *gate_up_blocks, *down_blocks;
  // [experts, 2 * bias_width], gate before up; [experts, bias_width] if `is_plain`. In the dtype of x; null: no bias.
  const void* gate_up_bias;
  const void* down_bias;    // [experts, hidden], in the dtype of x; null: no bias
  const float* correction;  // [experts], added to the scores that choose experts; null: not used
  const float* scales;      // [experts], factors of the weights; null: not used
  void* out;                // [rows, hidden]
  int64_t rows, x_row, experts, chosen, hidden;
  int64_t width;  // of an expert, a multiple of sixteen
  int64_t bias_width;
  // Groups of experts. A row runs only through experts of the best `chosen_groups` groups. A group's rank is the sum of
  // its `group_best` largest scores.
  int64_t groups, chosen_groups, group_best;
  float scale;              // of the weights
  float least_sum;          // if the sum of the weights is smaller, they are divided by this instead
  float tolerance;          // kSparseMixer: the most that (top - logit) / max(|logit|, top) may be
  int32_t score;            // kSoftmax, kSigmoid or kSparseMixer
  int32_t corrects_logits;  // add the correction to logits, not to scores
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

// The matrices of kAttendLatent, packed separately for each head; heads are `*_words` words apart.
struct LatentCall {
  const void* expand;  // [dim + value_dim outputs, rank]: a head's keys without their tails, then its values
  // [rank + tail outputs, dim + tail]: a head's key matrix, transposed, and the identity for the tail.
  const void* absorb;
  const void* restore;  // [value_dim outputs, rank]: a head's value matrix
  int64_t expand_words, absorb_words, restore_words;
  int64_t rank, tail, dim, value_dim;
};

// The two groups of the queries of a step over slots, if latent attention expands keys and values for some queries.
struct LatentSplit {
  const int64_t* absorbed;  // [num_absorbed], the absorbed queries, ascending; the step's own lists are theirs
  const int64_t* expanded;  // [num_expanded], the other queries, ascending
  const int64_t* slots;     // [keys], the slots of all keys that the expanded queries see
  int64_t num_absorbed, num_expanded, keys;
  TileCall tiles;  // the lists of the expanded queries; key i is in slot slots[i]
};

// The rows that a causal convolution reads. A place below first_row is a column of a state, and a place from first_row
// on is a row of x. A new state overwrites the state in its memory. Only the rows of the new state may read the old
// one.
struct ConvCall {
  const void* x;          // the rows, of stride x_row
  const int64_t* row_of;  // [rows]: the row of x for each row; null: row i is row i of x
  void* states;           // [states, kept, channels]
  const float* taps;      // [kept + 1, channels]; the last is for the row itself
  const float* bias;      // [channels]; null: no bias
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

// The order in which rows change states. Rows come in runs. A run starts from the state at the end of an earlier run.
// The runs of a wave do not depend on each other. States below num_states are in `states`, the others in `between`.
struct RunLists {
  const int64_t *first, *stop;  // [runs]: the first row of a run, and the row after its last
  const int64_t* source;        // [runs]: the state from which a run starts
  const int64_t* to;            // [runs]: the state to which a run writes; -1: discard
  const int64_t* waves;         // [num_waves + 1]: the first run of each wave, and the number of runs
  int64_t num_waves;
  int64_t num_states, num_between;
};

// A gated delta net (Yang et al. 2024). A row of x has q, k and v of its heads, then z, b and a. The convolution covers
// q, k and v. Head h uses the key head h % key_heads if `tiled`, else neighbouring heads share a key head.
struct DeltaCall {
  ConvCall conv;
  RunLists runs;
  void* out;                            // [picked, heads * value_dim]
  const int64_t* pick;                  // [picked], the rows to compute, each once; null: all
  float* states;                        // [num_states, heads, key_dim, value_dim]
  float* between;                       // [num_between, heads, key_dim, value_dim], states that only later runs read
  const float *rates, *dt_bias, *norm;  // [heads]: -exp(a_log); [heads]; [value_dim]
  int64_t picked, heads, key_heads, key_dim, value_dim;
  float eps, beta_scale;  // beta_scale: factor of the sigmoids of b
  int32_t tiled, threads;
};
extern "C" int32_t prefold_delta_net_float32(const DeltaCall* call);
extern "C" int32_t prefold_delta_net_bfloat16(const DeltaCall* call);

// Mamba-2 (Dao and Gu 2024). A row of x has the gate, x, b, c and dt. The convolution covers x, b and c. The heads of a
// group share b and c [key_dim], and the norm. Let t = softplus(step_scale dt + dt_bias), clamped to [least, most].
// Then
//   S = exp(rates t) S + t b x^T
//   y = c^T S + skips x
//   out = RMS norm of (y silu(gate_scale gate)); if `norm_first`: (RMS norm of y) silu(gate_scale gate)
struct MambaCall {
  ConvCall conv;
  RunLists runs;
  void* out;  // out, pick, states and between: see DeltaCall
  const int64_t* pick;
  float *states, *between;
  const float *rates, *dt_bias, *skips, *norm;  // [heads] each; norm [heads * value_dim], or null: no norm
  int64_t picked, heads, groups, key_dim, value_dim;
  float eps, least, most, gate_scale, step_scale;
  int32_t norm_first, threads;
};
extern "C" int32_t prefold_mamba2_float32(const MambaCall* call);
extern "C" int32_t prefold_mamba2_bfloat16(const MambaCall* call);

// ----------------------------------------------------------------------------------------------------------- programs

// The operations of a program. Each reads and writes buffers, [rows, width]. `wide` and `plane` have a different
// meaning in each operation. Weights are in the dtype of the rows, unless stated otherwise.
//
// kNorm
//     source += beside (-1: skip this), then out = norm(source), for `columns` numbers from `at` on. A LayerNorm if
//     there is a bias, else an RMS norm. wide: float32 weights with bfloat16 rows. If `summed`, each rank has only some
//     of the `heads` numbers of a row, and `kv_heads` ranks have a copy of each number. Then `beside` is not used.
// kLinear
//     out = activation(source times the matrix, plus bias).
// kGated
//     out = activation(eps * gate) * up, with gate and up from source times the matrix.
// kRope
//     Rotate `heads` heads of `dim` numbers in source, from `at` on, in place. Table `plane` (-1: none) rotates the
//     first ProgramCall.dims[plane] numbers of each head. With a weight, the RMS norm of the whole head comes first.
//     wide: float32 weights with bfloat16 rows.
// kAttend
//     out = attention of the queries in source, from `at` on. beside has the new keys, from `keys` on, then the new
//     values, of `columns` numbers per head. plane: of K/V; window: the index of the plan; weight: float32 sinks, or
//     null. wide: an earlier kAttend has stored these keys and values.
// kAttendLatent
//     out = attention of the queries in source, [heads, dim + tail], over the latents in beside, [rank + tail]. `call`
//     has the matrices (latent.h). Over slots, a LatentSplit may divide the queries.
// kPick
//     Keep only the rows of source that are read. If `beside` is not 0, drop the other rows for the rest of the pass.
// kEmbed
//     out = eps * the embeddings of the tokens, plus learned embeddings of `positions` positions in `bias` (or null). A
//     matrix without blocks has its rows one after the other, or is packed in words if `wide`. There are `dim` ids;
//     this rank has `columns` of them from `at` on. Tokens from `keys` on use the embedding of token 0 (keys 0: no
//     token does).
// kHead
//     ids = the most likely token of each row of source. This rank has `columns` ids from `at` on.
// kAdd
//     source += eps * beside.
// kGate
//     Multiply `heads` heads of `dim` numbers in source with the sigmoid of the gates in beside, from `at` on. A head
//     has `columns` gates: one per number, or a single one. wide: multiply with the gates themselves. Activation
//     kGeluTanh: multiply with GELU of the gates.
// kExperts
//     out = the mixture of experts `call` of source. The router reads beside; its matrix and bias are the operation's.
// kShortConv, kGatedDelta, kMamba2
//     out = the mixer `call` of all rows of source, with the states of `plane`. Rows that are not read get no result if
//     `beside` is not 0, or after a kPick for the rest of the pass.
// kNormHeads
//     Norm `heads` heads of `dim` numbers in source, from `at` on, in place, see NormHeads. weight and bias are
//     float32, and heads have them `columns` apart.
// kXielu
//     source = xIELU(source), in place. weight: p, n, beta and eps as float32 (activations.h).
// kScaleRows
//     out = eps * weight * source. weight: float32, one factor per number of a row, or null.
// kMix
//     s_i += sum over j of (eps + (W tanh(beside))_ij) * o_j, for `heads` buffers s and `kv_heads` buffers o. weight:
//     W, float32 [heads * kv_heads, columns]; bias: the buffers as int64, s before o. heads, kv_heads and columns are
//     at most kMostMixed.
// kMatch
//     Scale each row of source, in place, to the root mean square of the row of beside. eps: the least mean square of
//     source.
// kSparseGate
//     out = activation(max(gate - cut, 0)) * up. source has `columns` gates, then up. The cut is the mean of a row's
//     gates plus eps times their standard deviation.
// kClamp
//     out[at, at + columns) = source[0, columns), clamped to [weight[0], weight[1]]. weight: float32.
// kByPosition
//     Multiply `heads` heads of `dim` numbers in source, from `at` on, in place, with
//     1 + eps * log(1 + floor(position / positions)).
// kScaleHeads
//     Multiply `heads` heads of `dim` numbers in source, from `at` on, in place, with weight, float32 [heads, dim].
// kActivateGated
//     out = activation(gate) * up. source has `columns` gates, then up.
// kInterpolate
//     source += weight * (beside - source), in place. weight: float32, one factor per number of a row.
//
// `call` points to a LatentCall, ExpertsCall, ShortConvCall, DeltaCall or MambaCall with the weights, the sizes and
// eps. The program fills in its other fields.
// clang-format off
enum Kind : int32_t {
  kNorm, kLinear, kGated, kRope, kAttend, kPick, kEmbed, kHead, kAdd, kGate, kExperts, kShortConv, kGatedDelta, kMamba2,
  kAttendLatent, kNormHeads, kXielu, kByPosition, kScaleRows, kScaleHeads, kActivateGated, kInterpolate,
  kMix, kMatch, kSparseGate, kClamp,
};
// clang-format on
constexpr int32_t kMostMixed = 8;

// An operation of a program. `Kind` tells which fields it reads. Offsets within rows are in elements.
struct Operation {
  int32_t kind;
  int32_t source, out, beside;  // buffers
  int32_t wide, plane, window;
  int32_t activation;  // kLinear, kGated, kExperts, kGate, kActivateGated, kSparseGate
  int32_t linear;      // kLinear, kGated: the index in an adapter's table
  int32_t summed;      // whether to sum the result (kNorm: the squares) over all ranks
  float eps;
  int64_t at, keys, heads, dim, kv_heads, columns, positions;
  const void *weight, *bias;
  const BlockPanel* blocks;  // the matrix, if it is in blocks; then weight is null
  // The distance from one head to the next; 0: dim. For kRope, kNormHeads, kByPosition, kScaleHeads, kAttend (of the
  // queries) and kGate (of the gates).
  int64_t stride;
  const void* call;  // kAttendLatent, kExperts, kShortConv, kGatedDelta, kMamba2
};

// K/V of one plane for the path above a step of a row stream, and memory for the path above the next step. Shape of
// each: [path, kv_heads, dim].
struct PathPlane {
  const char *keys, *values;
  char *next_keys, *next_values;
};

// States of one layer (see ConvCall and DeltaCall). `states` is null for a short convolution.
struct StatePlane {
  void* columns;
  float* states;
};

// The rows that convolutions read (see ConvCall).
struct PlaceLists {
  const int64_t *above, *below;
};

// The order in which the rows of one step change states, for all layers. With sharing "mlp" these are the rows of the
// stream.
struct StateStep {
  const PlaceLists* places;  // by the number of columns that a convolution keeps
  const int64_t* to;         // [num_ends], see ConvCall
  int64_t num_ends;
  RunLists runs;
};

// One step of a program, over slots or over the rows of a stream.
struct ProgramCall {
  const Operation* operations;
  int64_t count;  // the number of operations
  char* const* buffers;
  const int64_t* widths;  // the row width of each buffer
  int64_t rows, picked;
  const int64_t* read;         // [picked], the rows that kPick keeps, ascending; unused if it keeps all rows
  const int64_t* tokens;       // [rows]
  const int64_t* positions;    // [rows]
  const int64_t* slots;        // [rows]; null: the rows belong to a stream
  const float* const* tables;  // [num_tables] tables [positions, dims[t]]: cosines, then sines
  const int64_t* dims;         // [num_tables]: rotated numbers of a head
  int64_t num_tables;
  float* angles;                        // scratch memory, [rows, dims[t]] for each table
  int64_t* ids;                         // [picked]: results of kHead; null: skip kHead
  const SlotPlane* planes;              // if there are slots
  const PathPlane* paths;               // if there are none, by plane
  int64_t path;                         // the number of rows of the path
  const int64_t *keep_path, *keep_new;  // the path rows, and the new rows, that form the path of the next step
  int64_t kept_path, kept_new;          // the lengths of these two
  // With sharing "mlp" a row stands for several rows of the stream. Attention runs over the rows of the stream.
  int64_t unfolded;                    // rows of the stream
  const int64_t* scatter;              // [unfolded]: the row that stands for each row of the stream; null: not "mlp"
  const int64_t* gather;               // [rows]: one row of the stream for each row
  const int64_t* read_order;           // [picked]: the order in which attention reads the rows that are read
  char* unfolded_room;                 // scratch memory for q, k, v and the result
  const TileCall *plans, *read_plans;  // by window: for all rows, and for the rows that are read
  // By window, for kAttendLatent over slots. Null, or num_expanded = 0: all queries are absorbed.
  const LatentSplit *splits, *read_splits;
  const int64_t* numbers;          // [rows]: the adapter of each row, or -1; null: no row has an adapter
  const LowRank* const* adapters;  // by adapter: a LowRank for each linear
  RowLow* adapted;                 // scratch memory, [rows]
  float* low;                      // scratch memory, [rows, most_ranks]
  int64_t most_ranks;
  RanksView* ranks;  // null: the model is not split
  int64_t none;      // the id of a row whose largest logit is not finite
  float scale, cap;  // see TileCall
  int32_t threads, is_bf16;
  const StatePlane* states;     // for each layer with a state
  const StateStep* state_step;  // null: no layer has a state
};

extern "C" int32_t prefold_run_program(const ProgramCall* call);
// Turn a call over slots into the call of the next step: each row moves on by one position, one slot and one key of its
// own. takes: whether the tokens become `ids`. Not for models with windows. States do not change, so each run must have
// written its state back to its source.
extern "C" void prefold_follow_program(const ProgramCall* call, int32_t takes);

// ------------------------------------------------------------------------------------------------------- the library

// Shorten the time that PyTorch's OpenMP threads spin (threads.cpp).
extern "C" void prefold_calm_openmp();
// Return the sizes, offsets and signatures of this file as the compiler has them, as text (layout.cpp).
extern "C" const char* prefold_layout();

}  // namespace prefold
