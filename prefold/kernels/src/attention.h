// The packed keys and values that the attention kernels work on.
#pragma once

#include "interface.h"
#include "tiles.h"
#include "vectors.h"

namespace prefold {

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
