// Statistics of rows of logits: log-sum-exp, the largest numbers, the entropy of the probabilities, and ranks.
#include "logits.h"

#include <cmath>

#include "interface.h"
#include "parallel.h"

namespace prefold {
namespace {

constexpr int64_t kTopChunk = 256;  // numbers to compare at once with the smallest of the largest

// The log-sum-exp if the largest number is not finite: NaN if any number is NaN, else the largest number.
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

// With p = exp(x - top) / sum, the entropy is log(sum) - sum of p (x - top). A logit of -inf adds nothing.
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

// NaN counts as the lowest number.
float key(float x) { return std::isnan(x) ? kLowest : x; }

// The largest numbers of a row so far, in descending order: values, places [count]. Ties go to the lower place.
struct Top {
  const float* x;
  int64_t count;
  float* values;
  int64_t* places;
  int64_t held = 0;

  // Places come in ascending order, so a number is inserted after its equals.
  void take(int64_t place) {
    const float own = key(x[place]);
    if (held == count) {
      if (!(own > key(values[count - 1]))) return;
    } else {
      ++held;
    }
    int64_t at = held - 1;
    for (; at > 0 && own > key(values[at - 1]); --at) values[at] = values[at - 1], places[at] = places[at - 1];
    values[at] = x[place], places[at] = place;
  }
};

// Skip chunks in which no number exceeds the smallest number held.
void find_top(const float* x, int64_t columns, int64_t count, float* values, int64_t* places) {
  Top top{x, count, values, places};
  int64_t at = 0;
  for (; at < count; ++at) top.take(at);
  while (count > 0 && at < columns) {
    const int64_t stop = std::min(columns, at + kTopChunk);
    if (max_of(x + at, stop - at) > key(values[count - 1])) {
      for (; at < stop; ++at) top.take(at);
    }
    at = stop;
  }
}

int64_t count_larger(const float* x, int64_t columns, float value) {
  int64_t total = 0;
  for (int64_t first = 0; first < columns; first += kChunk) {
    int32_t here = 0;  // as wide as a float, so that the loop vectorises
    const int64_t stop = std::min(columns, first + kChunk);
    for (int64_t i = first; i < stop; ++i) here += x[i] > value;
    total += here;
  }
  return total;
}

}  // namespace
extern "C" void prefold_largest(const float* logits, int64_t rows, int64_t columns, int64_t row, int64_t count,
                                float* values, int64_t* places, int32_t threads) {
  parallel_ranges(rows, columns, threads, [&](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; ++r) {
      find_top(logits + r * row, columns, count, values + r * count, places + r * count);
    }
  });
}

extern "C" void prefold_count_larger(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                                     const float* values, int64_t numbers, int64_t* counts, int32_t threads) {
  parallel_ranges(numbers, columns, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) counts[i] = count_larger(logits + rows[i] * stride, columns, values[i]);
  });
}

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
