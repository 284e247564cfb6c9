// Chooses, for latent attention over KV slots, the queries whose keys and values are expanded (latent.h).
//
// The choice changes the time, and the result only by rounding. All costs are per head. Their unit is one multiply-add
// in a product of a matrix and rows.
#include <algorithm>
#include <new>
#include <numeric>
#include <vector>

#include "interface.h"

namespace prefold {
namespace {

// The cost of one multiply-add in attention, for absorbed and for expanded queries, and the cost of storing and packing
// one number of an expanded key or value. The costs are fitted to times on two cores of an AMD EPYC with AVX2, in
// float32, with 2,048 keys before a prompt (as in benchmarks/latent.py). Both forms take the same time at about 250
// rows with the sizes of GLM-4.7-Flash, 110 rows with the sizes of DeepSeek-V3, and 70 rows with the sizes of
// MiniCPM 3. In bfloat16, GLM-4.7-Flash needs 260 rows.
constexpr double kAbsorbedProduct = 1.55, kExpandedProduct = 1.35, kPackedNumber = 90;

// The costs that decide between the two forms, per head, in multiply-adds.
struct LatentWork {
  double key;    // cost of expanding one key and its value
  double query;  // saved once per expanded query
  double seen;   // saved per key that an expanded query sees

  LatentWork(double rank, double tail, double dim, double value_dim)
      : key((rank + kPackedNumber) * (dim + value_dim)),
        query((dim + tail) * (rank + tail) + rank * value_dim),
        seen(kAbsorbedProduct * (rank + tail + rank) - kExpandedProduct * (dim + tail + value_dim)) {}
};

// Runs of keys form a tree: the queries that see a run include all queries that see the runs below it. A query needs
// all keys on its path, so the expanded runs are a part of the tree that includes the roots. The best part is found
// from the leaves up: a run is expanded if the queries and runs below it save more than its keys cost.
class ExpandedChoice {
 public:
  ExpandedChoice(const int64_t* count, const int64_t* first, const int64_t* last, int64_t runs, int64_t queries,
                 const LatentWork& work)
      : count_(count),
        first_(first),
        last_(last),
        runs_(runs),
        work_(work),
        seen_(queries + 1),
        left_out_(queries + 1) {
    for (int64_t i = 0; i < runs; ++i) seen_[first[i]] += count[i], seen_[last[i]] -= count[i];
    std::partial_sum(seen_.begin(), seen_.end(), seen_.begin());
  }

  // Set chosen[i] to 1 for each expanded query, else to 0.
  void choose(uint8_t* chosen) {
    const int64_t queries = static_cast<int64_t>(seen_.size()) - 1;
    std::vector<int64_t> order(runs_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return first_[a] != first_[b] ? first_[a] < first_[b] : last_[a] > last_[b];
    });
    for (const int64_t run : order) {
      close(first_[run]);
      add_queries(first_[run]);
      open_.push_back({run, 0});
    }
    close(queries);
    int64_t out = 0;
    for (int64_t i = 0; i < queries; ++i) {
      out += left_out_[i];
      chosen[i] = out == 0 && saved(i) > 0;
    }
  }

 private:
  struct Open {
    int64_t run;
    double saved;
  };

  double saved(int64_t query) const { return work_.query + work_.seen * static_cast<double>(seen_[query]); }

  // Add the savings of the queries before `stop` to the innermost open run.
  void add_queries(int64_t stop) {
    for (; next_ < stop; ++next_) {
      if (!open_.empty()) open_.back().saved += std::max(saved(next_), 0.0);
    }
  }

  // Close the open runs that end at or before `query`. Exclude the queries of a run that saves no more than its
  // keys cost.
  void close(int64_t query) {
    while (!open_.empty() && last_[open_.back().run] <= query) {
      const int64_t run = open_.back().run;
      add_queries(last_[run]);
      const double gain = open_.back().saved - work_.key * static_cast<double>(count_[run]);
      open_.pop_back();
      if (gain <= 0) {
        ++left_out_[first_[run]], --left_out_[last_[run]];
      } else if (!open_.empty()) {
        open_.back().saved += gain;
      }
    }
  }

  const int64_t *count_, *first_, *last_;  // per run: number of keys; queries [first, last) see them
  const int64_t runs_;
  const LatentWork work_;
  std::vector<int64_t> seen_;      // number of keys that each query sees
  std::vector<int64_t> left_out_;  // number of runs that exclude each query, as differences to the query before
  std::vector<Open> open_;         // the open runs, innermost last
  int64_t next_ = 0;               // first query with savings that no run has counted yet
};

}  // namespace
extern "C" int32_t prefold_choose_expanded(const int64_t* count, const int64_t* first, const int64_t* last,
                                           int64_t runs, int64_t queries, int64_t rank, int64_t tail, int64_t dim,
                                           int64_t value_dim, uint8_t* chosen) {
  try {
    const auto of = [](int64_t size) { return static_cast<double>(size); };
    const LatentWork work(of(rank), of(tail), of(dim), of(value_dim));
    ExpandedChoice(count, first, last, runs, queries, work).choose(chosen);
    return 0;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace prefold
