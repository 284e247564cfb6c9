// Draws a token from a row of logits: the token with the largest logit / temperature + Gumbel noise.
//
// A token's noise is -log(-log(1 - v)). v in (0, 1) comes from a hash of the token and the draw's key. The compared
// numbers are computed in double, with the same operations as in engine/sampling.py and worker/torch/draw_triton.py, so
// all three draw the same tokens. With filters they draw as the functions of worker/sampler.py define. Logarithms of a
// whole vocabulary would take longer than all other work here. But -log(1 - v) is at least v, so one float comparison
// with the best token so far rules out nearly every token.
//
// Filters keep the tokens whose weight is at least some threshold. A weight is exp(logit / temperature), relative to
// the largest. Rows are not sorted: the threshold is selected among candidates, which the largest weights of blocks
// help to find.
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <new>

#include "interface.h"
#include "logits.h"
#include "parallel.h"

namespace prefold {
namespace {

constexpr int kVectors = 8;  // per check whether any token is near
constexpr int kBlock = kVectors * kLanes;
// The factor by which float comparisons allow for rounding.
constexpr double kMargin = 1.001;
constexpr int kFilters = 4;  // numbers in the filters of one draw
// The number of candidates to try first for top_p; fewer if there are fewer blocks.
constexpr int64_t kCandidates = 256;

// `hash_ids` of engine/sampling.py. T is a number or a vector of numbers.
template <class T>
PREFOLD_INLINE T hash_id(T x, uint32_t low, uint32_t high) {
  x = x ^ low;
  x = (x ^ (x >> 17)) * 0xed5ad4bbu;
  x = (x ^ (x >> 11) ^ high) * 0xac4c1b51u;
  x = (x ^ (x >> 15)) * 0x31848babu;
  return x ^ (x >> 14);
}

// The largest y + noise so far. A token of weight w = exp(y) can only exceed it if the upper 24 bits of the token's
// hash are at most reach * w.
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

PREFOLD_INLINE Floats weight_of(const Best& best, const Floats& x) {
  return exp2<true>((x - Floats(best.top)) * Floats(best.inverse * 1.44269504f));
}

// Return a number for each of the tokens [first, first + 16). It is at least 0 if the token is within reach.
PREFOLD_INLINE Floats nearness(const Best& best, const Floats& weight, int64_t first) {
  return Floats::make([&](int p) {
    const Part<uint32_t> ids = (Part<uint32_t>)lane_numbers(p) + static_cast<uint32_t>(first);
    const Part<uint32_t> hash = hash_id(ids, best.low, best.high) >> 8;
    return weight.part[p] * best.reach - __builtin_convertvector((Part<int32_t>)hash, Part<float>);
  });
}

// Consider the tokens of the block [first, first + some) that are within reach and satisfy may_be(token).
// near_at(token, count) returns the nearness of the sixteen tokens from `token` on.
template <class Near, class May>
PREFOLD_INLINE void consider_block(Best& best, int64_t first, int64_t some, const Near& near_at, const May& may_be) {
  float near[kBlock];
  Floats most(kLowest);
  for (int64_t d = 0; d < some; d += kLanes) {
    const Floats here = near_at(first + d, some - d);
    most = larger(here, most);
    store(near + d, here);
  }
  if (max_of(most) < 0) return;
  for (int64_t d = 0; d < some; ++d) {
    if (near[d] >= 0 && may_be(first + d)) best.consider(first + d);
  }
}

struct Filters {
  double top_n_sigma, min_p;
  int64_t top_k;
  double top_p;

  Filters(const double* of, int64_t columns)
      : top_n_sigma(of[0]), min_p(of[1]), top_k(of[2] < columns ? static_cast<int64_t>(of[2]) : 0), top_p(of[3]) {}
  bool leave_all() const { return top_n_sigma <= 0 && min_p <= 0 && top_k <= 0 && top_p >= 1; }
};

// Memory for one row: weights [columns], padded to whole blocks, the largest of each block, and candidates [columns].
struct Workspace {
  const int64_t columns, blocks;
  const std::unique_ptr<float[]> memory;
  float *weights, *tops, *candidates;

  explicit Workspace(int64_t columns)
      : columns(columns),
        blocks((columns + kBlock - 1) / kBlock),
        memory(new(std::nothrow) float[2 * blocks * kBlock + blocks]) {
    weights = memory.get(), candidates = weights + blocks * kBlock, tops = candidates + blocks * kBlock;
  }

  // Compute weights and tops. Return the sum of the weights, which is NaN if any number is.
  double weigh(const Best& best) const {
    double total = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * kBlock, some = std::min<int64_t>(kBlock, columns - first);
      Floats most = zeros(), sum = zeros();
      for (int64_t d = 0; d < some; d += kLanes) {
        const int64_t here = std::min<int64_t>(kLanes, some - d);
        const Floats all = weight_of(best, load_some(best.x + first + d, here));
        const Floats weight = choose((1u << here) - 1, all, zeros());
        store(weights + first + d, weight);
        most = larger(weight, most), sum += weight;
      }
      tops[b] = max_of(most), total += sum_of(sum);
    }
    return total;
  }

  // Set candidates to the weights that are at least `bound`. Return how many there are.
  int64_t gather(float bound) const {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      if (tops[b] < bound) continue;
      for (int64_t i = b * kBlock; i < std::min(columns, (b + 1) * kBlock); ++i) {
        candidates[count] = weights[i];
        count += weights[i] >= bound;
      }
    }
    return count;
  }

  // Return a bound that at least `count` weights reach.
  float below_top(int64_t count) const {
    if (count > blocks) return 0;
    std::copy(tops, tops + blocks, candidates);
    std::nth_element(candidates, candidates + count - 1, candidates + blocks, std::greater<float>());
    return candidates[count - 1];
  }
};

double sum_of(const float* x, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += x[i];
  return total;
}

// Return the largest number t in x [count] for which all numbers >= t sum up to at least `target`. Return the smallest
// number if there is no such t. Reorders x.
float heaviest(float* x, int64_t count, double target) {
  float *first = x, *last = x + count;
  double above = 0;
  while (true) {
    const float a = *first, b = first[(last - first) / 2], c = last[-1];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    float *larger_end = first, *less = last;
    double larger_sum = 0;
    for (float* at = first; at < less;) {
      if (*at > pivot) {
        larger_sum += *at;
        std::swap(*at++, *larger_end++);
      } else if (*at < pivot) {
        std::swap(*at, *--less);
      } else {
        ++at;
      }
    }
    const double with_equals = above + larger_sum + static_cast<double>(pivot) * (less - larger_end);
    if (larger_end > first && above + larger_sum >= target) {
      last = larger_end;
    } else if (less == last || with_equals >= target) {
      return pivot;
    } else {
      above = with_equals, first = less;
    }
  }
}

// The standard deviation of (logit - largest logit) / temperature over the tokens that are not forbidden (-inf).
double deviation(const Best& best, int64_t columns) {
  constexpr int kDoubles = 8;
  double mean = 0, found = 0;
  for (int round = 0; round < 2; ++round) {
    double sums[kDoubles] = {}, counts[kDoubles] = {};
    for (int64_t first = 0; first < columns; first += kDoubles) {
      for (int64_t i = 0; i < std::min<int64_t>(kDoubles, columns - first); ++i) {
        const float y = (best.x[first + i] - best.top) * best.inverse;
        const bool is_finite = y > kLowest;
        const double off = y - mean;
        sums[i] += is_finite ? (round ? off * off : off) : 0.0;
        counts[i] += is_finite;
      }
    }
    for (int i = 1; i < kDoubles; ++i) sums[0] += sums[i], counts[0] += counts[i];
    (round ? found : mean) = sums[0] / counts[0];
  }
  return std::sqrt(found);
}

// The smallest weight that passes the filters. total: the sum of all weights.
float least_weight(const Best& best, const Filters& filters, const Workspace& work, double total) {
  const double sigmas = filters.top_n_sigma;
  const double in_sigmas = sigmas > 0 ? std::exp(-sigmas * deviation(best, work.columns)) : 0.0;
  float least = static_cast<float>(std::max(filters.min_p, in_sigmas));
  if (filters.top_k <= 0 && filters.top_p >= 1) return least;
  const bool is_whole = filters.top_k <= 0 && least <= 0;  // whether top_p is over all tokens
  int64_t count = 0;
  if (is_whole) {
    // All tokens below `lowest` together have less than half of the weight that top_p may drop.
    const float lowest = static_cast<float>((1 - filters.top_p) * total / (2 * work.columns));
    float bound = std::max(lowest, work.below_top(std::min(kCandidates, work.blocks)));
    while (true) {
      count = work.gather(bound);
      if (bound <= lowest || sum_of(work.candidates, count) >= filters.top_p * total) break;
      bound = std::max(bound / 8, lowest);
    }
  } else {
    count = work.gather(filters.top_k > 0 ? std::max(least, work.below_top(filters.top_k)) : least);
  }
  float* some = work.candidates;
  if (filters.top_k > 0 && count >= filters.top_k) {
    std::nth_element(some, some + filters.top_k - 1, some + count, std::greater<float>());
    least = std::max(least, some[filters.top_k - 1]);
    count = std::partition(some, some + count, [least](float weight) { return weight >= least; }) - some;
  }
  if (filters.top_p >= 1) return least;
  return heaviest(some, count, filters.top_p * (is_whole ? total : sum_of(some, count)));
}

Best start(const float* x, const Largest& top, float inverse, uint64_t key) {
  Best best{x, top.value, inverse, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  best.consider(top.at);
  return best;
}

int64_t draw(const float* x, int64_t columns, float inverse, uint64_t key) {
  const Largest top = find_largest(x, columns);
  if (!std::isfinite(top.value)) return -1;
  Best best = start(x, top, inverse, key);
  for (int64_t first = 0; first < columns; first += kBlock) {
    const auto near_at = [&](int64_t at, int64_t some) __attribute__((always_inline)) {
      return nearness(best, weight_of(best, load_some(x + at, some)), at);
    };
    consider_block(best, first, std::min<int64_t>(kBlock, columns - first), near_at, [](int64_t) { return true; });
  }
  return best.token;
}

int64_t draw_filtered(const float* x, float inverse, uint64_t key, const Filters& filters, const Workspace& work) {
  const Largest top = find_largest(x, work.columns);
  if (!std::isfinite(top.value)) return -1;
  Best best = start(x, top, inverse, key);
  const double total = work.weigh(best);
  if (std::isnan(total)) return -1;
  const float least = least_weight(best, filters, work, total);
  for (int64_t b = 0; b < work.blocks; ++b) {
    if (work.tops[b] < least) continue;
    const auto near_at = [&](int64_t at, int64_t)
                             __attribute__((always_inline)) { return nearness(best, load(work.weights + at), at); };
    const int64_t first = b * kBlock, some = std::min<int64_t>(kBlock, work.columns - first);
    consider_block(best, first, some, near_at, [&](int64_t token) { return work.weights[token] >= least; });
  }
  return best.token;
}

}  // namespace
extern "C" int32_t prefold_draw(const float* logits, int64_t stride, int64_t columns, const int64_t* rows,
                                const float* inverses, const double* filters, const uint64_t* keys, int64_t draws,
                                int64_t* tokens, int32_t threads) {
  std::atomic<bool> is_short{false};
  parallel_ranges(draws, columns, threads, [&](int64_t first, int64_t stop) {
    const Workspace work(filters == nullptr ? 0 : columns);
    if (work.memory == nullptr) return is_short.store(true);
    for (int64_t i = first; i < stop; ++i) {
      const float* x = logits + rows[i] * stride;
      const double none[kFilters] = {0, 0, 0, 1};
      const Filters some(filters == nullptr ? none : filters + i * kFilters, columns);
      tokens[i] = some.leave_all() ? draw(x, columns, inverses[i], keys[i])
                                   : draw_filtered(x, inverses[i], keys[i], some, work);
    }
  });
  return is_short.load();
}

}  // namespace prefold
