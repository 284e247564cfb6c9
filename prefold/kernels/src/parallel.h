// Parallel loops, on the threads of `pool.h`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "pool.h"

namespace prefold {

// Numbers to read or write, and products to sum, below which another thread costs more than it saves: some
// microseconds, and far more on a busy machine.
constexpr int64_t kNumbersPerThread = 16384;
constexpr int64_t kProductsPerThread = 500000;
// Pieces that a thread's share of a loop is cut into, so that others can take what it has not come to.
constexpr int64_t kPieces = 4;

// body(participant) by up to `threads` threads at once; one call of body must be enough to do all the work.
template <class Body>
void together(int threads, const Body& body) {
  if (threads <= 1) return body(0);
  Pool::of_process().run(threads, body);
}

// body(i) for every i of [0, n), taken one by one in ascending order by whichever thread is free.
template <class Body>
void parallel_tasks(int64_t n, int threads, const Body& body) {
  std::atomic<int64_t> next{0};
  together(static_cast<int>(std::min<int64_t>(threads, n)), [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
  });
}

// body(i) for every i of [0, n): each thread one after the other of its own equal share, then of what others have
// not come to. For work on memory that is fetched ahead. with(run) is called in each thread, and calls run() once.
template <class Body, class With>
void parallel_shares(int64_t n, int threads, const Body& body, const With& with) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t stop;
  };
  constexpr int kMaxShares = 128;
  const int workers = static_cast<int>(std::min<int64_t>({threads, n, kMaxShares}));
  if (workers <= 1) {
    return with([&] {
      for (int64_t i = 0; i < n; ++i) body(i);
    });
  }
  Share shares[kMaxShares];
  for (int w = 0; w < workers; ++w) {
    shares[w].next.store(n * w / workers, std::memory_order_relaxed);
    shares[w].stop = n * (w + 1) / workers;
  }
  together(workers, [&](int participant) {
    with([&] {
      for (int other = 0; other < workers; ++other) {
        Share& share = shares[(participant + other) % workers];
        for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.stop;) body(i);
      }
    });
  });
}

template <class Body>
void parallel_shares(int64_t n, int threads, const Body& body) {
  parallel_shares(n, threads, body, [](const auto& run) { run(); });
}

// body(first, last) on contiguous pieces of [0, n); `size` numbers each.
template <class Body>
void parallel_ranges(int64_t n, int64_t size, int threads, const Body& body) {
  const int64_t workers = std::min<int64_t>({threads, n, 1 + n * size / kNumbersPerThread});
  if (workers <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  const int64_t pieces = std::min<int64_t>(n, workers * kPieces);
  parallel_shares(pieces, static_cast<int>(workers),
                  [&](int64_t i) { body(n * i / pieces, n * (i + 1) / pieces); });
}

}  // namespace prefold
