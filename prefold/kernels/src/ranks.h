// The ranks of a split model: processes on one machine that exchange data through shared memory.
#pragma once

#include <atomic>

#include "interface.h"
#include "parallel.h"
#include "vectors.h"

namespace prefold {

// One cache line of the shared memory per rank. Only this rank writes it.
struct alignas(kRankLine) Line {
  std::atomic<uint64_t> met;       // how many meetings the rank has come to
  std::atomic<uint64_t> bytes[2];  // the size of its part of a meeting, by the parity of the meeting
};
static_assert(sizeof(Line) == kRankLine && std::atomic<uint64_t>::is_always_lock_free);

// A rank's exchanges with the others.
struct Ranks {
  RanksView& view;

  Line& line(int64_t of) const { return reinterpret_cast<Line*>(view.memory)[of]; }

  // The memory for a rank's part of the next meeting.
  template <class E>
  E* part_of(int64_t of) const {
    return reinterpret_cast<E*>(view.memory + view.first + ((view.met & 1) * view.size + of) * view.part);
  }

  // Come to the next meeting and wait for all ranks. Return 0 when all are there, else a Failure. The parts of all
  // ranks can be read until `read` returns.
  int32_t meet(int64_t bytes, const Body<>& read);

  // Set x [count] to the sum over all ranks, added in the order of the ranks and rounded once. is_given: this rank's
  // numbers are already in its part.
  template <class E>
  int32_t sum(E* x, int64_t count, int threads, bool is_given);

  // Set x [count] to the largest value of all ranks.
  int32_t most(uint64_t* x, int64_t count);

 private:
  int32_t wait_for(int64_t other) const;
};

}  // namespace prefold
