// The LM head: bfloat16 rows times a packed bfloat16 matrix, summed and kept in float32.
//
// The matrix comes in panels of 64 columns, [columns / 64][k / 2][64] pairs of bfloat16 numbers, zeros past
// the last column: a panel is one stream of memory, and fits into the second-level cache. A block of up to
// six rows goes through a panel with its sums in registers. With few rows the time is that of reading the
// matrix; with more, each block of rows fetches a part of the next panel, so that reading costs nothing.
#include <new>
#include <vector>

#include "formats.h"
#include "parallel.h"

namespace prefold {
namespace {

constexpr int kPanel = 64;     // columns
constexpr int kBlockRows = 6;  // with a block's vectors, three quarters of the registers
constexpr int kBlockParts = kRegisters / 8;
constexpr int kPasses = kPanel / (kBlockParts * kPartLanes);
constexpr int kLine = 64;  // bytes
// A thread takes so many panels at a time that it comes back some sixteen times: another program may take
// its core away.
constexpr int64_t kTurns = 16;

using Format = InBf16;
using Stored = Format::Stored;
using Lane = Format::Lane;
constexpr int kHalves = 2 / Format::kWidth;  // of a pair: how many times it is multiplied

// A number of each pair, or the pairs themselves.
PREFOLD_INLINE Part<Lane> half_of(Part<uint32_t> pairs, int half) {
  if constexpr (kHalves == 1) return (Part<Lane>)pairs;
  return (Part<Lane>)(half ? pairs & 0xffff0000u : pairs << 16);
}

// out [ROWS, kPanel] = x times a panel; x has `steps` * kHalves Stored a row. On the way fetches LINES cache
// lines a step from `ahead` on.
template <int ROWS, int LINES>
PREFOLD_APART void multiply(const Stored* x, int64_t x_row, const uint32_t* panel, int64_t steps, const char* ahead,
                            float* out, int64_t out_row) {
  for (int pass = 0; pass < kPasses; ++pass) {
    const uint32_t* weights = panel + pass * kBlockParts * kPartLanes;
    Part<float> acc[ROWS][kBlockParts] = {};
    for (int64_t s = 0; s < steps; ++s, weights += kPanel) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        Part<Lane> w[kBlockParts];
#pragma GCC unroll 4
        for (int i = 0; i < kBlockParts; ++i) {
          Part<uint32_t> pairs;
          memcpy(&pairs, weights + i * kPartLanes, sizeof pairs);
          w[i] = half_of(pairs, half);
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          Stored number;
          memcpy(&number, x + r * x_row + s * kHalves + half, sizeof number);
#pragma GCC unroll 4
          for (int i = 0; i < kBlockParts; ++i) acc[r][i] = Format::mul_add(acc[r][i], w[i], number);
        }
      }
      if (pass == 0) {
#pragma GCC unroll 4
        for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + (s * LINES + i) * kLine, 0, 2);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      memcpy(out + r * out_row + pass * kBlockParts * kPartLanes, acc[r], sizeof acc[r]);
    }
  }
}

using Multiply = decltype(&multiply<1, 0>);

template <int LINES>
constexpr Multiply kMultiply[kBlockRows] = {multiply<1, LINES>, multiply<2, LINES>, multiply<3, LINES>,
                                            multiply<4, LINES>, multiply<5, LINES>, multiply<6, LINES>};

struct Product {
  const Stored* x;
  int64_t x_row;
  const uint32_t* packed;
  float* out;
  int64_t rows, columns, steps;

  // All rows times panel p, in blocks as equal as can be.
  void run(int64_t p) const {
    const uint32_t* panel = packed + p * steps * kPanel;
    const int64_t first = p * kPanel, count = std::min<int64_t>(kPanel, columns - first);
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int64_t lines = kPanel * sizeof(uint32_t) / kLine;  // of a step
    const auto& functions = blocks == 1 ? kMultiply<0> : blocks < lines ? kMultiply<2> : kMultiply<1>;
    const int64_t fetched = blocks == 1 ? 0 : blocks < lines ? 2 : 1;
    const bool last = first + kPanel >= columns;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = rows * b / blocks, stop = rows * (b + 1) / blocks;
      const bool fetch = !last && (b + 1) * fetched <= lines;
      const Multiply function = (fetch ? functions : kMultiply<0>)[stop - row - 1];
      const char* ahead = reinterpret_cast<const char*>(panel + steps * kPanel) + b * fetched * steps * kLine;
      float* to = out + row * columns + first;
      if (count == kPanel) {
        function(x + row * x_row, x_row, panel, steps, ahead, to, columns);
      } else {
        float some[kBlockRows * kPanel];
        function(x + row * x_row, x_row, panel, steps, ahead, some, kPanel);
        for (int64_t r = 0; r < stop - row; ++r) memcpy(to + r * columns, some + r * kPanel, count * sizeof(float));
      }
    }
  }
};

}  // namespace
}  // namespace prefold

// x [rows, k] bfloat16 with row stride x_row (in elements), packed as above -> out float32 [rows, columns]. k is
// even. 0, or 1 where memory is short.
extern "C" int32_t prefold_head(const prefold::Bf16* x, int64_t x_row, const uint32_t* packed, float* out, int64_t rows,
                                int64_t columns, int64_t k, int32_t threads) {
  using namespace prefold;
  if (rows == 0 || columns == 0) return 0;
  Product product{reinterpret_cast<const Stored*>(x), x_row / 2, packed, out, rows, columns, k / 2};
  std::vector<float> widened;
  if constexpr (kHalves == 2) {
    try {
      widened.resize(rows * k);
    } catch (const std::bad_alloc&) {
      return 1;
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; i += kLanes) store_some(&widened[r * k + i], load_some(x + r * x_row + i, k - i), k - i);
    }
    product.x = reinterpret_cast<const Stored*>(widened.data());
    product.x_row = k;
  }
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const int64_t products = rows * columns * k;
  const int workers = static_cast<int>(std::min<int64_t>(threads, 1 + products / kProductsPerThread));
  const int64_t turns = workers == 1 ? 1 : std::min<int64_t>(panels, workers * kTurns);
  parallel_tasks(turns, workers, [&](int64_t turn) {
    for (int64_t p = panels * turn / turns; p < panels * (turn + 1) / turns; ++p) product.run(p);
  });
  return 0;
}
