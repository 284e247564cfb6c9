// What calls of the attention kernels are given, and the packed keys and values they work on.
#pragma once

#include <cstdint>

#include "tiles.h"
#include "vectors.h"

namespace prefold {

// Queries, where their results go, and the keys each tile of them reads. Filled in by Python (calls.py,
// class TileCall): same fields, same order. Strides are in elements; the last dimension is contiguous.
struct TileCall {
  const void* q;
  void* out;  // [queries, heads, dim], contiguous
  int64_t q_row, q_head;
  int64_t queries, heads, kv_heads, dim, tiles;
  const int64_t *run_offsets, *mask_offsets;
  const Run* runs;
  const MaskedPair* masked;
  // Null where a tile is always sixteen queries and its lists are all there is (interval attention).
  const int64_t *tile_starts, *own_offsets;
  const OwnRun* own;
  // Of each head a number that is beside its scores in the softmax and has no value; null: there is none.
  const float* sinks;
  float scale;
  int32_t threads;
  float cap;  // scores s become cap * tanh(s / cap); 0: they stay
};

// A product of a query and a key, which is still to be multiplied with the scale, with the cap of its score.
// One that is not finite becomes NaN, as without a cap its row would.
struct Cap {
  const Floats rate, most;
  explicit Cap(const TileCall& call) : rate(2.88539008f * call.scale / call.cap), most(call.cap / call.scale) {}
  PREFOLD_INLINE Floats operator()(const Floats& product) const {
    const Floats z = product * rate;  // tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e))
    return most * (Floats(1.0f) - Floats(2.0f) / (Floats(1.0f) + exp2<true>(z))) + (z - z);
  }
};

// Interval attention: keys as they lie, the `path` carried rows, then `rows` new ones.
struct RowCall {
  TileCall tiles;
  const void *k, *v, *path_k, *path_v;
  int64_t k_row, k_head, v_row, v_head, path_k_row, path_k_head, path_v_row, path_v_head;
  int64_t rows, path;
};

// One plane of a KV store: keys and values as in Packed, slots 2p and 2p + 1 in pair p. Bit 0 of `unsafe` is
// about the first slot of a pair, bit 1 about the second; behind the pairs' bytes one more says whether any of
// them was ever set. All zeros at first, so that what nobody wrote is finite.
struct SlotPlane {
  void *keys, *values;
  uint8_t* unsafe;
  int64_t slots, kv_heads, dim;
  int64_t rounded;  // whether float32 rows are kept as bfloat16
};

// Attention over slots.
struct SlotCall {
  TileCall tiles;
  SlotPlane plane;
};

// Rows to be put into slots; a slot is given twice only if nobody will read it.
struct WriteCall {
  SlotPlane plane;
  const int64_t* slots;  // [rows]
  const void *k, *v;
  int64_t k_row, k_head, v_row, v_head, rows;
  int32_t threads;
};

// Keys and values packed a KV head at a time: pair p of KV head h at (h * pairs + p) * pair_size.
// Dimensions are padded with zeros to whole vectors, keys to whole pairs.
template <class Format>
struct Packed {
  using Kept = typename Format::Kept;
  int64_t pairs, dim, pair_size;  // dim: padded
  Kept *keys, *values;
  uint8_t* unsafe;  // [kv_heads, pairs]: not zero where the pair has a value that is not finite
  bool any_unsafe;

  static int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

  const Kept* key_pairs(int64_t head) const { return keys + head * pairs * pair_size; }
  const Kept* value_pairs(int64_t head) const { return values + head * pairs * pair_size; }
  bool is_unsafe(int64_t head, int64_t pair) const { return unsafe[head * pairs + pair]; }
};

template <class Format>
Packed<Format> packed(const SlotPlane& plane) {
  using Kept = typename Format::Kept;
  Packed<Format> packed;
  packed.pairs = (plane.slots + 1) / 2;
  packed.dim = packed.padded(plane.dim);
  packed.pair_size = 2 * packed.dim / Format::kWidth;
  packed.keys = static_cast<Kept*>(plane.keys);
  packed.values = static_cast<Kept*>(plane.values);
  packed.unsafe = plane.unsafe;
  packed.any_unsafe = plane.unsafe[plane.kv_heads * packed.pairs];
  return packed;
}

}  // namespace prefold
