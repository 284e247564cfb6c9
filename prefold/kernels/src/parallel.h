// Parallel loops, on the threads of `pool.cpp`.
#pragma once

#include <algorithm>
#include <cstdint>

namespace prefold {

// The least work per thread: numbers to read or write, and products to sum. With less, another thread costs more than
// it saves: some microseconds, and far more on a busy machine.
constexpr int64_t kNumbersPerThread = 16384;
constexpr int64_t kProductsPerThread = 500000;

// A reference to a function object that outlives the call. Functions with a Body parameter are compiled once, not once
// for each function object.
template <class... Arguments>
class Body {
 public:
  template <class F>
  Body(const F& function)
      : function_(&function), call_([](const void* of, Arguments... with) { (*static_cast<const F*>(of))(with...); }) {}

  void operator()(Arguments... with) const { call_(function_, with...); }

 private:
  const void* function_;
  void (*call_)(const void*, Arguments...);
};

// Run body(participant) on up to `threads` threads at once. One call of body must be able to do all the work.
void together(int threads, const Body<int>& body);

// Run body(i) for every i of [0, n). Each free thread takes the next i, in ascending order.
void parallel_tasks(int64_t n, int threads, const Body<int64_t>& body);

// Each thread of a loop calls it with the thread's part of the loop. It must call that part exactly once.
using Around = Body<const Body<>&>;

// Run body(i) for every i of [0, n). Each thread goes through its own equal share in order, then helps with the rest of
// the other shares. For work that prefetches the memory of the next i.
void parallel_shares(int64_t n, int threads, const Body<int64_t>& body, const Around& around);
void parallel_shares(int64_t n, int threads, const Body<int64_t>& body);

// Run body(first, last) on contiguous pieces of [0, n). size: numbers per i, for the choice of the number of threads.
void parallel_ranges(int64_t n, int64_t size, int threads, const Body<int64_t, int64_t>& body);

}  // namespace prefold
