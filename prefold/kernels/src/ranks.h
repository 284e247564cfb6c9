// Ranks of a split model: processes of one machine that meet in memory which all of them map.
#pragma once

#include <atomic>

#include "interface.h"
#include "parallel.h"
#include "vectors.h"

namespace prefold {

// A line of the memory for each rank. A rank alone writes its own.
struct alignas(kRankLine) Line {
  std::atomic<uint64_t> met;       // how often the rank has come
  std::atomic<uint64_t> bytes[2];  // of what it gives, by the parity of the meeting
};
static_assert(sizeof(Line) == kRankLine && std::atomic<uint64_t>::is_always_lock_free);

// A rank's exchanges with the others.
struct Ranks {
  RanksView& view;

  Line& line(int64_t of) const { return reinterpret_cast<Line*>(view.memory)[of]; }

  // What a rank gives at the next meeting.
  template <class E>
  E* part_of(int64_t of) const {
    return reinterpret_cast<E*>(view.memory + view.first + ((view.met & 1) * view.size + of) * view.part);
  }

  // Comes to the next meeting, waits for all, and returns 0 when they are there, or a Failure. While `read` runs, the
  // parts of all can be read.
  int32_t meet(int64_t bytes, const Body<>& read);

  // x [count] = the sum of every rank's, in the order of the ranks, rounded once. Where `is_given`, the rank's own is in
  // its part already.
  template <class E>
  int32_t sum(E* x, int64_t count, int threads, bool is_given);

  // x [count] = the largest of every rank's.
  int32_t most(uint64_t* x, int64_t count);

 private:
  int32_t wait_for(int64_t other) const;
};

}  // namespace prefold
