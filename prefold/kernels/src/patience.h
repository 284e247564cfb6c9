// How long the threads of a pool spin before they sleep. Two measurements decide: the gaps between recent loops, and
// how often the system takes a core from a spinning thread.
#pragma once

#include <algorithm>
#include <atomic>

#include "spin.h"

namespace prefold {

// One thread's record of how often the system has taken its core away.
struct Watch {
  Clock::time_point since{};
  long switches = 0;
};

class Patience {
  using Duration = Clock::duration;
  // The least time that a thread spins for the next loop: Python needs 10 to 40 microseconds between two loops of a
  // decoding step. While other processes want the cores, threads spin no longer than this.
  static constexpr Duration kShort = std::chrono::microseconds(50);
  // A longer gap lies neither within a step nor between two steps, so threads sleep through it.
  static constexpr Duration kLongestGap = std::chrono::milliseconds(4);
  // How long the caller spins for threads that still work. If they need longer, they have probably lost their core, and
  // the caller's core is the next that becomes free.
  static constexpr Duration kHelpers = std::chrono::microseconds(500);
  static constexpr Duration kHelpersShort = std::chrono::microseconds(20);
  // After a long loop, threads spin for at least this fraction of its time, but at most for a millisecond.
  static constexpr int kPart = 16;
  static constexpr Duration kLongestPart = std::chrono::milliseconds(1);
  // A core is wanted if the system takes it from a thread kSwitches times within kWindow. Threads of the kernel take a
  // core a few times a second. A process that computes takes it once per time slice of the scheduler (3 to 8 ms).
  static constexpr Duration kWindow = std::chrono::milliseconds(20);
  static constexpr long kSwitches = 2;
  // How long threads then do not spin. The pause doubles if the core is found wanted again, and halves if not.
  static constexpr Duration kLeastPause = std::chrono::milliseconds(100);
  static constexpr Duration kMostPause = std::chrono::seconds(2);

 public:
  // How long a thread spins for the next loop.
  Duration for_loop() const { return Duration(loop_.load(std::memory_order_relaxed)); }

  // How long the caller of a loop spins for threads that still work. taken: how long its own part took.
  Duration for_helpers(Duration taken) {
    part_ = std::min(kLongestPart, taken / kPart);
    return std::max(wanted_.load(std::memory_order_relaxed) ? kHelpersShort : kHelpers, part_);
  }

  // The caller starts a loop. Only callers record gaps, one caller at a time.
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

  // Check whether the core of this thread (of the pool, or the caller) is wanted. Cheap until a window has passed.
  // `switches()` returns how often the system has taken the thread's core so far.
  template <class Switches>
  void look(Watch& watch, Clock::time_point now, const Switches& switches) {
    if (now - watch.since < kWindow) return;
    const long before = watch.switches;
    watch.switches = switches();
    const bool judged = now - watch.since < 2 * kWindow;  // else the thread spent most of the time elsewhere
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
