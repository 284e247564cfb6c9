// Loops over a row of logits, sixteen numbers at a time.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace prefold {

constexpr int64_t kChunk = 1024;  // numbers
constexpr int kSums = 4;          // independent vectors of sums
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Run body(i, vector) for all numbers in [0, count), with i below kSums. Lanes past the end are -inf.
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

// NaN is ignored.
inline float max_of(const float* x, int64_t count) {
  Floats top[kSums];
  for (Floats& t : top) t = Floats(kLowest);
  for_numbers(x, count, [&](int i, const Floats& v) __attribute__((always_inline)) { top[i] = larger(v, top[i]); });
  float lanes[kLanes];
  store(lanes, larger(larger(top[0], top[1]), larger(top[2], top[3])));
  return *std::max_element(lanes, lanes + kLanes);
}

// The largest number and its first index; -inf and 0 if all numbers are -inf or NaN.
struct Largest {
  float value;
  int64_t at;
};

inline Largest find_largest(const float* x, int64_t count) {
  float top = kLowest;
  int64_t at = 0;
  for (int64_t chunk = 0; chunk < count; chunk += kChunk) {
    const float here = max_of(x + chunk, std::min(kChunk, count - chunk));
    if (here > top) top = here, at = chunk;
  }
  while (at < count && x[at] != top) ++at;
  return {top, at < count ? at : 0};
}

}  // namespace prefold
