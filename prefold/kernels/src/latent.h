// Attention with latents (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).
//
// A plane stores a row's latent c, and the tail of its key, which all heads share. Head h has the key K[h] c, then the
// tail, and the value V[h] c. There are two exact forms.
//
// Absorbed: q . (K c) = (K^T q) . c. So all heads attend over the latents like the keys of a single KV head, whose
// values are the latents as well. V is applied after the sum over keys.
//
// Expanded: the keys and values of all heads are computed once per step, from the latents. Then attention is as usual.
//
// Absorbed queries do more work for each key that they see. Expanded queries need work for each key, however few
// queries see it. In a stream of rows, all queries are expanded. Over slots, the planner chooses (latent_plan.cpp).
//
// Heads are processed in groups, so that the scratch memory stays small.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "interface.h"
#include "parallel.h"
#include "tile.h"
#include "workspace.h"

namespace prefold {

template <class E>
class LatentAttention {
 public:
  // op: a kAttendLatent.
  LatentAttention(const ProgramCall& call, const Operation& op)
      : call_(call), op_(op), of_(*static_cast<const LatentCall*>(op.call)) {}

  // Attend over slots into `out`, absorbed. tiles: the lists and the number of the queries.
  int32_t over_slots(TileCall tiles, const SlotPlane& plane, const E* q, int64_t q_row, E* out) const {
    const int64_t rows = tiles.queries, numbers = rows * (2 * of_.rank + of_.tail + of_.value_dim);
    return for_groups(numbers, [&](int64_t first, int64_t heads, E* room) {
      E *absorbed = room, *attended = absorbed + rows * heads * width(), *restored = attended + rows * heads * of_.rank;
      int32_t failed = for_heads(first, heads, rows, [&](int64_t h, int32_t threads) {
        return multiply(q + h * query_dim(), q_row, matrix(of_.absorb, of_.absorb_words, h),
                        absorbed + (h - first) * rows * width(), rows, width(), query_dim(), threads);
      });
      if (failed) return failed;
      tiles.q = absorbed, tiles.q_row = width(), tiles.q_head = rows * width(), tiles.out = attended;
      tiles.heads = heads, tiles.kv_heads = 1, tiles.dim = width(), tiles.value_dim = of_.rank;
      const SlotCall over{tiles, plane};
      if ((failed = prefold_slot_attention(&over, kBf16))) return failed;
      failed = for_heads(first, heads, rows, [&](int64_t h, int32_t threads) {
        return multiply(attended + (h - first) * of_.rank, heads * of_.rank, matrix(of_.restore, of_.restore_words, h),
                        restored + (h - first) * rows * of_.value_dim, rows, of_.value_dim, of_.rank, threads);
      });
      if (failed) return failed;
      put(restored, out, rows, first, heads);
      return 0;
    });
  }

  // Attend over the latents of a path, [path, width], and of `count` more rows, into `out`, expanded.
  int32_t over_rows(TileCall tiles, const E* path, int64_t path_rows, const E* rows, int64_t row, int64_t count,
                    const E* q, int64_t q_row, E* out) const {
    const int64_t keys = path_rows + count, size = of_.dim + of_.value_dim;
    return for_groups(keys * size + tiles.queries * of_.value_dim, [&](int64_t first, int64_t heads, E* room) {
      E *expanded = room, *attended = expanded + heads * keys * size;
      const int32_t failed = for_heads(first, heads, keys, [&](int64_t h, int32_t threads) {
        const uint32_t* up = matrix(of_.expand, of_.expand_words, h);
        E* to = expanded + (h - first) * keys * size;
        if (const int32_t of_path = multiply(path, width(), up, to, path_rows, size, of_.rank, threads)) return of_path;
        return multiply(rows, row, up, to + path_rows * size, count, size, of_.rank, threads);
      });
      if (failed) return failed;
      tiles.q = q + first * query_dim(), tiles.q_row = q_row, tiles.q_head = query_dim(), tiles.out = attended;
      tiles.heads = tiles.kv_heads = heads, tiles.dim = query_dim(), tiles.value_dim = of_.value_dim;
      const E* fresh = expanded + path_rows * size;
      RowCall over{};
      over.tiles = tiles, over.rows = count, over.path = path_rows;
      over.path_k = expanded, over.path_v = expanded + of_.dim, over.k = fresh, over.v = fresh + of_.dim;
      over.k_row = over.v_row = over.path_k_row = over.path_v_row = size;
      over.k_head = over.v_head = over.path_k_head = over.path_v_head = keys * size;
      over.path_tail = path + of_.rank, over.tail = rows + of_.rank;
      over.path_tail_row = width(), over.tail_row = row, over.tail_dim = of_.tail;
      if (const int32_t unable = prefold_row_attention(&over, kBf16)) return unable;
      const int64_t part = heads * of_.value_dim;
      parallel_ranges(tiles.queries, part, call_.threads, [&](int64_t begin, int64_t stop) {
        for (int64_t r = begin; r < stop; ++r) {
          std::memcpy(out + (r * op_.heads + first) * of_.value_dim, attended + r * part, part * sizeof(E));
        }
      });
      return 0;
    });
  }

  // The numbers per row in a plane.
  int64_t width() const { return of_.rank + of_.tail; }

 private:
  static constexpr bool kBf16 = !std::is_same_v<E, float>;
  static constexpr int64_t kRoom = 32 << 20;  // bytes of scratch memory for a group of more than kMaxHeads heads

  int64_t query_dim() const { return of_.dim + of_.tail; }
  static const uint32_t* matrix(const void* every, int64_t words, int64_t head) {
    return static_cast<const uint32_t*>(every) + head * words;
  }

  // Run body(first head, heads, memory) for each group. memory: `numbers` numbers for each head.
  template <class F>
  int32_t for_groups(int64_t numbers, const F& body) const {
    static thread_local Workspace workspace;
    const int64_t bytes = numbers * static_cast<int64_t>(sizeof(E));
    const int64_t most = std::clamp<int64_t>(kRoom / std::max<int64_t>(1, bytes), kMaxHeads, op_.heads);
    const int64_t groups = (op_.heads + most - 1) / most, heads = (op_.heads + groups - 1) / groups;
    auto* room = static_cast<E*>(workspace.reserve(heads * bytes));
    for (int64_t first = 0; first < op_.heads; first += heads) {
      if (const int32_t failed = body(first, std::min(heads, op_.heads - first), room)) return failed;
    }
    return 0;
  }

  // Run body(head, threads). With few rows, heads run in parallel; with many, one after the other.
  template <class F>
  int32_t for_heads(int64_t first, int64_t heads, int64_t rows, const F& body) const {
    constexpr int64_t kFew = 64;
    if (rows > kFew) {
      for (int64_t h = first; h < first + heads; ++h) {
        if (const int32_t failed = body(h, call_.threads)) return failed;
      }
      return 0;
    }
    std::atomic<int32_t> failed{0};
    const int64_t work = rows * heads * (of_.dim + of_.tail) * width();
    const auto threads = static_cast<int>(std::min<int64_t>(call_.threads, 1 + work / kProductsPerThread));
    parallel_tasks(heads, threads, [&](int64_t i) {
      if (const int32_t one = body(first + i, 1)) failed = one;
    });
    return failed;
  }

  static int32_t multiply(const E* x, int64_t x_row, const uint32_t* words, E* out, int64_t rows, int64_t columns,
                          int64_t k, int32_t threads) {
    if (!rows) return 0;
    if constexpr (kBf16) {
      return prefold_linear_bfloat16(x, x_row, words, nullptr, nullptr, out, rows, columns, k, threads, nullptr);
    } else {
      return prefold_linear_float32(x, x_row, words, nullptr, nullptr, out, rows, columns, k, threads, nullptr);
    }
  }

  // Copy [heads, rows, value_dim] into these heads' columns of out [rows, all heads, value_dim].
  void put(const E* from, E* out, int64_t rows, int64_t first, int64_t heads) const {
    const int64_t size = of_.value_dim;
    parallel_ranges(rows, heads * size, call_.threads, [&](int64_t begin, int64_t stop) {
      for (int64_t r = begin; r < stop; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          std::memcpy(out + (r * op_.heads + first + h) * size, from + (h * rows + r) * size, size * sizeof(E));
        }
      }
    });
  }

  const ProgramCall& call_;
  const Operation& op_;
  const LatentCall& of_;
};

}  // namespace prefold
