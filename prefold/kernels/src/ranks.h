// Ranks of a split model: processes of one machine that meet in memory which all of them map.
#pragma once

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

  // Comes to the next meeting, waits for all, and returns 0 when they are there: then the parts of all can be read,
  // until the next meeting.
  template <class Read>
  int32_t meet(int64_t bytes, const Read& read) {
    line(view.rank).bytes[view.met & 1].store(bytes, std::memory_order_relaxed);
    line(view.rank).met.store(view.met + 1, std::memory_order_release);
    for (int64_t other = 0; other < view.size; ++other) {
      const auto is_there = [&] { return line(other).met.load(std::memory_order_acquire) > view.met; };
      if (!is_there()) {
        if (const int32_t unmet = wait(is_there)) return unmet;
      }
      const auto theirs = line(other).bytes[view.met & 1].load(std::memory_order_relaxed);
      if (theirs != static_cast<uint64_t>(bytes)) return kApart;
    }
    read();
    ++view.met;
    return 0;
  }

  // Waits until a rank is there: spins, then lets other threads have the core, then sleeps. Returns 0, or a Failure.
  template <class There>
  int32_t wait(const There& is_there) const {
    constexpr Clock::duration kSpin = std::chrono::microseconds(30), kYield = std::chrono::milliseconds(2);
    constexpr double kLook = 0.01;  // seconds from one look at the pipes to the next
    if (spin(kSpin, is_there)) return 0;
    const auto begun = Clock::now();
    double waited = 0;  // without the time in which this process was stopped
    auto looked = begun;
    while (!is_there()) {
      const auto now = Clock::now();
      if (now - begun < kYield) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      const double since = std::chrono::duration<double>(now - looked).count();
      if (since < kLook) continue;
      looked = now;
      waited += std::min(since, 1.0);
      if (has_ended(view.pipes, view.num_pipes) && !is_there()) return kGone;
      if (waited > view.patience) return kLate;
    }
    return 0;
  }

  // x [count] = the sum of every rank's, in the order of the ranks, rounded once. Where `is_given`, the rank's own is in
  // its part already.
  template <class E>
  int32_t sum(E* x, int64_t count, int threads, bool is_given) {
    const int64_t most = view.part / static_cast<int64_t>(sizeof(E));
    for (int64_t at = 0; at < count; at += most) {
      const int64_t some = std::min(most, count - at);
      if (!is_given) {
        E* own = part_of<E>(view.rank);
        in_pieces(some, threads, [&](int64_t begin, int64_t stop) {
          std::memcpy(own + begin, x + at + begin, (stop - begin) * sizeof(E));
        });
      }
      const int32_t unmet = meet(some * sizeof(E), [&] {
        in_pieces(some, threads, [&](int64_t begin, int64_t stop) {
          for (int64_t i = begin; i < stop; i += kLanes) {
            const int64_t lanes = std::min<int64_t>(kLanes, stop - i);
            Floats total = load_some(part_of<E>(0) + i, lanes);
            for (int64_t other = 1; other < view.size; ++other) total += load_some(part_of<E>(other) + i, lanes);
            store_some(x + at + i, total, lanes);
          }
        });
      });
      if (unmet) return unmet;
    }
    return 0;
  }

  // x [count] = the largest of every rank's.
  int32_t most(uint64_t* x, int64_t count) {
    const int64_t most = view.part / static_cast<int64_t>(sizeof *x);
    for (int64_t at = 0; at < count; at += most) {
      const int64_t some = std::min(most, count - at);
      std::memcpy(part_of<char>(view.rank), x + at, some * sizeof *x);
      const int32_t unmet = meet(some * sizeof *x, [&] {
        for (int64_t other = 0; other < view.size; ++other) {
          const uint64_t* theirs = part_of<uint64_t>(other);
          for (int64_t i = 0; i < some; ++i) x[at + i] = std::max(x[at + i], theirs[i]);
        }
      });
      if (unmet) return unmet;
    }
    return 0;
  }

 private:
  template <class Body>
  static void in_pieces(int64_t count, int threads, const Body& body) {
    constexpr int64_t kPiece = 1024;
    parallel_ranges((count + kPiece - 1) / kPiece, kPiece, threads, [&](int64_t begin, int64_t stop) {
      body(begin * kPiece, std::min(stop * kPiece, count));
    });
  }
};

}  // namespace prefold
