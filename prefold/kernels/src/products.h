// Rows times a packed matrix, summed in float32 in registers.
//
// The matrix comes in panels of 32 columns: [columns / 32][steps][32] words, with zeros past the last column. A word is
// a float, or two bfloat16 numbers that are neighbours along k. A panel is one stream of memory, cut into slabs that
// fit into the second-level cache. A block of up to twelve rows goes through a slab in one or more passes. Each pass
// prefetches an equal part of the next slab, so that reading the matrix costs nothing while multiplying takes longer.
// With few rows, reading the matrix takes all of the time.
//
// Each row's sums run in the order of k. So a row's result does not depend on the rows beside it, nor on the number of
// threads.
#pragma once

#include <array>
#include <utility>

#include "blocks.h"
#include "formats.h"
#include "parallel.h"

namespace prefold {

// With eight lanes and sixteen registers, six rows by two vectors need fewer loads than twelve rows by one vector.
constexpr int kBlockRows = kPartBytes == 32 ? 6 : 12;
constexpr int kBlockSums = 12 * (kRegisters / 16);  // vectors of sums: three quarters of the registers

// Vectors of a panel's columns that are multiplied with `rows` rows at once: as many as have registers for their sums.
// The fewer passes the rows make through a panel, the faster its memory is read.
constexpr int block_parts(int rows) {
  int parts = kPanel / kPartLanes;
  while (parts > 1 && rows * parts > kBlockSums) parts /= 2;
  return parts;
}

// The number of passes that `rows` rows make through a panel.
constexpr int block_passes(int rows) { return kPanel / kPartLanes / block_parts(rows); }

constexpr int kLine = 64;                                  // bytes
constexpr int64_t kStepBytes = kPanel * sizeof(uint32_t);  // of a panel
// With at most so many rows, a product takes the time of reading the matrix.
constexpr int kFewRows = 5;
// Rows that go through a panel in one pass and do little more than read it. The hardware prefetches such a simple
// stream by itself.
constexpr int kOnePassRows = kPartBytes == 32 ? 3 : kFewRows;
// Rows that go through the matrix together. They stay in the second-level cache.
constexpr int kGroupRows = 384;
constexpr int64_t kSlabSteps = 1024;

// A number format, and the order of its numbers in a word. kParts: numbers of a word that are multiplied separately.
struct FloatWords : InFloat32<float> {
  static constexpr int kParts = 1;
  static PREFOLD_INLINE Part<Lane> lanes(Part<uint32_t> words, int) { return (Part<Lane>)words; }
};

// bfloat16 words for rows of float32.
struct WidenedWords : InFloat32<Bf16> {
  static constexpr int kParts = 2;
  static PREFOLD_INLINE Part<Lane> lanes(Part<uint32_t> words, int part) {
    return (Part<Lane>)(part ? words & 0xffff0000u : words << 16);
  }
};

#ifdef __AVX512BF16__
struct Bf16Words : InBf16 {
  static constexpr int kParts = 1;
  static PREFOLD_INLINE Part<Lane> lanes(Part<uint32_t> words, int) { return (Part<Lane>)words; }
};
#else
using Bf16Words = WidenedWords;
#endif

// Keep x in a register. Without this, GCC with AVX2 reads it from memory again for each product, and AVX2 can read only
// two vectors per cycle, as many as it can multiply.
template <class Vector>
PREFOLD_INLINE void keep_in_register(Vector& x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(x));
#endif
}

// Set tile [ROWS, kPanel] to ROWS rows times a slab, plus the old tile if `more`. A row of x has `steps` * kParts
// numbers of type Stored; rows are x_row bytes apart. Each step of a pass prefetches LINES cache lines from `ahead` on,
// and then moves `ahead` by `stride` bytes.
template <class Format, int ROWS, int LINES>
PREFOLD_APART void multiply(const char* x, int64_t x_row, const uint32_t* slab, int64_t steps, const char* ahead,
                            int64_t stride, float* tile, bool more) {
  using Lane = typename Format::Lane;
  using Stored = typename Format::Stored;
  constexpr int kBlockParts = block_parts(ROWS), kPasses = kPanel / (kBlockParts * kPartLanes);
  for (int pass = 0; pass < kPasses; ++pass) {
    const uint32_t* words = slab + pass * kBlockParts * kPartLanes;
    Part<float> acc[ROWS][kBlockParts] = {};
    if (more) {
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        memcpy(acc[r], tile + r * kPanel + pass * kBlockParts * kPartLanes, sizeof acc[r]);
      }
    }
    // One pointer per three rows, so that all addresses fit into the registers.
    constexpr int kBases = (ROWS + 2) / 3;
    const char* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = x + 3 * i * x_row;
    for (int64_t s = 0; s < steps; ++s, words += kPanel) {
#pragma GCC unroll 2
      for (int part = 0; part < Format::kParts; ++part) {
        Part<Lane> w[kBlockParts];
#pragma GCC unroll 8
        for (int i = 0; i < kBlockParts; ++i) {
          Part<uint32_t> word;
          memcpy(&word, words + i * kPartLanes, sizeof word);
          w[i] = Format::lanes(word, part);
          if constexpr (ROWS > kBlockParts) keep_in_register(w[i]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          Stored number;
          memcpy(&number, base[r / 3] + r % 3 * x_row + part * sizeof(Stored), sizeof number);
#pragma GCC unroll 8
          for (int i = 0; i < kBlockParts; ++i) acc[r][i] = Format::mul_add(acc[r][i], w[i], number);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kBases; ++i) base[i] += Format::kParts * sizeof(Stored);
#pragma GCC unroll 2
      for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + i * kLine, 0, 2);
      if constexpr (LINES > 0) ahead += stride;
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      memcpy(tile + r * kPanel + pass * kBlockParts * kPartLanes, acc[r], sizeof acc[r]);
    }
  }
}

template <class Format>
using Multiply = decltype(&multiply<Format, 1, 0>);

template <class Format, int LINES, int... ROWS>
constexpr std::array<Multiply<Format>, sizeof...(ROWS)> multiply_rows(std::integer_sequence<int, ROWS...>) {
  return {multiply<Format, ROWS + 1, LINES>...};
}

// The functions by the number of rows, minus one.
template <class Format, int LINES>
constexpr auto kMultiply = multiply_rows<Format, LINES>(std::make_integer_sequence<int, kBlockRows>());

// Rows and a packed matrix. The matrix is in words, or in blocks if `blocks` is not null. as_words: the blocks are
// bfloat16, which need no decoding. x: as for `multiply`.
struct Product {
  const char* x;
  int64_t x_row;
  const uint32_t* packed;
  int64_t rows, columns, steps;
  const BlockPanel* blocks = nullptr;
  bool as_words = false;

  bool is_decoded() const { return blocks && !as_words; }
  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
};

// Memory for the words of one decoded slab.
struct alignas(64) Decoded {
  uint32_t words[kSlabSteps * kPanel];
};

// Return steps [first, first + steps) of panel p. Blocks are decoded into `room`.
template <class Format>
const uint32_t* slab_of(const Product& product, int64_t p, int64_t first, int64_t steps, uint32_t* room) {
  if (!product.blocks) return product.packed + (p * product.steps + first) * kPanel;
  if (product.as_words) return reinterpret_cast<const uint32_t*>(product.blocks[p].data) + first * kPanel;
  constexpr int64_t kNumbers = sizeof(uint32_t) / sizeof(typename Format::Element);  // per step
  decode(product.blocks[p], first * kNumbers, steps * kNumbers, kNumbers == 2, room);
  return room;
}

// The number of steps in a slab for `rows` rows. If few rows use a decoded slab, it is short, so that decoding the next
// slab starts while this one is still multiplied.
template <class Format>
int64_t slab_steps(const Product& product, int64_t rows) {
  constexpr int64_t kFew = 24, kShort = 128, kNumbers = sizeof(uint32_t) / sizeof(typename Format::Element);
  return product.is_decoded() && rows <= kFew ? kShort / kNumbers : kSlabSteps;
}

// store(row, column, number of rows, number of columns, sums [rows, kPanel]), called for each block of a product.
using Store = Body<int64_t, int64_t, int64_t, int64_t, float*>;

// Multiply rows [first, stop), at most kGroupRows, with panel p, in blocks of about equal size.
template <class Format>
void multiply_panel(const Product& product, int64_t p, int64_t first, int64_t stop, const Store& store) {
  const int64_t rows = stop - first, blocks = (rows + kBlockRows - 1) / kBlockRows;
  const auto block_row = [&](int64_t b) { return rows * b / blocks; };
  const int64_t columns = std::min<int64_t>(kPanel, product.columns - p * kPanel);
  int64_t passes = 0;
  for (int64_t b = 0; b < blocks; ++b) passes += block_passes(block_row(b + 1) - block_row(b));
  const int64_t stride = kStepBytes / passes;
  float tiles[kGroupRows * kPanel];
  Decoded room;
  const int64_t most = slab_steps<Format>(product, rows);
  for (int64_t step = 0; step < product.steps; step += most) {
    const int64_t steps = std::min(most, product.steps - step);
    const uint32_t* slab = slab_of<Format>(product, p, step, steps, room.words);
    const char* x = product.x + first * product.x_row + step * Format::kParts * sizeof(typename Format::Stored);
    const bool done = step + steps == product.steps;
    const bool fetch = rows > kOnePassRows && !product.is_decoded() && !(done && p + 1 == product.panels());
    const char* ahead = reinterpret_cast<const char*>(slab + steps * kPanel);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = block_row(b);
      const auto& functions = !fetch ? kMultiply<Format, 0> : passes > 1 ? kMultiply<Format, 1> : kMultiply<Format, 2>;
      const int64_t count = block_row(b + 1) - row;
      // If there is only one slab, all blocks reuse the same memory, which stays in the cache.
      float* tile = tiles + (product.steps > most ? row * kPanel : 0);
      functions[count - 1](x + row * product.x_row, product.x_row, slab, steps, ahead, stride, tile, step > 0);
      ahead += stride * steps * block_passes(count);
      if (done) store(first + row, p * kPanel, count, columns, tile);
    }
  }
}

// Run body(panel, first row, stop row) over a whole product, in parallel. Each call has at most `group_rows` rows, and
// about `block_rows` rows or more if the product has as many. around: see `parallel_shares`.
inline void for_panels(const Product& product, int block_rows, int group_rows, int threads,
                       const Body<int64_t, int64_t, int64_t>& body, const Around& around) {
  const int64_t panels = product.panels();
  // Reading a word takes as long as multiplying it with kFewRows rows.
  const int64_t products = std::max<int64_t>(product.rows, kFewRows) * product.columns * product.steps;
  const int workers = static_cast<int>(std::min<int64_t>(threads, 1 + products / kProductsPerThread));
  const int64_t wanted = std::max((product.rows + group_rows - 1) / group_rows, (4 * workers + panels - 1) / panels);
  const int64_t groups = std::min(wanted, (product.rows + block_rows - 1) / block_rows);
  parallel_shares(groups * panels, workers, [&](int64_t i) {
    const int64_t group = i / panels;
    body(i % panels, product.rows * group / groups, product.rows * (group + 1) / groups);
  }, around);
}

// Multiply the whole product, in parallel.
template <class Format>
void multiply_all(const Product& product, int threads, const Store& store) {
  for_panels(product, kBlockRows, kGroupRows, threads, [&](int64_t panel, int64_t first, int64_t stop) {
    multiply_panel<Format>(product, panel, first, stop, store);
  }, [](const Body<>& run) { run(); });
}

}  // namespace prefold
