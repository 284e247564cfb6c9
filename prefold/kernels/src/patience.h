// How long threads of a pool spin before they sleep: learned from the gaps between loops, and from whether spinning
// keeps somebody else from a core.
#pragma once

#include <algorithm>
#include <atomic>

#include "spin.h"

namespace prefold {

// What one thread knows of its own core: how often the system has taken it away.
struct Watch {
  Clock::time_point since{};
  long switches = 0;
};

class Patience {
  using Duration = Clock::duration;
  // The least time that a thread spins for the next loop: Python needs 10 to 40 microseconds between two loops of a
  // decoding step. It is all of the time while somebody else wants the cores.
  static constexpr Duration kShort = std::chrono::microseconds(50);
  // A longer gap is no part of a step, nor the time between two steps: threads sleep in it.
  static constexpr Duration kLongestGap = std::chrono::milliseconds(4);
  // How long the caller spins for threads that still work. If they take longer, they have probably lost their core,
  // and the caller's is the next that is free.
  static constexpr Duration kHelpers = std::chrono::microseconds(500);
  static constexpr Duration kHelpersShort = std::chrono::microseconds(20);
  // After a long loop, threads spin at least for this part of its time, and not more than a millisecond.
  static constexpr int kPart = 16;
  static constexpr Duration kLongestPart = std::chrono::milliseconds(1);
  // A core is wanted where the system takes it from a thread so often within a time of this length. Threads of the
  // kernel do so a few times a second; a process that computes, once in each slice of the scheduler's (3 to 8 ms).
  static constexpr Duration kWindow = std::chrono::milliseconds(20);
  static constexpr long kSwitches = 2;
  // For how long threads then do not spin: doubled each time that the core is found wanted again, halved when not.
  static constexpr Duration kLeastPause = std::chrono::milliseconds(100);
  static constexpr Duration kMostPause = std::chrono::seconds(2);

 public:
  // How long a thread spins for the next loop.
  Duration for_loop() const { return Duration(loop_.load(std::memory_order_relaxed)); }

  // How long the caller of a loop that took it `taken` spins for threads that still work.
  Duration for_helpers(Duration taken) {
    part_ = std::min(kLongestPart, taken / kPart);
    return std::max(wanted_.load(std::memory_order_relaxed) ? kHelpersShort : kHelpers, part_);
  }

  // The caller of a loop begins it. Only callers write what is learned of gaps, one at a time.
  void begin(Clock::time_point now) {
    const Duration gap = now - ended_;
    if (gap <= kLongestGap) longest_ = std::max(gap, longest_ - longest_ / 1024);
  }

  // The caller's loop has ended.
  void end(Clock::time_point now) {
    ended_ = now;
    const bool wanted = wanted_.load(std::memory_order_relaxed);
    const Duration least = std::max(kShort, part_);
    const Duration longest = wanted ? least : std::max(least, std::min(kLongestGap, 2 * longest_));
    loop_.store(longest.count(), std::memory_order_relaxed);
  }

  // A thread of the pool, or the caller, looks whether its core is wanted; cheap unless a window has passed.
  // `switches()` is how often the system has taken the thread's core so far.
  template <class Switches>
  void look(Watch& watch, Clock::time_point now, const Switches& switches) {
    if (now - watch.since < kWindow) return;
    const long before = watch.switches;
    watch.switches = switches();
    const bool judged = now - watch.since < 2 * kWindow;  // otherwise most of the time was spent elsewhere
    watch.since = now;
    const Clock::rep time = now.time_since_epoch().count();
    if (wanted_.load(std::memory_order_relaxed)) {
      if (time >= until_.load(std::memory_order_relaxed)) wanted_.store(false, std::memory_order_relaxed);
    } else if (judged && watch.switches - before >= kSwitches) {
      const Clock::rep pause = pause_.load(std::memory_order_relaxed);
      until_.store(time + pause, std::memory_order_relaxed);
      pause_.store(std::min(Duration(kMostPause).count(), 2 * pause), std::memory_order_relaxed);
      wanted_.store(true, std::memory_order_relaxed);
    } else if (judged) {
      const Clock::rep pause = pause_.load(std::memory_order_relaxed);
      pause_.store(std::max(Duration(kLeastPause).count(), pause / 2), std::memory_order_relaxed);
    }
  }

 private:
  Clock::time_point ended_{};
  Duration longest_{}, part_{};
  std::atomic<Clock::rep> loop_{Duration(kShort).count()};
  std::atomic<bool> wanted_{false};
  std::atomic<Clock::rep> until_{0}, pause_{Duration(kLeastPause).count()};
};

}  // namespace prefold
