// Packs keys and values for the attention kernel, in parallel.
#pragma once

#include <atomic>

#include "attention.h"
#include "formats.h"
#include "parallel.h"
#include "tile.h"
#include "workspace.h"

namespace prefold {

// The rows of keys (or values): rows of the path, then new rows.
template <class E>
struct RowSource {
  const E *path, *rows;
  int64_t path_count, count, path_row, path_head, row, head;

  // Return null past the last row. Zeros are packed there.
  const E* at(int64_t key, int64_t kv_head) const {
    if (key < path_count) return path + key * path_row + kv_head * path_head;
    key -= path_count;
    return key < count ? rows + key * row + kv_head * head : nullptr;
  }
};

// The last numbers of keys, if all KV heads share them.
template <class E>
struct KeyTails {
  RowSource<E> rows;
  int64_t dim;  // 0: keys have no shared numbers
};

// Pack a row of keys, or zeros if `row` is null.
template <class Format>
PREFOLD_INLINE void pack_key(typename Format::Kept* out, const typename Format::Element* row, int64_t dim,
                             int64_t padded) {
  constexpr int kStep = kLanes * Format::kWidth;
  for (int64_t d = 0; d < padded; d += kStep) {
    const int64_t count = row ? dim - d : 0;
    const auto x = Format::load_row(row + (row ? d : 0), count);
    if constexpr (std::is_same_v<typename Format::Kept, Bf16>) {
      store(out + d, x);
    } else if (padded - d >= kStep) {
      memcpy(out + d / Format::kWidth, &x, sizeof x);
    } else {  // half a step is left if the dimensions are an odd multiple of sixteen
      memcpy(out + d / Format::kWidth, &x, sizeof x / 2);
    }
  }
}

template <class Format>
void pack_keys(const Packed<Format>& packed, const RowSource<typename Format::Element>& source,
               const KeyTails<typename Format::Element>& tails, int64_t dim, int64_t head, int64_t pair) {
  auto* out = packed.keys + (head * packed.pairs + pair) * packed.key_size;
  for (int half = 0; half < 2; ++half, out += packed.key_size / 2) {
    const auto* row = source.at(2 * pair + half, head);
    if (row && tails.dim) {
      typename Format::Element whole[kMaxDim];
      memcpy(static_cast<void*>(whole), row, (dim - tails.dim) * sizeof *whole);
      memcpy(static_cast<void*>(whole + dim - tails.dim), tails.rows.at(2 * pair + half, 0), tails.dim * sizeof *whole);
      pack_key<Format>(out, whole, dim, packed.dim);
    } else {
      pack_key<Format>(out, row, dim, packed.dim);
    }
  }
}

// Set all bits in lanes with an infinity or NaN, or with a number that bfloat16 rounds to an infinity.
PREFOLD_INLINE Words not_finite(const Floats& x) {
  return Words::make([&](int p) {
    const Part<int32_t> size = (Part<int32_t>)x.part[p] & 0x7fffffff;
    return (Part<uint32_t>)(size >= 0x7f7f8000);
  });
}

// Replace infinities, NaN, and numbers that bfloat16 rounds to an infinity by zero.
PREFOLD_INLINE Floats finite_or_zero(const Floats& x) {
  const Words bad = not_finite(x);
  return Floats::make([&](int p) { return (Part<float>)((Part<uint32_t>)x.part[p] & ~bad.part[p]); });
}

// Pack a pair of values. Return whether all of them are finite.
template <class Format>
bool pack_values(const Packed<Format>& packed, const RowSource<typename Format::Element>& source, int64_t dim,
                 int64_t head, int64_t pair) {
  auto* out = packed.values + (head * packed.pairs + pair) * packed.value_size;
  const auto* first = source.at(2 * pair, head);
  const auto* second = source.at(2 * pair + 1, head);
  Words unsafe(0);
  for (int64_t d = 0; d < packed.value_dim; d += kLanes) {
    const Floats a = load_some(first + d, dim - d);
    const Floats b = second ? load_some(second + d, dim - d) : zeros();
    unsafe |= not_finite(a) | not_finite(b);
    Format::store_values(out + d, packed.value_row, a, b);
  }
  return !any_bit(unsafe);
}

template <class Format>
Packed<Format> pack(const RowCall& call, Workspace& workspace) {
  const int64_t kv_heads = call.tiles.kv_heads, dim = call.tiles.dim, value_dim = call.tiles.value_dim;
  using E = typename Format::Element;
  using Kept = typename Format::Kept;
  Packed<Format> packed;
  packed.pairs = (call.path + call.rows + 1) / 2;
  packed.set_sizes(dim, value_dim, false);
  const int64_t pairs = kv_heads * packed.pairs, numbers = pairs * (packed.key_size + packed.value_size);
  packed.keys = static_cast<Kept*>(workspace.reserve(numbers * sizeof(Kept) + pairs));
  packed.values = packed.keys + pairs * packed.key_size;
  packed.unsafe = reinterpret_cast<uint8_t*>(packed.keys + numbers);

  const auto source = [&](const void* path, const void* rows, int64_t path_row, int64_t path_head, int64_t row,
                          int64_t head) {
    return RowSource<E>{
        static_cast<const E*>(path), static_cast<const E*>(rows), call.path, call.rows, path_row, path_head, row, head};
  };
  const auto keys = source(call.path_k, call.k, call.path_k_row, call.path_k_head, call.k_row, call.k_head);
  const auto values = source(call.path_v, call.v, call.path_v_row, call.path_v_head, call.v_row, call.v_head);
  const auto tails = source(call.path_tail, call.tail, call.path_tail_row, 0, call.tail_row, 0);
  const KeyTails<E> shared{tails, call.tail_dim};
  std::atomic<bool> any_unsafe{false};
  parallel_ranges(packed.pairs, 2 * kv_heads * (dim + value_dim), call.tiles.threads, [&](int64_t first, int64_t last) {
    bool safe = true;
    for (int64_t pair = first; pair < last; ++pair) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        pack_keys(packed, keys, shared, dim, head, pair);
        const bool finite = pack_values(packed, values, value_dim, head, pair);
        packed.unsafe[head * packed.pairs + pair] = !finite;
        safe &= finite;
      }
    }
    if (!safe) any_unsafe.store(true, std::memory_order_relaxed);
  });
  packed.any_unsafe = any_unsafe.load();
  return packed;
}

}  // namespace prefold
