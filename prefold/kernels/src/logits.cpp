// What is asked of rows of logits: the logarithm of the sum of their exponentials, the first of the largest, and the
// entropy of the probabilities that they stand for.
#include <cmath>

#include "interface.h"
#include "logits.h"
#include "parallel.h"

namespace prefold {
namespace {

// Where there is nothing to sum: NaN, or the largest number itself.
float not_summed(const float* x, int64_t count, float top) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(x[i])) return x[i];
  }
  return top;
}

float log_sum_exp(const float* x, int64_t count, float top) {
  if (!std::isfinite(top)) return not_summed(x, count, top);
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

struct Spread {
  float log_sum_exp, entropy;
};

// With p = exp(x - top) / sum the entropy is log sum - sum p (x - top); a number of -inf adds nothing to it.
Spread spread_of(const float* x, int64_t count, float top) {
  if (!std::isfinite(top)) return {not_summed(x, count, top), std::nanf("")};
  const Floats scale(1.44269504f), shift(top), lowest(-1e30f);
  Floats sums[kSums], weighted[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = weighted[i] = zeros();
  for_numbers(x, count, [&](int i, const Floats& v) __attribute__((always_inline)) {
    const Floats below = v - shift, share = exp2<true>(below * scale);
    sums[i] += share;
    weighted[i] += share * larger(below, lowest);
  });
  double sum = 0, total = 0;
  for (int i = 0; i < kSums; ++i) sum += sum_of(sums[i]), total += sum_of(weighted[i]);
  return {static_cast<float>(top + std::log(sum)), static_cast<float>(std::log(sum) - total / sum)};
}

}  // namespace
extern "C" void prefold_log_sum_exp(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                    int64_t* largest, int32_t threads) {
  parallel_ranges(rows, columns, threads, [&](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; ++r) {
      const float* x = logits + r * row;
      const Largest top = find_largest(x, columns);
      largest[r] = top.at;
      sums[r] = log_sum_exp(x, columns, top.value);
    }
  });
}

extern "C" void prefold_entropy(const float* logits, int64_t rows, int64_t columns, int64_t row, float* sums,
                                int64_t* largest, float* entropies, int32_t threads) {
  parallel_ranges(rows, columns, threads, [&](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; ++r) {
      const float* x = logits + r * row;
      const Largest top = find_largest(x, columns);
      const Spread spread = spread_of(x, columns, top.value);
      largest[r] = top.at, sums[r] = spread.log_sum_exp, entropies[r] = spread.entropy;
    }
  });
}

}  // namespace prefold
