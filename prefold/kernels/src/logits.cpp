// What is asked of rows of logits: the logarithm of the sum of their exponentials, and the first of the largest.
#include <cmath>

#include "logits.h"
#include "parallel.h"

namespace prefold {
namespace {

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
      const Largest top = find_largest(x, columns);
      largest[r] = top.at;
      sums[r] = log_sum_exp(x, columns, top.value);
    }
  });
}
