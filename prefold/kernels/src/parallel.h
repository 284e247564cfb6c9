// Loops on the OpenMP pool that PyTorch uses too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace prefold {

// Numbers to read or write, and products to sum, below which another thread costs more than it saves: some
// microseconds, and far more on a busy machine.
constexpr int64_t kNumbersPerThread = 16384;
constexpr int64_t kProductsPerThread = 500000;

// body(first, last) on equal contiguous shares of [0, n); `size` numbers each.
template <class Body>
void parallel_ranges(int64_t n, int64_t size, int threads, const Body& body) {
  const int64_t workers = std::min<int64_t>({threads, n, 1 + n * size / kNumbersPerThread});
  if (workers <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(workers)
  for (int64_t w = 0; w < workers; ++w) body(n * w / workers, n * (w + 1) / workers);
}

// body(i) for every i of [0, n), taken one by one in ascending order by whichever thread is free.
template <class Body>
void parallel_tasks(int64_t n, int threads, const Body& body) {
  const int workers = static_cast<int>(std::min<int64_t>(threads, n));
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(workers) if (workers > 1)
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
}

// body(i) for every i of [0, n): each thread one after the other of its own equal share, then of what others have
// not come to. For work on memory that is fetched ahead.
template <class Body>
void parallel_shares(int64_t n, int threads, const Body& body) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t stop;
  };
  constexpr int kMaxShares = 128;
  const int workers = static_cast<int>(std::min<int64_t>({threads, n, kMaxShares}));
  if (workers <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  Share shares[kMaxShares];
  for (int w = 0; w < workers; ++w) {
    shares[w].next.store(n * w / workers, std::memory_order_relaxed);
    shares[w].stop = n * (w + 1) / workers;
  }
#pragma omp parallel for schedule(static, 1) num_threads(workers)
  for (int w = 0; w < workers; ++w) {
    for (int other = 0; other < workers; ++other) {
      Share& share = shares[(w + other) % workers];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.stop;) body(i);
    }
  }
}

}  // namespace prefold
