// The packed keys and values that the attention kernels read.
#pragma once

#include "interface.h"
#include "tiles.h"
#include "vectors.h"

namespace prefold {

// Caps the score of a query and a key. Input and result are products before the scale is applied. A product that is not
// finite becomes NaN, as its row would without a cap.
struct Cap {
  const Floats rate, most;
  explicit Cap(const TileCall& call) : rate(2.88539008f * call.scale / call.cap), most(call.cap / call.scale) {}
  PREFOLD_INLINE Floats operator()(const Floats& product) const {
    const Floats z = product * rate;  // tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e))
    return most * (Floats(1.0f) - Floats(2.0f) / (Floats(1.0f) + exp2<true>(z))) + (z - z);
  }
};

// Packed keys and values, one KV head after the other. Pair p of KV head h has its keys at (h * pairs + p) * key_size
// and its values at (h * pairs + p) * value_size. Dimensions are padded with zeros to whole vectors, keys to whole
// pairs. The values may be the first numbers of the keys, in the same memory.
template <class Format>
struct Packed {
  using Kept = typename Format::Kept;
  int64_t pairs, dim, value_dim;  // padded dimensions
  int64_t key_size, value_size;   // of a pair
  int64_t value_row;              // from the first value of a pair to the second, if they are not interleaved
  Kept *keys, *values;
  uint8_t* unsafe;  // [kv_heads, pairs]: not zero if the pair has a value that is not finite
  bool any_unsafe;

  static int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

  // in_keys: whether the values are the first numbers of the keys.
  void set_sizes(int64_t of_key, int64_t of_value, bool in_keys) {
    dim = padded(of_key), value_dim = padded(of_value);
    value_row = in_keys ? dim : value_dim;
    key_size = 2 * dim / Format::kWidth, value_size = 2 * value_row / Format::kWidth;
  }

  const Kept* key_pairs(int64_t head) const { return keys + head * pairs * key_size; }
  const Kept* value_pairs(int64_t head) const { return values + head * pairs * value_size; }
  bool is_unsafe(int64_t head, int64_t pair) const { return unsafe[head * pairs + pair]; }
};

template <class Format>
Packed<Format> packed(const SlotPlane& plane) {
  using Kept = typename Format::Kept;
  Packed<Format> packed;
  packed.pairs = (plane.slots + 1) / 2;
  packed.keys = static_cast<Kept*>(plane.keys);
  packed.values = static_cast<Kept*>(plane.values);
  packed.set_sizes(plane.dim, plane.value_dim, plane.values == plane.keys);
  packed.unsafe = plane.unsafe;
  packed.any_unsafe = plane.unsafe[plane.kv_heads * packed.pairs];
  return packed;
}

}  // namespace prefold
