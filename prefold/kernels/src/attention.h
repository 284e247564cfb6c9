// What a call of the attention kernel is given, and the packed keys and values it works on.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace prefold {

// Filled in by Python (library.py, class AttentionCall): same fields, same order. Strides are in elements;
// the last dimension is contiguous. Keys are the `path` carried rows, then `rows` new ones.
struct AttentionCall {
  const void *q, *k, *v, *path_k, *path_v;
  void* out;  // [queries, heads, dim], contiguous
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, path_k_row, path_k_head, path_v_row, path_v_head;
  int64_t queries, rows, path, heads, kv_heads, dim;
  const int64_t *run_offsets, *mask_offsets;
  const Run* runs;
  const MaskedPair* masked;
  float scale;
  int32_t threads;
};

// Keys and values packed a KV head at a time: pair p of KV head h at (h * pairs + p) * pair_size.
// Dimensions are padded with zeros to whole vectors, keys to whole pairs.
template <class Format>
struct Packed {
  using Stored = typename Format::Stored;
  int64_t pairs, dim, pair_size;  // dim: padded
  Stored *keys, *values;
  uint8_t* unsafe;  // [kv_heads, pairs]: the pair has a value that is not finite
  bool any_unsafe;

  const Stored* key_pairs(int64_t head) const { return keys + head * pairs * pair_size; }
  const Stored* value_pairs(int64_t head) const { return values + head * pairs * pair_size; }
  bool is_unsafe(int64_t head, int64_t pair) const { return unsafe[head * pairs + pair]; }
};

}  // namespace prefold
