// Products of int8 rows with matrices of integers of up to eight bits. The sums within a group of numbers along k are
// integers too, so they are exact.
//
// Rows are quantised once per product: the largest number of each group along k becomes 127. A matrix's numbers u are
// unsigned. They stand for scale * (u - zero), or scale * u + minimum, with a scale (and a minimum) for each column and
// group. A row of integers a with the scale s adds this for each group:
//
//   s * scale * (sum of u a - zero * sum of a),   or   s * scale * sum of u a + minimum * s * sum of a
//
// The inner sums are integers below 2^24. The results of the groups are added in the order of k, in float32, by the
// same operations on every path. So a row's result does not depend on the rows beside it.
//
// Among every eight numbers along k, the numbers at even places come first, in rows as in matrices. So blocks of files
// can be decoded with few instructions.
#pragma once

#include "amx.h"
#include "products.h"

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
#define PREFOLD_INT8
#endif
#if defined(PREFOLD_INT8) && defined(PREFOLD_TILES) && defined(__AMX_INT8__)
#define PREFOLD_INT8_TILES
#endif

namespace prefold {

// A group of numbers in a row.
struct RowGroup {
  float scale;
  float sum;     // the sum of the integers, times the scale
  int32_t zero;  // minus the sum of the integers
};

// Rows as integers, [rows][stride], and their groups, [groups][rows]. sixteens: each group of 32 as two groups of
// sixteen with the same scale, for matrices with groups of sixteen; null if no matrix needs them.
struct Int8Rows {
  const int8_t* numbers;
  int64_t stride;
  const RowGroup *groups, *sixteens;
};

// k rounded up to whole runs of 32 numbers; the rest are zeros.
constexpr int64_t int8_padded(int64_t k) { return (k + 31) / 32 * 32; }

// Quantise rows x [rows, k] in groups of `group` numbers, a multiple of 32. With several digits (few_rows.h) a row
// becomes one row per digit, whose sum it is. The memory belongs to the calling thread, until its next call.
template <class E>
Int8Rows quantise(const E* x, int64_t x_row, int64_t rows, int64_t k, int64_t group, bool sixteens, int threads,
                  int64_t digits = 1);

// Rows, and some groups of a panel. units: see `Int8Form`.
struct Int8Pass {
  const int8_t* x;
  int64_t x_row;
  const RowGroup* groups;  // of the first row; the next group is `groups_row` further on
  int64_t groups_row;
  const uint8_t* units;
  int64_t count;
  const Int8Form* form;
  int64_t ahead;  // bytes to prefetch ahead of the reading position; 0: do not prefetch
};

// Add the products to sums [rows, kPanel], for up to kBlockRows rows.
void add_int8(const Int8Pass& pass, int rows, float* sums);
// The AMX version of add_int8, for 16 to 32 rows, groups of a multiple of 64 numbers, and no minima.
void add_int8_in_tiles(const Int8Pass& pass, int rows, float* sums);

#ifdef PREFOLD_INT8

// For each lane: sums plus four products of unsigned bytes with signed bytes.
PREFOLD_INLINE Part<int32_t> dot(Part<int32_t> sums, Part<uint32_t> u, Part<int32_t> a) {
#ifdef __AVX512F__
  return (Part<int32_t>)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)u, (__m512i)a);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Part<int32_t>)vusdotq_s32((int32x4_t)sums, (uint8x16_t)u, (int8x16_t)a);
#elif defined(__ARM_FEATURE_DOTPROD)
  // Both factors are signed here. The highest bit of u, worth 128, is a factor of its own, -128.
  const Part<int32_t> low = (Part<int32_t>)vdotq_s32((int32x4_t)sums, (int8x16_t)(u & 0x7f7f7f7fu), (int8x16_t)a);
  return low - (Part<int32_t>)vdotq_s32(int32x4_t{}, (int8x16_t)(u & 0x80808080u), (int8x16_t)a);
#else
  return (Part<int32_t>)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)u, (__m256i)a);
#endif
}

constexpr int64_t kInt8Slab = 1024;  // numbers along k
// The larger of a unit of 32 numbers with a scale and a minimum per column, and two units of sixteen with a scale.
constexpr int64_t kMostUnitBytes = std::max(kPanel * (32 + 8), 2 * kPanel * (16 + 4));

// Multiply rows [first, stop), at most kGroupRows, with panel p.
inline void multiply_panel_in_int8(const Product& product, const Int8Rows& x, int64_t p, int64_t first, int64_t stop,
                                   const Store& store) {
  const Int8Form& form = *int8_form(product.blocks[p].type);
  const int64_t rows = stop - first, k = product.steps * 4,
                columns = std::min<int64_t>(kPanel, product.columns - p * kPanel);
#ifdef PREFOLD_INT8_TILES
  const bool in_tiles = rows >= kTile && form.group % 64 == 0 && !form.minima && may_use_tiles();
  const int64_t most_rows = in_tiles ? 2 * kTile : kBlockRows;
#else
  constexpr int64_t most_rows = kBlockRows;
#endif
  const int64_t blocks = (rows + most_rows - 1) / most_rows;
  const auto block_row = [&](int64_t b) {
#ifdef PREFOLD_INT8_TILES
    if (in_tiles) return b * most_rows;
#endif
    return rows * b / blocks;
  };
  constexpr int64_t kFew = 64, kShort = 128, kAhead = 8192;
  const int64_t most = form.decode && rows <= kFew ? kShort : kInt8Slab / form.group * form.group;
  const RowGroup* groups = form.group == 16 ? x.sixteens : x.groups;
  float tiles[kGroupRows * kPanel];
  std::fill(tiles, tiles + rows * kPanel, 0.0f);
  alignas(64) uint8_t room[kInt8Slab / 32 * kMostUnitBytes];
  for (int64_t at = 0; at < k; at += most) {
    const int64_t count = std::min(most, k - at) / form.group;
    const uint8_t* units = room;
    if (form.decode) form.decode(product.blocks[p].data, at, count * form.group, room);
    else units = product.blocks[p].data + at / form.group * form.unit_bytes;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = block_row(b), next = std::min(rows, block_row(b + 1));
      // The first rows prefetch the data after this slab. Few rows prefetch data that is a little ahead.
      const int64_t ahead = form.decode || b > 0 ? 0 : blocks == 1 ? kAhead : count * form.unit_bytes;
      const Int8Pass pass{x.numbers + (first + row) * x.stride + at,
                          x.stride,
                          groups + at / form.group * product.rows + first + row,
                          product.rows,
                          units,
                          count,
                          &form,
                          ahead};
      float* sums = tiles + row * kPanel;
#ifdef PREFOLD_INT8_TILES
      if (in_tiles && next - row >= kTile) add_int8_in_tiles(pass, next - row, sums);
      else
#endif
      {
        for (int64_t done = 0, some; row + done < next; done += some) {
          some = std::min<int64_t>(kBlockRows, next - row - done);
          Int8Pass part = pass;
          part.x += done * x.stride, part.groups += done;
          add_int8(part, some, sums + done * kPanel);
        }
      }
      if (at + most >= k) store(first + row, p * kPanel, next - row, columns, sums);
    }
  }
}

// Multiply x [rows, k], of row stride x_row, with the whole matrix, in parallel.
template <class E>
void multiply_all_in_int8(const E* x, int64_t x_row, const BlockPanel* blocks, int64_t rows, int64_t columns, int64_t k,
                          int threads, const Store& store) {
  Product product{nullptr, 0, nullptr, rows, columns, int8_padded(k) / 4, blocks};
  int64_t group = 0;
  bool sixteens = false;
  for (int64_t p = 0; p < product.panels(); ++p) {
    const int64_t of_panel = int8_form(blocks[p].type)->group;
    group = std::max({group, of_panel, int64_t{32}}), sixteens |= of_panel == 16;
  }
  const Int8Rows quantised = quantise(x, x_row, rows, k, group, sixteens, threads);
  for_panels(product, kBlockRows, kGroupRows, threads, [&](int64_t panel, int64_t first, int64_t stop) {
    multiply_panel_in_int8(product, quantised, panel, first, stop, store);
  }, [&](const Body<>& run) {
#ifdef PREFOLD_INT8_TILES
    const TileScope scope(rows >= kTile && may_use_tiles());
#endif
    run();
  });
}

#endif

}  // namespace prefold
