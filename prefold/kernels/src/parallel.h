// Parallel loops, on the threads of `pool.cpp`.
#pragma once

#include <algorithm>
#include <cstdint>

namespace prefold {

// Numbers to read or write, and products to sum, below which another thread costs more than it saves: some
// microseconds, and far more on a busy machine.
constexpr int64_t kNumbersPerThread = 16384;
constexpr int64_t kProductsPerThread = 500000;

// A function object that outlives the call it is passed to. Functions that take one are compiled once, not for each body.
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

// body(participant) by up to `threads` threads at once; one call of body must be enough to do all the work.
void together(int threads, const Body<int>& body);

// body(i) for every i of [0, n), taken one by one in ascending order by whichever thread is free.
void parallel_tasks(int64_t n, int threads, const Body<int64_t>& body);

// Called in each thread of a loop with the thread's part of it, which it calls once.
using Around = Body<const Body<>&>;

// body(i) for every i of [0, n): each thread one after the other of its own equal share, then of what others have
// not come to. For work on memory that is fetched ahead.
void parallel_shares(int64_t n, int threads, const Body<int64_t>& body, const Around& around);
void parallel_shares(int64_t n, int threads, const Body<int64_t>& body);

// body(first, last) on contiguous pieces of [0, n); `size` numbers each.
void parallel_ranges(int64_t n, int64_t size, int threads, const Body<int64_t, int64_t>& body);

}  // namespace prefold
