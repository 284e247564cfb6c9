// What is asked of rows of logits: the logarithm of the sum of their exponentials, and the first of the largest.
#include <cmath>
#include <limits>

#include "parallel.h"
#include "vectors.h"

namespace prefold {
namespace {

constexpr int64_t kChunk = 1024;   // numbers
constexpr int kSums = 4;           // vectors that are summed side by side
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// body(which of kSums, numbers) for [0, count) in vectors; past the end the lanes are -inf.
template <class Body>
PREFOLD_INLINE void for_numbers(const float* x, int64_t count, const Body& body) {
  int64_t d = 0;
  for (; d + kSums * kLanes <= count; d += kSums * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) body(i, load(x + d + i * kLanes));
  }
  for (; d < count; d += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - d);
    body(0, choose((1u << some) - 1, load_some(x + d, some), Floats(kLowest)));
  }
}

// NaN is not the largest of anything.
float max_of(const float* x, int64_t count) {
  Floats top[kSums];
  for (Floats& t : top) t = Floats(kLowest);
  for_numbers(x, count, [&](int i, const Floats& v) __attribute__((always_inline)) { top[i] = larger(v, top[i]); });
  float lanes[kLanes];
  store(lanes, larger(larger(top[0], top[1]), larger(top[2], top[3])));
  return *std::max_element(lanes, lanes + kLanes);
}

float log_sum_exp(const float* x, int64_t count, float top) {
  if (!std::isfinite(top)) {
    for (int64_t i = 0; i < count; ++i) {
      if (std::isnan(x[i])) return x[i];
    }
    return top;
  }
  const Floats scale(1.44269504f), shift(top);  // exp(x) = 2^(x log2 e)
  Floats sums[kSums];
  for (Floats& s : sums) s = zeros();
  for_numbers(x, count, [&](int i, const Floats& v) __attribute__((always_inline)) {
    sums[i] += exp2<true>((v - shift) * scale);
  });
  double sum = 0;
  for (const Floats& s : sums) sum += sum_of(s);
  return static_cast<float>(top + std::log(sum));
}

}  // namespace
}  // namespace prefold

// logits [rows, columns] with row stride `row` (in elements) -> sums [rows], and the place of the largest [rows].
extern "C" void prefold_log_sum_exp(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                    int64_t* largest, int32_t threads) {
  using namespace prefold;
  parallel_ranges(rows, columns, threads, [&](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; ++r) {
      const float* x = logits + r * row;
      float top = kLowest;
      int64_t at = 0;
      for (int64_t chunk = 0; chunk < columns; chunk += kChunk) {
        const float here = max_of(x + chunk, std::min(kChunk, columns - chunk));
        if (here > top) top = here, at = chunk;
      }
      while (at < columns && x[at] != top) ++at;
      largest[r] = at < columns ? at : 0;
      sums[r] = log_sum_exp(x, columns, top);
    }
  });
}
