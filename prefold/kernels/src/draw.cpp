// Drawing a token from a row of logits: the one whose logit over the temperature plus Gumbel noise is the largest.
//
// A token's noise is -log(-log(1 - v)), where v in (0, 1) is made of a hash of the token and the draw's key. What is
// compared is computed in double, operation by operation as worker/noise.py and worker/draw_triton.py do, so that all
// three draw alike. Logarithms of a whole vocabulary would take longer than everything else here; but -log(1 - v) is
// at least v, which rules out nearly every token by one comparison of floats with the best token so far.
#include <cmath>

#include "interface.h"
#include "logits.h"
#include "parallel.h"

namespace prefold {
namespace {

constexpr int kVectors = 8;  // worked on between two looks at whether a token is near
constexpr int kBlock = kVectors * kLanes;
// Floats are compared with this much room for their rounding.
constexpr double kMargin = 1.001;

// worker/noise.py: `hash_ids`. T is a number or a vector of numbers.
template <class T>
PREFOLD_INLINE T hash_id(T x, uint32_t low, uint32_t high) {
  x = x ^ low;
  x = (x ^ (x >> 17)) * 0xed5ad4bbu;
  x = (x ^ (x >> 11) ^ high) * 0xac4c1b51u;
  x = (x ^ (x >> 15)) * 0x31848babu;
  return x ^ (x >> 14);
}

// The largest y + noise so far. `reach`: a token with weight w = exp(y) can be larger only where the upper 24 bits of
// its hash are at most reach * w.
struct Best {
  const float* x;
  float top, inverse;
  uint32_t low, high;
  double score = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  float reach = 0;

  void consider(int64_t id) {
    const float y = (x[id] - top) * inverse;
    const double v = (hash_id(static_cast<uint32_t>(id), low, high) + 0.5) * 0x1p-32;
    const double score_here = y - std::log(-std::log(1 - v));
    if (score_here > score || (score_here == score && id < token)) {
      score = score_here, token = id;
      reach = static_cast<float>(kMargin * 0x1p24 * std::exp(-score));
    }
  }
};

// How far the tokens [first, first + 16) are within reach: not below 0 where they are.
PREFOLD_INLINE Floats nearness(const Best& best, const Floats& x, int64_t first) {
  const Floats weight = exp2<true>((x - Floats(best.top)) * Floats(best.inverse * 1.44269504f));
  return Floats::make([&](int p) {
    const Part<uint32_t> ids = (Part<uint32_t>)lane_numbers(p) + static_cast<uint32_t>(first);
    const Part<uint32_t> hash = hash_id(ids, best.low, best.high) >> 8;
    return weight.part[p] * best.reach - __builtin_convertvector((Part<int32_t>)hash, Part<float>);
  });
}

int64_t draw(const float* x, int64_t columns, float inverse, uint64_t key) {
  const Largest top = find_largest(x, columns);
  if (!std::isfinite(top.value)) return -1;
  Best best{x, top.value, inverse, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  best.consider(top.at);
  float near[kBlock];
  for (int64_t first = 0; first < columns; first += kBlock) {
    Floats most(kLowest);
    const int64_t some = std::min<int64_t>(kBlock, columns - first);
    for (int64_t d = 0; d < some; d += kLanes) {
      const Floats here = nearness(best, load_some(x + first + d, some - d), first + d);
      most = larger(here, most);
      store(near + d, here);
    }
    if (max_of(most) < 0) continue;
    for (int64_t d = 0; d < some; ++d) {
      if (near[d] >= 0) best.consider(first + d);
    }
  }
  return best.token;
}

}  // namespace
extern "C" void prefold_draw(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                             const float* inverses, const uint64_t* keys, int64_t draws, int64_t* tokens,
                             int32_t threads) {
  parallel_ranges(draws, columns, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) tokens[i] = draw(logits + rows[i] * stride, columns, inverses[i], keys[i]);
  });
}

}  // namespace prefold
